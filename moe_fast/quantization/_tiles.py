"""Tiles of x, and the blocks of tiles.

A tile is [rows, columns] of x within one group. Each group is cut into tiles from its own first row
on, and the rows past the last group, which count as zeros, are cut like one more group. If only the
end of the last group matters, x is cut as one group.
"""

import triton
import triton.language as tl

from moe_fast.quantization._formats import as_float32


@triton.jit
def are_wrong(splits_ptr, stride_splits, num_rows, num_groups, MULTIPLE: tl.constexpr, BLOCK_G: tl.constexpr):
    """Whether the splits are illegal: one is negative or no multiple of MULTIPLE, or their sum
    exceeds the rows.
    """
    is_illegal = tl.full([], False, tl.int1)
    if splits_ptr is not None:
        g = tl.arange(0, BLOCK_G)
        # the block is a power of two
        sizes = tl.load(splits_ptr + g * stride_splits, mask=g < num_groups, other=0).to(tl.int64)
        illegal_split = (sizes < 0) | (sizes > num_rows) | (sizes % MULTIPLE != 0)
        most = tl.minimum(sizes, num_rows)
        is_illegal = (tl.sum(illegal_split.to(tl.int32), axis=0) > 0) | (tl.sum(most, axis=0) > num_rows)
    return is_illegal


@triton.jit
def group_of_tile(splits_ptr, stride_splits, num_rows, num_groups, tile, BLOCK_M: tl.constexpr, BLOCK_G: tl.constexpr):
    """(group, first row, end of the group) of a tile. The rows past the last group are group
    `num_groups`.
    """
    if splits_ptr is None:
        group = tl.full([], 0, tl.int64)
        begin = tl.full([], 0, tl.int64)
        first_tile = tl.full([], 0, tl.int64)
        size = tl.cast(num_rows, tl.int64)
    else:
        g = tl.arange(0, BLOCK_G)
        # the block is a power of two
        sizes = tl.load(splits_ptr + g * stride_splits, mask=g < num_groups, other=0).to(tl.int64)
        sizes = tl.maximum(sizes, 0)  # so that illegal sizes stay within memory; other functions report them
        sizes = tl.where(g == num_groups, tl.maximum(num_rows - tl.sum(sizes), 0), sizes)
        tiles = (sizes + (BLOCK_M - 1)) // BLOCK_M
        is_earlier = tl.cumsum(tiles, 0) <= tile
        group = tl.sum(is_earlier.to(tl.int64))
        begin = tl.sum(tl.where(is_earlier, sizes, 0))
        first_tile = tl.sum(tl.where(is_earlier, tiles, 0))
        size = tl.sum(tl.where(g == group, sizes, 0))
    return group, begin + (tile - first_tile) * BLOCK_M, tl.minimum(begin + size, num_rows)


