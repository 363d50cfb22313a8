"""Cases of permutation: routing maps, chunks and expert indices."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from conformance.core.axes import choice, dtypes, flag, number, size
from conformance.core.case import Case
from conformance.core.lists import bitmasks, order, parts, table
from conformance.core.space import ALIGNMENTS
from conformance.core.tensors import STRANGE, hashed
from moe_ref.permutation.routing_map import EMPTY

HEAVY_ALIGN = 2**21  # rows of padding, past 2³¹ elements where they are 1,024 or more wide
FLOATS = ("float32", "bfloat16", "float16")
MOVED = (*FLOATS, "float8_e4m3fn", "float8_e5m2", "uint8")  # dtypes of rows moved, not summed
PROBS = ("float32", "bfloat16")
MAPS = ("bool", "uint8", "int32", "int64")
SPREADS = (
    *("all", "uniform", "skewed", "one_hot", "empty", "ragged", "sparse"),
    *("front_empty", "middle_empty", "back_empty", "last_token"),
)


@dataclass(frozen=True, kw_only=True)
class RoutingCase(Case):
    """A routing map: explicit when small, a distribution when large."""

    tokens: int = size("T")
    experts: int = size("E", at_least=1)
    hidden: int = size("H")
    # experts per token in a distribution; slots per token in the index form
    topk: int = size("K", at_least=1, pairs=(1, 2, 4, 6), always=True, argument="topk")
    routing: tuple[int, ...] | None = bitmasks("tokens", "experts", written_out=lambda case: routed(case))
    spread: str = choice("all", also=SPREADS[1:], data=True)
    map_dtype: str = dtypes(*MAPS, also=("int16",))
    dtype: str = dtypes(*FLOATS, also=(*MOVED[3:], "float64"))
    probs: str = dtypes("", *PROBS, also=("float16", "float64"))  # empty: none
    zero_probs: bool = flag(of=("probs",), data=True)
    values: str = choice("dyadic", "wide", "special", also=STRANGE[1:], of=("tokens", "rows"), data=True)
    align: int = number(0, *ALIGNMENTS, pairs=(1, 2, 5, 16), argument="align", given=True)
    capacity: int = number(0, *range(1, 41), pairs=(3, 2), argument="capacity", given=True)
    # num_rows less the rows needed, in units of align
    slack: int | None = number(None, *range(-4, 5), pairs=(-2, 3), argument="num_rows", given=True)

    @property
    def is_heavy(self) -> bool:
        """Whether the case takes gigabytes, and seconds.

        Padding past 32 bits of offsets does, too.
        """
        return super().is_heavy or self.align >= HEAVY_ALIGN

    def clash(self) -> str | None:
        if self.routing is not None and self.spread != "all":
            return "an explicit routing has no spread"
        if self.capacity and (self.align or self.slack is not None):
            return "a capacity excludes align and num_rows"
        if self.values == "wide" and self.dtype == "float16":
            return "wide values exceed float16's range"
        if self.zero_probs and not self.probs and self.function in ("permute", "unpermute"):
            return "zero_probs needs probs"
        return None

    @property
    def sized(self) -> bool:
        permutes = self.function in ("permute", "unpermute")
        return not permutes or bool(self.capacity) or self.slack is not None


def routed(case: RoutingCase) -> np.ndarray:
    """The map as a [T,E] bool array."""
    shape = (case.tokens, case.experts)
    if case.routing is not None:
        return np.array([[mask >> e & 1 for e in range(case.experts)] for mask in case.routing], dtype=bool).reshape(
            shape
        )
    noise = hashed(case.seed, "map", case.tokens * case.experts).reshape(shape)
    if case.spread == "skewed":
        # low experts score higher
        noise = (noise >> np.uint32(1)) // (1 + np.arange(case.experts, dtype=np.uint32))
    count = np.full(case.tokens, min(case.topk, case.experts))
    if case.spread == "ragged":
        count = hashed(case.seed, "count", case.tokens) % (min(case.topk, case.experts) + 1)
    if case.spread in ("one_hot", "empty", "all", "sparse", "last_token"):
        return _unranked(case, shape)
    out = np.zeros(shape, dtype=bool)
    order = np.argsort(noise, axis=1, kind="stable")[:, ::-1]
    np.put_along_axis(out, order, np.arange(case.experts)[None, :] < count[:, None], axis=1)
    third = -(-case.experts // 3)
    hole = {
        "front_empty": slice(0, third),
        "middle_empty": slice(third, 2 * third),
        "back_empty": slice(case.experts - third, case.experts),
    }
    out[:, hole.get(case.spread, slice(0, 0))] = False
    return out


def _unranked(case: RoutingCase, shape: tuple[int, int]) -> np.ndarray:
    """The distributions that need no ranking."""
    out = np.zeros(shape, dtype=bool)
    if case.spread == "all":
        out[:] = True
    elif case.spread == "one_hot":
        out[:, case.seed % case.experts] = True
    elif case.spread == "sparse":
        out = hashed(case.seed, "map", shape[0] * shape[1]).reshape(shape) % 16 == 0
    elif case.spread == "last_token" and case.tokens:
        out[-1, -1] = True
    return out


def routing_map(case: RoutingCase) -> Tensor:
    """The map in the case's dtype; in an integer dtype every routed cell is 1."""
    return torch.from_numpy(routed(case)).to(getattr(torch, case.map_dtype))


