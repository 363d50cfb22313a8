"""The experts: activations, grouped GEMMs, expert MLPs, shared experts."""

from typing import Any

import torch
from torch import Tensor

from moe_fast.declared import COMPUTED, Family
from moe_fast.experts.activations import activation, activation_backward, check_probs, glu, glu_backward
from moe_fast.experts.factors import weights_quantized_once as weights_quantized_once
from moe_fast.experts.linear import check_product, grouped_dgrad, grouped_linear, grouped_wgrad, latent_projection
from moe_fast.experts.mlp import grouped_mlp, sequential_mlp, shared_experts
from moe_fast.experts.scaled_linear import scales_in_hardware
from moe_fast.launch import backend

_FP8, _BLOCKS = ("delayed", "current", "block"), ("mxfp8", "nvfp4")  # scalings, by the matrix unit of their products
_ACTIVATIONS = ("glu", "glu_backward", "activation", "activation_backward")
_NO_AUTOGRAD = {"differentiable": False}


def _product() -> dict[str, Any]:
    """The products of this machine."""
    device = torch.device("cpu" if backend.INTERPRETED else "cuda")
    emulated: tuple[str, ...] = () if backend.casts_in_hardware(device) else _FP8
    emulated += () if scales_in_hardware(device) else _BLOCKS
    accumulator = "hopper_fp8" if backend.is_hopper(device) else "float32"  # of FP8 products in its matrix unit
    promised = COMPUTED | {"reduction_order": "ascending", "accumulator": accumulator}
    return promised | ({"emulated": emulated} if emulated else {})


def _check(function: str, payload: Tensor, settings: dict[str, Any]) -> None:
    check_probs(settings.get("probs"))
    if function not in _ACTIVATIONS:
        check_product(payload, settings.get("recipe"), settings.get("accumulator", "float32"))


_family = Family(
    {
        glu: COMPUTED,
        glu_backward: COMPUTED | _NO_AUTOGRAD,
        activation: COMPUTED,
        activation_backward: COMPUTED | _NO_AUTOGRAD,
        grouped_linear: _product,
        grouped_dgrad: lambda: _product() | _NO_AUTOGRAD,
        grouped_wgrad: lambda: _product() | _NO_AUTOGRAD,
        grouped_mlp: _product,
        sequential_mlp: _product,
        shared_experts: _product,
        latent_projection: _product,
    },
    _check,
)
declares, supports = _family.declares, _family.supports
__all__ = _family.names
