"""Kernels for one scale per group, from the group's amax or from earlier steps, and for the memory
of these steps.

Tiles are as in `quantization._tiles`, each within one group. Atomics combine the maxima of tiles,
because a maximum does not depend on the order.
"""

import triton
import triton.language as tl

from moe_fast.launch._rounding import number, rounded
from moe_fast.launch.specialization import jit
from moe_fast.quantization._formats import FLOAT32_MAX, as_float32, encoded
from moe_fast.quantization._hadamard import SIZE, hadamard_sums
from moe_fast.quantization._quantize import E4M3_MAX, E5M2_MAX, INFINITE, fitting_scale, over
from moe_fast.quantization._tiles import load_tile, magnitude, place_of_tile


@jit(
    together=[("stride_x_m", "num_columns")],
    along=["stride_x_n"],
    do_not_specialize=["stride_splits", "num_rows", "num_groups", "column_programs", "steps"],
)
def group_amax_kernel(
    x_ptr, stride_x_m, stride_x_n, splits_ptr, stride_splits,
    # result, as integers; zeros at the launch
    amax_ptr,
    # sizes; `column_programs` programs share the columns of a tile of rows, `steps` tiles each
    num_rows, num_columns, num_groups, column_programs, steps,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_G: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """max |x| over each group. A program takes `steps` tiles side by side. Atomics combine the
    maxima as integers: the bits of numbers ≥ 0 have the order of the numbers.
    """
    tile = tl.program_id(0) // column_programs
    group, first, end, _, _ = place_of_tile(
        splits_ptr, stride_splits, num_rows, num_groups, tile, True, BLOCK_M, BLOCK_G
    )
    row = first + tl.arange(0, BLOCK_M)
    begin = (tl.program_id(0) % column_programs).to(tl.int64) * (steps * BLOCK_N)
    largest = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for i in tl.range(0, tl.where(first < end, steps, 0), num_stages=STAGES):
        n = begin + i * BLOCK_N + tl.arange(0, BLOCK_N)
        # ignores NaN
        largest = tl.maximum(largest, tl.abs(load_tile(x_ptr, stride_x_m, stride_x_n, row, end, n, num_columns)))
    bits = tl.max(tl.max(largest, axis=1), axis=0).to(tl.int32, bitcast=True)
    tl.atomic_max(amax_ptr + group, bits, mask=(first < end) & (bits > 0), sem="relaxed")  # not past the last group


@triton.jit(do_not_specialize=["stride_splits", "num_rows", "num_groups", "column_programs", "steps"])
def two_levels_amax_kernel(
    x_ptr, stride_x_m, stride_x_n, splits_ptr, stride_splits,
    # results, as integers, zeros at the launch; either may be left out
    row_amax_ptr, column_amax_ptr,
    # sizes; `column_programs` programs share the columns of a tile of rows, `steps` tiles each
    num_rows, num_columns, num_groups, column_programs, steps,
    ROW_SCALED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_G: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """max |x| over each group, and over each group of the Hadamard transform; with ROW_SCALED over
    each row, and over each column of a group. A program takes `steps` tiles side by side.
    """
    tile = tl.program_id(0) // column_programs
    group, first, end, _, _ = place_of_tile(
        splits_ptr, stride_splits, num_rows, num_groups, tile, True, BLOCK_M, BLOCK_G
    )
    row = first + tl.arange(0, BLOCK_M)
    begin = (tl.program_id(0) % column_programs).to(tl.int64) * (steps * BLOCK_N)
    largest = tl.zeros([BLOCK_M, BLOCK_N] if ROW_SCALED else [BLOCK_M // SIZE, 1, BLOCK_N], tl.float32)
    largest_turned = tl.zeros([1 if ROW_SCALED else BLOCK_M // SIZE, BLOCK_N], tl.float32)
    for i in tl.range(0, tl.where(first < end, steps, 0), num_stages=STAGES):
        column = begin + i * BLOCK_N
        if ROW_SCALED:
            n = column + tl.arange(0, BLOCK_N)
            size = magnitude(load_tile(x_ptr, stride_x_m, stride_x_n, row, end, n, num_columns))
            largest = tl.maximum(largest, size)
            if column_amax_ptr is not None:
                bits = tl.max(size, axis=0).to(tl.int32, bitcast=True)
                tl.atomic_max(
                    column_amax_ptr + group * num_columns + n, bits, mask=(n < num_columns) & (bits > 0), sem="relaxed"
                )
        else:
            turned, size = hadamard_sums(
                x_ptr, stride_x_m, stride_x_n, first, end, column, num_columns, False, BLOCK_M, BLOCK_N
            )
            largest = tl.maximum(largest, size)
            largest_turned = tl.maximum(largest_turned, tl.max(tl.abs(turned), axis=1))  # rounding keeps the order
    if row_amax_ptr is not None:
        if ROW_SCALED:
            bits = tl.max(largest, axis=1).to(tl.int32, bitcast=True)
            tl.atomic_max(row_amax_ptr + row, bits, mask=(row < end) & (bits > 0), sem="relaxed")
        else:
            bits = tl.max(tl.max(tl.max(largest, axis=2), axis=1), axis=0).to(tl.int32, bitcast=True)
            # not past the last group
            tl.atomic_max(row_amax_ptr + group, bits, mask=(first < end) & (bits > 0), sem="relaxed")
    if column_amax_ptr is not None and not ROW_SCALED:
        most = as_float32(rounded(tl.max(tl.max(largest_turned, axis=1), axis=0), x_ptr.dtype.element_ty))
        bits = most.to(tl.int32, bitcast=True)
        tl.atomic_max(column_amax_ptr + group, bits, mask=(first < end) & (bits > 0), sem="relaxed")  # as above


@triton.jit
def scale_of_group(
    delayed_scale_ptr, stride_delayed_scale, amax_ptr, inverse_ptr, group, num_groups, epsilon,
    FORMAT: tl.constexpr, POWER_OF_TWO: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """The multiplier s of a group: given, or from the group's amax. The first program also writes
    1/s of all groups.
    """
    FORMAT_MAX: tl.constexpr = E4M3_MAX if FORMAT == "e4m3" else E5M2_MAX
    least = number(epsilon, tl.float32)
    g = tl.arange(0, BLOCK_G)
    real = g < num_groups  # BLOCK_G is a power of two
    if delayed_scale_ptr is not None:
        scale = tl.load(
            delayed_scale_ptr + group * stride_delayed_scale, mask=group < num_groups, other=1.0
        )  # not past the last group
        if tl.program_id(0) == 0:
            tl.store(
                inverse_ptr + g,
                over(1.0, tl.load(delayed_scale_ptr + g * stride_delayed_scale, mask=real, other=1.0)),
                mask=real,
            )
    else:
        amax = tl.load(amax_ptr + group, mask=group < num_groups, other=0).to(tl.float32, bitcast=True)  # as above
        scale = fitting_scale(amax, least, FLOAT32_MAX, FORMAT_MAX, POWER_OF_TWO)
        if tl.program_id(0) == 0:
            amax_G = tl.load(amax_ptr + g, mask=real, other=0).to(tl.float32, bitcast=True)
            tl.store(
                inverse_ptr + g,
                over(1.0, fitting_scale(amax_G, least, FLOAT32_MAX, FORMAT_MAX, POWER_OF_TWO)),
                mask=real,
            )
    return scale


@triton.jit
def raise_amax_and_history(largest, amax_ptr, history_ptr, stride_history, group, in_group):
    """Raise the group's amax of this step, and the first column of its history, to the maximum of a
    tile; not for rows past the last group.
    """
    bits = tl.max(tl.max(largest, axis=1), axis=0).to(tl.int32, bitcast=True)
    tl.atomic_max(amax_ptr + group, bits, mask=in_group & (bits > 0), sem="relaxed")
    tl.atomic_max(history_ptr + group * stride_history, bits, mask=in_group, sem="relaxed")


@jit(
    together=[("stride_x_m", "num_columns")],
    along=["stride_x_n"],
    do_not_specialize=[
        *("stride_splits", "stride_delayed_scale", "stride_history", "num_rows"),
        *("num_groups", "column_programs", "steps", "epsilon"),
    ],
)
def cast_groups_kernel(
    x_ptr, stride_x_m, stride_x_n, splits_ptr, stride_splits,
    # scales of earlier steps; None: they follow from the amax
    delayed_scale_ptr, stride_delayed_scale,
    # the amax of each group, as integers: read, or with scales given a result, and zeros before;
    # and the history's first column
    amax_ptr, history_ptr, stride_history,
    # results
    codes_ptr, inverse_ptr,
    # sizes; `column_programs` programs share the columns of a tile of rows, `steps` tiles each
    num_rows, num_columns, num_groups, column_programs, steps,
    # the bits of a float64: 0, or an integer of 64 bits
    epsilon: tl.int64,
    FORMAT: tl.constexpr, POWER_OF_TWO: tl.constexpr, HARDWARE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_G: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """encode(x · s) and 1/s, with one scale s per group. s is given, and then the amax is measured
    on the way, or it follows from the amax. A program casts `steps` tiles side by side.
    """
    tile = tl.program_id(0) // column_programs
    group, first, read, _, written = place_of_tile(
        splits_ptr, stride_splits, num_rows, num_groups, tile, True, BLOCK_M, BLOCK_G
    )
    scale = scale_of_group(
        delayed_scale_ptr, stride_delayed_scale, amax_ptr, inverse_ptr, group, num_groups, epsilon,
        FORMAT, POWER_OF_TWO, BLOCK_G,
    )  # fmt: skip
    row = first + tl.arange(0, BLOCK_M)
    begin = (tl.program_id(0) % column_programs).to(tl.int64) * (steps * BLOCK_N)
    largest = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for i in tl.range(0, tl.where(first < written, steps, 0), num_stages=STAGES):
        n = begin + i * BLOCK_N + tl.arange(0, BLOCK_N)
        x = load_tile(x_ptr, stride_x_m, stride_x_n, row, read, n, num_columns)
        in_bounds = (row < written)[:, None] & (n < num_columns)[None, :]  # a tile sticks out of its group and of x
        tl.store(
            codes_ptr + row[:, None] * num_columns + n[None, :], encoded(x * scale, FORMAT, HARDWARE), mask=in_bounds
        )
        if delayed_scale_ptr is not None:
            largest = tl.maximum(largest, tl.abs(x))  # ignores NaN
    if delayed_scale_ptr is not None:
        raise_amax_and_history(largest, amax_ptr, history_ptr, stride_history, group, first < read)


@triton.jit
def update_scales_kernel(
    history_ptr, stride_history_g, stride_history_l, scale_ptr, stride_scale, reduced_ptr, stride_reduced,
    # results, contiguous
    new_history_ptr, new_scale_ptr, length, largest,
    MOST_RECENT: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    """Program g rolls the amax history of group g, and computes the scale that follows from it."""
    g = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK_L)
    history = history_ptr + g * stride_history_g
    last = tl.load(history)
    if reduced_ptr is not None:
        reduced = tl.load(reduced_ptr + g * stride_reduced)
        last = tl.where(reduced != 0, reduced, last)
    measured = last != 0
    old_history = tl.load(history + i * stride_history_l, mask=i < length, other=0.0)  # BLOCK_L is a power of two
    # the last entry has no next one
    rolled = tl.load(history + (i + 1) * stride_history_l, mask=i + 1 < length, other=0.0)
    rolled = tl.where(i == 0, 0.0, tl.where(i == length - 1, last, rolled))
    tl.store(new_history_ptr + g * length + i, tl.where(measured, rolled, old_history), mask=i < length)
    amax = last
    if not MOST_RECENT:
        older = tl.where((i > 0) & (i < length) & (old_history == old_history), old_history, 0.0)  # ignores NaN
        amax = tl.where(measured, tl.maximum(tl.where(last == last, last, 0.0), tl.max(older)), 0.0)
    usable = (amax > 0) & (amax < INFINITE)  # a NaN is not usable
    number_of = number(largest, tl.float32)
    proposed = tl.minimum(tl.div_rn(number_of, tl.where(usable, amax, 1.0)), FLOAT32_MAX)
    tl.store(new_scale_ptr + g, tl.where(usable, proposed, tl.load(scale_ptr + g * stride_scale)))
