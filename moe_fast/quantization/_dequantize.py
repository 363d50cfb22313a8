"""A kernel that turns codes and scales back into numbers."""

import triton.language as tl

from moe_fast.launch._rounding import rounded
from moe_fast.launch.specialization import jit
from moe_fast.quantization._formats import decoded, decoded_bytes, power_of_two
from moe_fast.quantization._nvfp4 import global_amax
from moe_fast.quantization._tiles import are_wrong, place_of_tile, spread


@jit(
    together=[("stride_scale_m",), ("num_columns",)],
    along=["stride_scale_n"],
    do_not_specialize=["stride_splits", "num_rows", "num_groups", "column_programs", "steps", "mantissa"],
)
def dequantize_kernel(
    codes_ptr, scale_ptr, stride_scale_m, stride_scale_n,
    # NVFP4: the amax that scales share
    amax_ptr, splits_ptr, stride_splits,
    # result, contiguous
    out_ptr,
    # sizes; `column_programs` programs share the columns of a tile of rows, `steps` tiles each
    num_rows, num_columns, num_groups, column_programs, steps,
    mantissa,  # bits of mantissa of an eight-bit code
    inverse,  # NVFP4: 1/(6 · the largest d)
    RULE: tl.constexpr, PER: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_G: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """out = code · scale, rounded once more; 0 past the last group, and NaN for illegal splits. A
    program computes `steps` tiles side by side.

    RULE "group" has one scale per group, the other rules one per block. RULE "nvfp4" has the scale
    d · A · inverse, where A is one amax per PER.
    """
    tile = tl.program_id(0) // column_programs
    group, first, _, owned, written = place_of_tile(
        splits_ptr, stride_splits, num_rows, num_groups, tile, ALIGNED, BLOCK_M, BLOCK_G
    )
    MULTIPLE: tl.constexpr = 32 if RULE == "mxfp8" else 16 if RULE == "nvfp4" else 1  # of a group's rows
    is_illegal = are_wrong(splits_ptr, stride_splits, num_rows, num_groups, MULTIPLE, BLOCK_G)
    row = first + tl.arange(0, BLOCK_M)
    begin = (tl.program_id(0) % column_programs).to(tl.int64) * (steps * BLOCK_N)
    for i in tl.range(0, tl.where(first < written, steps, 0), num_stages=STAGES):
        column = begin + i * BLOCK_N
        n = column + tl.arange(0, BLOCK_N)
        in_bounds = (row < written)[:, None] & (n < num_columns)[None, :]  # a tile sticks out of its group and of x
        offset = row[:, None] * num_columns + n[None, :]
        code = tl.load(codes_ptr + offset, mask=in_bounds, other=0)
        value = decoded(code, "e2m1") if RULE == "nvfp4" else decoded_bytes(code, mantissa)
        if RULE == "group":
            scale = tl.load(scale_ptr + group, mask=group < num_groups, other=0.0)  # not past the last group
        else:
            m = tl.arange(0, BLOCK_M // BLOCK_R)
            block = tile if RULE == "amax" and BLOCK_R > 1 else first // BLOCK_R
            b = column // BLOCK_C + tl.arange(0, BLOCK_N // BLOCK_C)
            there = (first + m * BLOCK_R < owned)[:, None] & (b * BLOCK_C < num_columns)[None, :]  # blocks that exist
            stored = tl.load(
                scale_ptr + (block + m)[:, None] * stride_scale_m + b[None, :] * stride_scale_n, mask=there, other=0
            )
            if RULE == "mxfp8":
                stored = power_of_two(stored)
            elif RULE == "nvfp4":
                outer_amax = global_amax(amax_ptr, group, num_groups, row, owned, n, num_columns, PER)
                stored = decoded(stored, "e4m3") * outer_amax * inverse
            scale = spread(stored, BLOCK_R, BLOCK_C)
        value = tl.where((row < owned)[:, None], value * scale, 0.0)
        value = tl.where(is_illegal, float("nan"), value)
        tl.store(out_ptr + offset, rounded(value, out_ptr.dtype.element_ty), mask=in_bounds)
