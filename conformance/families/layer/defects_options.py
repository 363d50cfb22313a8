"""Defects of the layer's options: each stage has them, and a layer that joins stages forgets one.

Options of the gates, of the losses, and parameters of the router that are wider than the tokens.
"""

from dataclasses import replace
from typing import Any

from torch import Tensor

from conformance.core.defect import Defect, Wrapper, with_values
from conformance.core.gradient_defects import rounded_to
from conformance.families.layer.defects import ORIGIN, Stage, in_stages
from moe_ref.config import LayerConfig, LayerParameters


def _without(*names: str) -> Stage:
    """A stage that does not get these options."""

    def stage(right: Stage, *arguments: Any, **settings: Any) -> Any:
        return right(*arguments, **{name: x for name, x in settings.items() if name not in names})

    return stage


def _unclamped_if_interleaved(shared: Stage, *arguments: Any, **settings: Any) -> Any:
    return shared(*arguments, **settings | ({"clamp": None} if settings.get("interleave") else {}))


def _configured(**changes: Any) -> Wrapper:
    """The layer with other settings."""

    def planted(layer: Wrapper, x: Any, p: Any, config: LayerConfig, **settings: Any) -> Any:
        return layer(x, p, replace(config, **{name: of(config) for name, of in changes.items()}), **settings)

    return planted


def _router(**changes: Any) -> Wrapper:
    """The layer with other settings of the router."""
    return _configured(router=lambda config: replace(config.router, **changes))


def _narrow(name: str) -> Wrapper:
    """The router's parameter is rounded to the dtype of the tokens."""

    def planted(layer: Wrapper, x: Tensor, p: LayerParameters, *rest: Any, **settings: Any) -> Any:
        own = getattr(p, name)
        changed = {} if own is None else {name: with_values(own, rounded_to(x.dtype))}
        return layer(x, p._replace(**changed), *rest, **settings)

    return planted


_PLANTED: tuple[tuple[str, Wrapper], ...] = (
    ("the gates of shared experts are not clamped", in_stages(shared_experts=_without("clamp"))),
    ("the gates of routed experts are not clamped", in_stages(grouped_mlp=_without("clamp"))),
    ("interleaved gates of shared experts are not clamped", in_stages(shared_experts=_unclamped_if_interleaved)),
    ("the gates of shared experts have no offset", in_stages(shared_experts=_without("offset"))),
    ("routed experts are not interleaved", in_stages(grouped_mlp=_without("interleave"))),
    (
        "shared experts are interleaved as the routed ones",
        _configured(shared_interleave=lambda config: config.interleave),
    ),
    ("the backward does not read the stored codes", _configured(fp8_input_store=lambda config: False)),
    ("losses are never per token", _router(loss_per_token=False)),
    ("losses of repeated calls are not divided", _router(loss_divisor=1)),
    ("the layer does not choose by the plan", _router(sinkhorn=False)),
    ("a wider bias of the router is rounded to the tokens' dtype", _narrow("router_bias")),
    ("a wider weight of the router is rounded to the tokens' dtype", _narrow("router_weight")),
)
DEFECTS = tuple(
    Defect(f"ML{number}", title, ORIGIN, {"moe_layer": wrapper})
    for number, (title, wrapper) in enumerate(_PLANTED, start=32)
)
