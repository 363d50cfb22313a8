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


def read_as_contiguous(x: Tensor, start: int | None = None) -> Tensor:
    """x, read as if its memory were contiguous; 0 past the end of the storage."""
    raw = x.detach()
    raw = raw.view(torch.uint8) if raw.element_size() == 1 else raw
    length = int(raw.untyped_storage().nbytes()) // raw.element_size()
    address = torch.arange(x.numel(), device=x.device) + int(x.storage_offset() if start is None else start)
    flat = raw.as_strided((length,), (1,), 0)
    in_bounds = address < length
    out = torch.where(
        in_bounds, flat[torch.where(in_bounds, address, 0)], torch.zeros((), dtype=raw.dtype, device=x.device)
    )
    return out.view(x.dtype).reshape(x.shape)


def _memory(x: Any) -> Any:
    return with_values(x, torch.neg) if isinstance(x, Tensor) and x.is_neg() else x


def reads_no_pending_minus(function: Wrapper, *inputs: Any, **settings: Any) -> Any:
    """Inputs are read from memory, without the minus that torch has left pending."""
    return function(*map(_memory, inputs), **{name: _memory(x) for name, x in settings.items()})


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
