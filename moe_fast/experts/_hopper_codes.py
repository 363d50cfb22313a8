"""Products of FP8 codes on NVIDIA's Hopper, in Gluon, with scales of blocks of 128 codes.

The matrix unit sums 128 products, and these sums are scaled and added in float32. One warp loads
tiles into a ring of stages, as in `_hopper`. Groups of four warps multiply, so that one group
scales its sums while another one multiplies. The results have the bits of `_scaled_linear`, and the
letters of shapes are those of that module.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from moe_fast.experts._hopper import PRODUCER_REGISTERS, SEGMENT, find_gradient, load_segment, new_barriers
from moe_fast.launch._hopper import load_tile, store_tile

HEIGHT = gl.constexpr(64)  # rows of a group
CODES = gl.constexpr(128)  # codes of a step; columns of a tile
SCALE_BYTES = gl.constexpr(4)
FIRST, SECOND, THIRD = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)  # groups


@gluon.jit
def find_tile(tile_ptr, capacity, work, columns, BLOCK_P: gl.constexpr):
    """As in `_linear`: (expert, its first row, its end, the first row of the tile, the column of
    the tile).
    """
    entry = tile_ptr + work // columns
    expert, first = gl.load(entry).to(gl.int32), gl.load(entry + capacity).to(gl.int32)
    begin, end = gl.load(entry + 2 * capacity).to(gl.int32), gl.load(entry + 3 * capacity).to(gl.int32)
    work_in_expert = work - first * columns
    tiles = gl.cdiv(end - begin, BLOCK_P)
    return expert, begin, end, begin + work_in_expert % tiles * BLOCK_P, work_in_expert // tiles


@gluon.jit
def sum_of_codes(
    ring, step, steps, row_ptrs, stride_row, live, column_ptr, stride_column,
    GROUP: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """(sum of `steps` scaled products of codes for the rows of a group, the next step of the ring).

    The scales of the rows, and the one scale of all columns, are loaded one step early.
    """
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CODES, 32])
    lhs, rhs, ready, empty = ring
    acc = gl.zeros([HEIGHT, CODES], gl.float32, layout)
    zeros = gl.zeros([HEIGHT, CODES], gl.float32, layout)
    row, column = gl.load(row_ptrs, mask=live & (steps > 0), other=0.0), gl.load(column_ptr)
    for done in range(steps):
        stage = step % STAGES
        next_step = gl.minimum(done + 1, steps - 1).to(gl.int64)
        mbarrier.wait(ready.index(stage), step // STAGES & 1)
        codes = rhs.index(stage).reshape([CODES, CODES]).permute((1, 0))
        partial_sum = warpgroup_mma(lhs.index(stage * GROUPS + GROUP), codes, zeros, use_acc=False, is_async=True)
        next_row = gl.load(row_ptrs + next_step * stride_row, mask=live, other=0.0)
        next_column = gl.load(column_ptr + next_step * stride_column)
        partial_sum = warpgroup_mma_wait(0, deps=(partial_sum,))
        mbarrier.arrive(empty.index(stage))
        acc += partial_sum * (row * column)[:, None]
        row, column = next_row, next_column
        step += 1
    return acc, step


@gluon.jit
def load_codes(operands, ring, plan, GROUPS: gl.constexpr, STAGES: gl.constexpr):
    """The producer warp: load rows, and the matrix of their expert, CODES deep. Rows of the next
    expert are loaded too, but not stored.
    """
    x_desc, weight_desc = operands
    lhs, rhs, ready, empty = ring
    tile_ptr, total_ptr, capacity, columns, depth = plan
    step = gl.to_tensor(0)
    for work in range(gl.program_id(0), gl.load(total_ptr).to(gl.int32) * columns, gl.num_programs(0)):
        expert, _begin, _end, row, column = find_tile(tile_ptr, capacity, work, columns, GROUPS * HEIGHT)
        for first in range(0, depth, CODES):
            stage = step % STAGES
            mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
            mbarrier.expect(ready.index(stage), (GROUPS * HEIGHT + CODES) * CODES)
            load_tile(weight_desc, [expert, column * CODES, first], ready.index(stage), rhs.index(stage))
            for group in gl.static_range(GROUPS):
                rows = lhs.index(stage * GROUPS + group)
                load_tile(x_desc, [row + group * HEIGHT, first], ready.index(stage), rows)
            step += 1


@gluon.jit
def multiply_codes(
    out_desc, buffer, ring, plan, scales, bias, GROUP: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr
):
    """A group of warps: compute its rows of one tile after another, and store them up to the end of
    their expert's rows.
    """
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CODES, 32])
    tile_ptr, total_ptr, capacity, columns, depth = plan
    x_scale_ptr, stride_x_p, stride_x_d, weight_scale_ptr, stride_weight_l, stride_weight_c, stride_weight_d = scales
    bias_ptr, stride_bias_l, stride_bias_c, num_columns = bias
    step = gl.to_tensor(0)
    for work in range(gl.program_id(0), gl.load(total_ptr).to(gl.int32) * columns, gl.num_programs(0)):
        expert, _begin, end, row, column = find_tile(tile_ptr, capacity, work, columns, GROUPS * HEIGHT)
        row += GROUP * HEIGHT
        p = row + gl.arange(0, HEIGHT, layout=gl.SliceLayout(1, layout))
        expert, column_offset = expert.to(gl.int64), column.to(gl.int64)
        acc, step = sum_of_codes(
            ring, step, gl.cdiv(depth, CODES),
            x_scale_ptr + p.to(gl.int64) * stride_x_p, stride_x_d, p < end,
            weight_scale_ptr + expert * stride_weight_l + column_offset * stride_weight_c, stride_weight_d,
            GROUP, GROUPS, STAGES,
        )  # fmt: skip
        if bias_ptr is not None:
            c = column_offset * CODES + gl.arange(0, CODES, layout=gl.SliceLayout(0, layout))
            values = gl.load(bias_ptr + expert * stride_bias_l + c * stride_bias_c, c < num_columns, other=0.0)
            acc += values.to(gl.float32)[None, :]
        tma.store_wait(0)
        group_buffer = buffer.index(GROUP)
        group_buffer.reshape([HEIGHT, CODES]).store(acc.to(out_desc.dtype))
        fence_async_shared()
        row_in_segment = SEGMENT - end + row  # `end - begin` rows are stored at most
        store_tile(out_desc, [SEGMENT, end, row_in_segment, column * CODES], group_buffer)
    tma.store_wait(0)


@gluon.jit
def fill_rows(out_ptr, begin, num_rows, num_columns, num_warps: gl.constexpr):
    """Write zeros to the rows from `begin` on; if `begin` is -1, for illegal counts, write NaN to
    all rows.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [num_warps, 1], [1, 0])
    value = gl.where(begin < 0, float("nan"), 0.0)
    begin = gl.maximum(begin, 0)
    columns = gl.cdiv(num_columns, CODES)
    filled = (gl.zeros([HEIGHT, CODES], gl.float32, layout) + value).to(out_ptr.dtype.element_ty)
    for work in range(gl.program_id(0), gl.cdiv(num_rows - begin, HEIGHT) * columns, gl.num_programs(0)):
        p = begin + work // columns * HEIGHT + gl.arange(0, HEIGHT, layout=gl.SliceLayout(1, layout))
        c = work % columns * CODES + gl.arange(0, CODES, layout=gl.SliceLayout(0, layout))
        in_bounds = (p < num_rows)[:, None] & (c < num_columns)[None, :]
        gl.store(out_ptr + p.to(gl.int64)[:, None] * num_columns + c[None, :], filled, mask=in_bounds)


