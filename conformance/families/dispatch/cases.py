"""Cases of dispatchers: tokens per rank, requested experts, payload."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from conformance.core.axes import (
    Axis,
    Changes,
    Choice,
    Number,
    Size,
    Words,
    blocks,
    choice,
    declared,
    dtypes,
    number,
    shorter,
    size,
)
from conformance.core.case import Case
from conformance.core.lists import Parts, Table
from conformance.core.signature import Signature
from conformance.core.space import ALIGNMENTS
from conformance.core.tensors import BITS, DTYPES, SHARED, hashed, payload, probabilities
from conformance.families.dispatch.values_of_wire import SCALE_DTYPES, at_edges_of_scales, at_reciprocals, with_special
from moe_ref.config import FP8_BLOCK

FLOATS = ("float32", "bfloat16", "float16")
MOVED = (*FLOATS, "float8_e4m3fn", "float8_e5m2", "uint8")  # dtypes of rows that are moved and not summed
MAPS = ("bool", "uint8", "int32", "int64")
PROBS = ("float32", "bfloat16")
SPREADS = ("uniform", "skewed", "one_rank", "local", "ragged", "empty", "same")
MOST_RANKS = 8
# dispatchers that read a routing map; the others read indices
MAPPED = ("allgather", "alltoall", "hybridep")
DISPATCHERS = ("allgather", "alltoall", "deepep", "deepep_low_latency", "hybridep")
CACHED = ("deepep_cached_dispatch", "hybridep_cached_dispatch")
PROGRAMS = ("num_sms", "num_blocks")  # arguments whose value changes no result
AT_SCALES = ("scales", "reciprocals")  # values of rows, at the edges of their scales: `values_of_wire`
# a dispatch; a combine through the newest handle, and through the first; a cached dispatch, and
# one of wider rows
JOURNEY = ("send", "back", "first", "again", "wider")
ARGUMENTS = {  # arguments of a dispatch, by the field of the case
    "allgather": {"slack": "num_rows"},
    "alltoall": {"capacity": "capacity", "slack": "num_rows"},
    "hybridep": {"align": "align", "slack": "num_rows", "fp8": "recipe"} | {name: name for name in PROGRAMS},
    "deepep": {"align": "expert_alignment", "slack": "num_worst_tokens", "scales": "scales"},
    "deepep_low_latency": {"slack": "max_tokens_per_rank", "fp8": "use_fp8"},
}
FUNCTIONS = (*(f"{name}_{step}" for name in DISPATCHERS for step in ("dispatch", "combine")), *CACHED)


@dataclass(kw_only=True)
class Ranks(Parts):
    """Tokens per rank."""

    def wrong(self, value: Any) -> str:
        legal = not super().wrong(value) and 1 <= len(value) <= MOST_RANKS
        return "" if legal else f"a list of whole numbers ≥ 0, of 1 to {MOST_RANKS} ranks"

    def plainer(self, case: Any) -> Iterator[Changes]:
        """One token on one rank, if there are more."""
        if getattr(case, self.name) not in (self.default, (0,)):
            yield {self.name: self.default}

    def other(self, case: Any) -> Changes:
        """The counts rotated by one rank, and one more token on the first rank."""
        counts = getattr(case, self.name)
        return {self.name: (counts[-1] + 1, *counts[:-1])}


@dataclass(kw_only=True)
class Shards(Size):
    """Ranks that hold shards of the same experts."""

    def live(self, signature: Signature) -> bool:
        return self.argument in signature.settings


@dataclass(kw_only=True)
class Columns(Size):
    """Row length. Reduction keeps one column, so that errors stay visible."""

    def smaller(self, case: Any) -> Iterator[Changes]:
        yield from ({self.name: n} for n in shorter(getattr(case, self.name), 1))


@dataclass(kw_only=True)
class Topk(Size):
    """Slots per token."""

    def fits(self, case: Any) -> str | None:
        value = getattr(case, self.name)
        return None if value <= case.experts else f"{self.name} is {value}; there are {case.experts} experts"

    def nearest(self, case: Any, mended: Any) -> Iterator[Changes]:
        yield {self.name: min(getattr(case, self.name), mended.experts)}


@dataclass(kw_only=True)
class Given(Axis):
    """A field whose argument has another name for each dispatcher; see `ARGUMENTS`."""

    def live(self, signature: Signature) -> bool:
        argument_names = (*signature.settings, *signature.required, *(x.name for x in signature.every_input))
        return any(names.get(self.name) in argument_names for names in ARGUMENTS.values())


@dataclass(kw_only=True)
class Setting(Given, Number):
    """A number passed as an argument."""

    def other(self, case: Any) -> Changes:
        value = getattr(case, self.name)
        alternatives = [pair for pair in self.pairs if pair != value]
        return {self.name: alternatives[0]} if value != self.default and alternatives else {}


@dataclass(kw_only=True)
class Codes(Given, Choice):
    """The encoding of rows that are sent as codes and scales."""


@dataclass(kw_only=True)
class Slots(Table):
    """The experts of all slots of all tokens; -1 is an empty slot."""

    def smaller(self, case: Any) -> Iterator[Changes]:
        """The slots written out; then without a rank, a token, an expert of each rank, a slot, an
        entry.
        """
        if getattr(case, self.name) != self.default:
            rows = self.unpacked(case)
            owner = np.repeat(np.arange(case.ranks), case.counts)
            yield from self._without_rank(case, rows, owner)
            for start, stop in blocks(len(rows)):
                remaining_owners = np.delete(owner, slice(start, stop))
                counts = tuple(np.bincount(remaining_owners, minlength=case.ranks).tolist())
                yield {"counts": counts, self.name: self.packed(rows[:start] + rows[stop:])}
            held = case.local_experts
            for gone in range(held) if held > 1 else ():
                kept_experts = [e for e in range(case.experts) if e % held != gone]
                yield {"local_experts": held - 1, self.name: self._renumbered(rows, kept_experts)}
        yield from (changes for changes in super().smaller(case) if self.rows not in changes)

    def _without_rank(self, case: Any, rows: list[tuple[int, ...]], owner: np.ndarray) -> Iterator[Changes]:
        for rank in range(case.ranks) if case.ranks > 1 and case.shards == 1 else ():
            kept_experts = [e for e in range(case.experts) if e // case.local_experts != rank]
            kept_rows = [row for row, owning_rank in zip(rows, owner, strict=True) if owning_rank != rank]
            yield {
                "counts": case.counts[:rank] + case.counts[rank + 1 :],
                self.name: self._renumbered(kept_rows, kept_experts),
            }

    def _renumbered(self, rows: list[tuple[int, ...]], kept_experts: list[int]) -> tuple[int, ...]:
        """The slots with the kept experts only, renumbered."""
        number = {expert: i for i, expert in enumerate(kept_experts)}
        return self.packed([tuple(number.get(e, -1) for e in row) for row in rows])

    def other(self, case: Any) -> Changes:
        return {self.name: self.default}


@dataclass(kw_only=True)
class Journey(Words):
    """A legal order of calls: a dispatch first, and cached ones if the dispatcher has them."""

    def live(self, signature: Signature) -> bool:
        return False  # only the machine of handles sets this field

    def wrong(self, value: Any) -> str:
        return "" if value == self.default else super().wrong(value)

    def smaller(self, case: Any) -> Iterator[Changes]:
        if getattr(case, self.name):
            yield from super().smaller(case)

    def fits(self, case: Any) -> str | None:
        words = [word for word in getattr(case, self.name).split("+") if word]
        if words and words[0] != "send":
            return f"{self.name} must begin with send"
        if {"again", "wider"} & set(words) and f"{case.dispatcher}_cached_dispatch" not in CACHED:
            return f"{self.name} has a cached dispatch, which {case.dispatcher} has not"
        return None


def setting(default: int | None, *values: int, **fields: Any) -> Any:
    return declared(Setting(default=default, values=(default, *values), **fields))


def written_out(case: Any) -> np.ndarray:
    """The slots the case describes."""
    return torch.cat(indices_of(case)).numpy() if case.repeats else slots_of(case)


@dataclass(frozen=True, kw_only=True)
class DispatchCase(Case):
    """A routing of all ranks' tokens. Fields a function does not use keep their default."""

    counts: tuple[int, ...] = declared(Ranks(default=(1,)))  # tokens of each rank
    shards: int = declared(  # expert tensor parallelism
        Shards(default=1, at_least=1, pairs=(1, 2), divides="ranks", argument="expert_tensor_parallel")
    )
    local_experts: int = size(at_least=1)  # per group of shards
    topk: int = declared(Topk(default=1, at_least=1))
    hidden: int = declared(Columns(default=1, letter="H"))
    # the policy for repeated experts of a token; empty: no expert is repeated
    repeats: str = choice("", "count each", "last slot", argument="policy")
    slots: tuple[int, ...] | None = declared(  # None: given by `spread`
        Slots(
            default=None,
            rows="tokens",
            columns="topk",
            written_out=written_out,
            below="experts",
            least=-1,
            simple=(-1,),
            cells=2**9,
        )
    )
    spread: str = choice(*SPREADS, data=True)
    # codes and scales on the wire; "powers": power-of-two scales, "least": amax has a lower bound
    fp8: str = declared(Codes(default="", values=("", "fp8", "powers"), also=("least",)))
    map_dtype: str = dtypes(*MAPS, also=("int16",))
    index_dtype: str = dtypes("int64", "int32", also=("int16",))
    dtype: str = dtypes(*FLOATS, MOVED[3], also=(*MOVED[4:], "float64"))
    probs: str = dtypes("", *PROBS, also=("float16", "float64"))  # empty: no probs
    zero_probs: bool = choice(False, also=(True,), data=True)
    # the policy for slots of probability 0
    drop_zeros: bool = choice(False, also=(True,), argument="policy")
    # policy for values: whether the indices, which are legal, need be read
    trusted: bool = choice(False, also=(True,), argument="policy")
    values: str = choice("dyadic", "integers", "special", also=("wide", *AT_SCALES), data=True)
    align: int = setting(0, *ALIGNMENTS, pairs=(4, 2), given=True)
    capacity: int = setting(0, 1, 2, 5, pairs=(2, 3), given=True)
    # rows of the buffer beyond the need of the fullest rank, in units of align
    slack: int | None = setting(None, *range(-3, 4), pairs=(2, 3), given=True)
    num_sms: int = setting(0, 1, 3, pairs=(1,), data=True)  # 0: not given
    num_blocks: int = setting(0, 1, 3, pairs=(3,), data=True)
    scales: int = setting(0, 1, 3, pairs=(3,))  # columns of the tokens' scales
    scale_dtype: str = dtypes("float32", also=SCALE_DTYPES)
    biases: int = number(0, 1, 2, pairs=(1, 2), of=("biases",))
    journey: str = declared(Journey(default="", known=JOURNEY))  # calls of the law `sequence`; empty: none

    @property
    def ranks(self) -> int:
        return len(self.counts)

    @property
    def experts(self) -> int:
        """Experts of all ranks; shards of one expert count once."""
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

    @property
    def floating(self) -> bool:
        """Whether rows have a quantisable dtype."""
        return self.dtype in (*FLOATS, "float64")

    def clash(self) -> str | None:
        if self.shards > 1 and self.dispatcher not in ("allgather", "alltoall"):
            return f"shards is {self.shards}; {self.dispatcher} has experts in one piece"
        if self.capacity and self.slack is not None and self.dispatcher == "alltoall":
            return "a capacity gives all sizes, and leaves no budget"
        if self.slots is not None and self.spread != "uniform":
            return "explicit slots have no spread"
        if self.slots is not None and not self.repeats and self.dispatcher not in MAPPED:
            rows = [self.slots[i : i + self.topk] for i in range(0, len(self.slots), self.topk)]
            if any(sum(e >= 0 for e in row) > len({*row} - {-1}) for row in rows):
                return "slots name an expert twice; `repeats` must say what that means"
        if self.fp8 and not self.floating:
            return f"dtype is {self.dtype!r}, which fp8 excludes"
        if self.fp8 and self.dispatcher == "deepep_low_latency":
            if self.hidden % FP8_BLOCK or self.fp8 == "least":
                return (
                    f"hidden is {self.hidden}, fp8 {self.fp8!r}; rows are blocks of {FP8_BLOCK}, and no amax is given"
                )
            if self.grads or self.values == "special":
                return "codes of low latency have no gradient, and no special values"
        if self.drop_zeros and not (self.probs and self.dispatcher == "deepep"):
            return "drop_zeros needs the probs of deepep"
        if self.scale_dtype != "float32" and not self.scales:
            return f"scale_dtype is {self.scale_dtype!r} without scales"
        if self.values in ("wide", "reciprocals") and self.dtype == "float16":
            return f"float16 has not the range of {self.values} values"
        if self.values == "reciprocals" and (self.layout, self.layout_of) == ("negated", "scales"):
            return "packed codes are no numbers: a pending minus changes the bits of a NaN"
        return "ranks have no rows that share memory" if self.layout in SHARED else None

    def arguments(self) -> tuple[str, ...]:
        named = ARGUMENTS.get(self.dispatcher, {}).items()
        differing = [argument for name, argument in named if getattr(self, name) != getattr(DispatchCase, name)]
        return (*differing, "round_scale") if "use_fp8" in differing and self.fp8 == "powers" else tuple(differing)


