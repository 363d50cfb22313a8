"""Cases of router logits: explicit when small, by distribution when large."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from conformance.core.case import Case
from conformance.core.shared_out import check_counts
from conformance.core.tensors import DTYPES, hashed

EXPLICIT_CELLS = 64  # up to so many logits are written out
MINUS_INFINITY, NOT_A_NUMBER = -(10**6), 10**6  # stand for these in explicit logits
SPREADS = ("distinct", "ties", "near", "negative", "extreme", "minus_inf", "nan", "equal", "saturated")
SCORES = ("softmax", "softmax_pre", "sigmoid", "sqrtsoftplus")


@dataclass(frozen=True, kw_only=True)
class LogitsCase(Case):
    """A case around [T,E] logits."""

    tokens: int = 1
    experts: int = 1
    topk: int = 1
    logits: tuple[int, ...] = ()  # in eighths, row by row, if explicit
    spread: str = "distinct"
    dtype: str = "float32"
    score: str = "softmax"
    groups: int = 0
    group_topk: int = 0
    scaling: int = 0  # the scaling factor in eighths; 0: none
    bias: str = ""  # expert bias: small (within ±1/2), large (within ±64)
    precomputed: bool = False
    padding: int = 0  # of 8 tokens, how many are padding
    coeff: int = 8  # a loss's coefficient in eighths
    evaluation: bool = False
    layout: str = "contiguous"
    layout_of: str = ""
    grads: str = ""

    words: ClassVar[dict[str, tuple[str, ...]]] = {"spread": SPREADS, "score": SCORES, "bias": ("small", "large")}

    def __post_init__(self) -> None:
        if self.tokens < 0 or min(self.experts, self.topk) < 1:
            raise ValueError(
                f"tokens ≥ 0 and experts, topk ≥ 1 are needed; they are {self.tokens}, {self.experts}, {self.topk}"
            )
        if self.logits and len(self.logits) != self.tokens * self.experts:
            raise ValueError(f"logits must hold {self.tokens} × {self.experts} numbers")


LogitsCase.serves("topk_indices", "topk_routing", "aux_loss_scores", "z_loss", "sinkhorn_routing")


def logits_of(case: LogitsCase) -> Tensor:
    """[T,E] logits in the case's dtype."""
    kind = DTYPES[case.dtype]
    shape = (case.tokens, case.experts)
    if case.logits:
        eighths = torch.tensor(case.logits, dtype=torch.float64)
        value = torch.where(
            eighths == MINUS_INFINITY, -torch.inf, torch.where(eighths == NOT_A_NUMBER, torch.nan, eighths / 8)
        )
        return value.reshape(shape).to(kind)
    return torch.from_numpy(_drawn(case, kind)).reshape(shape).to(kind)


def _drawn(case: LogitsCase, kind: torch.dtype) -> np.ndarray:
    noise = hashed(case.seed, "logits", case.tokens * case.experts).astype(np.int64)
    fine = kind in (torch.float32, torch.float64)
    plain = (noise % 2**17 - 2**16) / 2**13 if fine else (noise % 255 - 127) / 16  # within ±8; in float32 rarely equal
    if case.function == "sinkhorn_routing":
        plain = plain / 8  # an uneven plan takes thousands of rounds
    if case.spread == "ties":
        return (noise % 5 - 2) / 2 * np.where((noise >> 8) % 2 == 0, 1.0, -1.0)  # zeros of both signs
    if case.spread == "near":  # a few units in the last place apart
        return noise % 3 + 1 + (noise >> 8) % 8 * (2.0**-22 if fine else 2.0**-6)
    if case.spread == "negative":  # a Sinkhorn plan of less than exp(-9) creeps for millions of rounds
        return (-2 if case.function == "sinkhorn_routing" else -10) - np.abs(plain)
    if case.spread == "extreme":
        most = float(torch.finfo(kind).max) if kind != torch.float64 else 1e38
        return np.clip(plain * 10.0 ** ((noise >> 20) % 38), -most, most)
    if case.spread == "minus_inf":
        token = np.arange(len(noise)) // case.experts
        whole = (token % 4 == 3) & (case.function != "z_loss")  # one such row would leave nothing to judge of a loss
        return np.where(((noise >> 20) % 2 == 0) | whole, -np.inf, plain)
    if case.spread == "nan":
        token = np.arange(len(noise)) // case.experts
        strange = np.where((noise >> 20) % 2 == 0, np.nan, np.inf)
        return np.where(((noise >> 22) % 8 == 0) & (token % 2 == 0), strange, plain)
    if case.spread == "equal":
        return np.full(len(noise), 0.25)
    if case.spread == "saturated":  # where 1 - σ(x) is lost in float32
        return 16 + (noise % 128) / 8
    return plain


