"""Codes and scales of blocks of 128 of rows that are still tokens, on NVIDIA's Hopper, in Gluon.

As `quantization._hopper`, but each row of a tile is copied from its token, so that no row is stored
before it is encoded.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from moe_fast.launch._hopper import barrier, gather_tile
from moe_fast.launch._rounding import number
from moe_fast.quantization._hopper import SIZE, TILE, place_of_tile, quantize_tile

COPY = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0]))  # 16 bytes of a token for each thread
SOURCE = gl.constexpr(gl.SliceLayout(1, COPY.value))
HELD = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 1, [1, 0]))


@gluon.jit
def gather(tokens_ptr, offset, live, column, num_columns, buffer, wanted):
    """Begin to copy 128 columns of 128 tokens, with 0 where no row is live, as one group of copies.
    If it is not `wanted`, the group is empty.
    """
    n = column + gl.arange(0, SIZE, gl.SliceLayout(0, COPY))
    in_bounds = live[:, None] & (n < num_columns)[None, :] & wanted
    gather_tile(buffer, tokens_ptr + offset[:, None] + n[None, :], mask=in_bounds)
    async_copy.commit_group()


@gluon.jit(
    do_not_specialize=["stride_splits", "num_rows", "num_groups", "column_programs", "steps", "epsilon", "infinity"]
)
def quantize_gathered_kernel(
    tokens_ptr, stride_tokens_t, source_ptr, splits_ptr, stride_splits,
    # results, as for `quantize_blocks_kernel`
    row_form, stride_row_m, stride_row_n, column_form, stride_column_m, stride_column_n,
    # sizes; `column_programs` programs share the columns of a tile of rows, `steps` tiles each
    num_rows, num_columns, num_groups, column_programs, steps,
    # numbers, as the bits of a float64: 0, or an integer of 64 bits
    epsilon: gl.int64, infinity: gl.int64,
    FORMAT: gl.constexpr, POWER_OF_TWO: gl.constexpr, WHOLE: gl.constexpr, BLOCK_G: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Blocks of 1 × 128, 128 × 1, or both from one load. A program quantises `steps` tiles side by
    side. All tiles of some columns come before the next columns, so that the L2 cache can hold
    these columns of all tokens.
    """
    buffer = gl.allocate_shared_memory(tokens_ptr.dtype.element_ty, [STAGES, SIZE, SIZE], HELD)
    tiles = gl.num_programs(0) // column_programs
    tile = gl.program_id(0) % tiles
    first, read, written = place_of_tile(splits_ptr, stride_splits, num_rows, num_groups, tile, BLOCK_G)
    begin = gl.program_id(0) // tiles * (steps * SIZE)
    end = written if WHOLE else read
    count = gl.where(first < end, gl.minimum(gl.cdiv(num_columns - begin, SIZE), steps), 0)
    rows = gl.maximum(gl.minimum(written - first, SIZE), 0).to(gl.int32)
    group_rows = gl.maximum(gl.minimum(read - first, SIZE), 0).to(gl.int32)
    i = gl.arange(0, SIZE, SOURCE)
    source = gl.load(source_ptr + first + i, mask=i < group_rows, other=-1)
    live, offset = source >= 0, source * stride_tokens_t
    for s in gl.static_range(STAGES):
        gather(tokens_ptr, offset, live, begin + s * SIZE, num_columns, buffer.index(s), s < count)
    limits = (number(epsilon, gl.float32), number(infinity, gl.float32))
    for k in range(count):
        stage, column = k % STAGES, begin + k * SIZE
        async_copy.wait_group(STAGES - 1)
        barrier()  # so that all copies can be read
        x = buffer.index(stage).load(TILE).to(gl.float32)
        barrier()  # until all threads have read it
        has_next = k + STAGES < count
        gather(tokens_ptr, offset, live, column + STAGES * SIZE, num_columns, buffer.index(stage), has_next)
        columns = num_columns - column
        if row_form.scale_ptr is not None:
            quantize_tile(
                x, row_form, stride_row_m, stride_row_n, tile, tiles, first, column, rows, columns,
                num_columns, limits, FORMAT, POWER_OF_TWO, 1, SIZE,
            )  # fmt: skip
        if column_form.scale_ptr is not None:
            quantize_tile(
                x, column_form, stride_column_m, stride_column_n, tile, tiles, first, column, rows,
                columns, num_columns, limits, FORMAT, POWER_OF_TWO, SIZE, 1,
            )  # fmt: skip