def slots_of(case: DispatchCase) -> np.ndarray:
    """[G,K]: expert per slot of all ranks' tokens; -1: none."""
    shape = (case.tokens, case.topk)
    if case.slots is not None:
        return np.array(case.slots, dtype=np.int64).reshape(shape)
    cells = case.tokens * case.experts
    noise = hashed(case.seed, "slots", cells).reshape(case.tokens, case.experts).astype(np.int64)
    held = case.experts * case.shards // case.ranks  # experts per group of shards
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
        order = np.argsort(elsewhere, axis=1, kind="stable")  # local experts first
        chosen = np.where(np.take_along_axis(elsewhere, order, 1), -1, np.take_along_axis(chosen, order, 1))
    chosen = chosen[:, : case.topk]
    if case.spread in ("ragged", "empty"):
        lost = hashed(case.seed, "lost", case.tokens * case.topk).reshape(shape) % 3 == 0
        chosen = np.where(lost | (case.spread == "empty"), -1, chosen)
    return chosen


def indices_of(case: DispatchCase) -> list[Tensor]:
    """The slots [T_r,K] of each rank.

    If experts may repeat, a third of the slots repeat the slot before them.
    """
    slots = torch.from_numpy(slots_of(case))
    if case.repeats and case.slots is None:
        repeated = (
            torch.from_numpy(hashed(case.seed, "again", slots.numel()).astype(np.int64)).reshape(slots.shape) % 3 == 0
        )
        for k in range(1, case.topk):
            slots[:, k] = torch.where(repeated[:, k], slots[:, k - 1], slots[:, k])
    return list(slots.to(getattr(torch, case.index_dtype)).split(list(case.counts)))


