"""Each expert's rows times its own matrix. A number of the result is summed by one program, in
ascending order.

P rows, M outputs and N inputs of the layer. The product of rows with matrices serves forward and
backward: there C are the columns of the result, and D is the depth that is summed over. Operands
are passed as pointers. If there are tensor descriptors of the same operands too, tiles are moved by
the descriptors.
"""

import triton
import triton.language as tl

from moe_fast.launch._rounding import INTERPRETED, rounded
from moe_fast.launch._tiles import put_tiles
from moe_fast.launch.specialization import jit

SEGMENT_ROWS = 1 << 30
SEGMENT = tl.constexpr(SEGMENT_ROWS)  # where every segment ends for a descriptor of segments


@triton.jit
def load_segment(desc, begin, count, row, column, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr):
    """A tile of a segment that has `count` rows from row `begin` on: from its row `row` on, and 0
    past the segment. By a descriptor of segments.
    """
    begin, count, segment = begin.to(tl.int32), count.to(tl.int32), tl.full([], SEGMENT, tl.int32)
    return tl.reshape(desc.load([segment, begin + count, segment - count + row, column]), [BLOCK_P, BLOCK_C])


@triton.jit
def store_segment(desc, begin, count, row, column, tile, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr):
    """Store a tile at the place from which `load_segment` loads it; nothing is written past the
    segment.
    """
    begin, count, segment = begin.to(tl.int32), count.to(tl.int32), tl.full([], SEGMENT, tl.int32)
    desc.store([segment, begin + count, segment - count + row, column], tl.reshape(tile, [1, 1, BLOCK_P, BLOCK_C]))


@triton.jit
def add_bias(acc, bias_ptrs, in_row, BIAS_AS: tl.constexpr):
    """acc plus the bias of its columns."""
    bias = tl.load(bias_ptrs, mask=in_row, other=0.0)
    return acc + bias.to(BIAS_AS).to(acc.dtype)[None, :]


