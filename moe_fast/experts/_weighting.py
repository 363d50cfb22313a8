"""Rows times probabilities, a bias weighted like its row, and the shared experts' gate.

P rows in segments of L experts: expert e's rows begin at `ends[e - 1]`. Rows past the last segment
are never read; results are 0 there. Everything is computed in `ACCUMULATOR`, float32 or float64.
"""

import triton
import triton.language as tl

from moe_fast.launch._rounding import rounded, score_and_slope, widened
from moe_fast.launch.specialization import jit


@triton.jit
def stored_as(x, dtype: tl.constexpr):
    """x rounded to `dtype`: float64 has no direct way to sixteen bits."""
    if dtype.primitive_bitwidth == 16:
        x = x.to(tl.float32)
    return rounded(x, dtype)


@triton.jit
def segment_begin(ends_ptr, expert):
    """The first row of an expert."""
    return tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)  # the first begins at 0


@triton.jit
def rows_in_segments(ends_ptr, num_experts, num_rows):
    """How many rows belong to some expert."""
    # no illegal count leaves the rows
    return tl.minimum(tl.load(ends_ptr + num_experts - 1), num_rows)


@triton.jit
def expert_of(p, ends_ptr, num_experts, BLOCK_E: tl.constexpr):
    """The expert of each row: the number of experts whose rows end before it."""
    e = tl.arange(0, BLOCK_E)
    end = tl.load(ends_ptr + e, mask=e < num_experts, other=0)  # the block is a power of two
    ended = (end[None, :] <= p[:, None]) & (e < num_experts)[None, :]
    return tl.sum(ended.to(tl.int64), axis=1)


@triton.jit
def load_probs(probs_ptr, stride, p, live, dtype: tl.constexpr):
    """[BLOCK_P, 1], 1 without probs."""
    probs = tl.full([p.shape[0]], 1.0, dtype)
    if probs_ptr is not None:
        probs = widened(tl.load(probs_ptr + p * stride, mask=live, other=0.0), dtype)
    return probs[:, None]