def bias_of(case: LogitsCase) -> Tensor:
    """[E] expert bias, float32."""
    noise = hashed(case.seed, "bias", case.experts).astype(np.int64)
    steps = (noise % 257 - 128) / (256 if case.bias == "small" else 2)
    return torch.from_numpy(steps).float()


def padding_of(case: LogitsCase) -> Tensor:
    """[T] bool, True for padding."""
    return torch.from_numpy(hashed(case.seed, "padding", case.tokens) % 8 < case.padding)


def indices_of(case: LogitsCase) -> Tensor:
    """[T,K] different experts a token, in no order."""
    rank = torch.from_numpy(hashed(case.seed, "precomputed", case.tokens * case.experts).astype(np.int64)).reshape(
        case.tokens, case.experts
    )
    return rank.argsort(dim=1, stable=True)[:, : case.topk]


GO_WITH: dict[str, dict[str, Any]] = {"layout": {"layout_of": ""}, "groups": {"group_topk": 0}, "score": {"bias": ""}}


def simpler_logits(case: LogitsCase) -> Iterator[LogitsCase]:
    """Fewer tokens, experts and slots; explicit logits, and plainer ones; then plainer settings."""
    for name in (
        "law",
        "layout",
        "grads",
        "precomputed",
        "padding",
        "scaling",
        "bias",
        "groups",
        "score",
        "dtype",
        "poison",
        "coeff",
        "evaluation",
    ):
        default: Any = LogitsCase.__dataclass_fields__[name].default
        if getattr(case, name) != default:
            yield replace(case, **{name: default} | GO_WITH.get(name, {}))
    if case.logits:
        yield from _smaller_table(case)
    else:
        yield from (replace(case, tokens=t) for t in _fewer(case.tokens, 0))
        if not case.groups:
            yield from (replace(case, experts=e) for e in _fewer(case.experts, max(case.topk, 1)))
        if case.seed:
            yield replace(case, seed=0)
        if 0 < case.tokens * case.experts <= EXPLICIT_CELLS:
            yield replace(
                case, logits=tuple(_eighths(x) for x in logits_of(case).flatten().tolist()), spread="distinct"
            )
    if not case.groups:
        yield from (replace(case, topk=k) for k in _fewer(case.topk, 1))


def _eighths(x: float) -> int:
    if x != x:
        return NOT_A_NUMBER
    return MINUS_INFINITY if x == -torch.inf else round(max(min(x, 1000.0), -1000.0) * 8)