@dataclass(frozen=True, kw_only=True)
class ChunksCase(Case):
    """Chunk sizes and their new order."""

    sizes: tuple[int, ...] = parts(order="order")
    order: tuple[int, ...] = order(of="sizes")
    tail: int = number(0, 1, 5, pairs=(2,), given=True)  # rows past the last chunk
    hidden: int = size("H")
    dtype: str = dtypes(*FLOATS, "float8_e4m3fn", also=("float8_e5m2", "uint8", "float64"))
    probs: str = dtypes("", *PROBS, also=("float16", "float64"))
    values: str = choice("dyadic", "special", also=("wide", *STRANGE[1:]), data=True)
    index_dtype: str = dtypes("int64", "int32", also=("int16",))

    @property
    def order_dtype(self) -> str:
        """The dtype of the order. Every second case has another one than that of the sizes."""
        return "int64" if self.seed % 2 else self.index_dtype


@dataclass(frozen=True, kw_only=True)
class IndicesCase(Case):
    """Expert indices, K slots per token: explicit, or drawn from the seed."""

    tokens: int = size("T")
    topk: int = size("K", at_least=1)
    experts: int = size("E", at_least=1, argument="num_experts")
    ranks: int = size("R", at_least=1, divides="experts")  # expert-parallel ranks
    slots: tuple[int, ...] = table(
        "tokens", "topk", lambda case: indices(case), least=EMPTY, below="experts", simple=(EMPTY, 0)
    )
    empty: int = number(0, 1, 4, 8, pairs=(3,), data=True)  # empty slots (-1) per 8 slots
    repeats: bool = flag(data=True)  # a token may list an expert in several slots
    dtype: str = dtypes(*FLOATS, also=("float64",))
    index_dtype: str = dtypes("int64", "int32", "int16")
    zero_probs: bool = flag(of=("probs",), data=True)


def indices(case: IndicesCase) -> Tensor:
    """[T,K] expert indices."""
    shape = (case.tokens, case.topk)
    if case.slots:
        return torch.tensor(case.slots).reshape(shape)
    if case.repeats:
        chosen = torch.from_numpy(
            (hashed(case.seed, "indices", case.tokens * case.topk) % case.experts).astype("int64")
        ).reshape(shape)
    else:
        rank = torch.from_numpy(hashed(case.seed, "indices", case.tokens * case.experts).astype("int64")).reshape(
            case.tokens, case.experts
        )
        chosen = torch.nn.functional.pad(
            rank.argsort(dim=1, stable=True), (0, max(case.topk - case.experts, 0)), value=EMPTY
        )[:, : case.topk]
    none = torch.from_numpy((hashed(case.seed, "empty", case.tokens * case.topk) % 8 < case.empty).reshape(shape))
    return torch.where(none, EMPTY, chosen)
