"""Cases of the layer's laws, and per law a namespace that is right on its case and breaks it."""

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import Any

from conformance.families.layer.cases import LayerCase
from conformance.peers import reference_layer

LAYER = LayerCase(function="moe_layer", tokens=7, hidden=6, width=5, experts=4, topk=2)
SHARED = replace(LAYER, shared=2)
TRAINED = replace(LAYER, grads="x+fc1_weight+fc2_weight")
OF_LAYER = [LAYER, replace(LAYER, grads="x+router_weight+fc1_weight+fc2_weight"), SHARED]


def spoilt(where: Callable[[dict[str, Any]], bool]) -> SimpleNamespace:
    """The reference, whose second weights count twice where `where(settings)` holds."""

    def moe_layer(
        x: Any, p: Any, config: Any, *, wgrads: Any = None, overlap_shared: bool = False, **settings: Any
    ) -> Any:
        times = 1 + where({"wgrads": wgrads, "overlap_shared": overlap_shared})
        p = p._replace(fc2_weight=p.fc2_weight * times)
        return reference_layer.moe_layer(x, p, config, wgrads=wgrads, **settings)

    return SimpleNamespace(**vars(reference_layer) | {"moe_layer": moe_layer})


def from_the_third_call_on() -> SimpleNamespace:
    """The case's own call and the law's forward are right, what the backward runs again is not."""
    calls = count(1)
    return spoilt(lambda asked: next(calls) > 2)


LAYER_TWINS = [
    ("delayed", TRAINED, spoilt(lambda asked: asked["wgrads"] is not None)),
    ("overlap", SHARED, spoilt(lambda asked: asked["overlap_shared"])),
    ("recompute", TRAINED, from_the_third_call_on),
]
