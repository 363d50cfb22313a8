"""From hidden states to logits.

Mirrors `RouterGatingLinearFunction` of megatron.core.transformer.moe.moe_utils and
`TopKRouter.apply_input_jitter`. Differs: docs/differences.md#router.
"""

from typing import Any

import torch
from torch import Tensor

from moe_ref.config import check_gate, check_jitter
from moe_ref.rounding import product, round_to

ROUTER_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        logits = product(round_to(x, dtype), round_to(weight, dtype).T)
        return logits if bias is None else logits + round_to(bias, dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor):
        x, weight, bias = ctx.saved_tensors
        dx = round_to(product(g, round_to(weight, g.dtype)), x.dtype)
        dweight = round_to(product(g.T, round_to(x, g.dtype)), weight.dtype)
        return dx, dweight, None if bias is None else round_to(g.sum(0), bias.dtype), None


def gate(x_TH: Tensor, weight_EH: Tensor, *, bias: Tensor | None = None, router_dtype: str | None = None) -> Tensor:
    """The router's matrix product.

        logits = x Wᵀ + b,   in the router dtype: float32, float64, or x's own

    Backward, in the router dtype: dx = g W, rounded to x's dtype; dW = gᵀ x, to W's; db = Σ_t g, to
    b's. It saves x and W as they came.

    Args:
        x_TH: floating point.
        weight_EH: floating point.
        bias: [E] or None.
        router_dtype: None, "fp32" or "fp64".

    Returns:
        [T,E] logits in the router dtype.

    Raises:
        ValueError: see `moe_ref.config.check_gate`.
    """
    check_gate(x_TH, weight_EH, bias, router_dtype)
    return _Gate.apply(x_TH, weight_EH, bias, ROUTER_DTYPES.get(router_dtype or "", x_TH.dtype))


def jitter(x_TH: Tensor, *, eps: float) -> Tensor:
    """x ⊙ u, u uniform in [1 - eps, 1 + eps], drawn for each element in x's dtype. For the router's
    input only.

    Raises:
        ValueError: eps is no number from 0 to 1, 1 excluded.
    """
    check_jitter(eps)
    return x_TH * (1 - eps + 2 * eps * torch.rand_like(x_TH))