def _fewer(size: int, least: int) -> list[int]:
    return sorted({s for s in (least, 1, 2, 3, size // 2, size - 1) if least <= s < size})


def _smaller_table(case: LogitsCase) -> Iterator[LogitsCase]:
    rows = [case.logits[t * case.experts : (t + 1) * case.experts] for t in range(case.tokens)]
    for t in range(len(rows) if len(rows) > 1 else 0):
        yield replace(case, tokens=case.tokens - 1, logits=tuple(x for row in rows[:t] + rows[t + 1 :] for x in row))
    for e in range(case.experts if case.experts > case.topk and not case.groups else 0):
        yield replace(case, experts=case.experts - 1, logits=tuple(x for row in rows for x in row[:e] + row[e + 1 :]))
    for i, x in enumerate(case.logits):
        for plain in (0, 8, -8):
            if abs(plain) < abs(x):
                yield replace(case, logits=(*case.logits[:i], plain, *case.logits[i + 1 :]))


@dataclass(frozen=True, kw_only=True)
class GateCase(Case):
    """A case around [T,H] hidden states."""

    tokens: int = 1
    hidden: int = 1
    experts: int = 1
    dtype: str = "float32"
    weight_dtype: str = ""  # empty: as dtype
    router_dtype: str = ""
    bias: bool = False
    eps: int = 1  # of the jitter, in sixteenths
    scale: int = 8  # of the loss, in eighths
    counts: tuple[int, ...] = ()  # tokens of each of several ranks, with the same weights; empty: one process
    layout: str = "contiguous"
    layout_of: str = ""
    grads: str = ""

    words: ClassVar[dict[str, tuple[str, ...]]] = {"router_dtype": ("fp32", "fp64")}

    def __post_init__(self) -> None:
        if min(self.tokens, self.hidden) < 0 or self.experts < 1 or not 0 <= self.eps < 16:
            sizes = f"{self.tokens}, {self.hidden}, {self.experts}, {self.eps}"
            raise ValueError(f"tokens, hidden ≥ 0, experts ≥ 1 and eps from 0 to 15 are needed; they are {sizes}")
        check_counts(self.counts, self.tokens)


GateCase.serves("gate", "jitter", "attach_loss")


@dataclass(frozen=True, kw_only=True)
class LoadCase(Case):
    """A case around a routing map drawn from the seed, or its counts."""

    tokens: int = 1
    experts: int = 1
    topk: int = 1
    sequences: int = 1  # folded into columns
    dtype: str = "float32"
    map_dtype: str = "bool"
    values: str = "distinct"  # of the probs or scores: distinct, ties, zeros, negative
    capacity: int = 0
    policy: str = "probs"
    pad: bool = False
    coeff: int = 8  # in eighths
    total: str = "number"  # total_num_tokens as a number, on the device, or zero
    rate: int = 1  # update rate in thousandths
    bias: int = 0  # magnitude of the expert bias before, in halves
    even: bool = False  # all counts equal
    layout: str = "contiguous"
    layout_of: str = ""
    grads: str = ""

    words: ClassVar[dict[str, tuple[str, ...]]] = {
        "values": ("distinct", "ties", "zeros", "negative"),
        "policy": ("probs", "position"),
        "total": ("number", "device", "zero"),
    }

    def __post_init__(self) -> None:
        if min(self.tokens, self.capacity) < 0 or min(self.experts, self.topk, self.sequences) < 1:
            sizes = f"{self.tokens}, {self.capacity}, {self.experts}, {self.topk}, {self.sequences}"
            raise ValueError(f"tokens, capacity ≥ 0 and experts, topk, sequences ≥ 1 are needed; they are {sizes}")


LoadCase.serves("drop_tokens", "load_balancing_loss", "update_expert_bias")


def map_of(case: LoadCase) -> Tensor:
    """[T,E] bool, up to K experts a token; some tokens have none."""
    rank = (
        hashed(case.seed, "map", case.tokens * case.experts)
        .reshape(case.tokens, case.experts)
        .argsort(axis=1)
        .argsort(axis=1)
    )
    some = hashed(case.seed, "count", case.tokens)[:, None] % (case.topk + 1) if case.seed % 3 == 0 else case.topk
    return torch.from_numpy(rank < some)


def numbers(case: LoadCase, name: str, shape: tuple[int, ...]) -> Tensor:
    """Values of probs or scores."""
    noise = hashed(case.seed, name, int(np.prod(shape))).astype(np.int64)
    value = {
        "distinct": (noise % 2**16 + 1) / 2**16,
        "ties": (noise % 3 + 1) / 4,
        "zeros": np.where(noise % 2 == 0, np.where(noise % 4 == 0, 0.0, -0.0), (noise >> 8) % 64 / 64),
        "negative": (noise % 2**16) / 2**15 - 1,
    }[case.values]
    return torch.from_numpy(value).reshape(shape).to(DTYPES[case.dtype])
