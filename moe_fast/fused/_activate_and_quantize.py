"""Kernels that quantise an activation, or its gradient, as soon as it is computed.

Tiles are as in `quantization._tiles`, of the tensor that is quantised: the activation, or with
`d_out` its gradient d_h in the layout of h. `fused._tiles` computes the values of a tile.
"""

import triton
import triton.language as tl

from moe_fast.fused._tiles import Numbers, activated_tile, steps_of
from moe_fast.launch._rounding import number
from moe_fast.quantization._formats import encoded
from moe_fast.quantization._group_scales import raise_amax_and_history, scale_of_group
from moe_fast.quantization._quantize import quantize_forms
from moe_fast.quantization._tiles import magnitude, place_of_tile, store_tile


@triton.jit(
    do_not_specialize=[
        *("stride_splits", "num_rows", "num_groups", "column_programs", "steps", "epsilon", "infinity"),
        *("stride_probs", "offset", "clamp", "alpha"),
    ]
)
def quantize_activated_blocks_kernel(
    operands, stride_d_out_p, stride_d_out_f, stride_h_p, stride_h_f, stride_probs, width, between, offset, clamp,
    alpha, splits_ptr, stride_splits,
    # results; either form may be left out, and so may the programs' shares of d_probs,
    # [rows, column_programs]. Codes are contiguous
    row_form, stride_row_m, stride_row_n, column_form, stride_column_m, stride_column_n, share_ptr,
    # sizes; `column_programs` programs share the columns of a tile of rows, `steps` tiles each
    num_rows, num_columns, num_groups, column_programs, steps,
    # numbers, as the bits of a float64: 0, or an integer of 64 bits
    epsilon: tl.int64, infinity: tl.int64,
    CURVE: tl.constexpr, LAYOUT: tl.constexpr, CLAMPED: tl.constexpr, WHOLE: tl.constexpr, ROUNDED: tl.constexpr,
    ACCUMULATOR: tl.constexpr, RULE: tl.constexpr, FORMAT: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    HARDWARE: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_G: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Codes, scales and amax of blocks of 1 × BLOCK, of BLOCK × 1, or both from one load. A program
    quantises `steps` tiles side by side, and stores its share of their rows' d_probs.
    """
    numbers = Numbers(
        stride_d_out_p, stride_d_out_f, stride_h_p, stride_h_f, stride_probs, width, between, offset, clamp, alpha
    )
    tile = tl.program_id(0) // column_programs
    _, first, read, owned, written = place_of_tile(
        splits_ptr, stride_splits, num_rows, num_groups, tile, ALIGNED, BLOCK_M, BLOCK_G
    )
    p = tl.arange(0, BLOCK_M).to(tl.int64)
    least = number(epsilon, tl.float32)
    most = number(infinity, tl.float32)
    begin = (tl.program_id(0) % column_programs).to(tl.int64) * (steps * BLOCK_N)
    total = tl.zeros([BLOCK_M], ACCUMULATOR)
    for i in tl.range(0, steps_of(first, written, begin, steps, num_columns, WHOLE, BLOCK_N), num_stages=STAGES):
        column = begin + i * BLOCK_N
        x, x_of_values, d_probs_share = activated_tile(
            operands, numbers, first, read, owned, column, CURVE, LAYOUT, CLAMPED, WHOLE, ROUNDED, ACCUMULATOR,
            BLOCK_M, BLOCK_N,
        )  # fmt: skip
        total += d_probs_share
        for half in tl.static_range(2 if WHOLE else 1):
            if half == 1:
                x = x_of_values
                column += width
            quantize_forms(
                x, row_form, stride_row_m, stride_row_n, column_form, stride_column_m, stride_column_n, tile, first,
                written, column, num_columns, least, most, RULE, FORMAT, POWER_OF_TWO, HARDWARE, BLOCK, False,
            )  # fmt: skip
    if share_ptr is not None:
        # a tile sticks out of its group
        tl.store(
            share_ptr + (first + p) * column_programs + tl.program_id(0) % column_programs,
            total,
            mask=first + p < written,
        )


@triton.jit(
    do_not_specialize=[
        *("stride_splits", "num_rows", "num_groups", "column_programs", "steps"),
        *("stride_probs", "offset", "clamp", "alpha"),
    ]
)
def activated_group_amax_kernel(
    operands, stride_d_out_p, stride_d_out_f, stride_h_p, stride_h_f, stride_probs, width, between, offset, clamp,
    alpha, splits_ptr, stride_splits,
    # result, as integers; zeros at the launch
    amax_ptr,
    # sizes; `column_programs` programs share the columns of a tile of rows, `steps` tiles each
    num_rows, num_columns, num_groups, column_programs, steps,
    CURVE: tl.constexpr, LAYOUT: tl.constexpr, CLAMPED: tl.constexpr, WHOLE: tl.constexpr, ROUNDED: tl.constexpr,
    ACCUMULATOR: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_G: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """max |x| over each group. A program takes `steps` tiles side by side. Atomics combine the
    programs' maxima, as integers: the bits of numbers ≥ 0 have the order of the numbers.
    """
    numbers = Numbers(
        stride_d_out_p, stride_d_out_f, stride_h_p, stride_h_f, stride_probs, width, between, offset, clamp, alpha
    )
    tile = tl.program_id(0) // column_programs
    group, first, end, _, _ = place_of_tile(
        splits_ptr, stride_splits, num_rows, num_groups, tile, True, BLOCK_M, BLOCK_G
    )
    begin = (tl.program_id(0) % column_programs).to(tl.int64) * (steps * BLOCK_N)
    largest = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for i in tl.range(0, steps_of(first, end, begin, steps, num_columns, WHOLE, BLOCK_N), num_stages=STAGES):
        x, x_of_values, _share = activated_tile(
            operands, numbers, first, end, end, begin + i * BLOCK_N, CURVE, LAYOUT, CLAMPED, WHOLE, ROUNDED,
            ACCUMULATOR, BLOCK_M, BLOCK_N,
        )  # fmt: skip
        largest = tl.maximum(largest, magnitude(x))
        if WHOLE:
            largest = tl.maximum(largest, magnitude(x_of_values))
    bits = tl.max(tl.max(largest, axis=1), axis=0).to(tl.int32, bitcast=True)
    tl.atomic_max(amax_ptr + group, bits, mask=(first < end) & (bits > 0), sem="relaxed")  # not past the last group


@triton.jit(
    do_not_specialize=[
        *("stride_splits", "stride_delayed_scale", "stride_history"),
        *("num_rows", "num_groups", "column_programs", "steps", "epsilon", "stride_probs", "offset", "clamp", "alpha"),
    ]
)
def cast_activated_groups_kernel(
    operands, stride_d_out_p, stride_d_out_f, stride_h_p, stride_h_f, stride_probs, width, between, offset, clamp,
    alpha, splits_ptr, stride_splits,
    # scales of earlier steps; None: they follow from the amax
    delayed_scale_ptr, stride_delayed_scale,
    # the amax of each group, as integers: read, or with scales given a result, and zeros before;
    # and the history's first column
    amax_ptr, history_ptr, stride_history,
    # results; the programs' shares of d_probs, [rows, column_programs], may be left out
    codes_ptr, inverse_ptr, share_ptr,
    # sizes; `column_programs` programs share the columns of a tile of rows, `steps` tiles each
    num_rows, num_columns, num_groups, column_programs, steps,
    # a number, as the bits of a float64: 0, or an integer of 64 bits
    epsilon: tl.int64,
    CURVE: tl.constexpr, LAYOUT: tl.constexpr, CLAMPED: tl.constexpr, WHOLE: tl.constexpr, ROUNDED: tl.constexpr,
    ACCUMULATOR: tl.constexpr, FORMAT: tl.constexpr, POWER_OF_TWO: tl.constexpr, HARDWARE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_G: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """encode(x · s) and 1/s, with one scale s per group. s is given, and then the amax is measured
    on the way, or it follows from the amax. A program casts `steps` tiles side by side.
    """
    numbers = Numbers(
        stride_d_out_p, stride_d_out_f, stride_h_p, stride_h_f, stride_probs, width, between, offset, clamp, alpha
    )
    tile = tl.program_id(0) // column_programs
    group, first, read, owned, written = place_of_tile(
        splits_ptr, stride_splits, num_rows, num_groups, tile, True, BLOCK_M, BLOCK_G
    )
    scale = scale_of_group(
        delayed_scale_ptr, stride_delayed_scale, amax_ptr, inverse_ptr, group, num_groups, epsilon,
        FORMAT, POWER_OF_TWO, BLOCK_G,
    )  # fmt: skip
    p = tl.arange(0, BLOCK_M).to(tl.int64)
    begin = (tl.program_id(0) % column_programs).to(tl.int64) * (steps * BLOCK_N)
    total = tl.zeros([BLOCK_M], ACCUMULATOR)
    largest = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for i in tl.range(0, steps_of(first, written, begin, steps, num_columns, WHOLE, BLOCK_N), num_stages=STAGES):
        column = begin + i * BLOCK_N
        x, x_of_values, d_probs_share = activated_tile(
            operands, numbers, first, read, owned, column, CURVE, LAYOUT, CLAMPED, WHOLE, ROUNDED, ACCUMULATOR,
            BLOCK_M, BLOCK_N,
        )  # fmt: skip
        total += d_probs_share
        for half in tl.static_range(2 if WHOLE else 1):
            if half == 1:
                x = x_of_values
                column += width
            store_tile(codes_ptr, encoded(x * scale, FORMAT, HARDWARE), first, written, column, num_columns)
            if delayed_scale_ptr is not None:
                largest = tl.maximum(largest, magnitude(x))
    if share_ptr is not None:
        tl.store(
            share_ptr + (first + p) * column_programs + tl.program_id(0) % column_programs,
            total,
            mask=first + p < written,
        )  # as above
    if delayed_scale_ptr is not None:
        raise_amax_and_history(largest, amax_ptr, history_ptr, stride_history, group, first < read)
