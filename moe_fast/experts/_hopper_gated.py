"""Products of rows with matrices of gates and values, activated, on NVIDIA's Hopper, in Gluon.

As `_hopper_rows`, but a tile is 128 gates and the 128 values that belong to them, and only the
activation leaves the multiprocessor. The activation of a tile is computed while the matrix unit
multiplies the next tile: a piece of 32 columns at each of its first four steps. The bits are those
of the product, rounded, and of `_activations` on it. Instead of rows there may be tokens: four
warps then copy the token of each row.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from moe_fast.experts._activations import value_and_slope, within
from moe_fast.experts._hopper import PRODUCER_REGISTERS, SEGMENT, new_barriers
from moe_fast.experts._hopper_codes import FIRST, HEIGHT, SECOND, fill_rows, find_tile
from moe_fast.experts._hopper_rows import DEPTH, GROUPS, SUM, SUM_REGISTERS, WIDTH, add_step, end_step
from moe_fast.launch._hopper import gather_tile, load_tile, store_tile
from moe_fast.launch._rounding import number

HALF = gl.constexpr(128)  # gates of a tile
PIECE = gl.constexpr(32)  # columns that are activated beside a step
PIECES = gl.constexpr(4)
HALF_SUM = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
PIECE_SUM = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16]))
COPY = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))  # 16 bytes of a token for each thread
GATHER_REGISTERS = gl.constexpr(56)
GATHERED_SUM_REGISTERS = gl.constexpr(224)


@gluon.jit
def find_steps(depth):
    """How many steps a tile has: at least one for each piece. Steps past the depth add zeros."""
    return gl.maximum(gl.cdiv(depth, DEPTH), PIECES)


@gluon.jit
def load_operands(x_desc, weight_desc, ring, plan, STAGES: gl.constexpr):
    """The producer warp: load rows, and the gates and values of their expert's matrix,
    DEPTH deep.
    """
    lhs, rhs, ready, empty = ring
    tile_ptr, total_ptr, capacity, columns, depth = plan
    step = gl.to_tensor(0)
    for work in range(gl.program_id(0), gl.load(total_ptr).to(gl.int32) * columns, gl.num_programs(0)):
        expert, _begin, _end, row, column = find_tile(tile_ptr, capacity, work, columns, GROUPS * HEIGHT)
        for done in range(find_steps(depth)):
            stage = step % STAGES
            arrived = ready.index(stage)
            mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
            mbarrier.expect(arrived, (GROUPS * HEIGHT + WIDTH) * DEPTH * 2)
            for group in gl.static_range(GROUPS):
                load_tile(x_desc, [row + group * HEIGHT, done * DEPTH], arrived, lhs.index(stage * GROUPS + group))
            load_tile(weight_desc, [expert, 0, column * HALF, done * DEPTH], arrived, rhs.index(stage))
            step += 1


@gluon.jit
def gather_operands(tokens, weight_desc, ring, plan, STAGES: gl.constexpr):
    """The producer warps, as `load_operands`, where row p is token source[p], or zeros if source[p]
    is -1.
    """
    tokens_ptr, stride, source_ptr, num_rows = tokens
    lhs, rhs, ready, empty = ring
    tile_ptr, total_ptr, capacity, columns, depth = plan
    h = gl.arange(0, DEPTH, gl.SliceLayout(0, COPY))
    step = gl.to_tensor(0)
    for work in range(gl.program_id(0), gl.load(total_ptr).to(gl.int32) * columns, gl.num_programs(0)):
        expert, _begin, _end, row, column = find_tile(tile_ptr, capacity, work, columns, GROUPS * HEIGHT)
        p = row + gl.arange(0, HEIGHT, gl.SliceLayout(1, COPY))
        first = gl.load(source_ptr + p, mask=p < num_rows, other=-1)
        second = gl.load(source_ptr + p + HEIGHT, mask=p + HEIGHT < num_rows, other=-1)
        for done in range(find_steps(depth)):
            stage = step % STAGES
            arrived = ready.index(stage)
            mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
            mbarrier.expect(arrived, WIDTH * DEPTH * 2)
            load_tile(weight_desc, [expert, 0, column * HALF, done * DEPTH], arrived, rhs.index(stage))
            in_row = (done * DEPTH + h < depth)[None, :]
            column_ptrs = tokens_ptr + (done * DEPTH + h)[None, :]
            mask = (first >= 0)[:, None] & in_row
            gather_tile(lhs.index(stage * GROUPS), column_ptrs + (first * stride)[:, None], mask=mask)
            mask = (second >= 0)[:, None] & in_row
            gather_tile(lhs.index(stage * GROUPS + 1), column_ptrs + (second * stride)[:, None], mask=mask)
            async_copy.commit_group()
            # the rows of the step before have arrived, and the matrix unit may read them
            async_copy.wait_group(1)
            fence_async_shared()
            mbarrier.arrive(ready.index((step + STAGES - 1) % STAGES), pred=step > 0)
            step += 1
    async_copy.wait_group(0)
    fence_async_shared()
    mbarrier.arrive(ready.index((step + STAGES - 1) % STAGES), pred=step > 0)


@gluon.jit
def halves(x):
    """The left and the right half of the columns."""
    first, second = x.reshape([HEIGHT, 2, x.shape[1] // 2]).permute((0, 2, 1)).split()
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, x.shape[1] // 2, 16])
    return gl.convert_layout(first, layout), gl.convert_layout(second, layout)


@gluon.jit
def keep_pieces(x, buffer, FIRST_PIECE: gl.constexpr):
    """Store the 128 columns of x in four pieces of the buffer, the first at FIRST_PIECE."""
    first_half, second_half = halves(x)
    pieces = halves(first_half) + halves(second_half)
    for i in gl.static_range(PIECES):
        buffer.index(FIRST_PIECE + i).reshape([HEIGHT, PIECE]).store(pieces[i])


@gluon.jit
def add_bias(acc, bias, expert, column, end):
    """acc plus the bias of its 128 columns, which are those from `column` on; columns from `end` on
    have none.
    """
    bias_ptr, stride_bias_l, stride_bias_c = bias
    c = column + gl.arange(0, HALF, layout=gl.SliceLayout(0, HALF_SUM))
    bias_ptrs = bias_ptr + expert.to(gl.int64) * stride_bias_l + c.to(gl.int64) * stride_bias_c
    return acc + gl.load(bias_ptrs, c < end, other=0.0).to(gl.float32)[None, :]


@gluon.jit
def load_probs(probs, row, end):
    """The probs of a group's rows in float32. Without probs the result is not read."""
    probs_ptr, stride_probs = probs
    p = row + gl.arange(0, HEIGHT, layout=gl.SliceLayout(1, PIECE_SUM))
    if probs_ptr is not None:
        p = gl.load(probs_ptr + p.to(gl.int64) * stride_probs, mask=p < end, other=0.0)
    return p.to(gl.float32)


