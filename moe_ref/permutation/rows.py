"""The mover: rows copied from places in one buffer to places in another, and its transpose, a sum.

Every stage that moves rows (permute, sort_chunks, all dispatchers) moves them with `take_rows`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moe_ref.rounding import accumulator_dtype, round_to

PADDING = -1  # the source of a row of zeros; the place of a row that was dropped


def take_rows(x: Tensor, source: Tensor, transpose: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """Copy rows: out[i] = x[source[i]], or zeros where source[i] is PADDING.

    The gradient is dx = transpose(dout), by default `sum_rows(dout, source, len(x))`. (Autograd's
    own gradient of indexing would add in the storage dtype and in no particular order.)

    Rounding: none; a bit copy for every dtype.
    """
    return _TakeRows.apply(x, source, transpose or partial(sum_rows, source=source, num_tokens=len(x)))


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Tensor, transpose: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.transpose = transpose
        bits = x.view(torch.uint8) if x.element_size() == 1 else x  # fp8 cannot be indexed on every torch
        real = source != PADDING
        out = bits.new_zeros((len(source), *x.shape[1:]))
        return out.index_copy_(0, real.nonzero().flatten(), bits[source[real]]).view(x.dtype)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None, None]:
        return ctx.transpose(dout), None, None


def sum_rows(rows: Tensor, source: Tensor, num_tokens: int, biases: Sequence[Tensor] = ()) -> Tensor:
    """Add rows: out[t] = bias_0[t] + bias_1[t] + … + Σ_{i: source[i] = t} rows[i].

    Rounding: sums in the accumulator dtype, from left to right, i ascending; one rounding to the
    rows' dtype.
    """
    real = source != PADDING
    total = rows.new_zeros((num_tokens, *rows.shape[1:]), dtype=accumulator_dtype(rows.dtype))
    for bias in biases:
        total = total + bias.to(total.dtype)
    return round_to(total.index_add(0, source[real], rows[real].to(total.dtype)), rows.dtype)
