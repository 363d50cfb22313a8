"""Backwards made of kernels: autograd cannot differentiate them again."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from moe_fast.launch.operators import tracing


class _Refused(torch.autograd.Function):
    """The first `count` tensors as they are; the backward raises."""

    @staticmethod
    def forward(ctx: Any, of: str, count: int, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.of = of
        return tuple(None if x is None else x.view_as(x) for x in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> Any:
        raise RuntimeError(f"{ctx.of} has no second derivative: its kernels are differentiable once")


class _Nothing:
    """The context of a forward that has no backward."""

    def __init__(self, inputs: int) -> None:
        self.needs_input_grad = (False,) * inputs

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        pass

    def mark_non_differentiable(self, *outputs: Tensor) -> None:
        pass

    def set_materialize_grads(self, value: bool) -> None:
        pass


def applied(function: type[torch.autograd.Function], *inputs: Any) -> Any:
    """function.apply(*inputs); in no_grad its forward alone, which costs the host less.

    The forward must return new tensors.
    """
    forward_mode = forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()
    if torch.is_grad_enabled() or forward_mode or tracing():
        return function.apply(*inputs)
    return function.forward(_Nothing(len(inputs)), *inputs)


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
        whole = gradients if isinstance(gradients, tuple) else (gradients,)
        of, anchor = backward.__qualname__.rpartition(".")[0], torch.zeros((), requires_grad=True)
        refused = _Refused.apply(of, len(whole), *whole, anchor, *cotangents, *ctx.saved_tensors)
        return refused if isinstance(gradients, tuple) else refused[0]

    return once