@triton.jit
def place_of_tile(
    splits_ptr, stride_splits, num_rows, num_groups, tile,
    ALIGNED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """(group, first row, end of the rows to read, end of the rows in groups, end of the rows to
    write) of a tile.
    """
    if ALIGNED:
        group, first, written = group_of_tile(splits_ptr, stride_splits, num_rows, num_groups, tile, BLOCK_M, BLOCK_G)
        owned = tl.where(group < num_groups, written, 0)
        read = owned
    else:
        group = tl.full([], 0, tl.int64)
        first = tile.to(tl.int64) * BLOCK_M
        written = tl.cast(num_rows, tl.int64)
        owned = written
        read = written  # so that loads do not wait for the splits
        if splits_ptr is not None:
            g = tl.arange(0, BLOCK_G)
            # the block is a power of two
            sizes = tl.load(splits_ptr + g * stride_splits, mask=g < num_groups, other=0).to(tl.int64)
            owned = tl.minimum(tl.sum(sizes), written)
    return group, first, read, owned, written


@triton.jit
def load_tile(x_ptr, stride_m, stride_n, row, read, column, num_columns):
    """A tile of x in float32; rows from `read` on are 0."""
    in_bounds = (row < read)[:, None] & (column < num_columns)[None, :]  # a tile sticks out of its group and of x
    return as_float32(tl.load(x_ptr + row[:, None] * stride_m + column[None, :] * stride_n, mask=in_bounds, other=0.0))


@triton.jit
def load_tile_from(
    x_ptr, stride_m, stride_n, first, read, column, num_columns, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """A tile of x in float32, from row `first` and column `column` on; rows from `read` on are 0.
    Only the address of its corner takes 64 bits.
    """
    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    corner = x_ptr + first * stride_m + column * stride_n
    ptrs = corner + m[:, None].to(tl.int64) * stride_m + n[None, :].to(tl.int64) * stride_n
    # it sticks out of its group and of x
    in_bounds = (m < ending(first, read, BLOCK_M))[:, None] & (n < (num_columns - column).to(tl.int32))[None, :]
    return as_float32(tl.load(ptrs, mask=in_bounds, other=0.0))


@triton.jit
def ending(first, end, BLOCK_M: tl.constexpr):
    """How many of a tile's rows lie before row `end`."""
    return tl.maximum(tl.minimum(end - first, BLOCK_M), 0).to(tl.int32)


@triton.jit
def store_tile(out_ptr, value, first, written, column, num_columns):
    """Store a tile of a contiguous result, up to row `written`."""
    m = tl.arange(0, value.shape[0])
    n = tl.arange(0, value.shape[1])
    corner = out_ptr + first * num_columns + column
    in_bounds = (m < ending(first, written, value.shape[0]))[:, None] & (n < (num_columns - column).to(tl.int32))[
        None, :
    ]
    tl.store(corner + m[:, None].to(tl.int64) * num_columns + n[None, :], value, mask=in_bounds)


@triton.jit
def store_turned(out_ptr, value, tile, tiles, column, num_columns):
    """Store a tile of a transposed result, whose rows are as long as `tiles` whole tiles."""
    m = tl.arange(0, value.shape[0])
    n = tl.arange(0, value.shape[1])
    stride = tl.cast(tiles, tl.int64) * value.shape[0]
    corner = out_ptr + column.to(tl.int64) * stride + tl.cast(tile, tl.int64) * value.shape[0]
    in_bounds = (n < (num_columns - column).to(tl.int32))[:, None]
    tl.store(corner + n[:, None].to(tl.int64) * stride + m[None, :], tl.trans(value), mask=in_bounds)


@triton.jit
def store_blocks(
    out_ptr, stride_m, stride_n, value, block, first, written, column, num_columns,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Store one value per block of a tile, from row `block` of blocks on, for the blocks that
    exist.
    """
    m = tl.arange(0, value.shape[0])
    n = tl.arange(0, value.shape[1])
    corner = out_ptr + block * stride_m + column // BLOCK_C * stride_n
    in_bounds = (m * BLOCK_R < ending(first, written, value.shape[0] * BLOCK_R))[:, None] & (
        n * BLOCK_C < (num_columns - column).to(tl.int32)
    )[None, :]
    tl.store(corner + m[:, None].to(tl.int64) * stride_m + n[None, :].to(tl.int64) * stride_n, value, mask=in_bounds)


@triton.jit
def magnitude(x):
    """|x|, and 0 for a NaN."""
    return tl.where(x == x, tl.abs(x), 0.0)


@triton.jit
def block_amax(x, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """max |x| over each block, [m / BLOCK_R, n / BLOCK_C]; a NaN does not count."""
    m: tl.constexpr = x.shape[0] // BLOCK_R
    n: tl.constexpr = x.shape[1] // BLOCK_C
    if BLOCK_R == 1:
        amax = tl.max(tl.reshape(tl.abs(x), [m, n, BLOCK_C]), axis=2)
    elif BLOCK_C == 1:
        amax = tl.max(tl.reshape(tl.abs(x), [m, BLOCK_R, n]), axis=1)
    else:
        amax = tl.max(tl.max(tl.reshape(tl.abs(x), [m, BLOCK_R, n, BLOCK_C]), axis=3), axis=1)
    return tl.maximum(amax, 0.0)  # a maximum ignores NaN


@triton.jit
def spread(scale, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """[m, n]: the number of its block for each element of a tile."""
    m: tl.constexpr = scale.shape[0]
    n: tl.constexpr = scale.shape[1]
    if BLOCK_R == 1:
        repeated = tl.broadcast_to(scale[:, :, None], [m, n, BLOCK_C])
    elif BLOCK_C == 1:
        repeated = tl.broadcast_to(scale[:, None, :], [m, BLOCK_R, n])
    else:
        repeated = tl.broadcast_to(scale[:, None, :, None], [m, BLOCK_R, n, BLOCK_C])
    return tl.reshape(repeated, [m * BLOCK_R, n * BLOCK_C])
