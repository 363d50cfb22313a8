"""A tile of an activation, or of its gradient, in registers, for `fused._activate_and_quantize`.

`LAYOUT` is as in `experts._activations`. x is computed in `ACCUMULATOR`, rounded to the dtype of h
if `ROUNDED`, and then in float32.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from moe_fast.experts._activations import load_gate_and_value, value_and_slope, within
from moe_fast.launch._rounding import number, rounded, widened
from moe_fast.quantization._formats import as_float32
from moe_fast.quantization._tiles import ending


class Operands(NamedTuple):
    """The memory of an activation as one argument of a kernel."""

    d_out_ptr: Any  # None: no gradient
    h_ptr: Any
    probs_ptr: Any  # or None


class Numbers(NamedTuple):
    """The strides and widths of `Operands`, and the settings as the bits of float64 numbers. A
    kernel makes the record of its arguments.
    """

    stride_d_out_p: Any
    stride_d_out_f: Any
    stride_h_p: Any
    stride_h_f: Any
    stride_probs: Any
    width: Any
    between: Any
    offset: Any
    clamp: Any
    alpha: Any


@triton.jit
def columns_of_gradient(h_ptr, numbers, p, read, column, LAYOUT: tl.constexpr, BLOCK_N: tl.constexpr):
    """(u, v, columns of the result, where x is the gradient of v, mask) for columns of d_h. The
    layout is never "pairs".
    """
    width, between = numbers.width, numbers.between
    n = column + tl.arange(0, BLOCK_N)
    if LAYOUT == "single":
        num_columns = width
        of_value = column < 0
        f = n
        gate = n
    else:
        num_columns = 2 * width
        within_pair = n % (2 * between)
        of_value = (within_pair >= between)[None, :]
        f = n // (2 * between) * between + within_pair % between
        gate = n - tl.where(within_pair >= between, between, 0)
    in_bounds = (p < read)[:, None] & (n < num_columns)[None, :]  # a tile sticks out of its group and of h
    gate_ptrs = h_ptr + p[:, None] * numbers.stride_h_p + gate[None, :] * numbers.stride_h_f
    u = tl.load(gate_ptrs, mask=in_bounds, other=0.0)
    v = u
    if LAYOUT != "single":
        v = tl.load(gate_ptrs + tl.cast(between, tl.int64) * numbers.stride_h_f, mask=in_bounds, other=0.0)
    return u, v, f, of_value, in_bounds


@triton.jit
def load_for_gradient(
    d_out_ptr, h_ptr, numbers, p, read, column,
    LAYOUT: tl.constexpr, WHOLE: tl.constexpr, dtype: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """(d_out, u, v, where x is the gradient of v) for columns of d_h; with WHOLE for the columns of
    the gates.
    """
    if LAYOUT == "pairs" or WHOLE:
        ratio: tl.constexpr = 1 if WHOLE else 2
        u, v = load_gate_and_value(
            h_ptr, numbers.stride_h_p, numbers.stride_h_f, p, read, column // ratio, numbers.width, numbers.between,
            LAYOUT, dtype, BLOCK_N // ratio,
        )  # fmt: skip
        f = column // ratio + tl.arange(0, BLOCK_N // ratio)
        in_bounds = (p < read)[:, None] & (f < numbers.width)[None, :]  # a tile sticks out of its group and of h
        of_value = column < 0  # is not used
    else:
        u, v, f, of_value, in_bounds = columns_of_gradient(h_ptr, numbers, p, read, column, LAYOUT, BLOCK_N)
        u, v = widened(u, dtype), widened(v, dtype)
    d_out_ptrs = d_out_ptr + p[:, None] * numbers.stride_d_out_p + f[None, :] * numbers.stride_d_out_f
    return widened(tl.load(d_out_ptrs, mask=in_bounds, other=0.0), dtype), u, v, of_value


@triton.jit
def activated_tile(
    operands, numbers, first, end_read, end_owned, column,
    CURVE: tl.constexpr, LAYOUT: tl.constexpr, CLAMPED: tl.constexpr, WHOLE: tl.constexpr, ROUNDED: tl.constexpr,
    ACCUMULATOR: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """(x, x_of_values, d_probs_share): x = f(u) · (v + offset) · p, or its gradient, in float32,
    and this tile's share of each row's d_probs; 0 outside groups.

    WHOLE: the columns are those of the gates, x is their gradient, and x_of_values is the gradient
    of the values, which lie `width` columns further on.
    """
    p = tl.arange(0, BLOCK_M).to(tl.int64)
    read, owned = ending(first, end_read, BLOCK_M), ending(first, end_owned, BLOCK_M)
    h_ptr = operands.h_ptr + first * numbers.stride_h_p
    if operands.d_out_ptr is None:
        u, v = load_gate_and_value(
            h_ptr, numbers.stride_h_p, numbers.stride_h_f, p, read, column, numbers.width, numbers.between,
            LAYOUT, ACCUMULATOR, BLOCK_N,
        )  # fmt: skip
    else:
        d_out_ptr = operands.d_out_ptr + first * numbers.stride_d_out_p
        d_out, u, v, of_value = load_for_gradient(
            d_out_ptr, h_ptr, numbers, p, read, column, LAYOUT, WHOLE, ACCUMULATOR, BLOCK_N
        )
    bound = number(numbers.clamp, ACCUMULATOR)
    if CLAMPED:
        free_u, free_v = u <= bound, tl.abs(v) <= bound  # the bounds themselves are free
        u, v = within(u, -float("inf"), bound), within(v, -bound, bound)
    value, slope = value_and_slope(u, number(numbers.alpha, ACCUMULATOR), CURVE)
    shifted = v + number(numbers.offset, ACCUMULATOR) if LAYOUT != "single" else 1.0
    prob = 1.0
    if operands.probs_ptr is not None:
        probs_ptr = operands.probs_ptr + first * numbers.stride_probs
        # the last tile sticks out
        prob = widened(tl.load(probs_ptr + p * numbers.stride_probs, mask=p < read, other=0.0), ACCUMULATOR)[:, None]
    in_group = (p < owned)[:, None]
    x_of_values, d_probs_share = 0.0, 0.0
    if operands.d_out_ptr is None:
        x = value * shifted * prob
    else:
        g = d_out * prob
        x = g * slope * shifted
        counted = in_group
        if LAYOUT != "single":
            dv = g * value
            if CLAMPED:
                x = tl.where(free_u, x, 0.0)
                dv = tl.where(free_v, dv, 0.0)
            if WHOLE:
                x_of_values = as_float32(rounded(dv, h_ptr.dtype.element_ty) if ROUNDED else dv)
                x_of_values = tl.where(in_group, x_of_values, 0.0)
            elif LAYOUT == "pairs":
                x = tl.reshape(tl.join(x, dv), [p.shape[0], BLOCK_N])
            else:
                x = tl.where(of_value, dv, x)
                counted = in_group & (of_value == 0)  # so that each term counts once
        d_probs_share = tl.sum(tl.where(counted, d_out * (value * shifted), 0.0), axis=1)
    if ROUNDED:
        x = rounded(x, h_ptr.dtype.element_ty)
    return tl.where(in_group, as_float32(x), 0.0), x_of_values, d_probs_share


@triton.jit
def steps_of(first, written, begin, steps, num_columns, WHOLE: tl.constexpr, BLOCK_N: tl.constexpr):
    """How many steps a program takes: none past the written rows or past the columns (with WHOLE
    the columns of the gates).
    """
    columns = num_columns // 2 if WHOLE else num_columns
    there = tl.maximum(tl.minimum(steps, tl.cdiv(columns - begin, BLOCK_N)), 0)
    return tl.where(first < written, there, 0).to(tl.int32)