@gluon.jit
def activate_piece(
    out_desc, buffer, numbers, probs, prob, coordinates, i, CURVE: gl.constexpr, CLAMPED: gl.constexpr,
    ROUND_FIRST: gl.constexpr,
):  # fmt: skip
    """Compute f(u) · (v + offset) · p for a piece, as in `_activations`, and store it over u."""
    offset, clamp, alpha = numbers
    u = buffer.index(i).reshape([HEIGHT, PIECE]).load(PIECE_SUM).to(gl.float32)
    v = buffer.index(PIECES + i).reshape([HEIGHT, PIECE]).load(PIECE_SUM).to(gl.float32)
    if CLAMPED:
        bound = number(clamp, gl.float32)
        u = within(u, -float("inf"), bound)
        v = within(v, -bound, bound)
    act, _ = value_and_slope(u, number(alpha, gl.float32), CURVE)
    act = act * (v + number(offset, gl.float32))
    if probs[0] is not None:
        if ROUND_FIRST:
            act = act.to(out_desc.dtype).to(gl.float32)
        act = act * prob[:, None]
    buffer.index(i).reshape([HEIGHT, PIECE]).store(act.to(out_desc.dtype))
    fence_async_shared()
    store_tile(out_desc, [coordinates[0], coordinates[1], coordinates[2], coordinates[3] + i * PIECE], buffer.index(i))


