"""Weight gradients that the backward leaves for later: it keeps their factors, in order.

What follows the backward of the experts, such as the dispatcher's exchange, then need not wait for
them.
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
    """Within it, products by these weights leave the weights' gradients for later: each backward
    appends one to its weight's list.
    """
    token = _waiting.set(weights)
    try:
        yield
    finally:
        _waiting.reset(token)


def waiting_for(weight: Tensor) -> Waiting | None:
    """The list of the weight, if its gradient is wanted and shall wait."""
    wanted = weight.requires_grad and torch.is_grad_enabled()
    return _waiting.get().get(weight) if wanted else None


class Later(torch.autograd.Function):
    """out as it is; its backward puts off wgrad(d_out, rows, tokens_per_expert).

    `anchor` requires grad: so does the result, even if no other factor of the product does.
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