@gluon.jit(do_not_specialize=["stride_x_d", "stride_bias_l", "stride_bias_c", "capacity", "num_rows", "depth"])
def scaled_matmul_kernel(
    # codes of the rows, of a matrix for each expert; the result, a descriptor of its segments
    x_desc, weight_desc, out_ptr, out_desc,
    # scales, of 128 codes of a row and of 128 · 128 of a matrix
    x_scale_ptr, stride_x_p, stride_x_d, weight_scale_ptr, stride_weight_l, stride_weight_c, stride_weight_d,
    bias_ptr, stride_bias_l, stride_bias_c,
    # plan and sizes
    tile_ptr, total_ptr, capacity, num_rows, num_columns, depth,
    GROUPS: gl.constexpr, STAGES: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """out[p] = x[p] · weight[e] + bias[e] for each row p of an expert e, and 0 past all segments.
    Program i computes the tiles i, i + the number of programs, and so on.
    """
    lhs = gl.allocate_shared_memory(x_desc.dtype, [STAGES * GROUPS, HEIGHT, CODES], x_desc.layout)
    rhs = gl.allocate_shared_memory(weight_desc.dtype, [STAGES, 1, CODES, CODES], weight_desc.layout)
    buffer = gl.allocate_shared_memory(out_desc.dtype, [GROUPS, 1, 1, HEIGHT, CODES], out_desc.layout)
    ready, empty = new_barriers(STAGES, GROUPS)
    ring = (lhs, rhs, ready, empty)
    plan = (tile_ptr, total_ptr, capacity, gl.cdiv(num_columns, CODES), depth)
    scales = (
        x_scale_ptr, stride_x_p, stride_x_d, weight_scale_ptr, stride_weight_l, stride_weight_c, stride_weight_d,
    )  # fmt: skip
    bias = (bias_ptr, stride_bias_l, stride_bias_c, num_columns)
    fill_rows(out_ptr, gl.load(total_ptr + 1).to(gl.int32), num_rows, num_columns, num_warps)
    if GROUPS == 3:
        gl.warp_specialize(
            [
                (multiply_codes, (out_desc, buffer, ring, plan, scales, bias, FIRST, GROUPS, STAGES)),
                (multiply_codes, (out_desc, buffer, ring, plan, scales, bias, SECOND, GROUPS, STAGES)),
                (multiply_codes, (out_desc, buffer, ring, plan, scales, bias, THIRD, GROUPS, STAGES)),
                (load_codes, ((x_desc, weight_desc), ring, plan, GROUPS, STAGES)),
            ],
            [4, 4, 1],
            [160, 160, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (multiply_codes, (out_desc, buffer, ring, plan, scales, bias, FIRST, GROUPS, STAGES)),
                (multiply_codes, (out_desc, buffer, ring, plan, scales, bias, SECOND, GROUPS, STAGES)),
                (load_codes, ((x_desc, weight_desc), ring, plan, GROUPS, STAGES)),
            ],
            [4, 1],
            [232, PRODUCER_REGISTERS],
        )


# --- the weight's gradient, of codes that were turned, each expert's from a tile of CODES on


@gluon.jit
def find_turned(plan, segment, work, BAND: gl.constexpr):
    """(block of outputs, block of inputs, expert, its first tile, its number of tiles) of a piece
    of work; the number is -1 for an illegal plan.
    """
    block_m, block_n, expert, _begin, count = find_gradient(plan, segment, work, BAND)
    return block_m, block_n, expert, segment[2].to(gl.int32), gl.where(count < 0, -1, gl.cdiv(count, CODES))


@gluon.jit
def load_turned(operands, ring, plan, BAND: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr):
    """The producer warp: load columns of both factors, CODES rows of the expert at a time, and
    their scales.
    """
    d_out_desc, d_out_scale_desc, x_desc, x_scale_desc = operands
    lhs, lhs_scales, rhs, rhs_scales, ready, empty = ring
    num_pieces = plan[1] * plan[2] * plan[3]
    step = gl.to_tensor(0)
    for work in range(gl.program_id(0), num_pieces, gl.num_programs(0)):
        block_m, block_n, _expert, tile, steps = find_turned(plan, load_segment(plan, work), work, BAND)
        for done in range(steps):
            stage, first = step % STAGES, (tile + done) * CODES
            arrived, n = ready.index(stage), block_n * CODES
            mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
            mbarrier.expect(arrived, (GROUPS * HEIGHT + CODES) * (CODES + SCALE_BYTES))
            load_tile(x_desc, [n, first], arrived, rhs.index(stage))
            load_tile(x_scale_desc, [tile + done, n], arrived, rhs_scales.index(stage))
            for group in gl.static_range(GROUPS):
                m, group_stage = (block_m * GROUPS + group) * HEIGHT, stage * GROUPS + group
                load_tile(d_out_desc, [m, first], arrived, lhs.index(group_stage))
                load_tile(d_out_scale_desc, [tile + done, m], arrived, lhs_scales.index(group_stage))
            step += 1


@gluon.jit
def multiply_turned(
    out_desc, buffer, ring, plan, BAND: gl.constexpr, GROUP: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr
):
    """A group of warps: compute its rows of one tile of an expert's gradient after another. An
    illegal plan gives NaN.
    """
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CODES, 32])
    lhs, lhs_scales, rhs, rhs_scales, ready, empty = ring
    num_pieces = plan[1] * plan[2] * plan[3]
    step = gl.to_tensor(0)
    zeros = gl.zeros([HEIGHT, CODES], gl.float32, layout)
    segment = load_segment(plan, gl.program_id(0))
    for work in range(gl.program_id(0), num_pieces, gl.num_programs(0)):
        block_m, block_n, expert, _tile, steps = find_turned(plan, segment, work, BAND)
        segment = load_segment(plan, work + gl.num_programs(0))
        acc = gl.zeros([HEIGHT, CODES], gl.float32, layout) + gl.where(steps < 0, float("nan"), 0.0)
        for _ in range(steps):
            stage = step % STAGES
            group_stage = stage * GROUPS + GROUP
            mbarrier.wait(ready.index(stage), step // STAGES & 1)
            codes = rhs.index(stage).permute((1, 0))
            partial_sum = warpgroup_mma(lhs.index(group_stage), codes, zeros, use_acc=False, is_async=True)
            # the step before is in the sum, so its scales are read; after a barrier alone another
            # warp's loads of them may still be on their way
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), pred=step > 0)
            row = lhs_scales.index(group_stage).reshape([HEIGHT]).load(gl.SliceLayout(1, layout))
            partial_sum = warpgroup_mma_wait(0, deps=(partial_sum,))
            column = rhs_scales.index(stage).reshape([CODES]).load(gl.SliceLayout(0, layout))
            acc += partial_sum * (row[:, None] * column[None, :])
            step += 1
        tma.store_wait(0)
        group_buffer = buffer.index(GROUP)
        group_buffer.reshape([HEIGHT, CODES]).store(acc.to(out_desc.dtype))
        fence_async_shared()
        store_tile(out_desc, [expert, (block_m * GROUPS + GROUP) * HEIGHT, block_n * CODES], group_buffer)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_experts", "num_outs", "num_ins"])
