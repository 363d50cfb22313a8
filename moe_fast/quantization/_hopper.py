"""Codes and scales of blocks of 128 on NVIDIA's Hopper, in Gluon: the forms by rows and by columns
from one load.

The copy engine brings tiles into a ring of stages, so that tiles are loaded while another one is
encoded. The results have the bits of `_quantize`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from moe_fast.launch._hopper import barrier, load_tile
from moe_fast.launch._rounding import number
from moe_fast.quantization._quantize import block_scale

SIZE = gl.constexpr(128)  # of a tile, as of blocks
# 8 rows of 8 columns for each thread: of both directions, eight codes lie side by side
TILE = gl.constexpr(gl.BlockedLayout([8, 8], [2, 16], [8, 1], [1, 0]))
# the same, but neighbours in a column are in neighbouring registers
PAIRED = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[1, 0], [2, 0], [4, 0], [0, 1], [0, 2], [0, 4]],
        lane_bases=[[0, 8], [0, 16], [0, 32], [0, 64], [8, 0]],
        warp_bases=[[16, 0], [32, 0], [64, 0]],
        block_bases=[],
        shape=[128, 128],
    )
)
ROW = gl.constexpr(gl.SliceLayout(1, TILE.value))  # a number for each row
COLUMN = gl.constexpr(gl.SliceLayout(0, TILE.value))
# the largest number of each column in the rows of each warp, for one thread of each column
PARTS = gl.constexpr(gl.BlockedLayout([8, 1], [1, 32], [1, 8], [1, 0]))
TURNED = gl.constexpr(gl.BlockedLayout([1, 16], [4, 8], [8, 1], [1, 0]))
FLAT = gl.constexpr(gl.BlockedLayout([1], [32], [8], [0]))


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def place_of_tile(splits_ptr, stride_splits, num_rows, num_groups, tile, BLOCK_G: gl.constexpr):
    """(first row of a tile, end of the rows to read, end of the rows to write), as in `_tiles`
    where tiles are aligned to groups.
    """
    if splits_ptr is None:
        first = tile.to(gl.int64) * SIZE
        read = gl.to_tensor(num_rows).to(gl.int64)
        written = read
    else:
        g = gl.arange(0, BLOCK_G, FLAT)
        sizes = gl.load(splits_ptr + g * stride_splits, mask=g < num_groups, other=0).to(gl.int64)
        sizes = gl.maximum(sizes, 0)
        sizes = gl.where(g == num_groups, gl.maximum(num_rows - gl.sum(sizes, 0), 0), sizes)
        tiles = (sizes + (SIZE - 1)) // SIZE
        is_earlier = gl.associative_scan(tiles, 0, add) <= tile
        group = gl.sum(is_earlier.to(gl.int64), 0)
        begin = gl.sum(gl.where(is_earlier, sizes, 0), 0)
        first_tile = gl.sum(gl.where(is_earlier, tiles, 0), 0)
        size = gl.sum(gl.where(g == group, sizes, 0), 0)
        first = begin + (tile - first_tile) * SIZE
        written = gl.minimum(begin + size, num_rows)
        read = gl.where(group < num_groups, written, 0)
    return first, read, written


@gluon.jit
def encoded(x, FORMAT: gl.constexpr):
    """The codes of float32 numbers, by the conversion of the hardware."""
    return x.to(gl.float8e4nv if FORMAT == "e4m3" else gl.float8e5).to(gl.uint8, bitcast=True)


@gluon.jit
def store_codes(form, code, first, column, rows, columns, num_columns):
    """Store a tile of codes, of which `rows` rows and `columns` columns exist."""
    m, n = gl.arange(0, SIZE, ROW), gl.arange(0, SIZE, COLUMN)
    corner = form.codes_ptr + first * num_columns + column
    in_bounds = (m < rows)[:, None] & (n < columns)[None, :]
    gl.store(corner + m[:, None].to(gl.int64) * num_columns + n[None, :], code, mask=in_bounds)


@gluon.jit
def store_turned(form, code, column, tile, tiles, columns):
    """Store a tile of transposed codes, of which `columns` columns exist, in all their rows."""
    turned = gl.convert_layout(gl.permute(code, (1, 0)), TURNED)
    n, m = gl.arange(0, SIZE, gl.SliceLayout(1, TURNED)), gl.arange(0, SIZE, gl.SliceLayout(0, TURNED))
    stride = tiles.to(gl.int64) * SIZE
    corner = form.turned_ptr + column.to(gl.int64) * stride + tile.to(gl.int64) * SIZE
    gl.store(corner + n[:, None].to(gl.int64) * stride + m[None, :], turned, mask=(n < columns)[:, None])


@gluon.jit
def column_amax(x):
    """max |x| of each column: first over the rows of each warp, then over the warps, in one thread.

    `gl.max` over all rows at once would store the numbers of the warps in one bank of shared
    memory.
    """
    warps = gl.max(gl.reshape(gl.abs(x), [8, SIZE // 8, SIZE]), 1)
    return gl.max(gl.convert_layout(warps, PARTS), 0)


@gluon.jit
def quantize_tile(
    x, form, stride_m, stride_n, tile, tiles, first, column, rows, columns, num_columns, limits,
    FORMAT: gl.constexpr, POWER_OF_TWO: gl.constexpr, BLOCK_R: gl.constexpr, BLOCK_C: gl.constexpr,
):  # fmt: skip
    """Compute and store one form of a tile, of which `rows` rows and `columns` columns exist."""
    if BLOCK_C == 1:
        amax = column_amax(x)
    elif BLOCK_R == 1:
        amax = gl.max(gl.abs(x), 1)
    else:
        amax = gl.max(gl.max(gl.abs(x), 1), 0)
    if BLOCK_R == 1 or BLOCK_C == 1:
        amax = gl.convert_layout(amax, FLAT)  # so that one thread computes a scale, not all that use it
    amax = gl.maximum(amax, 0.0)  # a maximum ignores NaN
    multiplier, stored = block_scale(amax, limits[0], limits[1], "amax", FORMAT, POWER_OF_TWO)
    i = gl.arange(0, SIZE, FLAT)
    if BLOCK_R == 1:
        where, in_bounds = (first + i) * stride_m + (column // SIZE).to(gl.int64) * stride_n, i < rows
        spread = gl.convert_layout(multiplier, ROW)[:, None]
    elif BLOCK_C == 1:
        where, in_bounds = tile.to(gl.int64) * stride_m + (column + i).to(gl.int64) * stride_n, i < columns
        spread = gl.convert_layout(multiplier, COLUMN)[None, :]
    else:
        where, in_bounds = tile.to(gl.int64) * stride_m + (column // SIZE).to(gl.int64) * stride_n, True
        spread = multiplier
    if form.codes_ptr is not None:
        store_codes(form, encoded(x * spread, FORMAT), first, column, rows, columns, num_columns)
    if form.turned_ptr is not None:
        # the device's instruction makes pairs of codes: here of a column
        code = encoded(gl.convert_layout(x * spread, PAIRED), FORMAT)
        store_turned(form, code, column, tile, tiles, columns)
    gl.store(form.scale_ptr + where, stored, mask=in_bounds)
    if form.amax_ptr is not None:
        gl.store(form.amax_ptr + where, amax.to(form.amax_ptr.dtype.element_ty), mask=in_bounds)


@gluon.jit
def quantize_row_of_tiles(
    x_desc, buffer, ready, row_form, row_strides, column_form, column_strides, tile, tiles, first, begin, count,
    rows, group_rows, num_columns, limits,
    CUT: gl.constexpr, FORMAT: gl.constexpr, POWER_OF_TWO: gl.constexpr, SQUARE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Quantise `count` tiles side by side, from column `begin` on. With CUT only the first
    `group_rows` rows of a tile belong to the group: the others count as zeros.
    """
    corner = first.to(gl.int32)
    bytes: gl.constexpr = SIZE * SIZE * 2
    for i in range(count):
        stage, column = i % STAGES, begin + i * SIZE
        mbarrier.wait(ready.index(stage), i // STAGES & 1)
        x = buffer.index(stage).load(TILE)
        barrier()  # until all threads have read it
        has_next = i + STAGES < count
        mbarrier.expect(ready.index(stage), bytes, pred=has_next)
        load_tile(x_desc, [corner, column + STAGES * SIZE], ready.index(stage), buffer.index(stage), pred=has_next)
        x = x.to(gl.float32)
        if CUT:  # the rows below are the next group's
            x = gl.where((gl.arange(0, SIZE, ROW) < group_rows)[:, None], x, 0.0)
        columns = num_columns - column
        if row_form.scale_ptr is not None:
            quantize_tile(
                x, row_form, row_strides[0], row_strides[1], tile, tiles, first, column, rows, columns, num_columns,
                limits, FORMAT, POWER_OF_TWO, SIZE if SQUARE else 1, SIZE,
            )  # fmt: skip
        if column_form.scale_ptr is not None:
            quantize_tile(
                x, column_form, column_strides[0], column_strides[1], tile, tiles, first, column, rows, columns,
                num_columns, limits, FORMAT, POWER_OF_TWO, SIZE, 1,
            )  # fmt: skip


@gluon.jit(
    do_not_specialize=[
        *("stride_row_m", "stride_row_n", "stride_column_m", "stride_column_n", "stride_splits"),
        *("num_rows", "num_groups", "column_programs", "steps", "epsilon", "infinity"),
    ]
)
def quantize_tiles_kernel(
    x_desc, splits_ptr, stride_splits,
    # results, as for `quantize_blocks_kernel`
    row_form, stride_row_m, stride_row_n, column_form, stride_column_m, stride_column_n,
    # sizes; `column_programs` programs share the columns of a tile of rows, `steps` tiles each
    num_rows, num_columns, num_groups, column_programs, steps,
    # numbers, as the bits of a float64: 0, or an integer of 64 bits
    epsilon: gl.int64, infinity: gl.int64,
    FORMAT: gl.constexpr, POWER_OF_TWO: gl.constexpr, SQUARE: gl.constexpr,
    WHOLE: gl.constexpr,  # also write the tiles past the last group
    BLOCK_G: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Blocks of 1 × 128, 128 × 1, or both from one load; with SQUARE blocks of 128 × 128, as the
    form by rows. A program quantises `steps` tiles side by side.
    """
    buffer = gl.allocate_shared_memory(x_desc.dtype, [STAGES, SIZE, SIZE], x_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(ready.index(s), count=1)
    fence_async_shared()
    tile, tiles = gl.program_id(0) // column_programs, gl.num_programs(0) // column_programs
    first, read, written = place_of_tile(splits_ptr, stride_splits, num_rows, num_groups, tile, BLOCK_G)
    begin = gl.program_id(0) % column_programs * (steps * SIZE)
    end = written if WHOLE else read
    count = gl.where(first < end, gl.minimum(gl.cdiv(num_columns - begin, SIZE), steps), 0)
    rows = gl.maximum(gl.minimum(written - first, SIZE), 0).to(gl.int32)
    group_rows = gl.maximum(gl.minimum(read - first, SIZE), 0).to(gl.int32)
    corner = first.to(gl.int32)
    bytes: gl.constexpr = SIZE * SIZE * 2
    for s in gl.static_range(STAGES):
        mbarrier.expect(ready.index(s), bytes, pred=s < count)
        load_tile(x_desc, [corner, begin + s * SIZE], ready.index(s), buffer.index(s), pred=s < count)
    limits = (number(epsilon, gl.float32), number(infinity, gl.float32))
    row_strides, column_strides = (stride_row_m, stride_row_n), (stride_column_m, stride_column_n)
    if group_rows < SIZE:  # so in few tiles; the others need no mask
        quantize_row_of_tiles(
            x_desc, buffer, ready, row_form, row_strides, column_form, column_strides, tile, tiles, first, begin,
            count, rows, group_rows, num_columns, limits, True, FORMAT, POWER_OF_TWO, SQUARE, STAGES,
        )  # fmt: skip
    else:
        quantize_row_of_tiles(
            x_desc, buffer, ready, row_form, row_strides, column_form, column_strides, tile, tiles, first, begin,
            count, rows, group_rows, num_columns, limits, False, FORMAT, POWER_OF_TWO, SQUARE, STAGES,
        )  # fmt: skip