@gluon.jit
def multiply_and_activate(
    out_desc, buffer, ring, plan, epilogue, CURVE: gl.constexpr, CLAMPED: gl.constexpr, ROUND_FIRST: gl.constexpr,
    GROUP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A group of warps: compute its rows of one tile after another, and store them up to the end of
    their expert's rows.
    """
    bias, probs, numbers, width = epilogue
    tile_ptr, total_ptr, capacity, columns, depth = plan
    step, row_before, end_before, column_before = gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0)
    for work in range(gl.program_id(0), gl.load(total_ptr).to(gl.int32) * columns, gl.num_programs(0)):
        expert, _begin, end, row, column = find_tile(tile_ptr, capacity, work, columns, GROUPS * HEIGHT)
        row += GROUP * HEIGHT
        prob = load_probs(probs, row_before, end_before)
        # the tile before the first ends at row 0: nothing of it is stored
        coordinates = (SEGMENT, end_before, SEGMENT - end_before + row_before, column_before * HALF)
        acc = gl.zeros([HEIGHT, WIDTH], gl.float32, SUM)
        for i in range(PIECES):
            acc = add_step(acc, ring, step, True, GROUP, STAGES)
            activate_piece(out_desc, buffer, numbers, probs, prob, coordinates, i, CURVE, CLAMPED, ROUND_FIRST)
            acc = end_step(acc, ring, step, 1, i > 0, STAGES)
            step += 1
        for _ in range(PIECES, find_steps(depth)):
            acc = add_step(acc, ring, step, True, GROUP, STAGES)
            acc = end_step(acc, ring, step, 1, True, STAGES)
            step += 1
        acc = end_step(acc, ring, step - 1, 0, True, STAGES)
        u, v = halves(acc)
        if bias[0] is not None:
            u = add_bias(u, bias, expert, column * HALF, width)
            v = add_bias(v, bias, expert, width + column * HALF, 2 * width)
        tma.store_wait(0)
        keep_pieces(u.to(out_desc.dtype), buffer, 0)
        keep_pieces(v.to(out_desc.dtype), buffer, PIECES)
        row_before, end_before, column_before = row, end, column
    prob = load_probs(probs, row_before, end_before)
    coordinates = (SEGMENT, end_before, SEGMENT - end_before + row_before, column_before * HALF)
    for i in range(PIECES):
        activate_piece(out_desc, buffer, numbers, probs, prob, coordinates, i, CURVE, CLAMPED, ROUND_FIRST)
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "stride_probs", "stride_bias_l", "stride_bias_c", "capacity", "num_rows", "offset", "clamp", "alpha",
        "num_places",
    ]
)  # fmt: skip
def activated_matmul_kernel(
    # rows, or tokens and each row's; a matrix of gates and values for each expert; the result, a
    # descriptor of its segments
    x_desc, tokens_ptr, stride_tokens_t, source_ptr, num_places, weight_desc, out_ptr, out_desc,
    bias_ptr, stride_bias_l, stride_bias_c, probs_ptr, stride_probs,
    # plan and sizes
    tile_ptr, total_ptr, capacity, num_rows, width, depth,
    # numbers of the activation, as bits of a float64
    offset, clamp, alpha,
    CURVE: gl.constexpr, CLAMPED: gl.constexpr, ROUND_FIRST: gl.constexpr, STAGES: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """out[p] = f(u) · (v + offset) · prob[p] for each row p of an expert e, with (u, v) = x[p] ·
    weight[e] + bias[e], rounded; 0 past all segments. Program i computes the tiles i, i + the
    number of programs, and so on.
    """
    lhs = gl.allocate_shared_memory(x_desc.dtype, [STAGES * GROUPS, HEIGHT, DEPTH], x_desc.layout)
    rhs = gl.allocate_shared_memory(weight_desc.dtype, [STAGES, 1, 2, HALF, DEPTH], weight_desc.layout)
    first_buffer = gl.allocate_shared_memory(out_desc.dtype, [2 * PIECES, 1, 1, HEIGHT, PIECE], out_desc.layout)
    second_buffer = gl.allocate_shared_memory(out_desc.dtype, [2 * PIECES, 1, 1, HEIGHT, PIECE], out_desc.layout)
    ready, empty = new_barriers(STAGES, GROUPS, 1 if source_ptr is None else 2)
    ring = (lhs, rhs, ready, empty)
    plan = (tile_ptr, total_ptr, capacity, gl.cdiv(width, HALF), depth)
    bias, probs, numbers = (bias_ptr, stride_bias_l, stride_bias_c), (probs_ptr, stride_probs), (offset, clamp, alpha)
    epilogue = (bias, probs, numbers, width)
    fill_rows(out_ptr, gl.load(total_ptr + 1).to(gl.int32), num_rows, width, num_warps)
    if source_ptr is None:
        gl.warp_specialize(
            [
                (
                    multiply_and_activate,
                    (out_desc, first_buffer, ring, plan, epilogue, CURVE, CLAMPED, ROUND_FIRST, FIRST, STAGES),
                ),
                (
                    multiply_and_activate,
                    (out_desc, second_buffer, ring, plan, epilogue, CURVE, CLAMPED, ROUND_FIRST, SECOND, STAGES),
                ),
                (load_operands, (x_desc, weight_desc, ring, plan, STAGES)),
            ],
            [4, 1],
            [SUM_REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        tokens = (tokens_ptr, stride_tokens_t, source_ptr, num_places)
        gl.warp_specialize(
            [
                (
                    multiply_and_activate,
                    (out_desc, first_buffer, ring, plan, epilogue, CURVE, CLAMPED, ROUND_FIRST, FIRST, STAGES),
                ),
                (
                    multiply_and_activate,
                    (out_desc, second_buffer, ring, plan, epilogue, CURVE, CLAMPED, ROUND_FIRST, SECOND, STAGES),
                ),
                (gather_operands, (tokens, weight_desc, ring, plan, STAGES)),
            ],
            [4, 4],
            [GATHERED_SUM_REGISTERS, GATHER_REGISTERS],
        )
