"""Codes and scales of blocks and of whole groups, and back.

A tile is [rows, columns] of x and lies within one group: each group is cut into tiles from its own first row on, and the rows behind the
last group are cut likewise, as one more group, of zeros. Where nothing but the end of the last group matters, x is cut as a whole.
Every quotient is rounded once, and no product is fused with a sum.
"""

import triton
import triton.language as tl

from moe_fast.kernels.formats import FLOAT32_MAX, as_float32, decoded, encoded, encoded_up, power_of_two
from moe_fast.kernels.rounding import rounded
from moe_fast.kernels.scores import number

E4M3_MAX = tl.constexpr(448.0)  # OCP OFP8 1.0
E5M2_MAX = tl.constexpr(57344.0)
TWO_LEVELS_MAX = tl.constexpr(6.0 * 448.0)  # NVFP4: the largest number of E2M1 times the largest scale in E4M3
INFINITE = tl.constexpr(float("inf"))


@triton.jit
def group_of_tile(splits_ptr, stride_splits, num_rows, num_groups, tile, BLOCK_M: tl.constexpr, BLOCK_G: tl.constexpr):
    """(its group, its first row, the row behind its group) of a tile; group `num_groups` is the rest of x. None has a tile too many."""
    if splits_ptr is None:
        group = tl.full([], 0, tl.int64)
        begin = tl.full([], 0, tl.int64)
        first_tile = tl.full([], 0, tl.int64)
        size = tl.cast(num_rows, tl.int64)
    else:
        g = tl.arange(0, BLOCK_G)
        sizes = tl.load(splits_ptr + g * stride_splits, mask=g < num_groups, other=0).to(tl.int64)  # BLOCK_G is a power of two
        sizes = tl.maximum(sizes, 0)  # what is illegal is not checked, but reads and writes nothing that is not there
        sizes = tl.where(g == num_groups, tl.maximum(num_rows - tl.sum(sizes), 0), sizes)
        tiles = (sizes + (BLOCK_M - 1)) // BLOCK_M
        before = tl.cumsum(tiles, 0) <= tile
        group = tl.sum(before.to(tl.int64))
        begin = tl.sum(tl.where(before, sizes, 0))
        first_tile = tl.sum(tl.where(before, tiles, 0))
        size = tl.sum(tl.where(g == group, sizes, 0))
    return group, begin + (tile - first_tile) * BLOCK_M, tl.minimum(begin + size, num_rows)


@triton.jit
def place_of_tile(splits_ptr, stride_splits, num_rows, num_groups, tile, ALIGNED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_G: tl.constexpr):
    """(group, first row, end of the rows that are read, end of those that are anybody's, end of those that are written) of a tile."""
    if ALIGNED:
        group, first, written = group_of_tile(splits_ptr, stride_splits, num_rows, num_groups, tile, BLOCK_M, BLOCK_G)
        owned = tl.where(group < num_groups, written, 0)
        read = owned
    else:
        group = tl.full([], 0, tl.int64)
        first = tile.to(tl.int64) * BLOCK_M
        written = tl.cast(num_rows, tl.int64)
        owned = written
        read = written  # loads do not wait for the splits
        if splits_ptr is not None:
            g = tl.arange(0, BLOCK_G)
            sizes = tl.load(splits_ptr + g * stride_splits, mask=g < num_groups, other=0).to(tl.int64)  # BLOCK_G is a power of two
            owned = tl.minimum(tl.sum(sizes), written)
    return group, first, read, owned, written


@triton.jit
def load_tile(x_ptr, stride_m, stride_n, row, read, owned, column, num_columns, SELECT: tl.constexpr):
    """x in float32; 0 where nobody's."""
    inside = (row < read)[:, None] & (column < num_columns)[None, :]  # a tile sticks out of its group and of x
    x = tl.load(x_ptr + row[:, None] * stride_m + column[None, :] * stride_n, mask=inside, other=0.0)
    x = as_float32(x)
    if SELECT:
        x = tl.where((row < owned)[:, None], x, 0.0)
    return x


