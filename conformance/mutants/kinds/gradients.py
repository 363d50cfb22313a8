"""Parts of planted defects that show in gradients only, and of kernels that mistake a layout."""

from typing import Any

import torch
from torch import Tensor

from conformance.mutants.defect import Change, Wrapper, with_values


class _Replaced(torch.autograd.Function):
    """A value, with gradient_of(cotangent) as the gradient of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor, gradient_of: Change) -> Tensor:
        ctx.gradient_of = gradient_of
        return value.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        return ctx.gradient_of(g), None, None


def with_gradient(x: Tensor, change: Change) -> Tensor:
    """x, with change(gradient) as its gradient: a defect of the backward alone."""
    return with_backward(x, x.detach(), change) if x.requires_grad else x


def with_backward(x: Tensor, value: Tensor, gradient_of: Change) -> Tensor:
    """The value, with gradient_of(cotangent) as the gradient of x."""
    replaced: Tensor = _Replaced.apply(x, value, gradient_of)  # type: ignore[no-untyped-call]
    return replaced


def rounded_to(dtype: torch.dtype) -> Change:
    """A change that rounds to a dtype and back."""
    return lambda g: g.to(dtype).to(g.dtype)


def read_at(x: Tensor, addresses: Tensor) -> Tensor:
    """The elements of x's storage at these addresses; 0 outside of it."""
    raw = x.detach().view(torch.uint8) if x.element_size() == 1 else x.detach()
    length = raw.untyped_storage().nbytes() // raw.element_size()
    in_bounds = (addresses >= 0) & (addresses < length)
    elements = raw.as_strided((length,), (1,), 0)[torch.where(in_bounds, addresses, 0)]
    return torch.where(in_bounds, elements, torch.zeros_like(elements)).view(x.dtype)


def read_as_contiguous(x: Tensor) -> Tensor:
    """x, read as if its memory were contiguous; 0 past the end of the storage."""
    return read_at(x, torch.arange(x.numel(), device=x.device) + int(x.storage_offset())).reshape(x.shape)


def without_pending_minus(x: Any) -> Any:
    """A tensor as it is in memory, without the minus that torch has left pending."""
    return with_values(x, torch.neg) if isinstance(x, Tensor) and x.is_neg() else x


def reads_no_pending_minus_of_a_cotangent(function: Wrapper, *inputs: Any, **settings: Any) -> Any:
    """The backward reads the cotangent's memory."""
    out = function(*inputs, **settings)
    return with_backward(out, out.detach(), lambda g: -g if g.is_neg() else g) if out.requires_grad else out


def adds_float64_in_float32(function: Wrapper, rows: Tensor, *arguments: Any, **settings: Any) -> Any:
    """The sums of float64 rows are in float32."""
    out = function(rows, *arguments, **settings)
    if rows.dtype != torch.float64:
        return out
    narrow = rounded_to(torch.float32)
    return with_values(out, narrow) if isinstance(out, Tensor) else out._replace(tokens=with_values(out.tokens, narrow))
