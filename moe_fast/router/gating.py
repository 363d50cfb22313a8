"""From hidden states to logits, in plain torch: its matrix product is used."""

from typing import Any

import torch
from torch import Tensor

from moe_fast.launch.arithmetic import product
from moe_fast.launch.legal import unless_known
from moe_fast.launch.operators import as_operators, traceable
from moe_ref.config import check_gate, check_jitter

ROUTER_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
_check = unless_known(check_gate)


@as_operators
class _Gate(torch.autograd.Function):
    """`gate`. It saves its inputs as they are passed, not as they are multiplied. In a graph it is
    an operator, because inductor would not round a gradient that it fuses with the product.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.save_for_backward(x, weight)
        logits = product(x.to(dtype), weight.to(dtype).T)
        return logits if bias is None else logits + bias.to(dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        for_x, for_weight, for_bias, _ = ctx.needs_input_grad
        if g is None:
            return None, None, None, None
        dx = product(g, weight.to(g.dtype)).to(x.dtype) if for_x else None
        dweight = product(g.T, x.to(g.dtype)).to(weight.dtype) if for_weight else None
        return dx, dweight, g.sum(0).to(ctx.bias_dtype) if for_bias else None, None


@traceable
def gate(x_TH: Tensor, weight_EH: Tensor, *, bias: Tensor | None = None, router_dtype: str | None = None) -> Tensor:
    """The router's matrix product x Wᵀ + b in the router dtype, by torch; saves x and W."""
    _check(x_TH, weight_EH, bias, router_dtype)
    return _Gate.apply(x_TH, weight_EH, bias, ROUTER_DTYPES.get(router_dtype or "", x_TH.dtype))


@traceable
def jitter(x_TH: Tensor, *, eps: float) -> Tensor:
    """x ⊙ u, u uniform in [1 - eps, 1 + eps], drawn for each element in x's dtype."""
    check_jitter(eps)
    return x_TH * (1 - eps + 2 * eps * torch.rand_like(x_TH))