@jit(
    together=[("stride_x_p", "width")],
    along=["stride_x_h"],
    do_not_specialize=["stride_probs", "num_rows", "num_experts", "column_programs"],
)
def scale_rows_kernel(
    x_ptr, stride_x_p, stride_x_h, probs_ptr, stride_probs,
    # result, contiguous
    out_ptr,
    # sizes, and where segments end
    ends_ptr, num_rows, num_experts, width, column_programs,
    ACCUMULATOR: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """out[p] = x[p] · probs[p]. A program computes one tile."""
    p = (tl.program_id(0) // column_programs).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
    c = (tl.program_id(0) % column_programs).to(tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H)
    live = p < rows_in_segments(ends_ptr, num_experts, num_rows)
    in_row = (c < width)[None, :]  # the last block sticks out
    x = tl.load(x_ptr + p[:, None] * stride_x_p + c[None, :] * stride_x_h, mask=live[:, None] & in_row, other=0.0)
    product = widened(x, ACCUMULATOR) * load_probs(probs_ptr, stride_probs, p, live, ACCUMULATOR)
    tl.store(
        out_ptr + p[:, None] * width + c[None, :],
        stored_as(product, out_ptr.dtype.element_ty),
        mask=(p < num_rows)[:, None] & in_row,
    )


@jit(
    together=[("stride_y_p", "width")],
    along=["stride_y_h", "stride_bias_h"],
    do_not_specialize=["stride_probs", "stride_bias_l", "num_rows", "num_experts", "column_programs"],
)
def add_bias_kernel(
    y_ptr, stride_y_p, stride_y_h, bias_ptr, stride_bias_l, stride_bias_h, probs_ptr, stride_probs,
    # result, contiguous
    out_ptr,
    # sizes, and where segments end
    ends_ptr, num_rows, num_experts, width, column_programs,
    ACCUMULATOR: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """out[p] = y[p] + probs[p] · bias[e], where e is the expert of row p. A program computes one
    tile.
    """
    p = (tl.program_id(0) // column_programs).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
    c = (tl.program_id(0) % column_programs).to(tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H)
    live = p < rows_in_segments(ends_ptr, num_experts, num_rows)
    in_row = (c < width)[None, :]  # the last block sticks out
    in_bounds = live[:, None] & in_row
    expert = expert_of(p, ends_ptr, num_experts, BLOCK_E)
    y = widened(
        tl.load(y_ptr + p[:, None] * stride_y_p + c[None, :] * stride_y_h, mask=in_bounds, other=0.0), ACCUMULATOR
    )
    bias = widened(
        tl.load(bias_ptr + expert[:, None] * stride_bias_l + c[None, :] * stride_bias_h, mask=in_bounds, other=0.0),
        ACCUMULATOR,
    )
    total = y + load_probs(probs_ptr, stride_probs, p, live, ACCUMULATOR) * bias
    tl.store(
        out_ptr + p[:, None] * width + c[None, :],
        stored_as(total, out_ptr.dtype.element_ty),
        mask=(p < num_rows)[:, None] & in_row,
    )


@jit(
    together=[("stride_d_out_p", "width")],
    along=["stride_d_out_h", "stride_factor_h"],
    do_not_specialize=["stride_factor_r", "stride_probs", "num_rows", "num_experts"],
)
def weighted_rows_backward_kernel(
    d_out_ptr, stride_d_out_p, stride_d_out_h,
    # the factor of the probs: one row per row, or one per expert
    factor_ptr, stride_factor_r, stride_factor_h, probs_ptr, stride_probs,
    # results, contiguous; either may be none
    d_x_ptr, d_probs_ptr,
    # sizes, and where segments end
    ends_ptr, num_rows, num_experts, width,
    ACCUMULATOR: tl.constexpr, BY_EXPERT: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_E: tl.constexpr,
):  # fmt: skip
    """d_x[p] = d_out[p] · probs[p] and d_probs[p] = Σ d_out[p] · factor[p], or with BY_EXPERT
    factor[p's expert]. A program computes BLOCK_P whole rows.
    """
    p = tl.program_id(0).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
    live = p < rows_in_segments(ends_ptr, num_experts, num_rows)
    row = p
    if BY_EXPERT:
        row = expert_of(p, ends_ptr, num_experts, BLOCK_E)
    total = tl.zeros([BLOCK_P, BLOCK_H], ACCUMULATOR)
    for first in range(0, width, BLOCK_H):
        c = first + tl.arange(0, BLOCK_H).to(tl.int64)
        in_row = (c < width)[None, :]  # the last step sticks out
        in_bounds = live[:, None] & in_row
        d_out = widened(
            tl.load(d_out_ptr + p[:, None] * stride_d_out_p + c[None, :] * stride_d_out_h, mask=in_bounds, other=0.0),
            ACCUMULATOR,
        )
        if d_x_ptr is not None:
            d_x = stored_as(d_out * load_probs(probs_ptr, stride_probs, p, live, ACCUMULATOR), d_x_ptr.dtype.element_ty)
            tl.store(d_x_ptr + p[:, None] * width + c[None, :], d_x, mask=(p < num_rows)[:, None] & in_row)
        if d_probs_ptr is not None:
            factor = tl.load(
                factor_ptr + row[:, None] * stride_factor_r + c[None, :] * stride_factor_h, mask=in_bounds, other=0.0
            )
            total += d_out * widened(factor, ACCUMULATOR)
    if d_probs_ptr is not None:
        # the last tile sticks out
        tl.store(d_probs_ptr + p, stored_as(tl.sum(total, axis=1), d_probs_ptr.dtype.element_ty), mask=p < num_rows)


@jit(
    together=[("stride_d_out_p", "width")],
    along=["stride_d_out_h"],
    do_not_specialize=["stride_probs", "num_rows", "num_experts"],
)
def bias_gradient_kernel(
    d_out_ptr, stride_d_out_p, stride_d_out_h, probs_ptr, stride_probs,
    # result, contiguous
    out_ptr,
    # sizes, and where segments end
    ends_ptr, num_rows, num_experts, width,
    ACCUMULATOR: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """out[e] = Σ over e's rows p of d_out[p] · probs[p]. A program sums a block of columns for one
    expert: first every BLOCK_P-th row, then these sums.
    """
    column_programs = tl.cdiv(width, BLOCK_H)
    expert = (tl.program_id(0) // column_programs).to(tl.int64)
    c = (tl.program_id(0) % column_programs).to(tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H)
    begin = tl.minimum(segment_begin(ends_ptr, expert), num_rows)
    end = tl.minimum(tl.load(ends_ptr + expert), num_rows)
    total = tl.zeros([BLOCK_P, BLOCK_H], ACCUMULATOR)
    for first in range(begin, end, BLOCK_P):
        p = tl.cast(first, tl.int64) + tl.arange(0, BLOCK_P)
        live = p < end  # the last step sticks out, into the next expert's rows
        d_out = tl.load(
            d_out_ptr + p[:, None] * stride_d_out_p + c[None, :] * stride_d_out_h,
            mask=live[:, None] & (c < width)[None, :],
            other=0.0,
        )
        total += widened(d_out, ACCUMULATOR) * load_probs(probs_ptr, stride_probs, p, live, ACCUMULATOR)
    # the last block sticks out
    tl.store(out_ptr + expert * width + c, stored_as(tl.sum(total, axis=0), out_ptr.dtype.element_ty), mask=c < width)


@jit(
    together=[("stride_y_t", "width")],
    along=["stride_y_h"],
    do_not_specialize=["stride_z", "num_rows", "column_programs"],
)
def gate_kernel(
    y_ptr, stride_y_t, stride_y_h, z_ptr, stride_z,
    # result, contiguous
    out_ptr, num_rows, width, column_programs,
    ACCUMULATOR: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """out[t] = y[t] · σ(z[t]), with σ rounded to the dtype of z. A program computes one tile."""
    t = (tl.program_id(0) // column_programs).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    c = (tl.program_id(0) % column_programs).to(tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H)
    live = t < num_rows
    in_bounds = live[:, None] & (c < width)[None, :]  # the last tiles stick out on both sides
    score, _ = score_and_slope(widened(tl.load(z_ptr + t * stride_z, mask=live, other=0.0), ACCUMULATOR), "sigmoid")
    score = widened(stored_as(score, z_ptr.dtype.element_ty), ACCUMULATOR)
    y = widened(
        tl.load(y_ptr + t[:, None] * stride_y_t + c[None, :] * stride_y_h, mask=in_bounds, other=0.0), ACCUMULATOR
    )
    tl.store(
        out_ptr + t[:, None] * width + c[None, :],
        stored_as(y * score[:, None], out_ptr.dtype.element_ty),
        mask=in_bounds,
    )


@jit(
    together=[("stride_d_out_t", "stride_y_t", "width")],
    along=["stride_d_out_h", "stride_y_h"],
    do_not_specialize=["stride_z", "num_rows"],
)
def gate_backward_kernel(
    d_out_ptr, stride_d_out_t, stride_d_out_h, y_ptr, stride_y_t, stride_y_h, z_ptr, stride_z,
    # results, contiguous; either may be none
    d_y_ptr, d_z_ptr, num_rows, width,
    ACCUMULATOR: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """d_y[t] = d_out[t] σ and d_z[t] = σ(1 - σ) Σ d_out[t] · y[t], where σ and the sum are rounded
    to the dtype of z. A program computes BLOCK_T whole rows.
    """
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    live = t < num_rows
    score, slope = score_and_slope(widened(tl.load(z_ptr + t * stride_z, mask=live, other=0.0), ACCUMULATOR), "sigmoid")
    score = widened(stored_as(score, z_ptr.dtype.element_ty), ACCUMULATOR)
    total = tl.zeros([BLOCK_T, BLOCK_H], ACCUMULATOR)
    for first in range(0, width, BLOCK_H):
        c = first + tl.arange(0, BLOCK_H).to(tl.int64)
        in_bounds = live[:, None] & (c < width)[None, :]  # the last tile and the last step stick out
        d_out = widened(
            tl.load(d_out_ptr + t[:, None] * stride_d_out_t + c[None, :] * stride_d_out_h, mask=in_bounds, other=0.0),
            ACCUMULATOR,
        )
        if d_y_ptr is not None:
            tl.store(
                d_y_ptr + t[:, None] * width + c[None, :],
                stored_as(d_out * score[:, None], d_y_ptr.dtype.element_ty),
                mask=in_bounds,
            )
        if d_z_ptr is not None:
            y = tl.load(y_ptr + t[:, None] * stride_y_t + c[None, :] * stride_y_h, mask=in_bounds, other=0.0)
            total += d_out * widened(y, ACCUMULATOR)
    if d_z_ptr is not None:
        d_score = widened(stored_as(tl.sum(total, axis=1), d_z_ptr.dtype.element_ty), ACCUMULATOR)
        tl.store(d_z_ptr + t, stored_as(d_score * slope, d_z_ptr.dtype.element_ty), mask=live)
