"""The layer: all stages of one rank, as a function and as a module."""

from typing import Any

from torch import Tensor

from moe_fast import experts, router
from moe_fast.declared import Family
from moe_fast.layer.budget import within_budget as within_budget
from moe_fast.layer.layer import moe_layer
from moe_fast.layer.module import MoELayer as MoELayer
from moe_fast.router import new_state, state_from, state_tensors
from moe_ref.config import LayerConfig


def _check(function: str, payload: Tensor, settings: dict[str, Any]) -> None:
    config = settings.get("config")
    if not isinstance(config, LayerConfig):
        return
    for reason in (
        router.supports("topk_routing", payload, topk=config.router.topk),
        experts.supports("grouped_mlp", payload, recipe=config.recipe),
        router.supports("route", payload, config=config.router),
    ):
        if reason:
            raise ValueError(reason)


def _promises() -> dict[str, Any]:
    """The promises of the products and of the router's choice. On one rank the host never waits."""
    emulated = experts.declares("grouped_mlp")
    return emulated | {"reduction_order": "any", "tie_rule": "lowest_index"}


_family = Family({moe_layer: _promises}, _check, {router: (new_state, state_from, state_tensors)})
declares, supports = _family.declares, _family.supports
__all__ = _family.names
