"""Weight gradients that the backward leaves for later: it keeps their factors, in order.

Operations that follow the backward of the experts, such as the dispatcher's exchange, then need not
wait for these gradients.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moe_fast.launch.autograd import once_differentiable

# gradients of one weight: each a function of `accumulate_into`, of one backward
Waiting = list[Callable[..., Tensor]]

_waiting: ContextVar[Mapping[Tensor, Waiting]] = ContextVar("weights of delayed gradients", default={})  # noqa: B039


@contextmanager
def delaying(weights: Mapping[Tensor, Waiting]) -> Iterator[None]:
    """A context within which products with these weights do not compute the weights' gradients:
    instead each backward appends a function that does to the weight's list.
    """
    token = _waiting.set(weights)
    try:
        yield
    finally:
        _waiting.reset(token)


def waiting_for(weight: Tensor) -> Waiting | None:
    """The list to which the weight's gradient is to be appended; None if it is not delayed, or not
    wanted.
    """
    wanted = weight.requires_grad and torch.is_grad_enabled()
    return _waiting.get().get(weight) if wanted else None


class Later(torch.autograd.Function):
    """`out` unchanged. Its backward appends wgrad(d_out, rows, tokens_per_expert) to the list
    instead of computing it.

    `anchor` requires grad, so that the result does too, even if no other factor of the product
    does.
    """

    @staticmethod
    def forward(
        ctx: Any, out: Tensor, anchor: Tensor, rows: Tensor, tokens_per_expert: Tensor, waiting: Waiting,
        wgrad: Callable[..., Tensor],
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(rows, tokens_per_expert)
        ctx.waiting, ctx.wgrad = waiting, wgrad
        return out.view_as(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, None, None, None, None, None]:
        rows, tokens_per_expert = ctx.saved_tensors
        ctx.waiting.append(partial(ctx.wgrad, d_out, rows, tokens_per_expert))
        return d_out if ctx.needs_input_grad[0] else None, None, None, None, None, None
