"""Cases of the router: logits, hidden states, and routing maps with their counts."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from conformance.core.axes import Changes, Choice, Number, Size, choice, declared, dtypes, flag, number, size
from conformance.core.case import Case
from conformance.core.lists import table
from conformance.core.shared_out import counts
from conformance.core.signature import Signature
from conformance.core.tensors import DTYPES, hashed

FLOATS = ("float32", "bfloat16", "float16")
LOGITS = (*FLOATS, "float64")
EXPLICIT_CELLS = 64  # the most logits that are written out
MINUS_INFINITY, NOT_A_NUMBER = -(10**6), 10**6  # codes of -∞ and NaN in explicit logits
SPREADS = ("distinct", "ties", "near", "negative", "minus_inf", "nan", "extreme", "equal", "saturated")
MORE_SPREADS = ("edges", "every", "far", "zeros")
CROSSING = (1.0, 2.0, 3.0, 4.0)  # preferences that a slow plan reverses after 4, 11 and 33 rounds
COUNTED = {"past_16_bits": 2**16, "past_24_bits": 2**24, "past_31_bits": 2**31}
SCORES = ("softmax", "softmax_pre", "sigmoid", "sqrtsoftplus")


@dataclass(kw_only=True)
class Resized(Size):
    """A size. A second call has a size that is larger by one, or twice as large."""

    doubles: bool = False

    def other(self, case: Any) -> Changes:
        value = getattr(case, self.name)
        return {self.name: value + (value if self.doubles else 1)}


@dataclass(kw_only=True)
class Room(Number):
    """A capacity. A second call has a larger one, by one."""

    def other(self, case: Any) -> Changes:
        return {self.name: getattr(case, self.name) + 1}


@dataclass(kw_only=True)
class Slots(Number):
    """Experts per token."""

    spare: int = 0  # least number of experts not chosen

    def fits(self, case: Any) -> str | None:
        value, most = getattr(case, self.name), case.experts - self.spare
        return None if 1 <= value <= most else f"{self.name} is {value}; it must be from 1 to {most}"

    def nearest(self, case: Any, mended: Any) -> Iterator[Changes]:
        yield {self.name: min(getattr(case, self.name), mended.experts - self.spare)}

    def other(self, case: Any) -> Changes:
        return {}


@dataclass(kw_only=True)
class Scores(Choice):
    """A score function; `softmax_pre` is the argument `pre_softmax`."""

    def allowed(self, signature: Signature) -> list[str]:
        has_pre_softmax = not self.argument or "pre_softmax" in signature.settings
        return [value for value in self.values if has_pre_softmax or value != "softmax_pre"]

    def drawn(self, signature: Signature) -> st.SearchStrategy[Changes]:
        return st.sampled_from(self.allowed(signature)).map(lambda value: {self.name: value})

    def covered(self, signature: Signature) -> list[Changes]:
        return [{self.name: value} for value in self.allowed(signature)]

    def other(self, case: Any) -> Changes:
        return {self.name: "softmax_pre" if getattr(case, self.name) == "sigmoid" else "sigmoid"}


@dataclass(kw_only=True)
class Groups(Number):
    """Groups of experts. It sets two fields: `groups`, and `group_topk`, the groups kept."""

    def fits(self, case: Any) -> str | None:
        groups, group_topk = case.groups, case.group_topk
        if not groups and not group_topk:
            return None
        if not (groups and group_topk) or case.experts % groups:
            return f"groups is {groups} and group_topk {group_topk}; both are needed, and groups must divide experts"
        if not group_topk <= min(case.topk, groups) or case.topk > group_topk * (case.experts // groups):
            return f"{group_topk} of {groups} groups have no room for {case.topk} experts, one in each at least"
        return None

    def plainer(self, case: Any) -> Iterator[Changes]:
        if case.groups:
            yield {"groups": 0, "group_topk": 0}

    def nearest(self, case: Any, mended: Any) -> Iterator[Changes]:
        yield {"groups": case.groups, "group_topk": case.group_topk}
        yield {"groups": case.groups, "group_topk": min(case.group_topk, mended.topk)}
        yield {"groups": 0, "group_topk": 0}


def groups(argument: str = "") -> Any:
    return declared(Groups(default=0, values=(0,), argument=argument))


def slots(argument: str = "", of: tuple[str, ...] = (), spare: int = 0) -> Any:
    return declared(Slots(default=1, values=(1,), argument=argument, of=of, spare=spare))


def experts(default: int = 1, **fields: Any) -> Any:
    return declared(Resized(default=default, letter="E", at_least=1, **fields))


def eighths(case: "LogitsCase") -> Tensor:
    """The drawn logits of the case, as explicit integers."""
    bounded = logits_of(case).double().clamp(-1000, 1000).nan_to_num(nan=NOT_A_NUMBER / 8).mul(8).round()
    return torch.where(logits_of(case) == -torch.inf, MINUS_INFINITY, bounded).long()


@dataclass(frozen=True, kw_only=True)
class LogitsCase(Case):
    """A case with [T,E] logits."""

    tokens: int = size("T")
    experts: int = experts()
    topk: int = slots("topk")
    logits: tuple[int, ...] = table(  # in eighths, row by row, if explicit
        "tokens", "experts", eighths, least=MINUS_INFINITY, simple=(0, 8, -8), cells=EXPLICIT_CELLS
    )
    spread: str = choice(*SPREADS[:6], also=(*SPREADS[6:], *MORE_SPREADS, "slow"), data=True)
    dtype: str = dtypes(*LOGITS)
    score: str = declared(Scores(default="softmax", values=SCORES, argument="score_function"))
    groups: int = groups("num_groups")
    group_topk: int = number(0, argument="group_topk")
    scaling: int = number(0, 4, 20, 35, pairs=(20,), argument="scaling_factor", given=True)  # eighths; 0: none
    # expert bias: small (within ±1/2), large (within ±64), fine (near 1, too fine for bfloat16)
    bias: str = choice("", "small", "large", also=("fine",), of=("expert_bias",), given=True)
    precomputed: bool = flag(of=("precomputed_indices",))
    index_dtype: str = dtypes("int64", "int32")
    padding: int = number(0, 1, 4, 8, pairs=(3,), of=("padding_mask",), given=True)  # per 8 tokens
    coeff: int = number(8, *range(21), pairs=(8, 1), argument="coeff", data=True)  # in eighths
    evaluation: bool = flag(argument="training")

    @property
    def bias_dtype(self) -> str:
        """The dtype of the expert bias."""
        return "float64" if self.dtype == "float64" else "float32"

    def clash(self) -> str | None:
        if self.logits and self.spread != "distinct":
            return "explicit logits have no spread"
        if self.bias and self.score.startswith("softmax"):
            return "bias excludes softmax scores"
        if self.score == "softmax_pre" and self.function == "aux_loss_scores":
            return "score is 'softmax_pre', but no expert is chosen before the scores"
        return None

    @property
    def factor(self) -> float:
        """The scaling factor. For float64 logits it is one that float32 cannot represent."""
        return self.scaling / 8 + (2.0**-40 if self.dtype == "float64" else 0.0)

    def arguments(self) -> tuple[str, ...]:
        return ("pre_softmax",) if self.score == "softmax_pre" else ()


def logits_of(case: LogitsCase) -> Tensor:
    """[T,E] logits in the case's dtype."""
    dtype = DTYPES[case.dtype]
    shape = (case.tokens, case.experts)
    if case.logits:
        value = torch.tensor(case.logits, dtype=torch.float64)
        special = torch.where(value == NOT_A_NUMBER, torch.nan, value / 8)
        return torch.where(value == MINUS_INFINITY, -torch.inf, special).reshape(shape).to(dtype)
    return torch.from_numpy(_logit_values(case, dtype)).reshape(shape).to(dtype)


