"""All formulations in one namespace, as `moe_ref` is one."""

from typing import Any

from evidence.formulations import dispatch, experts, fused, layer, parameters, permutation, quantization, router

MODULES = (permutation, router, quantization, experts, fused, dispatch, parameters, layer)


def __getattr__(name: str) -> Any:
    """The function of that name."""
    for module in MODULES:
        if hasattr(module, name):
            return getattr(module, name)
    raise AttributeError(f"there is no formulation of {name}")
