"""Upcycling: slice a dense layer into experts, by one strided copy and one scaling."""

import torch
from torch import Tensor

from moe_ref.config.experts import GATED
from moe_ref.config.parameters import Upcycled, check_upcycle


def upcycle(
    router_weight_EH: Tensor, fc1_weight: Tensor, fc2_weight: Tensor, *, topk: int, granularity: int = 1,
    kind: str = "swiglu", pre_softmax: bool = False, fc1_bias: Tensor | None = None, fc2_bias: Tensor | None = None,
) -> Upcycled:  # fmt: skip
    """Experts made of a dense layer: each slice is scaled once, and copied to its experts."""
    halves = 1 + (kind in GATED)
    check_upcycle(router_weight_EH, fc1_weight, fc2_weight, topk, granularity, kind, fc1_bias, fc2_bias, halves)
    copies = router_weight_EH.shape[0] // granularity
    strength = copies * granularity / topk if pre_softmax else 1
    scale = (granularity * strength) ** (1 / (3 if halves == 2 or kind == "squared_relu" else 2))

    def of_experts(x: Tensor, along: int, blocks: int) -> Tensor:
        """[E,…]: x is `blocks` blocks side by side along a dimension, and each expert gets one
        slice of every block; all slices come before the next copy of them.
        """
        slices = scaled(x, scale).unflatten(along, (blocks, granularity, x.shape[along] // blocks // granularity))
        expert_slices = slices.movedim(along + 1, 0).flatten(along + 1, along + 2)
        return expert_slices.repeat(copies, *[1] * (expert_slices.dim() - 1))

    router = router_weight_EH[:copies].repeat_interleave(granularity, 0)
    bias1 = None if fc1_bias is None else of_experts(fc1_bias, 0, halves)
    bias2 = None if fc2_bias is None else fc2_bias.repeat(copies * granularity, 1)
    return Upcycled(router, of_experts(fc1_weight, 0, halves), of_experts(fc2_weight, 1, 1), bias1, bias2)


def scaled(x: Tensor, scale: float) -> Tensor:
    """x times the scale in float32 or float64, rounded once."""
    sum_dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return x.to(sum_dtype).mul(scale).to(x.dtype)
