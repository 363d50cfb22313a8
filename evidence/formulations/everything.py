"""All formulations in one namespace, as `moe_ref` is one."""

from typing import Any

from evidence.formulations import dispatch, experts, fused, layer, parameters, quantization, router
from moe_ref.permutation import second_oracle

MODULES = (second_oracle, router, quantization, experts, fused, dispatch, parameters, layer)


def __getattr__(name: str) -> Any:
    """The function of that name."""
    for module in MODULES:
        if hasattr(module, name):
            return getattr(module, name)
    raise AttributeError(f"there is no formulation of {name}")
