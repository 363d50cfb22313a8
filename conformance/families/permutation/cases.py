"""Routing maps: explicit when small, one bitmask a token; distributions when large."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from conformance.core.case import Case
from conformance.core.tensors import hashed

SPREADS = (
    "uniform",
    "skewed",
    "one_hot",
    "empty",
    "all",
    "ragged",
    "sparse",
    "front_empty",
    "middle_empty",
    "back_empty",
    "last_token",
)
EXPLICIT_CELLS = 2**12  # maps up to this size are turned into bitmasks when a case is reduced


@dataclass(frozen=True, kw_only=True)
class RoutingCase(Case):
    """A case around a routing map."""

    tokens: int = 1
    experts: int = 1
    hidden: int = 1
    topk: int = 1  # experts a token in the distributions; slots a token in the index form
    routing: tuple[int, ...] | None = None  # one bitmask a token, bit e for expert e; None: `spread` says it
    spread: str = "all"
    map_dtype: str = "bool"
    dtype: str = "float32"
    probs: str = ""  # dtype of the probabilities; empty: none are given
    zero_probs: bool = False
    values: str = "dyadic"
    align: int = 0  # 0: not given
    capacity: int = 0  # 0: not given
    slack: int | None = None  # num_rows less the rows needed, in units of align; None: num_rows is not given
    layout: str = "contiguous"
    layout_of: str = ""  # the input or cotangent that has this layout
    grads: str = ""  # which gradients are asked for, joined by +
    unused: str = ""  # the differentiable output that has no cotangent

    def __post_init__(self) -> None:
        if min(self.tokens, self.hidden) < 0 or min(self.experts, self.topk) < 1:
            raise ValueError(
                f"tokens, hidden ≥ 0 and experts, topk ≥ 1 are needed; they are {self.tokens}, {self.hidden}, {self.experts}, {self.topk}"
            )
        if self.routing is not None and (
            len(self.routing) != self.tokens or any(not 0 <= m < 2**self.experts for m in self.routing)
        ):
            raise ValueError(f"routing must hold {self.tokens} bitmasks below 2^{self.experts}")
        if self.routing is None and self.spread not in SPREADS:
            raise ValueError(f"spread is {self.spread!r}; known are {', '.join(SPREADS)}")


RoutingCase.serves("permute", "unpermute", "pad_routing_map", "multihot_to_indices")


def routed(case: RoutingCase) -> np.ndarray:
    """The map as a [T,E] bool array."""
    shape = (case.tokens, case.experts)
    if case.routing is not None:
        return np.array([[mask >> e & 1 for e in range(case.experts)] for mask in case.routing], dtype=bool).reshape(
            shape
        )
    noise = hashed(case.seed, "map", case.tokens * case.experts).reshape(shape)
    if case.spread == "skewed":
        noise = (noise >> np.uint32(1)) // (
            1 + np.arange(case.experts, dtype=np.uint32)
        )  # low experts have the higher scores
    count = np.full(case.tokens, min(case.topk, case.experts))
    if case.spread == "ragged":
        count = hashed(case.seed, "count", case.tokens) % (min(case.topk, case.experts) + 1)
    if case.spread in ("one_hot", "empty", "all", "sparse", "last_token"):
        return _plain(case, shape)
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


def _plain(case: RoutingCase, shape: tuple[int, int]) -> np.ndarray:
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


def simpler_routing(case: RoutingCase) -> Iterator[RoutingCase]:
    """Fewer tokens, experts, columns and routed cells; then plainer settings."""
    yield from _plainer(case)
    if case.routing is None:
        for tokens in _shorter(case.tokens):
            yield replace(case, tokens=tokens)
        for experts in _shorter(case.experts, 1):
            yield replace(case, experts=experts)
        if case.tokens * case.experts <= EXPLICIT_CELLS:
            masks = tuple(sum(1 << e for e in np.flatnonzero(row).tolist()) for row in routed(case))
            yield replace(
                case, routing=masks, spread="all", topk=case.topk if case.function == "multihot_to_indices" else 1
            )
    else:
        yield from _without_tokens(case, case.routing)
        yield from _without_experts(case, case.routing)
        for t, mask in enumerate(case.routing):
            for e in range(case.experts):
                if mask >> e & 1:
                    yield replace(case, routing=(*case.routing[:t], mask & ~(1 << e), *case.routing[t + 1 :]))
    for hidden in _shorter(case.hidden):
        yield replace(case, hidden=hidden)
    for topk in _shorter(case.topk, 1):
        yield replace(case, topk=topk)


def _plainer(case: RoutingCase) -> Iterator[RoutingCase]:
    """Each setting at its default, or at a smaller value."""
    plain = (
        "law",
        "values",
        "zero_probs",
        "layout",
        "grads",
        "unused",
        "map_dtype",
        "dtype",
        "probs",
        "seed",
        "slack",
        "capacity",
        "align",
        "poison",
    )
    for name in plain:
        default: Any = type(case).__dataclass_fields__[name].default
        if getattr(case, name) != default:
            changes = {name: default} | ({"layout_of": ""} if name == "layout" else {})
            yield replace(
                case,
                **changes
                | (
                    {"grads": _less(case.grads, "probs")}
                    if name == "probs" and case.function in ("permute", "unpermute")
                    else {}
                ),
            )
    for name in ("align", "capacity"):
        for smaller in _shorter(getattr(case, name), 1):
            changed: dict[str, Any] = {name: smaller}
            yield replace(case, **changed)
    if case.slack:
        yield from (replace(case, slack=s) for s in (0, 1, -1) if abs(s) < abs(case.slack))
    for grad in case.grads.split("+") if "+" in case.grads else ():
        yield replace(case, grads=grad)


def _less(grads: str, name: str) -> str:
    return "+".join(grad for grad in grads.split("+") if grad != name)


def _shorter(size: int, least: int = 0) -> list[int]:
    """Smaller sizes, the smallest first."""
    return sorted(
        {s for s in (least, 1, 2, 3, size // 4, size // 2, size * 3 // 4, size - 8, size - 1) if least <= s < size}
    )


def _without_tokens(case: RoutingCase, masks: tuple[int, ...]) -> Iterator[RoutingCase]:
    step = len(masks)
    while step:
        for start in range(0, len(masks), step):
            kept = masks[:start] + masks[start + step :]
            yield replace(case, tokens=len(kept), routing=kept)
        step //= 2


def _without_experts(case: RoutingCase, masks: tuple[int, ...]) -> Iterator[RoutingCase]:
    for e in range(case.experts) if case.experts > 1 else ():
        low = (1 << e) - 1
        yield replace(case, experts=case.experts - 1, routing=tuple((m & low) | (m >> (e + 1) << e) for m in masks))