def _logit_values(case: LogitsCase, dtype: torch.dtype) -> np.ndarray:
    noise = hashed(case.seed, "logits", case.tokens * case.experts).astype(np.int64)
    fine = dtype in (torch.float32, torch.float64)
    token = np.arange(len(noise)) // case.experts
    # within ±8; in float32 rarely equal
    values = (noise % 2**17 - 2**16) / 2**13 if fine else (noise % 255 - 127) / 16
    if dtype == torch.float64:
        values = values + (noise >> 17) * 2.0**-40  # float64 logits differ from those of float32
    if case.function == "sinkhorn_routing":
        values = values / 8  # uneven plans would take thousands of iterations
    if case.spread == "ties":  # with zeros of both signs
        return (noise % 5 - 2) / 2 * np.where((noise >> 8) % 2 == 0, 1.0, -1.0)
    if case.spread == "near":  # a few ulp apart
        ulp = 2.0**-50 if dtype == torch.float64 else 2.0**-22 if fine else 2.0**-6
        return noise % 3 + 1 + (noise >> 8) % 8 * ulp
    if case.spread == "negative":  # a Sinkhorn plan below exp(-9) takes millions of iterations
        return (-2 if case.function == "sinkhorn_routing" else -10) - np.abs(values)
    if case.spread == "far":  # exp(x) is small, and in float32 not yet subnormal
        return -20 - np.abs(values) * 7.5
    if case.spread == "extreme":
        most = float(torch.finfo(dtype).max) if dtype != torch.float64 else 1e38
        return np.clip(values * 10.0 ** ((noise >> 20) % 38), -most, most)
    if case.spread == "minus_inf":
        # z_loss: one such row would leave the loss unspecified
        whole_row = (token % 4 == 3) & (case.function != "z_loss")
        return np.where(((noise >> 20) % 2 == 0) | whole_row, -np.inf, values)
    if case.spread == "nan":
        special = np.where((noise >> 20) % 2 == 0, np.nan, np.inf)
        if case.function == "z_loss" and case.padding:  # elsewhere they would leave the loss unspecified
            return np.where(padding_of(case).numpy()[token], special, values)
        return np.where(((noise >> 22) % 8 == 0) & (token % 2 == 0), special, values)
    if case.spread == "equal":
        return np.full(len(noise), 0.25)
    if case.spread == "edges":
        return _edges(case, values, dtype)
    if case.spread == "every":
        return _all_patterns(case, noise, values, dtype)
    if case.spread == "slow":
        return _slow(case)
    if case.spread == "zeros":  # of both signs, which are equal
        return np.where(noise % 2 == 0, 0.0, -0.0)
    if case.spread == "saturated":  # 1 - σ(x) underflows in float32
        return 16 + (noise % 128) / 8
    return values