@triton.jit
def store_rows(
    acc, bias_ptr, stride_bias_l, stride_bias_c, has_bias, out_ptr, out_desc, num_columns, expert, begin, end, row,
    column, BIAS_AS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Add the expert's bias to a tile of sums, and store it up to the end of the expert's rows.

    If `has_bias` is None, the compiled version knows whether there is a bias; otherwise only the
    launch does.
    """
    p = row + tl.arange(0, BLOCK_P)
    c = column.to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
    in_row = c < num_columns  # the last block sticks out
    bias_offset = expert.to(tl.int64) * stride_bias_l + c * stride_bias_c
    if has_bias is None:
        if bias_ptr is not None:
            acc = add_bias(acc, bias_ptr + bias_offset, in_row, BIAS_AS)
    elif has_bias:
        acc = add_bias(acc, bias_ptr + bias_offset, in_row, BIAS_AS)
    result = rounded(acc, out_ptr.dtype.element_ty)
    if out_desc is not None:
        store_segment(
            out_desc, begin, end - begin, (row - begin).to(tl.int32), column * BLOCK_C, result, BLOCK_P, BLOCK_C
        )
    else:
        # the last tile sticks out
        tl.store(out_ptr + p[:, None] * num_columns + c[None, :], result, mask=(p < end)[:, None] & in_row[None, :])


@triton.jit
def find_gradient(segment_ptr, num_experts, work, blocks_m, blocks_n):
    """(block of outputs, block of inputs, expert, its first row, its end) of a piece of work."""
    block_m = work % blocks_m  # programs that run together share the columns of the rows
    block_n = work // blocks_m % blocks_n
    expert = (work // blocks_m // blocks_n).to(tl.int64)
    return block_m, block_n, expert, tl.load(segment_ptr + expert), tl.load(segment_ptr + num_experts + expert)


@triton.jit
def store_gradient(
    acc, addend_ptr, stride_addend_l, stride_addend_m, stride_addend_n, out_ptr, expert, count, m, n, num_outs, num_ins
):
    """Store a tile of an expert's gradient, added to the addend if there is one. The addend of an
    expert without rows is stored unchanged, bit by bit.
    """
    in_bounds = (m < num_outs)[:, None] & (n < num_ins)[None, :]  # the last blocks stick out
    if addend_ptr is not None:
        addend_ptrs = (
            addend_ptr + expert * stride_addend_l + m[:, None] * stride_addend_m + n[None, :] * stride_addend_n
        )
        addend = tl.load(addend_ptrs, mask=in_bounds, other=0.0)  # as above
        result = tl.where(count != 0, (addend + acc).to(addend.dtype), addend)  # -0 + 0 would be +0
    else:
        result = rounded(acc, out_ptr.dtype.element_ty)
    tl.store(out_ptr + (expert * num_outs + m[:, None]) * num_ins + n[None, :], result, mask=in_bounds)


@triton.jit
def add_product(acc, lhs, rhs):
    """acc + lhs · rhs."""
    if INTERPRETED:  # Triton 3.9 multiplies bfloat16 wrongly there
        lhs, rhs = lhs.to(acc.dtype), rhs.to(acc.dtype)
    return tl.dot(lhs, rhs, acc, input_precision="ieee", out_dtype=acc.dtype)


@triton.jit(do_not_specialize=["stride_counts", "capacity", "num_rows", "num_experts", "multiple"])
def plan_kernel(
    counts_ptr, stride_counts,
    # results: expert, its first tile, its first row and its end, per tile; the two
    # rows and the first tile, per expert; the two totals
    tile_ptr, segment_ptr, total_ptr,
    # sizes
    capacity, num_rows, num_experts, multiple,
    BLOCK_P: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Cut each expert's rows into tiles. Program e writes the tiles and the segment of expert e;
    the last one also writes the two totals.

    Illegal counts give a plan without tiles, in which all segments and rows end at -1: products
    with it are NaN.
    """
    expert = tl.program_id(0)
    e = tl.arange(0, BLOCK_E).to(tl.int64)
    # the block is a power of two
    count = tl.load(counts_ptr + e * stride_counts, mask=e < num_experts, other=0).to(tl.int64)
    illegal = (count < 0) | (count > num_rows) | (count % multiple != 0)
    is_illegal = (tl.sum(illegal.to(tl.int32), axis=0) > 0) | (tl.sum(tl.minimum(count, num_rows), axis=0) > num_rows)
    count = tl.where(is_illegal, tl.zeros_like(count), count)
    ends = tl.cumsum(count, 0)
    begin = ends - count
    end = tl.where(is_illegal, tl.zeros_like(ends) - 1, ends)
    tiles = tl.cdiv(count, BLOCK_P)
    first = tl.sum(tl.where(e < expert, tiles, 0), axis=0)
    num_tiles = tl.sum(tl.where(e == expert, tiles, 0), axis=0)
    expert_begin = tl.sum(tl.where(e == expert, begin, 0), axis=0)
    expert_end = tl.sum(tl.where(e == expert, end, 0), axis=0)
    zero = tl.zeros([1], tl.int64)
    put_tiles(
        tile_ptr,
        capacity,
        zero + expert,
        zero + first,
        zero + num_tiles,
        zero + expert_begin,
        zero + expert_end,
        BLOCK_T,
    )
    tl.store(segment_ptr + expert, expert_begin)
    tl.store(segment_ptr + num_experts + expert, expert_end)
    tl.store(segment_ptr + 2 * num_experts + expert, first)
    if expert == num_experts - 1:
        tl.store(total_ptr, first + num_tiles)
        tl.store(total_ptr + 1, expert_end)


@triton.jit
def find_tile(tile_ptr, capacity, work, columns, BLOCK_P: tl.constexpr):
    """(expert, first row and end of the expert's rows, first row of the tile, column of the tile)
    of a piece of work.

    An expert's tiles of one column follow each other, so that programs that run together share the
    columns of its matrix.
    """
    entry = tile_ptr + work // columns  # of any tile of the expert
    expert, first = tl.load(entry).to(tl.int32), tl.load(entry + capacity).to(tl.int32)
    begin, end = tl.load(entry + 2 * capacity), tl.load(entry + 3 * capacity)
    tiles = tl.cdiv(end - begin, BLOCK_P).to(tl.int32)
    work_in_expert = work - first * columns
    return expert, begin, end, begin + work_in_expert % tiles * BLOCK_P, work_in_expert // tiles


@triton.jit
def fill_rows(out_ptr, begin, end, num_columns, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr):
    """Write zeros to the rows from `begin` to `end`; all programs share the work. If the plan has
    -1 as `begin`, for illegal counts, write NaN to all rows.
    """
    columns = tl.cdiv(num_columns, BLOCK_C)
    value = tl.where(begin < 0, tl.full([], float("nan"), tl.float32), 0.0)
    filled = (tl.zeros([BLOCK_P, BLOCK_C], tl.float32) + value).to(out_ptr.dtype.element_ty)
    begin = tl.maximum(begin, 0)
    for work in range(tl.program_id(0), tl.cdiv(end - begin, BLOCK_P) * columns, tl.num_programs(0)):
        p = begin + (work // columns).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
        c = (work % columns).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
        in_bounds = (p < end)[:, None] & (c < num_columns)[None, :]  # the last tile and the last block stick out
        tl.store(out_ptr + p[:, None] * num_columns + c[None, :], filled, mask=in_bounds)


@triton.jit
def load_matrix(weight_desc, expert, d, c, TURNED: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr):
    """A [D, C] tile of an expert's matrix, which is stored as [D, C], or transposed (TURNED)."""
    if TURNED:
        tile = tl.trans(tl.reshape(weight_desc.load([expert, c, d]), [BLOCK_C, BLOCK_D]))
    else:
        tile = tl.reshape(weight_desc.load([expert, d, c]), [BLOCK_D, BLOCK_C])
    return tile


@jit(
    together=[("stride_x_p", "depth", "stride_weight_l", "stride_weight_row", "num_columns")],
    along=["stride_x_d", "stride_weight_inner"],
    do_not_specialize=["stride_bias_l", "stride_bias_c", "has_bias", "capacity", "num_rows"],
)
def grouped_matmul_kernel(
    # operands: rows, a matrix for each expert as it lies in memory, bias or an empty tensor
    x_ptr, stride_x_p, stride_x_d, weight_ptr, stride_weight_l, stride_weight_row, stride_weight_inner,
    bias_ptr, stride_bias_l, stride_bias_c, has_bias,
    # result, contiguous
    out_ptr,
    # descriptors of rows, matrices and result, or none
    x_desc, weight_desc, out_desc,
    # plan
    tile_ptr, total_ptr, capacity,
    # sizes
    num_rows, num_columns, depth,
    ACCUMULATOR: tl.constexpr,
    # holds the bias exactly, or in the accumulator's dtype: bfloat16 has no direct way to float64
    BIAS_AS: tl.constexpr,
    TURNED: tl.constexpr, FLATTEN: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """out[p] = x[p] · weight[e] + bias[e] for each row p of an expert e, and 0 past all segments.
    Program i computes the tiles i, i + the number of programs, and so on.
    """
    columns = tl.cdiv(num_columns, BLOCK_C)
    pieces = tl.load(total_ptr).to(tl.int32) * columns
    stride_weight_d = stride_weight_inner if TURNED else stride_weight_row
    stride_weight_c = stride_weight_row if TURNED else stride_weight_inner
    for work in tl.range(tl.program_id(0), pieces, tl.num_programs(0), flatten=FLATTEN):
        expert, begin, end, row, column = find_tile(tile_ptr, capacity, work, columns, BLOCK_P)
        p = row + tl.arange(0, BLOCK_P)
        c = column.to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
        in_segment = (p < end)[:, None]  # the last tile sticks out, into the next expert's rows
        in_row = (c < num_columns)[None, :]  # the last block sticks out
        acc = tl.zeros([BLOCK_P, BLOCK_C], ACCUMULATOR)
        for first in range(0, depth, BLOCK_D):
            if x_desc is not None:
                x = x_desc.load([row.to(tl.int32), first])  # the next expert's rows give only rows that are not stored
                weight = load_matrix(weight_desc, expert, first, column * BLOCK_C, TURNED, BLOCK_D, BLOCK_C)
            else:
                d = first + tl.arange(0, BLOCK_D).to(tl.int64)
                in_depth = d < depth  # the last step sticks out
                x = tl.load(
                    x_ptr + p[:, None] * stride_x_p + d[None, :] * stride_x_d,
                    mask=in_segment & in_depth[None, :],
                    other=0.0,
                )
                matrix_ptr = weight_ptr + expert.to(tl.int64) * stride_weight_l
                weight = tl.load(
                    matrix_ptr + d[:, None] * stride_weight_d + c[None, :] * stride_weight_c,
                    mask=in_depth[:, None] & in_row,
                    other=0.0,
                )
            acc = add_product(acc, x, weight)
        store_rows(
            acc, bias_ptr, stride_bias_l, stride_bias_c, has_bias, out_ptr, out_desc, num_columns, expert, begin, end,
            row, column, BIAS_AS, BLOCK_P, BLOCK_C,
        )  # fmt: skip
    fill_rows(out_ptr, tl.load(total_ptr + 1), num_rows, num_columns, BLOCK_P, BLOCK_C)


@jit(
    together=[("stride_d_out_p", "num_outs", "stride_x_p", "num_ins", "stride_addend_m")],
    along=["stride_d_out_m", "stride_x_n", "stride_addend_n"],
    do_not_specialize=["stride_addend_l", "num_experts"],
)
def grouped_wgrad_kernel(
    # operands: the gradient of the output, and the rows
    d_out_ptr, stride_d_out_p, stride_d_out_m, x_ptr, stride_x_p, stride_x_n,
    # the tensor to add to, or none
    addend_ptr, stride_addend_l, stride_addend_m, stride_addend_n,
    # result, contiguous
    out_ptr,
    # descriptors of the operands and the result, or none
    d_out_desc, x_desc, out_desc,
    # plan
    segment_ptr,
    # sizes
    num_experts, num_outs, num_ins,
    ACCUMULATOR: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """out[e] = addend[e] + Σ over e's rows p of d_out[p]ᵀ · x[p]; no other row is read. Program i
    computes the tiles i, i + the number of programs, and so on.
    """
    blocks_m, blocks_n = tl.cdiv(num_outs, BLOCK_M), tl.cdiv(num_ins, BLOCK_N)
    for work in range(tl.program_id(0), num_experts * blocks_m * blocks_n, tl.num_programs(0)):
        block_m, block_n, expert, begin, end = find_gradient(segment_ptr, num_experts, work, blocks_m, blocks_n)
        m = block_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        n = block_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
        acc = tl.zeros([BLOCK_M, BLOCK_N], ACCUMULATOR)
        count = (end - begin).to(tl.int32)
        for first in range(0, count, BLOCK_P):
            if x_desc is not None:
                d_out = load_segment(d_out_desc, begin, count, first, block_m * BLOCK_M, BLOCK_P, BLOCK_M)
                x = load_segment(x_desc, begin, count, first, block_n * BLOCK_N, BLOCK_P, BLOCK_N)
            else:
                p = begin + first + tl.arange(0, BLOCK_P)
                live = (p < end)[:, None]  # the last step sticks out
                d_out_ptrs = d_out_ptr + p[:, None] * stride_d_out_p + m[None, :] * stride_d_out_m
                d_out = tl.load(d_out_ptrs, mask=live & (m < num_outs)[None, :], other=0.0)  # the last block sticks out
                x = tl.load(
                    x_ptr + p[:, None] * stride_x_p + n[None, :] * stride_x_n,
                    mask=live & (n < num_ins)[None, :],
                    other=0.0,
                )  # as above
            acc = add_product(acc, tl.trans(d_out), x)
        acc = tl.where(count < 0, float("nan"), acc)  # the plan is illegal
        if out_desc is not None:
            result = tl.reshape(rounded(acc, out_ptr.dtype.element_ty), [1, BLOCK_M, BLOCK_N])
            out_desc.store([expert.to(tl.int32), block_m * BLOCK_M, block_n * BLOCK_N], result)
        else:
            store_gradient(
                acc, addend_ptr, stride_addend_l, stride_addend_m, stride_addend_n, out_ptr, expert, count, m, n,
                num_outs, num_ins,
            )  # fmt: skip


@jit(
    together=[("stride_x_p", "num_columns")],
    along=["stride_x_c"],
    do_not_specialize=["num_experts"],
)
def segment_sums_kernel(
    # rows to sum
    x_ptr, stride_x_p, stride_x_c,
    # result, contiguous
    out_ptr,
    # plan
    segment_ptr,
    # sizes
    num_experts, num_columns,
    ACCUMULATOR: tl.constexpr,
    RESULT_AS: tl.constexpr,  # on the way to the result's dtype: float64 has no direct one to bfloat16
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """out[e] = Σ over e's rows p of x[p]. A program sums a block of columns for one expert: first
    every BLOCK_P-th row, then these sums.
    """
    columns = tl.cdiv(num_columns, BLOCK_C)
    expert = (tl.program_id(0) // columns).to(tl.int64)
    c = (tl.program_id(0) % columns).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
    begin, end = tl.load(segment_ptr + expert), tl.load(segment_ptr + num_experts + expert)
    acc = tl.zeros([BLOCK_P, BLOCK_C], ACCUMULATOR)
    for first in range(begin, end, BLOCK_P):
        p = tl.cast(first, tl.int64) + tl.arange(0, BLOCK_P)
        in_bounds = (p < end)[:, None] & (c < num_columns)[None, :]  # the last step and the last block stick out
        acc += tl.load(x_ptr + p[:, None] * stride_x_p + c[None, :] * stride_x_c, mask=in_bounds, other=0.0).to(
            ACCUMULATOR
        )
    total = tl.where(end < begin, float("nan"), tl.sum(acc, axis=0)).to(RESULT_AS)  # the plan is illegal
    tl.store(out_ptr + expert * num_columns + c, rounded(total, out_ptr.dtype.element_ty), mask=c < num_columns)
