"""The layer over memory that the ranks share: an implementation of `moe_layer` for HybridEP.

moe-conformance run --impl moe_fast.layer.over_shared_memory
"""

from typing import Any

from moe_fast import layer, router
from moe_fast.declared import Family
from moe_fast.dispatch.symmetric import transport as transport
from moe_fast.layer import layer as stages
from moe_fast.router import new_state, state_from, state_tensors
from moe_ref.config import LayerOutput

scope = {"moe_layer": "dispatcher=hybridep"}


def moe_layer(*arguments: Any, **settings: Any) -> LayerOutput:
    """`moe_fast.moe_layer` with `shared_memory`."""
    return stages.moe_layer(*arguments, **settings, shared_memory=True)


_family = Family(
    {moe_layer: lambda: layer.declares("moe_layer")}, readers={router: (new_state, state_from, state_tensors)}
)
declares = _family.declares


def supports(function: str, *arguments: Any, **settings: Any) -> str | None:
    """Why a call is not supported, or None, as `moe_fast.supports`."""
    return layer.supports(function, *arguments, **settings)


__all__ = [*_family.names, "scope", "transport"]
