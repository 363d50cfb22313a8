"""Backwards that launch kernels, which autograd cannot differentiate again."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def mark_constant(ctx: Any, *outputs: Tensor | None) -> None:
    """Tell autograd which outputs have no gradient: those whose inputs, which stand in the same
    order before all other inputs, need none.
    """
    pairs = zip(outputs, ctx.needs_input_grad, strict=False)
    ctx.mark_non_differentiable(*(x for x, needed in pairs if x is not None and not needed))


class _Refused(torch.autograd.Function):
    """The first `count` tensors unchanged; the backward raises an error."""

    @staticmethod
    def forward(ctx: Any, of: str, count: int, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.of = of
        return tuple(None if x is None else x.view_as(x) for x in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> Any:
        raise RuntimeError(f"{ctx.of} has no second derivative: its kernels are differentiable once")


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the backward of an autograd function so that its gradients cannot be differentiated.

    torch's decorator of the same name refuses only if a cotangent requires grad, and only in
    `Tensor.backward`. The cotangent of a sum is a constant: with torch's decorator the dependence
    on saved tensors would be lost without an error, and so it would in `torch.autograd.grad`.

    Raises:
        RuntimeError: from the second backward, after a first one with `create_graph=True`.
    """

    @functools.wraps(backward)
    def once(ctx: Any, *cotangents: Tensor | None) -> Any:
        with torch.no_grad():
            gradients = backward(ctx, *cotangents)
        if not torch.is_grad_enabled():
            return gradients
        gradient_tuple = gradients if isinstance(gradients, tuple) else (gradients,)
        of, anchor = backward.__qualname__.rpartition(".")[0], torch.zeros((), requires_grad=True)
        refused = _Refused.apply(of, len(gradient_tuple), *gradient_tuple, anchor, *cotangents, *ctx.saved_tensors)
        return refused if isinstance(gradients, tuple) else refused[0]

    return once
