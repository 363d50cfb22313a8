"""For each law of the layer, a case and a namespace that is right on it but breaks the law."""

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import Any

from conformance.families.layer.cases import LayerCase
from conformance.peers import reference_layer

LAYER = LayerCase(function="moe_layer", tokens=7, hidden=6, width=5, experts=4, topk=2)
SHARED = replace(LAYER, shared=2)
JITTERED = replace(LAYER, jitter=True)
TRAINED = replace(LAYER, grads="x+fc1_weight+fc2_weight")
LARGE = replace(TRAINED, tokens=64, hidden=64, width=64)  # seeds 0 to 2: rows, activations, both


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
    """Right in the case and in the forward of the law, wrong where its backward recomputes."""
    calls = count(1)
    return spoilt(lambda settings: next(calls) > 2)


def saving(*arguments: Any, recompute: Any = None, **settings: Any) -> Any:
    """A layer that saves every tensor that it is told to recompute."""
    return reference_layer.moe_layer(*arguments, **settings)


def saving_rows(*arguments: Any, recompute: Any = None, **settings: Any) -> Any:
    """A layer that saves rows, not activations."""
    return reference_layer.moe_layer(*arguments, recompute=recompute and "moe_act", **settings)


def layer_of(moe_layer: Callable[..., Any]) -> SimpleNamespace:
    return SimpleNamespace(**vars(reference_layer) | {"moe_layer": moe_layer})


def still_without_noise(x: Any, p: Any, config: Any, *, noise: Any = None, **settings: Any) -> Any:
    """A layer that adds no jitter unless the noise is passed."""
    config = config if noise is not None else replace(config, jitter_eps=None)
    return reference_layer.moe_layer(x, p, config, noise=noise, **settings)


LAYER_TWINS = [
    *(("kept", replace(LARGE, seed=seed), layer_of(saving)) for seed in range(3)),
    ("kept", replace(LARGE, seed=2), layer_of(saving_rows)),
    ("delayed", TRAINED, spoilt(lambda settings: settings["wgrads"] is not None)),
    ("overlap", SHARED, spoilt(lambda settings: settings["overlap_shared"])),
    ("recompute", TRAINED, from_the_third_call_on),
    ("jittered", JITTERED, layer_of(still_without_noise)),
]