@triton.jit
def magnitude(x):
    """|x|, and 0 for a NaN."""
    return tl.where(x == x, tl.abs(x), 0.0)


@triton.jit
def block_amax(x, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """max |x| over each block, [m / BLOCK_R, n / BLOCK_C]."""
    m: tl.constexpr = x.shape[0] // BLOCK_R
    n: tl.constexpr = x.shape[1] // BLOCK_C
    if BLOCK_R == 1:
        return tl.max(tl.reshape(magnitude(x), [m, n, BLOCK_C]), axis=2)
    if BLOCK_C == 1:
        return tl.max(tl.reshape(magnitude(x), [m, BLOCK_R, n]), axis=1)
    return tl.max(tl.max(tl.reshape(magnitude(x), [m, BLOCK_R, n, BLOCK_C]), axis=3), axis=1)


@triton.jit
def spread(scale, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """Each block's number at each of its elements."""
    m: tl.constexpr = scale.shape[0]
    n: tl.constexpr = scale.shape[1]
    if BLOCK_R == 1:
        wide = tl.broadcast_to(scale[:, :, None], [m, n, BLOCK_C])
    elif BLOCK_C == 1:
        wide = tl.broadcast_to(scale[:, None, :], [m, BLOCK_R, n])
    else:
        wide = tl.broadcast_to(scale[:, None, :, None], [m, BLOCK_R, n, BLOCK_C])
    return tl.reshape(wide, [m * BLOCK_R, n * BLOCK_C])


@triton.jit
def over(numerator: tl.constexpr, denominator):
    """The quotient, rounded once; `/` is an approximation on a GPU."""
    return tl.div_rn(tl.full(denominator.shape, numerator, tl.float32), denominator)


@triton.jit
def fitting_scale(amax, epsilon, infinity, FORMAT_MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """format_max / max(amax, ε); 1 if that is 0 or ∞, `infinity` where it overflows; POWER_OF_TWO: rounded down to one."""
    a = tl.maximum(amax, epsilon)
    s = over(FORMAT_MAX, tl.where((a == 0) | (a == INFINITE), FORMAT_MAX, a))
    s = tl.where(s == INFINITE, infinity, s)
    if POWER_OF_TWO:
        s = (s.to(tl.int32, bitcast=True) & -0x800000).to(tl.float32, bitcast=True)  # the mantissa becomes 0
    return s


@triton.jit
def block_scale(amax, group_amax, epsilon, infinity, RULE: tl.constexpr, FORMAT: tl.constexpr, POWER_OF_TWO: tl.constexpr, HARDWARE: tl.constexpr):
    """(what is multiplied by, what is stored to decode with) of blocks.

    amax   s = format_max / amax                 1/s
    mxfp8  2^(127 - e)                           e = E8M0(amax · (1/format_max))
    nvfp4  1 / (d · (1/S)),  S = 2688 / A        d = E4M3(amax · (S · (1/6)))        both at most the largest float32
    """
    FORMAT_MAX: tl.constexpr = E4M3_MAX if FORMAT == "e4m3" else E5M2_MAX
    if RULE == "amax":
        multiplier = fitting_scale(amax, epsilon, infinity, FORMAT_MAX, POWER_OF_TWO)
        stored = over(1.0, multiplier)
    elif RULE == "mxfp8":
        stored = encoded_up(amax * (1 / FORMAT_MAX))
        multiplier = power_of_two(254 - stored)  # 2^(127 - e), e at most 254
    else:
        encoding = fitting_scale(group_amax, 0.0, FLOAT32_MAX, TWO_LEVELS_MAX, False)
        stored = encoded(tl.minimum(amax * (encoding * (1 / 6)), FLOAT32_MAX), "e4m3", HARDWARE)
        multiplier = tl.minimum(over(1.0, decoded(stored, "e4m3") * over(1.0, encoding)), FLOAT32_MAX)
    return multiplier, stored


@triton.jit
def quantize_blocks(
    x,
    codes_ptr,
    scale_ptr,
    amax_ptr,
    stride_m,
    stride_n,
    tile,
    first,
    written,
    column,
    num_columns,
    group_amax,
    epsilon,
    infinity,
    RULE: tl.constexpr,
    FORMAT: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    HARDWARE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """One form of a tile: its codes, and the scale and amax of its blocks. Blocks of scaling by amax that span rows are as high as a tile."""
    amax = block_amax(x, BLOCK_R, BLOCK_C)
    multiplier, stored = block_scale(amax, group_amax, epsilon, infinity, RULE, FORMAT, POWER_OF_TWO, HARDWARE)
    code = encoded(x * spread(multiplier, BLOCK_R, BLOCK_C), FORMAT, HARDWARE)
    row = first + tl.arange(0, x.shape[0])
    n = column + tl.arange(0, x.shape[1])
    inside = (row < written)[:, None] & (n < num_columns)[None, :]  # a tile sticks out of its group and of x
    tl.store(codes_ptr + row[:, None] * num_columns + n[None, :], code, mask=inside)
    m = tl.arange(0, x.shape[0] // BLOCK_R)
    block = tile if RULE == "amax" and BLOCK_R > 1 else first // BLOCK_R
    n = column // BLOCK_C + tl.arange(0, x.shape[1] // BLOCK_C)
    inside = (first + m * BLOCK_R < written)[:, None] & (n * BLOCK_C < num_columns)[None, :]  # likewise
    place = (block + m)[:, None] * stride_m + n[None, :] * stride_n
    tl.store(scale_ptr + place, stored.to(scale_ptr.dtype.element_ty), mask=inside)
    if amax_ptr is not None:
        tl.store(amax_ptr + place, rounded(amax, amax_ptr.dtype.element_ty), mask=inside)  # exact: it is a number of that dtype


@triton.jit(do_not_specialize=["stride_splits", "num_rows", "num_groups", "parts", "steps", "epsilon", "infinity"])
def quantize_blocks_kernel(
    x_ptr,
    stride_x_m,
    stride_x_n,
    splits_ptr,
    stride_splits,
    group_amax_ptr,
    # results; either form may be left out, and so may its amax. Codes are contiguous
    row_codes_ptr,
    row_scale_ptr,
    row_amax_ptr,
    stride_row_m,
    stride_row_n,
    column_codes_ptr,
    column_scale_ptr,
    column_amax_ptr,
    stride_column_m,
    stride_column_n,
    # sizes; a tile's rows are the work of so many programs, each so many steps
    num_rows,
    num_columns,
    num_groups,
    parts,
    steps,
    # numbers, as bits of a float64
    epsilon,
    infinity,
    RULE: tl.constexpr,
    FORMAT: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    HARDWARE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
    SQUARE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_G: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Codes, scales and amax of blocks of 1 × BLOCK, of BLOCK × 1, or both of one load; SQUARE: of BLOCK × BLOCK, as the form by rows."""
    tile = tl.program_id(0) // parts
    group, first, read, owned, written = place_of_tile(splits_ptr, stride_splits, num_rows, num_groups, tile, ALIGNED, BLOCK_M, BLOCK_G)
    row = first + tl.arange(0, BLOCK_M)
    least = number(epsilon, tl.float32)
    most = number(infinity, tl.float32)
    group_amax = 0.0
    if group_amax_ptr is not None:
        group_amax = tl.load(group_amax_ptr + group, mask=group < num_groups, other=0.0)  # the rest of x has none
    begin = (tl.program_id(0) % parts).to(tl.int64) * (steps * BLOCK_N)
    for i in tl.range(0, tl.where(first < written, steps, 0), num_stages=STAGES):
        column = begin + i * BLOCK_N
        n = column + tl.arange(0, BLOCK_N)
        x = load_tile(x_ptr, stride_x_m, stride_x_n, row, read, owned, n, num_columns, not ALIGNED and splits_ptr is not None)
        if row_codes_ptr is not None:
            quantize_blocks(
                x,
                row_codes_ptr,
                row_scale_ptr,
                row_amax_ptr,
                stride_row_m,
                stride_row_n,
                tile,
                first,
                written,
                column,
                num_columns,
                group_amax,
                least,
                most,
                RULE,
                FORMAT,
                POWER_OF_TWO,
                HARDWARE,
                BLOCK if SQUARE else 1,
                BLOCK,
            )
        if column_codes_ptr is not None:
            quantize_blocks(
                x,
                column_codes_ptr,
                column_scale_ptr,
                column_amax_ptr,
                stride_column_m,
                stride_column_n,
                tile,
                first,
                written,
                column,
                num_columns,
                group_amax,
                least,
                most,
                RULE,
                FORMAT,
                POWER_OF_TWO,
                HARDWARE,
                BLOCK,
                1,
            )


@triton.jit(do_not_specialize=["stride_splits", "num_rows", "num_groups", "parts", "steps"])
def dequantize_kernel(
    codes_ptr,
    scale_ptr,
    stride_scale_m,
    stride_scale_n,
    group_amax_ptr,
    splits_ptr,
    stride_splits,
    # result, contiguous
    out_ptr,
    # sizes; a tile's rows are the work of so many programs, each so many steps
    num_rows,
    num_columns,
    num_groups,
    parts,
    steps,
    RULE: tl.constexpr,
    FORMAT: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_G: tl.constexpr,
    STAGES: tl.constexpr,
):
    """code · scale, rounded once more; 0 behind the last group. RULE "group": a scale for each group, else for each block."""
    tile = tl.program_id(0) // parts
    group, first, _, owned, written = place_of_tile(splits_ptr, stride_splits, num_rows, num_groups, tile, ALIGNED, BLOCK_M, BLOCK_G)
    row = first + tl.arange(0, BLOCK_M)
    begin = (tl.program_id(0) % parts).to(tl.int64) * (steps * BLOCK_N)
    for i in tl.range(0, tl.where(first < written, steps, 0), num_stages=STAGES):
        column = begin + i * BLOCK_N
        n = column + tl.arange(0, BLOCK_N)
        inside = (row < written)[:, None] & (n < num_columns)[None, :]  # a tile sticks out of its group and of x
        place = row[:, None] * num_columns + n[None, :]
        value = decoded(tl.load(codes_ptr + place, mask=inside, other=0), FORMAT)
        if RULE == "group":
            scale = tl.load(scale_ptr + group, mask=group < num_groups, other=0.0)  # the rest of x has none
        else:
            m = tl.arange(0, BLOCK_M // BLOCK_R)
            block = tile if RULE == "amax" and BLOCK_R > 1 else first // BLOCK_R
            b = column // BLOCK_C + tl.arange(0, BLOCK_N // BLOCK_C)
            there = (first + m * BLOCK_R < owned)[:, None] & (b * BLOCK_C < num_columns)[None, :]  # no scale behind the last group
            stored = tl.load(scale_ptr + (block + m)[:, None] * stride_scale_m + b[None, :] * stride_scale_n, mask=there, other=0)
            if RULE == "mxfp8":
                stored = power_of_two(stored)
            elif RULE == "nvfp4":
                group_amax = tl.load(group_amax_ptr + group, mask=group < num_groups, other=0.0)  # the rest of x has none
                stored = decoded(stored, "e4m3") * group_amax * (1 / TWO_LEVELS_MAX)
            scale = spread(stored, BLOCK_R, BLOCK_C)
        value = tl.where((row < owned)[:, None], value * scale, 0.0)
        tl.store(out_ptr + place, rounded(value, out_ptr.dtype.element_ty), mask=inside)
