"""Cases of dispatchers: how many tokens each rank has, which experts they ask for, and what is sent."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from conformance.core.axes import shorter
from conformance.core.case import Case
from conformance.core.tensors import BITS, DTYPES, WIDE_LAYOUTS, hashed, payload, probabilities
from moe_ref.config import FP8_BLOCK

SPREADS = ("uniform", "skewed", "one_rank", "local", "ragged", "empty", "same")
STYLES = ("dyadic", "integers", "wide", "special")
MOST_RANKS = 8
PLAINER: tuple[str, ...] = (
    "law",
    "values",
    "zero_probs",
    "layout",
    "grads",
    "unused",
    "map_dtype",
    "index_dtype",
    "dtype",
    "probs",
    "seed",
    "poison",
)
PLAINER += ("slack", "capacity", "align", "shards", "scales", "fp8", "biases", "repeats", "drop_zeros")
EXPLICIT_SLOTS = 2**9  # routings up to this size are written out when a case is reduced
MAPPED = ("allgather", "alltoall", "hybridep")  # dispatchers that read a routing map; the others read indices


@dataclass(frozen=True, kw_only=True)
class DispatchCase(Case):
    """A routing of the tokens of all ranks. Where a function has no use for a field, the field has its default."""

    counts: tuple[int, ...] = (1,)  # tokens of each rank; as many ranks
    local_experts: int = 1  # of each rank that holds experts of its own
    hidden: int = 1
    topk: int = 1  # slots of a token
    slots: tuple[int, ...] | None = None  # the experts of all slots of all tokens, -1 for none; None: `spread` says it
    spread: str = "uniform"
    repeats: str = ""  # the policy for a token that names an expert twice, as some do then; empty: none does
    drop_zeros: bool = False  # the policy for slots of probability 0
    map_dtype: str = "bool"
    index_dtype: str = "int64"
    dtype: str = "float32"
    probs: str = ""  # dtype of the probabilities; empty: none are given
    zero_probs: bool = False
    values: str = "dyadic"
    align: int = 0  # 0: not given
    capacity: int = 0  # 0: not given
    shards: int = 1  # expert tensor parallelism
    slack: int | None = (
        None  # rows of the buffers less those that the fullest rank needs, in units of align; None: not given
    )
    scales: int = 0  # columns of the scales that go with the tokens; 0: none are given
    fp8: str = ""  # rows travel as codes and scales: "fp8", "powers" for scales that are powers of two, "least" for a least amax
    biases: int = 0
    layout: str = "contiguous"
    layout_of: str = ""  # the input or cotangent that has this layout, on every rank
    grads: str = ""  # which gradients are asked for, joined by +
    unused: str = ""  # the differentiable output that has no cotangent

    words: ClassVar[dict[str, tuple[str, ...]]] = {
        "layout": ("contiguous", "transposed", "strided", "shifted", *WIDE_LAYOUTS),
        "spread": SPREADS,
        "values": STYLES,
        "repeats": ("", "count each", "last slot"),
        "fp8": ("", "fp8", "powers", "least"),
        "unused": ("", "rows", "tokens", "probs"),
    }

    def __post_init__(self) -> None:
        if not 1 <= len(self.counts) <= MOST_RANKS or min(self.counts) < 0:
            raise ValueError(f"counts are {self.counts}; they must be from 0, of 1 to {MOST_RANKS} ranks")
        if (
            self.hidden < 0
            or self.topk < 1
            or self.local_experts < 1
            or self.shards < 1
            or len(self.counts) % self.shards
        ):
            raise ValueError(
                f"hidden ≥ 0, topk, local_experts and shards ≥ 1 are needed, shards a divisor of {len(self.counts)}; "
                f"they are {self.hidden}, {self.topk}, {self.local_experts}, {self.shards}"
            )
        if self.shards > 1 and self.dispatcher not in ("allgather", "alltoall"):
            raise ValueError(f"shards are {self.shards}; {self.dispatcher} has experts in one piece")
        if self.fp8 and self.dispatcher == "deepep_low_latency" and (self.hidden % FP8_BLOCK or self.fp8 == "least"):
            raise ValueError(
                f"hidden is {self.hidden}, fp8 {self.fp8!r}; in low latency rows are blocks of {FP8_BLOCK}, and no amax is given"
            )
        if self.topk > self.experts:
            raise ValueError(f"topk is {self.topk}; there are {self.experts} experts")
        if self.slots is not None and (
            len(self.slots) != self.tokens * self.topk or any(not -1 <= e < self.experts for e in self.slots)
        ):
            raise ValueError(f"slots must hold {self.tokens * self.topk} experts from -1 to {self.experts - 1}")
        if self.slots is not None and not self.repeats and self.dispatcher not in MAPPED:
            named = [
                tuple(e for e in self.slots[t : t + self.topk] if e >= 0) for t in range(0, len(self.slots), self.topk)
            ]
            if any(len(set(experts)) < len(experts) for experts in named):
                raise ValueError("slots name an expert twice; `repeats` must say what that means")

    @property
    def ranks(self) -> int:
        return len(self.counts)

    @property
    def experts(self) -> int:
        """Of all ranks; with expert tensor parallelism each is held by several."""
        return self.local_experts * len(self.counts) // self.shards

    @property
    def tokens(self) -> int:
        return sum(self.counts)

    @property
    def dispatcher(self) -> str:
        return next(
            name
            for name in ("allgather", "alltoall", "hybridep", "deepep_low_latency", "deepep")
            if self.function.startswith(name)
        )


DISPATCHERS = ("allgather", "alltoall", "deepep", "deepep_low_latency", "hybridep")
CACHED = ("deepep_cached_dispatch", "hybridep_cached_dispatch")
FUNCTIONS = (*(f"{name}_{step}" for name in DISPATCHERS for step in ("dispatch", "combine")), *CACHED)
DispatchCase.serves(*FUNCTIONS)


def slots_of(case: DispatchCase) -> np.ndarray:
    """[G,K]: the expert of each slot of each token of all ranks, or -1."""
    shape = (case.tokens, case.topk)
    if case.slots is not None:
        return np.array(case.slots, dtype=np.int64).reshape(shape)
    cells = case.tokens * case.experts
    noise = hashed(case.seed, "slots", cells).reshape(case.tokens, case.experts).astype(np.int64)
    held = case.experts * case.shards // case.ranks  # experts that the ranks of one group of shards hold
    if case.spread == "skewed":
        noise //= 1 + np.arange(case.experts)
    if case.spread == "same":
        noise[:] = noise[:1]
    groups = case.ranks // case.shards
    source = np.repeat(np.arange(case.ranks), case.counts) // case.shards
    home = {"one_rank": np.full(case.tokens, case.seed % groups), "local": source}.get(case.spread)
    chosen = np.argsort(-noise, axis=1, kind="stable")
    if home is not None:
        elsewhere = chosen // held != home[:, None]
        order = np.argsort(elsewhere, axis=1, kind="stable")  # its own first
        chosen = np.where(np.take_along_axis(elsewhere, order, 1), -1, np.take_along_axis(chosen, order, 1))
    chosen = chosen[:, : case.topk]
    if case.spread in ("ragged", "empty"):
        lost = hashed(case.seed, "lost", case.tokens * case.topk).reshape(shape) % 3 == 0
        chosen = np.where(lost | (case.spread == "empty"), -1, chosen)
    return chosen


def indices_of(case: DispatchCase) -> list[Tensor]:
    """[T_r,K] of each rank. Where experts repeat, a third of the slots name what the slot before them does."""
    slots = torch.from_numpy(slots_of(case))
    if case.repeats and case.slots is None:
        again = (
            torch.from_numpy(hashed(case.seed, "again", slots.numel()).astype(np.int64)).reshape(slots.shape) % 3 == 0
        )
        for k in range(1, case.topk):
            slots[:, k] = torch.where(again[:, k], slots[:, k - 1], slots[:, k])
    return list(slots.to(getattr(torch, case.index_dtype)).split(list(case.counts)))


def maps_of(case: DispatchCase) -> list[Tensor]:
    """[T_r,E] of each rank."""
    slots = torch.from_numpy(slots_of(case))
    wide = torch.zeros((case.tokens, case.experts + 1), dtype=torch.bool)
    wide.scatter_(1, torch.where(slots < 0, case.experts, slots), True)
    return list(wide[:, :-1].to(getattr(torch, case.map_dtype)).split(list(case.counts)))


def values_of(
    case: DispatchCase,
    name: str,
    lengths: list[int],
    columns: tuple[int, ...] | None = None,
    dtype: str = "",
    style: str = "",
) -> list[Tensor]:
    """A payload of each rank. The first column tells the rows of all ranks apart, unless the numbers are small integers."""
    dtype, style = dtype or case.dtype, style or case.values
    columns = (case.hidden,) if columns is None else columns
    shape = (sum(lengths), int(np.prod(columns)))
    if style == "integers" and DTYPES[dtype].itemsize > 1:
        whole = (
            torch.from_numpy(hashed(case.seed, name, shape[0] * shape[1]) % 17 - 8.0).to(DTYPES[dtype]).reshape(shape)
        )
    else:
        whole = payload(case.seed, name, shape, dtype, "dyadic" if style == "integers" else style)
    return [own.reshape(len(own), *columns).clone() for own in whole.split(lengths)]


def probs_of(case: DispatchCase, name: str, lengths: list[int], columns: tuple[int, ...]) -> list[Tensor]:
    """Probabilities of each rank; with small integers ½, 1 and 2, and 0 where zeros are asked for."""
    shape, dtype = (sum(lengths), *columns), case.probs or "float32"
    if case.values == "integers":
        noise = hashed(case.seed, name, int(np.prod(shape)))
        steps = np.array([0.5, 1.0, 2.0, 0.0])[noise % (4 if case.zero_probs else 3)]
        whole = torch.from_numpy(steps).to(DTYPES[dtype]).reshape(shape)
    else:
        whole = probabilities(case.seed, name, shape, dtype, case.zero_probs)
    return [own.clone() for own in whole.split(lengths)]


def is_exact(case: DispatchCase, dtype: torch.dtype, magnitude: Tensor) -> Tensor:
    """Where every sum of small integers and halves is exact in `dtype`, in whatever order it is taken."""
    return (
        2 * magnitude <= 2 ** min(BITS[dtype], 11)
        if case.values == "integers" and dtype in BITS
        else torch.zeros_like(magnitude, dtype=torch.bool)
    )


def simpler_dispatch(case: DispatchCase) -> Iterator[DispatchCase]:
    """Fewer ranks, tokens, experts, slots and columns; then plainer settings."""
    yield from filter(None, (_changed(case, **changes) for changes in _smaller(case)))


def _smaller(case: DispatchCase) -> Iterator[dict[str, Any]]:
    for name, field in type(case).__dataclass_fields__.items():
        if name in PLAINER and getattr(case, name) != field.default:
            beside = {"layout": {"layout_of": ""}, "probs": {"grads": _less(case.grads, "probs")}}.get(name, {})
            yield {name: field.default} | beside
    if case.slots is None:
        for counts in _fewer(case.counts):
            yield {"counts": counts}
        for name, least in (("local_experts", 1), ("topk", 1)):
            for size in shorter(getattr(case, name), least):
                yield {name: size}
        if case.tokens * case.topk <= EXPLICIT_SLOTS:
            written = torch.cat(indices_of(case)) if case.repeats else torch.from_numpy(slots_of(case))
            yield {"slots": tuple(written.flatten().tolist()), "spread": "uniform"}
    else:
        yield from _fewer_slots(case, torch.tensor(case.slots).reshape(-1, case.topk))
    for name in ("hidden", "align", "capacity", "scales", "biases"):
        for size in shorter(getattr(case, name), 1):
            yield {name: size}
    if case.slack:
        yield from ({"slack": slack} for slack in (0, 1, -1) if abs(slack) < abs(case.slack))
    for grad in case.grads.split("+") if "+" in case.grads else ():
        yield {"grads": grad}


def _fewer(counts: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """One rank less; fewer tokens on one."""
    for rank in range(len(counts)) if len(counts) > 1 else ():
        yield counts[:rank] + counts[rank + 1 :]
    for rank, count in enumerate(counts):
        yield from ((*counts[:rank], less, *counts[rank + 1 :]) for less in shorter(count))


def _fewer_slots(case: DispatchCase, slots_GK: Tensor) -> Iterator[dict[str, Any]]:
    """One rank less, with its tokens and experts; one token, one expert a rank, one slot less."""
    owner = torch.repeat_interleave(torch.arange(case.ranks), torch.tensor(case.counts))
    held = case.local_experts
    for rank in range(case.ranks) if case.ranks > 1 and case.shards == 1 else ():
        left = slots_GK[owner != rank]
        moved = torch.where(left // held == rank, -1, left - torch.where(left // held > rank, held, 0))
        yield {"counts": case.counts[:rank] + case.counts[rank + 1 :], "slots": tuple(moved.flatten().tolist())}
    for token in range(case.tokens):
        rank = int(owner[token])
        counts = tuple(n - (r == rank) for r, n in enumerate(case.counts))
        yield {
            "counts": counts,
            "slots": tuple(torch.cat([slots_GK[:token], slots_GK[token + 1 :]]).flatten().tolist()),
        }
    for expert in range(held) if held > 1 else ():
        local, group = slots_GK % held, slots_GK // held
        moved = torch.where(
            (slots_GK < 0) | (local == expert), -1, group * (held - 1) + local - (local > expert).long()
        )
        yield {"local_experts": held - 1, "slots": tuple(moved.flatten().tolist())}
    for slot in range(case.topk) if case.topk > 1 else ():
        yield {
            "topk": case.topk - 1,
            "slots": tuple(torch.cat([slots_GK[:, :slot], slots_GK[:, slot + 1 :]], 1).flatten().tolist()),
        }
    flat = slots_GK.flatten().tolist()
    for place, expert in enumerate(flat):
        if expert >= 0:
            yield {"slots": (*flat[:place], -1, *flat[place + 1 :])}


def _changed(case: DispatchCase, **changes: Any) -> DispatchCase | None:
    """The case with other fields, if there is such a case."""
    try:
        return replace(case, **changes)
    except ValueError:
        return None


def _less(grads: str, name: str) -> str:
    return "+".join(grad for grad in grads.split("+") if grad != name)
