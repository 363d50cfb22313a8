"""Backwards made of kernels: autograd cannot differentiate them again."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class _Refused(torch.autograd.Function):
    """The first `count` tensors as they are; the backward raises."""

    @staticmethod
    def forward(ctx: Any, of: str, count: int, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.of = of
        return tuple(None if x is None else x.view_as(x) for x in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> Any:
        raise RuntimeError(f"{ctx.of} has no second derivative: its kernels are differentiable once")


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates the backward of an autograd function: its gradients refuse to be differentiated.

    torch's decorator of this name refuses only where a cotangent requires grad, and only in
    `Tensor.backward`. The cotangent of a sum is a constant: then the dependence on saved tensors is
    lost without an error, as it is in `torch.autograd.grad`.

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