def _edges(case: LogitsCase, values: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """-∞, zeros of both signs, and the smallest and large numbers as first and last logit."""
    info = torch.finfo(dtype)
    large = min(info.max, 2.0**100) if case.function != "z_loss" else 8.0  # a sum over tokens
    ends = np.array([-np.inf, -0.0, info.smallest_normal * info.eps, -large, info.tiny, 0.0, large])
    rows, token = values.astype(np.float64).reshape(case.tokens, case.experts), np.arange(case.tokens)
    rows[:, 0] = ends[(token + case.seed) % len(ends)]
    rows[:, -1] = ends[(2 * token + 3 + case.seed) % len(ends)]
    return rows.flatten()


def _slow(case: LogitsCase) -> np.ndarray:
    """Logits whose plan takes many rounds.

    Slightly more than half of the tokens prefer even experts, some of them so little that the plan
    moves them to odd experts, one after the other.
    """
    token, expert = np.arange(case.tokens)[:, None], np.arange(case.experts)[None]
    moved = CROSSING[: max(case.tokens // 16, 1)]
    prefers = np.concatenate([moved, np.full(case.tokens, 6.0)])[: case.tokens, None]
    even = (expert % 2 == 0) == (token < case.tokens // 2 + len(moved))
    within = (expert // 2 + token) % min(max(case.experts // 2, 1), 4) / 2  # between experts of one kind
    slow: np.ndarray = np.where(even, prefers, -prefers) / 2 + within - 2
    return slow.flatten()


def _all_patterns(case: LogitsCase, noise: np.ndarray, values: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Consecutive finite 16-bit patterns, with random bits after them in a wider dtype; others are
    plain, in z_loss, a sum over tokens, also large ones.
    """
    pattern = (np.arange(len(noise)) + 7919 * case.seed) % 2**16
    low = 0 if dtype == torch.bfloat16 else noise % 2**16
    half = dtype == torch.float16
    bits = (
        pattern.astype(np.uint16).view(np.float16) if half else (pattern << 16 | low).astype(np.uint32).view(np.float32)
    )
    with np.errstate(invalid="ignore"):  # of signalling NaNs
        patterns = bits.astype(np.float64)
    most = 16.0 if case.function == "z_loss" else np.inf
    return np.where(np.abs(patterns) < most, patterns, values)


def bias_of(case: LogitsCase) -> Tensor:
    """[E] expert bias; a fine one is near 1, in float64 too fine for float32."""
    noise = hashed(case.seed, "bias", case.experts).astype(np.int64)
    fine = 4096 if case.bias_dtype == "float32" else 2**40
    steps = (noise % 257 - 128) / {"small": 256, "large": 2, "fine": fine}[case.bias] + (case.bias == "fine")
    return torch.from_numpy(steps).to(DTYPES[case.bias_dtype])


def padding_of(case: LogitsCase) -> Tensor:
    """[T] bool, True for padding."""
    return torch.from_numpy(hashed(case.seed, "padding", case.tokens) % 8 < case.padding)


def indices_of(case: LogitsCase) -> Tensor:
    """[T,K] distinct experts per token, unordered."""
    noise = hashed(case.seed, "precomputed", case.tokens * case.experts).astype(np.int64)
    rank = torch.from_numpy(noise).reshape(case.tokens, case.experts)
    return rank.argsort(dim=1, stable=True)[:, : case.topk].to(DTYPES[case.index_dtype])


@dataclass(frozen=True, kw_only=True)
class GateCase(Case):
    """A case with [T,H] hidden states."""

    tokens: int = size("T")
    hidden: int = declared(Resized(default=1, letter="H"))
    experts: int = experts()
    dtype: str = dtypes(*FLOATS, also=("float64",))
    weight_dtype: str = choice("", "float32", also=("bfloat16",), of=("weight",))  # empty: as dtype
    router_dtype: str = choice("", "fp32", "fp64", argument="router_dtype")
    bias: bool = flag(of=("bias",))
    eps: int = number(1, *range(16), pairs=(0, 1, 15), argument="eps", data=True)  # in sixteenths
    # in eighths; sums of 2049 of them have more bits than float16
    scale: int = number(8, *range(-20, 41), 2049, pairs=(8, 3, -8, 0), argument="scale", data=True)
    # of x; special: NaN, infinities and -0 at the ends of rows
    values: str = choice("dyadic", also=("special",), data=True)
    # tokens per rank, all with the same weights; empty: one process
    counts: tuple[int, ...] = counts(of="weight")

    @property
    def parameter_dtype(self) -> str:
        """The dtype of weight and bias."""
        return self.weight_dtype or self.dtype

    @property
    def bias_dtype(self) -> str:
        """The dtype of the bias. In every second case it is not the dtype of the weight."""
        return "float32" if self.seed % 2 and self.dtype != "float64" else self.parameter_dtype

    @property
    def loss_dtype(self) -> str:
        """The dtype of the loss that x carries."""
        return "float64" if self.dtype == "float64" else "float32"

    def clash(self) -> str | None:
        if self.eps > 15:
            return f"eps is {self.eps}; it must be below 16"
        if self.counts and self.values != "dyadic":
            return "ranks have dyadic inputs"
        return "ranks have contiguous inputs" if self.counts and self.layout != "contiguous" else None


@dataclass(frozen=True, kw_only=True)
class LoadCase(Case):
    """A case with a routing map drawn from the seed, or with its counts."""

    tokens: int = size("T")
    experts: int = experts(always=True)
    topk: int = slots(of=("probs", "scores"))
    # folded into columns
    sequences: int = declared(Size(default=1, letter="C", at_least=1, most=3, pairs=(1, 3)))
    dtype: str = dtypes(*LOGITS)
    map_dtype: str = dtypes("bool", "uint8", "int32", "int64")  # bool, uint8: int64, float32 counts
    # fine: 2⁻⁵³ apart, a unit in the last place of float64
    # above_one: of a scaling factor
    values: str = choice(
        "distinct", "ties", "zeros", "negative", also=("fine", "above_one"), of=("probs", "scores"), data=True
    )
    capacity: int = declared(Room(default=0, values=(0,), pairs=(1, 3, 9), argument="capacity", data=True))
    policy: str = choice("probs", "position", argument="drop_policy", turns=True)
    pad: bool = flag(argument="pad_to_capacity")
    coeff: int = number(8, *range(21), pairs=(8, 1), argument="coeff", data=True)  # in eighths
    # total_num_tokens: a number, a device tensor ("one": of shape [1]), zero, or a mean length
    total: str = choice("number", "device", also=("zero", "mean", "one"), argument="total_num_tokens")
    rate: int = number(1, *range(501), pairs=(0, 1, 250), argument="update_rate", data=True)  # in thousandths
    bias: int = number(0, 1, 4, 100, pairs=(1, 40), of=("expert_bias",), data=True)  # range, in halves
    even: bool = flag(of=("expert_bias",), data=True)  # all counts equal
    # of tokens per expert: see `counts_past`
    counted: str = choice("few", also=(*COUNTED, "fractions"), of=("tokens_per_expert",), data=True)

    def clash(self) -> str | None:
        if self.counted == "past_31_bits" and self.map_dtype == "int32":
            return "int32 holds no count past 31 bits"
        if self.counted == "fractions" and self.map_dtype != "uint8":
            return "only counts in float32 have fractions"
        return None


def counts_past(case: LoadCase, small_counts: np.ndarray) -> Tensor:
    """Counts in the case's dtype: 2ⁿ plus a few, a few units in the last place of float32 apart,
    and in integers a few; also counts with fractions.
    """
    kind = {"bool": torch.int64, "uint8": torch.float32}.get(case.map_dtype, getattr(torch, case.map_dtype))
    past = COUNTED.get(case.counted, 0)
    unit = max(past >> 22, 1) if kind == torch.float32 else 1
    counts = past + unit * (small_counts % 5) if past else small_counts
    return torch.from_numpy(counts / 8 if case.counted == "fractions" else counts).to(kind)


def map_of(case: LoadCase) -> Tensor:
    """[T,E] bool, up to K experts per token; some tokens have none."""
    noise = hashed(case.seed, "map", case.tokens * case.experts).reshape(case.tokens, case.experts)
    rank = noise.argsort(axis=1).argsort(axis=1)
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
        "fine": 0.5 + (noise % 2**16 + 1) / 2**53,
        "above_one": 1 + (noise % 2**16 + 1) / 2**13,
    }[case.values]
    return torch.from_numpy(value).reshape(shape).to(DTYPES[case.dtype])
