"""Products of quantised rows. The matrix unit multiplies codes with codes, and scales are
multiplied as far outside of the sum as possible.

    rule    | scale                                   | where it is multiplied
    group   | one of each factor for an expert        | onto the sum
    amax    | of blocks of 128 along the depth        | onto each sum of 128 products, in float32
    mxfp8   | powers of two, 32 along the depth       | onto each code
    nvfp4   | in E4M3, 16 along the depth; an amax    | onto each code; the amax onto the sum

A code times its block's scale is exact in bfloat16: it has four bits and a power of two, or six
bits. The codes of both factors are contiguous along the depth, which is summed over. Factors that
lie the other way were transposed before, in tiles of TILE rows; each expert's rows begin at such a
tile. L experts, P rows, C columns of the result, D the depth; M outputs and N inputs of the layer.
"""

import triton
import triton.language as tl

from moe_fast.experts._factors import (
    TILE,
    add_blocks,
    add_codes,
    codes_product,
    factor,
    load_outer,
    outer_scale,
    times,
)
from moe_fast.experts._linear import fill_rows, find_gradient, find_tile, load_matrix, store_gradient, store_rows
from moe_fast.launch.specialization import jit


@jit(together=[("num_columns",)], do_not_specialize=["capacity"])
def turn_kernel(
    codes_ptr,
    # result: a row for each column of the codes, as many tiles long as there are at most
    out_ptr, stride_out,
    # plan
    tile_ptr, total_ptr, capacity, num_columns,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Transpose codes. Program t · columns + b handles tile t of TILE rows and block b of columns.
    Each expert's rows begin at a tile, and its last tile ends with zeros.
    """
    columns = tl.cdiv(num_columns, BLOCK_C)
    t = (tl.program_id(0) // columns).to(tl.int64)
    c = (tl.program_id(0) % columns).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
    if t < tl.load(total_ptr):
        first, begin, end = (
            tl.load(tile_ptr + capacity + t),
            tl.load(tile_ptr + 2 * capacity + t),
            tl.load(tile_ptr + 3 * capacity + t),
        )
        i = tl.arange(0, TILE)
        p = begin + (t - first) * TILE + i
        in_bounds = (p < end)[:, None] & (c < num_columns)[None, :]  # the last tile and the last block stick out
        codes = tl.load(codes_ptr + p[:, None] * num_columns + c[None, :], mask=in_bounds, other=0)
        tl.store(
            out_ptr + c[:, None] * stride_out + t * TILE + i[None, :], tl.trans(codes), mask=(c < num_columns)[:, None]
        )


@triton.jit
def load_codes(
    x_ptr, stride_x_p, x_desc, weight_ptr, stride_weight_l, stride_weight_c, weight_desc, expert, row, column, first, p,
    c, in_segment, in_row, depth, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """A step of the depth: tiles [P, D] of the rows and [C, D] of the expert's matrix."""
    if x_desc is not None:
        x = x_desc.load([row.to(tl.int32), first])  # the next expert's rows give only rows that are not stored
        weight = tl.trans(load_matrix(weight_desc, expert, first, column * BLOCK_C, True, BLOCK_D, BLOCK_C))
    else:
        d = first + tl.arange(0, BLOCK_D)
        in_depth = (d < depth)[None, :]  # the last step sticks out
        x = tl.load(x_ptr + p[:, None] * stride_x_p + d[None, :], mask=in_segment[:, None] & in_depth, other=0.0)
        matrix_ptr = weight_ptr + expert.to(tl.int64) * stride_weight_l
        weight = tl.load(
            matrix_ptr + c[:, None] * stride_weight_c + d[None, :], mask=in_row[:, None] & in_depth, other=0.0
        )
    return x, weight


@triton.jit
def load_scales(
    x_scale_ptr, stride_x_p, stride_x_d, weight_scale_ptr, stride_weight_c, stride_weight_d, block, column, p, c,
    in_segment, in_row, SHARED_C: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The scale of each row times the scale of each column, for one block of the depth."""
    block = tl.cast(block, tl.int64)
    x_scale = tl.load(x_scale_ptr + p * stride_x_p + block * stride_x_d, mask=in_segment, other=0.0)
    weight_scale_ptrs = weight_scale_ptr + block * stride_weight_d
    if SHARED_C == BLOCK_C:
        scale = (x_scale * tl.load(weight_scale_ptrs + column.to(tl.int64) * stride_weight_c))[:, None]
    else:
        weight_scale = tl.load(weight_scale_ptrs + (c // SHARED_C) * stride_weight_c, mask=in_row, other=0.0)
        scale = x_scale[:, None] * weight_scale[None, :]
    return scale


@jit(
    together=[
        ("stride_weight_scale_l", "stride_weight_scale_d"),
        *(("stride_x_p", "depth", "stride_weight_l", "stride_weight_c", "num_columns"), ("stride_x_scale_p",)),
    ],
    # scales that columns share are loaded one by one, whatever their stride
    along=["stride_weight_scale_c", "SHARED_C"],
    do_not_specialize=["stride_bias_l", "stride_bias_c", "has_bias", "capacity", "num_rows", "x_share", "weight_share"],
)
def scaled_matmul_kernel(
    # rows: codes, contiguous along the depth; block scales; factors of the sum
    x_ptr, stride_x_p, x_scale_ptr, stride_x_scale_p, stride_x_scale_d,
    x_outer_ptr, stride_x_outer_l, stride_x_outer_p, x_share,
    # one matrix per expert, in the same parts; bias, or an empty tensor
    weight_ptr, stride_weight_l, stride_weight_c,
    weight_scale_ptr, stride_weight_scale_l, stride_weight_scale_c, stride_weight_scale_d,
    weight_outer_ptr, stride_weight_outer_l, weight_share, bias_ptr, stride_bias_l, stride_bias_c, has_bias,
    # result, contiguous; descriptors of both factors, or none, and of the result, or none
    out_ptr, x_desc, weight_desc, out_desc,
    # plan and sizes
    tile_ptr, total_ptr, capacity, num_rows, num_columns, depth,
    SHARED_C: tl.constexpr, SHARED_D: tl.constexpr,  # columns that share a scale, and how deep
    RULE: tl.constexpr, X_FORMAT: tl.constexpr, WEIGHT_FORMAT: tl.constexpr, FACTOR: tl.constexpr,
    SCALED_BY_HARDWARE: tl.constexpr,
    BIAS_AS: tl.constexpr,  # holds the bias exactly, or in float32
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """out[p] = x[p] · weight[e] + bias[e] for each row p of an expert e, and 0 past all segments.
    Program i computes the tiles i, i + the number of programs, and so on.
    """
    columns = tl.cdiv(num_columns, BLOCK_C)
    pieces = tl.load(total_ptr).to(tl.int32) * columns
    # one flat loop with that over the depth is a fifth slower
    for work in range(tl.program_id(0), pieces, tl.num_programs(0)):
        expert, begin, end, row, column = find_tile(tile_ptr, capacity, work, columns, BLOCK_P)
        p = row + tl.arange(0, BLOCK_P)
        c = column.to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
        in_segment, in_row = p < end, c < num_columns  # the last tile and the last block stick out
        offset = expert.to(tl.int64) * stride_weight_scale_l
        x_amax = load_outer(x_outer_ptr, stride_x_outer_l, stride_x_outer_p, expert, p, in_segment, RULE)
        weight_amax = load_outer(weight_outer_ptr, stride_weight_outer_l, 0, expert, c, in_row, RULE)
        acc = tl.zeros([BLOCK_P, BLOCK_C], tl.float32)
        for first in range(0, depth, BLOCK_D):
            x, weight = load_codes(
                x_ptr, stride_x_p, x_desc, weight_ptr, stride_weight_l, stride_weight_c, weight_desc, expert, row,
                column, first, p, c, in_segment, in_row, depth, BLOCK_C, BLOCK_D,
            )  # fmt: skip
            if RULE == "group":
                acc = add_codes(acc, factor(x, X_FORMAT, FACTOR), factor(weight, WEIGHT_FORMAT, FACTOR), FACTOR)
            elif RULE == "amax":
                scale = load_scales(
                    x_scale_ptr, stride_x_scale_p, stride_x_scale_d, weight_scale_ptr + offset, stride_weight_scale_c,
                    stride_weight_scale_d, first // SHARED_D, column, p, c, in_segment, in_row, SHARED_C, BLOCK_C,
                )  # fmt: skip
                acc += codes_product(factor(x, X_FORMAT, FACTOR), factor(weight, WEIGHT_FORMAT, FACTOR)) * scale
            else:
                acc = add_blocks(
                    acc, x, x_scale_ptr + p * stride_x_scale_p, stride_x_scale_d, x_amax, in_segment,
                    weight, weight_scale_ptr + offset + (c // SHARED_C) * stride_weight_scale_c,
                    stride_weight_scale_d, weight_amax, in_row, tl.cast(first // SHARED_D, tl.int64), depth // SHARED_D,
                    RULE, X_FORMAT, WEIGHT_FORMAT, FACTOR, SCALED_BY_HARDWARE, BLOCK_D // SHARED_D,
                )  # fmt: skip
        if RULE == "group" or RULE == "nvfp4":
            x_outer = outer_scale(x_outer_ptr, stride_x_outer_l, stride_x_outer_p, expert, p, in_segment, x_share, RULE)
            weight_outer = outer_scale(
                weight_outer_ptr, stride_weight_outer_l, 0, expert, c, in_row, weight_share, RULE
            )
            acc = times(acc, x_outer, weight_outer)
        store_rows(
            acc, bias_ptr, stride_bias_l, stride_bias_c, has_bias, out_ptr, out_desc, num_columns, expert, begin, end,
            row, column, BIAS_AS, BLOCK_P, BLOCK_C,
        )  # fmt: skip
    fill_rows(out_ptr, tl.load(total_ptr + 1), num_rows, num_columns, BLOCK_P, BLOCK_C)


@triton.jit
def load_turned(ptr, stride, desc, first_row, row, live, column, BLOCK_P: tl.constexpr):
    """A whole tile of transposed codes, from `column` on."""
    if desc is not None:
        codes = desc.load([first_row, column.to(tl.int32)])
    else:
        i = column + tl.arange(0, BLOCK_P)
        codes = tl.load(ptr + row[:, None] * stride + i[None, :], mask=live[:, None], other=0.0)
    return codes


@jit(
    together=[("stride_addend_m",), ("num_outs", "num_ins"), ("stride_d_out_scale_p", "stride_x_scale_p")],
    along=["stride_addend_n"],
    do_not_specialize=["stride_addend_l", "num_experts", "d_out_share", "x_share"],
)
def scaled_wgrad_kernel(
    # the gradient of the output, transposed: codes; block scales along the rows; factors of sums
    d_out_ptr, stride_d_out_m, d_out_scale_ptr, stride_d_out_scale_p, stride_d_out_scale_m,
    d_out_outer_ptr, stride_d_out_outer_l, stride_d_out_outer_m, d_out_share,
    # the rows, in the same parts
    x_ptr, stride_x_n, x_scale_ptr, stride_x_scale_p, stride_x_scale_n,
    x_outer_ptr, stride_x_outer_l, stride_x_outer_n, x_share,
    # the tensor to add to, or none; the result, contiguous; descriptors of the factors, or none
    addend_ptr, stride_addend_l, stride_addend_m, stride_addend_n, out_ptr, d_out_desc, x_desc,
    # plan and sizes
    segment_ptr, num_experts, num_outs, num_ins,
    RULE: tl.constexpr, D_OUT_FORMAT: tl.constexpr, X_FORMAT: tl.constexpr, FACTOR: tl.constexpr,
    SCALED_BY_HARDWARE: tl.constexpr, SHARED_P: tl.constexpr,  # rows that share a scale
    BLOCK_P: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """out[e] = Σ over e's rows p of d_out[p]ᵀ · x[p], plus before[e] if there is a tensor to add
    to. Program i computes the tiles i, i + the number of programs, and so on.
    """
    blocks_m, blocks_n = tl.cdiv(num_outs, BLOCK_M), tl.cdiv(num_ins, BLOCK_N)
    for work in range(tl.program_id(0), num_experts * blocks_m * blocks_n, tl.num_programs(0)):
        block_m, block_n, expert, begin, end = find_gradient(segment_ptr, num_experts, work, blocks_m, blocks_n)
        tile = tl.load(segment_ptr + 2 * num_experts + expert)  # of TILE rows, the first of the expert's
        m = block_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        n = block_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
        live_m, live_n = m < num_outs, n < num_ins  # the last blocks stick out
        d_out_amax = load_outer(d_out_outer_ptr, stride_d_out_outer_l, stride_d_out_outer_m, expert, m, live_m, RULE)
        x_amax = load_outer(x_outer_ptr, stride_x_outer_l, stride_x_outer_n, expert, n, live_n, RULE)
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        count = (end - begin).to(tl.int32)
        for first in range(0, count, BLOCK_P):
            turned_column = tile * TILE + first
            d_out = load_turned(
                d_out_ptr, stride_d_out_m, d_out_desc, block_m * BLOCK_M, m, live_m, turned_column, BLOCK_P
            )
            x = load_turned(x_ptr, stride_x_n, x_desc, block_n * BLOCK_N, n, live_n, turned_column, BLOCK_P)
            if RULE == "group":
                acc = add_codes(acc, factor(d_out, D_OUT_FORMAT, FACTOR), factor(x, X_FORMAT, FACTOR), FACTOR)
            elif RULE == "amax":
                block = tile + first // SHARED_P
                d_out_scale_ptrs = d_out_scale_ptr + block * stride_d_out_scale_p + m * stride_d_out_scale_m
                d_out_scale = tl.load(d_out_scale_ptrs, mask=live_m, other=0.0)
                x_scale = tl.load(x_scale_ptr + block * stride_x_scale_p + n * stride_x_scale_n, mask=live_n, other=0.0)
                product = codes_product(factor(d_out, D_OUT_FORMAT, FACTOR), factor(x, X_FORMAT, FACTOR))
                acc += product * (d_out_scale[:, None] * x_scale[None, :])
            else:
                acc = add_blocks(
                    acc, d_out, d_out_scale_ptr + m * stride_d_out_scale_m, stride_d_out_scale_p, d_out_amax, live_m,
                    x, x_scale_ptr + n * stride_x_scale_n, stride_x_scale_p, x_amax, live_n,
                    (begin + first) // SHARED_P, end // SHARED_P,
                    RULE, D_OUT_FORMAT, X_FORMAT, FACTOR, SCALED_BY_HARDWARE, BLOCK_P // SHARED_P,
                )  # fmt: skip
        if RULE == "group" or RULE == "nvfp4":
            outer_l, outer_m = stride_d_out_outer_l, stride_d_out_outer_m
            d_out_outer = outer_scale(d_out_outer_ptr, outer_l, outer_m, expert, m, live_m, d_out_share, RULE)
            x_outer = outer_scale(x_outer_ptr, stride_x_outer_l, stride_x_outer_n, expert, n, live_n, x_share, RULE)
            acc = times(acc, d_out_outer, x_outer)
        acc = tl.where(count < 0, float("nan"), acc)  # the plan is illegal
        store_gradient(
            acc, addend_ptr, stride_addend_l, stride_addend_m, stride_addend_n, out_ptr, expert, count, m, n, num_outs,
            num_ins,
        )  # fmt: skip
