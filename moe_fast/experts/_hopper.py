"""The gradient of the weight on NVIDIA's Hopper, in Gluon: one warp loads tiles into a ring of
stages, the other warps multiply them.

A stage is `ready` when its bytes have arrived, and `empty` when all its readers have read it. A
tile of the result leaves through shared memory while the next one is summed. Sums have the order of
`_linear`, and therefore the same bits. The letters of shapes are those of that module.
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

from moe_fast.experts._linear import SEGMENT_ROWS
from moe_fast.launch._hopper import load_tile, store_tile

SEGMENT = gl.constexpr(SEGMENT_ROWS)
PRODUCER_REGISTERS = gl.constexpr(24)


@gluon.jit
def new_barriers(STAGES: gl.constexpr, READERS: gl.constexpr, WRITERS: gl.constexpr = 1):
    """The barriers of a ring's stages: (ready, empty)."""
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=WRITERS)
        mbarrier.init(empty.index(stage), count=READERS)
    fence_async_shared()
    return ready, empty


@gluon.jit
def load_segment(plan, work):
    """(first row, end, first tile) of the expert of a piece of work; past the last piece, of the
    last expert.
    """
    segment_ptr, num_experts, blocks_m, blocks_n = plan
    entry_ptr = segment_ptr + gl.minimum(work // (blocks_m * blocks_n), num_experts - 1)
    return gl.load(entry_ptr), gl.load(entry_ptr + num_experts), gl.load(entry_ptr + 2 * num_experts)


@gluon.jit
def find_gradient(plan, segment, work, BAND: gl.constexpr):
    """(block of outputs, block of inputs, expert, its first row, its number of rows) of a piece of
    work.

    Programs that run together read few blocks of outputs and of inputs, because the pieces go in
    bands of BAND blocks of outputs.
    """
    _segment_ptr, _num_experts, blocks_m, blocks_n = plan
    begin, end, _tile = segment
    expert = work // (blocks_m * blocks_n)
    work_in_expert = work % (blocks_m * blocks_n)
    first = work_in_expert // (BAND * blocks_n) * BAND
    height = gl.minimum(blocks_m - first, BAND)
    work_in_expert -= first * blocks_n
    return (
        first + work_in_expert % height,
        work_in_expert // height,
        expert,
        begin.to(gl.int32),
        (end - begin).to(gl.int32),
    )


@gluon.jit
def find_steps(count, BLOCK_P: gl.constexpr):
    """How many steps a tile has. A tile of an expert without rows has one step, of zeros."""
    return gl.cdiv(gl.maximum(count, 1), BLOCK_P)


@gluon.jit
def load_outer(
    operands, ring, plan, STAGES: gl.constexpr, BAND: gl.constexpr, BLOCK_P: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
):  # fmt: skip
    """The producer warp: load the rows of an expert, BLOCK_P at a time, and zeros past its last
    row.
    """
    d_out_desc, x_desc = operands
    lhs, rhs, ready, empty = ring
    num_pieces = plan[1] * plan[2] * plan[3]
    step = gl.to_tensor(0)
    for work in range(gl.program_id(0), num_pieces, gl.num_programs(0)):
        block_m, block_n, _expert, begin, count = find_gradient(plan, load_segment(plan, work), work, BAND)
        for done in range(find_steps(count, BLOCK_P)):
            stage = step % STAGES
            mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
            mbarrier.expect(ready.index(stage), BLOCK_P * (BLOCK_M + BLOCK_N) * 2)
            row_in_segment = SEGMENT - count + done * BLOCK_P
            at_m, at_n = block_m * BLOCK_M, block_n * BLOCK_N
            load_tile(d_out_desc, [SEGMENT, begin + count, row_in_segment, at_m], ready.index(stage), lhs.index(stage))
            load_tile(x_desc, [SEGMENT, begin + count, row_in_segment, at_n], ready.index(stage), rhs.index(stage))
            step += 1


@gluon.jit
def add_outer(acc, ring, step, STAGES: gl.constexpr, BLOCK_P: gl.constexpr):
    """acc plus the products of a step. The matrix unit may still be computing them."""
    lhs, rhs, ready, _empty = ring
    stage = step % STAGES
    mbarrier.wait(ready.index(stage), step // STAGES & 1)
    d_out = lhs.index(stage).reshape([BLOCK_P, acc.shape[0]]).permute((1, 0))
    x = rhs.index(stage).reshape([BLOCK_P, acc.shape[1]])
    return warpgroup_mma(d_out, x, acc, is_async=True)


@gluon.jit
def multiply_outer(
    out_desc, buffer, ring, plan, STAGES: gl.constexpr, BAND: gl.constexpr, BLOCK_P: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """The other warps: compute one tile of an expert's gradient after another. An illegal plan
    gives NaN.
    """
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_N, 16])
    empty = ring[3]
    step, num_pieces = gl.to_tensor(0), plan[1] * plan[2] * plan[3]
    piece = find_gradient(plan, load_segment(plan, gl.program_id(0)), gl.program_id(0), BAND)
    for work in range(gl.program_id(0), num_pieces, gl.num_programs(0)):
        block_m, block_n, expert, _begin, count = piece
        acc = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout) + gl.where(count < 0, float("nan"), 0.0)
        acc = add_outer(acc, ring, step, STAGES, BLOCK_P)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        step += 1
        following = work + gl.num_programs(0)
        segment = load_segment(plan, following)
        for _ in range(1, find_steps(count, BLOCK_P)):
            acc = add_outer(acc, ring, step, STAGES, BLOCK_P)
            acc = warpgroup_mma_wait(1, deps=(acc,))
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES))  # the step before has ended
            step += 1
        piece = find_gradient(plan, segment, following, BAND)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES))
        tma.store_wait(0)
        buffer.reshape([BLOCK_M, BLOCK_N]).store(acc.to(out_desc.dtype))
        fence_async_shared()
        store_tile(out_desc, [expert, block_m * BLOCK_M, block_n * BLOCK_N], buffer)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_experts", "num_outs", "num_ins"])
def outer_products_kernel(
    # rows: the gradient of the output, and the input; the result
    d_out_desc, x_desc, out_desc,
    # plan and sizes
    segment_ptr, num_experts, num_outs, num_ins,
    STAGES: gl.constexpr, BAND: gl.constexpr, BLOCK_P: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """out[e] = Σ over e's rows p of d_out[p]ᵀ · x[p]; no other row is read. Program i computes the
    tiles i, i + the number of programs, and so on.
    """
    lhs = gl.allocate_shared_memory(d_out_desc.dtype, [STAGES, 1, 1, BLOCK_P, BLOCK_M], d_out_desc.layout)
    rhs = gl.allocate_shared_memory(x_desc.dtype, [STAGES, 1, 1, BLOCK_P, BLOCK_N], x_desc.layout)
    buffer = gl.allocate_shared_memory(out_desc.dtype, [1, BLOCK_M, BLOCK_N], out_desc.layout)
    ready, empty = new_barriers(STAGES, 1)
    ring = (lhs, rhs, ready, empty)
    plan = (segment_ptr, num_experts, gl.cdiv(num_outs, BLOCK_M), gl.cdiv(num_ins, BLOCK_N))
    gl.warp_specialize(
        [
            (multiply_outer, (out_desc, buffer, ring, plan, STAGES, BAND, BLOCK_P, BLOCK_M, BLOCK_N, num_warps)),
            (load_outer, ((d_out_desc, x_desc), ring, plan, STAGES, BAND, BLOCK_P, BLOCK_M, BLOCK_N)),
        ],
        [1],
        [PRODUCER_REGISTERS],
    )
