"""Smaller cases of permute_and_quantize: the part of them that is a routing map."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from conformance.core.axes import shorter
from conformance.families.permutation.cases import RoutingCase, routed

EXPLICIT_CELLS = 2**12  # maps up to this size are turned into bitmasks


def simpler_routing(case: RoutingCase) -> Iterator[RoutingCase]:
    """Fewer tokens, experts, columns and routed cells; then plainer settings."""
    yield from _plainer(case)
    if case.routing is None:
        for tokens in shorter(case.tokens):
            yield replace(case, tokens=tokens)
        for experts in shorter(case.experts, 1):
            yield replace(case, experts=experts)
        if case.tokens * case.experts <= EXPLICIT_CELLS:
            masks = tuple(sum(1 << e for e in np.flatnonzero(row).tolist()) for row in routed(case))
            yield replace(case, routing=masks, spread="all", topk=1)
    else:
        yield from _without_tokens(case, case.routing)
        yield from _without_experts(case, case.routing)
        for t, mask in enumerate(case.routing):
            for e in range(case.experts):
                if mask >> e & 1:
                    yield replace(case, routing=(*case.routing[:t], mask & ~(1 << e), *case.routing[t + 1 :]))
    for hidden in shorter(case.hidden):
        yield replace(case, hidden=hidden)
    for topk in shorter(case.topk, 1):
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
                    if name == "probs" and case.function != "permute_and_quantize"
                    else {}
                ),
            )
    for name in ("align", "capacity"):
        for smaller in shorter(getattr(case, name), 1):
            changed: dict[str, Any] = {name: smaller}
            yield replace(case, **changed)
    if case.slack:
        yield from (replace(case, slack=s) for s in (0, 1, -1) if abs(s) < abs(case.slack))
    for grad in case.grads.split("+") if "+" in case.grads else ():
        yield replace(case, grads=grad)


def _less(grads: str, name: str) -> str:
    return "+".join(grad for grad in grads.split("+") if grad != name)


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
