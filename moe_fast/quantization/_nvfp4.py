"""Kernels for NVFP4: codes of E2M1, an E4M3 scale d for each block of 16, and above it a float32
scale S for the group, or for each row or column.

    S = 2688 / A,   d = E4M3(amax · (S · (1/6))),   m = 1 / (d · (1/S)),   q = E2M1(x · m)

with A = max |x|; `four_over_six` computes another d. Tiles lie within one group, and consist of
whole blocks.
"""

import triton
import triton.language as tl

from moe_fast.quantization._formats import E2M1_MAX, FLOAT32_MAX, encoded, encoded_randomly
from moe_fast.quantization._four_over_six import better_of_two, multiplier_of
from moe_fast.quantization._hadamard import hadamard_tile
from moe_fast.quantization._quantize import fitting_scale
from moe_fast.quantization._tiles import block_amax, load_tile_from, place_of_tile, spread, store_blocks, store_tile

SIZE = tl.constexpr(16)  # of a block


@triton.jit
def global_amax(amax_ptr, group, num_groups, row, owned, column, num_columns, PER: tl.constexpr):
    """A for a tile: a scalar for PER "group", [m, 1] for "row", [1, n] for the "column" of a group;
    0 past the last group.
    """
    if PER == "row":
        amax = tl.load(amax_ptr + row, mask=row < owned, other=0.0)[:, None]
    elif PER == "column":
        there = column < tl.where(group < num_groups, num_columns, 0)  # not past the last group
        amax = tl.load(amax_ptr + group * num_columns + column, mask=there, other=0.0)[None, :]
    else:
        amax = tl.load(amax_ptr + group, mask=group < num_groups, other=0.0)  # as above
    return amax


@triton.jit
def quantize_form(
    x, x_ptr, stride_x_m, stride_x_n, amax_ptr, noise_ptr, stride_noise_m, stride_noise_n, codes_ptr, scale_ptr,
    group, num_groups, first, owned, written, column, num_columns, largest,
    PER: tl.constexpr, ERROR: tl.constexpr, HARDWARE: tl.constexpr, BY_ROWS: tl.constexpr, SQUARE: tl.constexpr,
):  # fmt: skip
    """Compute and store one form of a tile: codes and scales of blocks. ERROR is the measure of
    errors by which "four over six" chooses, or None.
    """
    BLOCK_R: tl.constexpr = SIZE if SQUARE or not BY_ROWS else 1
    BLOCK_C: tl.constexpr = SIZE if SQUARE or BY_ROWS else 1
    row = first + tl.arange(0, x.shape[0])
    n = column + tl.arange(0, x.shape[1])
    amax = block_amax(x, BLOCK_R, BLOCK_C)
    outer_amax = global_amax(amax_ptr, group, num_groups, row, owned, n, num_columns, PER)
    encoding = fitting_scale(outer_amax, 0.0, FLOAT32_MAX, E2M1_MAX * largest, False)
    if ERROR is None:
        scale = tl.minimum(amax * (encoding * (1 / E2M1_MAX)), FLOAT32_MAX)
    else:
        scale = better_of_two(
            x_ptr, stride_x_m, stride_x_n, amax, outer_amax, encoding, first, owned, column, num_columns, largest,
            ERROR, HARDWARE, BY_ROWS, SQUARE, x.shape[0], x.shape[1],
        )  # fmt: skip
    stored = encoded(scale, "e4m3", HARDWARE)
    scaled = x * spread(multiplier_of(stored, encoding), BLOCK_R, BLOCK_C)
    if noise_ptr is None:
        code = encoded(scaled, "e2m1", HARDWARE)
    else:
        in_bounds = (row < written)[:, None] & (n < num_columns)[None, :]  # a tile sticks out of its group and of x
        noise = tl.load(
            noise_ptr + row[:, None] * stride_noise_m + n[None, :] * stride_noise_n, mask=in_bounds, other=0.0
        )
        code = encoded_randomly(scaled, noise)
    store_tile(codes_ptr, code, first, written, column, num_columns)
    store_blocks(
        scale_ptr, num_columns // BLOCK_C, 1, stored, first // BLOCK_R, first, written, column, num_columns,
        BLOCK_R, BLOCK_C,
    )  # fmt: skip


@triton.jit(do_not_specialize=["stride_splits", "num_rows", "num_groups", "column_programs", "steps"])
def quantize_two_levels_kernel(
    x_ptr, stride_x_m, stride_x_n, splits_ptr, stride_splits,
    # the global amax of each form
    row_amax_ptr, column_amax_ptr,
    # [2, rows, columns], for the one form and the other; None: codes are the nearest
    noise_ptr, stride_noise_d, stride_noise_m, stride_noise_n,
    # results, contiguous; either form may be left out
    row_codes_ptr, row_scale_ptr, column_codes_ptr, column_scale_ptr,
    # sizes; `column_programs` programs share the columns of a tile of rows, `steps` tiles each
    num_rows, num_columns, num_groups, column_programs, steps,
    largest,  # scale of a block
    ROW_SCALED: tl.constexpr, TRANSFORMED: tl.constexpr, ERROR: tl.constexpr, SQUARE: tl.constexpr,
    HARDWARE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_G: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Both forms in one pass: blocks of 1 × 16 and of 16 × 1, or with SQUARE of 16 × 16. With
    TRANSFORMED the form by columns is of the Hadamard transform. A program quantises `steps` tiles
    side by side.
    """
    tile = tl.program_id(0) // column_programs
    group, first, _, owned, written = place_of_tile(
        splits_ptr, stride_splits, num_rows, num_groups, tile, True, BLOCK_M, BLOCK_G
    )
    begin = (tl.program_id(0) % column_programs).to(tl.int64) * (steps * BLOCK_N)
    for i in tl.range(0, tl.where(first < written, steps, 0), num_stages=STAGES):
        column = begin + i * BLOCK_N
        if row_codes_ptr is not None or not TRANSFORMED:
            x = load_tile_from(x_ptr, stride_x_m, stride_x_n, first, owned, column, num_columns, BLOCK_M, BLOCK_N)
        if row_codes_ptr is not None:
            quantize_form(
                x, x_ptr, stride_x_m, stride_x_n, row_amax_ptr, noise_ptr, stride_noise_m, stride_noise_n,
                row_codes_ptr, row_scale_ptr, group, num_groups, first, owned, written, column, num_columns, largest,
                "row" if ROW_SCALED else "group", ERROR, HARDWARE, True, SQUARE,
            )  # fmt: skip
        if column_codes_ptr is not None:
            if TRANSFORMED:
                x = hadamard_tile(
                    x_ptr, stride_x_m, stride_x_n, first, owned, column, num_columns, False, BLOCK_M, BLOCK_N
                )
            quantize_form(
                x, x_ptr, stride_x_m, stride_x_n, column_amax_ptr,
                None if noise_ptr is None else noise_ptr + stride_noise_d, stride_noise_m, stride_noise_n,
                column_codes_ptr, column_scale_ptr, group, num_groups, first, owned, written, column,
                num_columns, largest, "column" if ROW_SCALED else "group", ERROR, HARDWARE, False, SQUARE,
            )  # fmt: skip