def maps_of(case: DispatchCase) -> list[Tensor]:
    """[T_r,E] per rank."""
    slots = torch.from_numpy(slots_of(case))
    padded_map = torch.zeros((case.tokens, case.experts + 1), dtype=torch.bool)
    padded_map.scatter_(1, torch.where(slots < 0, case.experts, slots), True)
    return list(padded_map[:, :-1].to(getattr(torch, case.map_dtype)).split(list(case.counts)))


def values_of(
    case: DispatchCase,
    name: str,
    lengths: list[int],
    columns: tuple[int, ...] | None = None,
    dtype: str = "",
    style: str = "",
) -> list[Tensor]:
    """One payload per rank.

    The values of the first column are different in all rows, except for small integers.
    """
    dtype, style = dtype or case.dtype, style or case.values
    columns = (case.hidden,) if columns is None else columns
    shape = (sum(lengths), int(np.prod(columns)))
    if style == "integers" and DTYPES[dtype].itemsize > 1:
        payload_of_all = (
            torch.from_numpy(hashed(case.seed, name, shape[0] * shape[1]) % 17 - 8.0).to(DTYPES[dtype]).reshape(shape)
        )
    else:
        payload_of_all = payload(
            case.seed, name, shape, dtype, "dyadic" if style in ("integers", *AT_SCALES) else style
        )
    if style == "scales" and payload_of_all.shape[1] > 1 and payload_of_all.element_size() > 1:
        payload_of_all = at_edges_of_scales(payload_of_all)
    if (
        style == "reciprocals"
        and payload_of_all.shape[1] > 1
        and name.startswith("tokens")
        and payload_of_all.element_size() > 1
    ):
        payload_of_all = at_reciprocals(payload_of_all)
    return [rank_payload.reshape(len(rank_payload), *columns).clone() for rank_payload in payload_of_all.split(lengths)]