def scaled_wgrad_kernel(
    # turned codes and their scales, of the gradient of the output and of the input; the result
    d_out_desc, d_out_scale_desc, x_desc, x_scale_desc, out_desc,
    # plan and sizes
    segment_ptr, num_experts, num_outs, num_ins,
    BAND: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """out[e] = Σ over e's rows p of d_out[p]ᵀ · x[p], from transposed codes. Program i computes the
    tiles i, i + the number of programs, and so on.
    """
    GROUPS: gl.constexpr = 3
    lhs = gl.allocate_shared_memory(d_out_desc.dtype, [STAGES * GROUPS, HEIGHT, CODES], d_out_desc.layout)
    lhs_scales = gl.allocate_shared_memory(gl.float32, [STAGES * GROUPS, 1, HEIGHT], d_out_scale_desc.layout)
    rhs = gl.allocate_shared_memory(x_desc.dtype, [STAGES, CODES, CODES], x_desc.layout)
    rhs_scales = gl.allocate_shared_memory(gl.float32, [STAGES, 1, CODES], x_scale_desc.layout)
    buffer = gl.allocate_shared_memory(out_desc.dtype, [GROUPS, 1, HEIGHT, CODES], out_desc.layout)
    ready, empty = new_barriers(STAGES, GROUPS)
    ring = (lhs, lhs_scales, rhs, rhs_scales, ready, empty)
    plan = (segment_ptr, num_experts, gl.cdiv(num_outs, GROUPS * HEIGHT), gl.cdiv(num_ins, CODES))
    operands = (d_out_desc, d_out_scale_desc, x_desc, x_scale_desc)
    gl.warp_specialize(
        [
            (multiply_turned, (out_desc, buffer, ring, plan, BAND, FIRST, GROUPS, STAGES)),
            (multiply_turned, (out_desc, buffer, ring, plan, BAND, SECOND, GROUPS, STAGES)),
            (multiply_turned, (out_desc, buffer, ring, plan, BAND, THIRD, GROUPS, STAGES)),
            (load_turned, (operands, ring, plan, BAND, GROUPS, STAGES)),
        ],
        [4, 4, 1],
        [160, 160, PRODUCER_REGISTERS],
    )
