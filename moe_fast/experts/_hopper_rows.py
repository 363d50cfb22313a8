"""Products of rows with matrices on NVIDIA's Hopper, in Gluon.

One warp loads tiles into a ring of stages, as in `_hopper`. Two groups of four warps multiply half
of the rows each, and store them. Sums have the order of `_linear`, and therefore the same bits. The
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

from moe_fast.experts._hopper import PRODUCER_REGISTERS, SEGMENT, new_barriers
from moe_fast.experts._hopper_codes import FIRST, HEIGHT, SECOND, fill_rows, find_tile
from moe_fast.launch._hopper import load_tile, store_tile

GROUPS = gl.constexpr(2)
DEPTH = gl.constexpr(64)  # of a step
WIDTH = gl.constexpr(256)  # columns of a tile
SUM = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
SUM_REGISTERS = gl.constexpr(240)


@gluon.jit
def load_operands(x_desc, weight_desc, ring, plan, TURNED: gl.constexpr, STAGES: gl.constexpr):
    """The producer warp: load rows, and the matrix of their expert, DEPTH deep. Rows of the next
    expert are loaded too, but not stored.
    """
    lhs, rhs, ready, empty = ring
    tile_ptr, total_ptr, capacity, columns, depth = plan
    step = gl.to_tensor(0)
    for work in range(gl.program_id(0), gl.load(total_ptr).to(gl.int32) * columns, gl.num_programs(0)):
        expert, _begin, _end, row, column = find_tile(tile_ptr, capacity, work, columns, GROUPS * HEIGHT)
        for first in range(0, depth, DEPTH):
            stage = step % STAGES
            arrived = ready.index(stage)
            mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
            mbarrier.expect(arrived, (GROUPS * HEIGHT + WIDTH) * DEPTH * 2)
            for group in gl.static_range(GROUPS):
                load_tile(x_desc, [row + group * HEIGHT, first], arrived, lhs.index(stage * GROUPS + group))
            if TURNED:
                load_tile(weight_desc, [expert, column * WIDTH, first], arrived, rhs.index(stage))
            else:
                load_tile(weight_desc, [expert, first, column * WIDTH], arrived, rhs.index(stage))
            step += 1


@gluon.jit
def add_step(acc, ring, step, TURNED: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr):
    """acc plus the product of a step for the rows of a group. The matrix unit may still be
    computing it.
    """
    lhs, rhs, ready, _empty = ring
    stage = step % STAGES
    mbarrier.wait(ready.index(stage), step // STAGES & 1)
    if TURNED:
        matrix = rhs.index(stage).reshape([WIDTH, DEPTH]).permute((1, 0))
    else:
        matrix = rhs.index(stage).reshape([DEPTH, WIDTH])
    return warpgroup_mma(lhs.index(stage * GROUPS + GROUP), matrix, acc, is_async=True)


@gluon.jit
def end_step(acc, ring, step, PENDING: gl.constexpr, is_one, STAGES: gl.constexpr):
    """Wait until at most PENDING products still run, and mark the stage of the last one that ended
    as empty.
    """
    acc = warpgroup_mma_wait(PENDING, deps=(acc,))
    mbarrier.arrive(ring[3].index((step + STAGES - PENDING) % STAGES), pred=is_one)
    return acc


@gluon.jit
def sum_of_products(ring, step, steps, TURNED: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr):
    """(sum of `steps` products for the rows of a group, the next step of the ring)."""
    acc = gl.zeros([HEIGHT, WIDTH], gl.float32, SUM)
    for done in range(steps):
        acc = add_step(acc, ring, step, TURNED, GROUP, STAGES)
        acc = end_step(acc, ring, step, 1, done > 0, STAGES)
        step += 1
    return end_step(acc, ring, step - 1, 0, True, STAGES), step


@gluon.jit
def multiply_rows(out_desc, buffer, ring, plan, bias, TURNED: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr):
    """A group of warps: compute its rows of one tile after another, and store them up to the end of
    their expert's rows.
    """
    tile_ptr, total_ptr, capacity, columns, depth = plan
    bias_ptr, stride_bias_l, stride_bias_c, num_columns = bias
    step = gl.to_tensor(0)
    for work in range(gl.program_id(0), gl.load(total_ptr).to(gl.int32) * columns, gl.num_programs(0)):
        expert, _begin, end, row, column = find_tile(tile_ptr, capacity, work, columns, GROUPS * HEIGHT)
        acc, step = sum_of_products(ring, step, gl.cdiv(depth, DEPTH), TURNED, GROUP, STAGES)
        if bias_ptr is not None:
            c = column.to(gl.int64) * WIDTH + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, SUM))
            bias_ptrs = bias_ptr + expert.to(gl.int64) * stride_bias_l + c * stride_bias_c
            acc += gl.load(bias_ptrs, c < num_columns, other=0.0).to(gl.float32)[None, :]
        tma.store_wait(0)
        buffer.reshape([HEIGHT, WIDTH]).store(acc.to(out_desc.dtype))
        fence_async_shared()
        store_tile(out_desc, [SEGMENT, end, SEGMENT - end + row + GROUP * HEIGHT, column * WIDTH], buffer)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["stride_bias_l", "stride_bias_c", "capacity", "num_rows", "depth"])
def matmul_kernel(
    # rows, a matrix for each expert; the result, a descriptor of its segments
    x_desc, weight_desc, out_ptr, out_desc,
    bias_ptr, stride_bias_l, stride_bias_c,
    # plan and sizes
    tile_ptr, total_ptr, capacity, num_rows, num_columns, depth,
    TURNED: gl.constexpr, STAGES: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """out[p] = x[p] · weight[e] + bias[e] for each row p of an expert e, and 0 past all segments.
    Program i computes the tiles i, i + the number of programs, and so on.
    """
    block: gl.constexpr = [STAGES, 1, WIDTH, DEPTH] if TURNED else [STAGES, 1, DEPTH, WIDTH]
    lhs = gl.allocate_shared_memory(x_desc.dtype, [STAGES * GROUPS, HEIGHT, DEPTH], x_desc.layout)
    rhs = gl.allocate_shared_memory(weight_desc.dtype, block, weight_desc.layout)
    buffers = gl.allocate_shared_memory(out_desc.dtype, [GROUPS, 1, 1, HEIGHT, WIDTH], out_desc.layout)
    ready, empty = new_barriers(STAGES, GROUPS)
    ring = (lhs, rhs, ready, empty)
    plan = (tile_ptr, total_ptr, capacity, gl.cdiv(num_columns, WIDTH), depth)
    bias = (bias_ptr, stride_bias_l, stride_bias_c, num_columns)
    fill_rows(out_ptr, gl.load(total_ptr + 1).to(gl.int32), num_rows, num_columns, num_warps)
    gl.warp_specialize(
        [
            (multiply_rows, (out_desc, buffers.index(0), ring, plan, bias, TURNED, FIRST, STAGES)),
            (multiply_rows, (out_desc, buffers.index(1), ring, plan, bias, TURNED, SECOND, STAGES)),
            (load_operands, (x_desc, weight_desc, ring, plan, TURNED, STAGES)),
        ],
        [4, 1],
        [SUM_REGISTERS, PRODUCER_REGISTERS],
    )