def probs_of(case: DispatchCase, name: str, lengths: list[int], columns: tuple[int, ...]) -> list[Tensor]:
    """The probabilities of each rank: ½, 1 and 2 if values are small integers; some 0 with
    `zero_probs`; special values if they are only moved.
    """
    shape, dtype = (sum(lengths), *columns), case.probs or "float32"
    if case.values == "integers":
        noise = hashed(case.seed, name, int(np.prod(shape)))
        steps = np.array([0.5, 1.0, 2.0, 0.0])[noise % (4 if case.zero_probs else 3)]
        probs_of_all = torch.from_numpy(steps).to(DTYPES[dtype]).reshape(shape)
    else:
        probs_of_all = probabilities(case.seed, name, shape, dtype, case.zero_probs)
    special = case.values == "special" and not case.function.endswith("_combine")
    probs_of_all = with_special(probs_of_all, case.seed) if special else probs_of_all
    return [rank_probs.clone() for rank_probs in probs_of_all.split(lengths)]


def is_exact(case: DispatchCase, dtype: torch.dtype, magnitude: Tensor) -> Tensor:
    """Where sums of small integers and halves are exact in `dtype` in any order."""
    exact = 2 * magnitude <= 2 ** min(BITS.get(dtype, 0), 11)
    return exact if case.values == "integers" and dtype in BITS else torch.zeros_like(exact)
