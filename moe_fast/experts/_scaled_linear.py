"""Products of quantised rows: codes times codes in the matrix unit, scales as far outside of the
sum as they may stand.

    rule    | scale                                   | where it is multiplied
    group   | one of each factor for an expert        | onto the sum
    amax    | of blocks of 128 along the depth        | onto the sum of 128 products, before that is added in float32
    mxfp8   | powers of two, 32 along the depth       | onto each code
    nvfp4   | in E4M3, 16 along the depth; an amax    | onto each code; the amax onto the sum

A code times its block's scale is exact in bfloat16: four bits and a power of two, or six bits. All
factors lie along their depth, which is summed over; what lies turned was turned before, in pieces
of TILE, so that an expert's begin at a tile. L experts, P rows, C columns of the result, D the
depth; M outputs and N inputs of the layer.
"""

import triton
import triton.language as tl

from moe_fast.experts._factors import (
    TILE,
    add_codes,
    add_scaled_by_hardware,
    block_codes,
    codes_product,
    factor,
    outer_scale,
    scaled_factor,
    times,
)
from moe_fast.experts._linear import find_tile, load_matrix, store_segment, zero_rows
from moe_fast.launch._rounding import rounded


@triton.jit(do_not_specialize=["capacity"])
def turn_kernel(
    codes_ptr,
    # result: a row for each column of the codes, as many tiles long as there are at most
    out_ptr, stride_out,
    # plan
    tile_ptr, total_ptr, capacity, num_columns,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Transposed codes: each expert's begin at a tile, and its last tile ends with zeros."""
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
        inside = (p < end)[:, None] & (c < num_columns)[None, :]  # the last tile and the last block stick out
        codes = tl.load(codes_ptr + p[:, None] * num_columns + c[None, :], mask=inside, other=0)
        tl.store(
            out_ptr + c[:, None] * stride_out + t * TILE + i[None, :], tl.trans(codes), mask=(c < num_columns)[:, None]
        )


@triton.jit(
    do_not_specialize=[
        *("stride_bias_l", "stride_bias_c", "capacity", "num_rows", "num_experts", "x_share", "weight_share"),
    ]
)
def scaled_matmul_kernel(
    # rows: codes, contiguous along the depth; block scales; factors of the sum
    x_ptr, stride_x_p, x_scale_ptr, stride_x_scale_p, stride_x_scale_d,
    x_outer_ptr, stride_x_outer_l, stride_x_outer_p, x_share,
    # one matrix per expert, in the same parts
    weight_ptr, stride_weight_l, stride_weight_c,
    weight_scale_ptr, stride_weight_scale_l, stride_weight_scale_c, stride_weight_scale_d,
    weight_outer_ptr, stride_weight_outer_l, weight_share, bias_ptr, stride_bias_l, stride_bias_c,
    # result, contiguous
    out_ptr,
    # descriptors of both factors, or none, and of the result, or none
    x_desc, weight_desc, out_desc,
    # plan
    tile_ptr, total_ptr, capacity,
    # sizes
    num_rows, num_columns, depth,
    RULE: tl.constexpr, X_FORMAT: tl.constexpr, WEIGHT_FORMAT: tl.constexpr, FACTOR: tl.constexpr,
    SCALED_BY_HARDWARE: tl.constexpr,
    SHARED_C: tl.constexpr,  # columns that share a scale
    SHARED_D: tl.constexpr,  # and how deep
    BIAS_AS: tl.constexpr,  # holds the bias exactly, or in float32
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """out[p] = x[p] · weight[e] + bias[e] for each row p of an expert e, 0 past all segments."""
    columns = tl.cdiv(num_columns, BLOCK_C)
    pieces = tl.load(total_ptr).to(tl.int32) * columns
    # one flat loop with that over the depth is a fifth slower
    for work in range(tl.program_id(0), pieces, tl.num_programs(0)):
        expert, begin, end, row, column = find_tile(tile_ptr, capacity, work, columns, BLOCK_P)
        p = row + tl.arange(0, BLOCK_P)
        c = column.to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
        in_segment, in_row = p < end, c < num_columns  # the last tile and the last block stick out
        own_scales = expert.to(tl.int64) * stride_weight_scale_l
        if RULE == "nvfp4":
            x_amax = tl.load(
                x_outer_ptr + expert.to(tl.int64) * stride_x_outer_l + p * stride_x_outer_p, mask=in_segment, other=0.0
            ).to(tl.float32)
            weight_amax = tl.load(weight_outer_ptr + expert.to(tl.int64) * stride_weight_outer_l + c * 0).to(tl.float32)
        else:
            x_amax, weight_amax = None, None
        acc = tl.zeros([BLOCK_P, BLOCK_C], tl.float32)
        for first in range(0, depth, BLOCK_D):
            if x_desc is not None:
                x = x_desc.load([row.to(tl.int32), first])  # the next expert's rows make only rows that are not stored
                weight = tl.trans(load_matrix(weight_desc, expert, first, column * BLOCK_C, True, BLOCK_D, BLOCK_C))
            else:
                d = first + tl.arange(0, BLOCK_D)
                in_depth = (d < depth)[None, :]  # the last step sticks out
                x = tl.load(
                    x_ptr + p[:, None] * stride_x_p + d[None, :], mask=in_segment[:, None] & in_depth, other=0.0
                )
                matrix_ptr = weight_ptr + expert.to(tl.int64) * stride_weight_l
                weight = tl.load(
                    matrix_ptr + c[:, None] * stride_weight_c + d[None, :], mask=in_row[:, None] & in_depth, other=0.0
                )
            if RULE == "group":
                acc = add_codes(acc, factor(x, X_FORMAT, FACTOR), factor(weight, WEIGHT_FORMAT, FACTOR), FACTOR)
            elif RULE == "amax":
                block = tl.cast(first // SHARED_D, tl.int64)
                x_scale = tl.load(
                    x_scale_ptr + p * stride_x_scale_p + block * stride_x_scale_d, mask=in_segment, other=0.0
                )
                weight_scale_ptrs = weight_scale_ptr + own_scales + block * stride_weight_scale_d
                if SHARED_C == BLOCK_C:
                    scale = (x_scale * tl.load(weight_scale_ptrs + column.to(tl.int64) * stride_weight_scale_c))[
                        :, None
                    ]
                else:
                    weight_scale = tl.load(
                        weight_scale_ptrs + (c // SHARED_C) * stride_weight_scale_c, mask=in_row, other=0.0
                    )
                    scale = x_scale[:, None] * weight_scale[None, :]
                acc += codes_product(factor(x, X_FORMAT, FACTOR), factor(weight, WEIGHT_FORMAT, FACTOR)) * scale
            else:
                block, blocks = tl.cast(first // SHARED_D, tl.int64), depth // SHARED_D
                x_stored = block_codes(
                    x_scale_ptr + p * stride_x_scale_p, stride_x_scale_d, block, blocks, in_segment, BLOCK_D // SHARED_D
                )
                row_ptrs = weight_scale_ptr + own_scales + (c // SHARED_C) * stride_weight_scale_c
                weight_stored = block_codes(row_ptrs, stride_weight_scale_d, block, blocks, in_row, BLOCK_D // SHARED_D)
                if SCALED_BY_HARDWARE:
                    acc = add_scaled_by_hardware(acc, x, x_stored, X_FORMAT, weight, weight_stored, WEIGHT_FORMAT, RULE)
                else:
                    left = scaled_factor(x, x_stored, x_amax, block, blocks, RULE, X_FORMAT, FACTOR)
                    right = scaled_factor(
                        weight, weight_stored, weight_amax, block, blocks, RULE, WEIGHT_FORMAT, FACTOR
                    )
                    acc = tl.dot(left, tl.trans(right), acc, input_precision="ieee")
        if RULE == "group" or RULE == "nvfp4":
            x_outer = outer_scale(x_outer_ptr, stride_x_outer_l, stride_x_outer_p, expert, p, in_segment, x_share, RULE)
            weight_outer = outer_scale(
                weight_outer_ptr, stride_weight_outer_l, 0, expert, c, in_row, weight_share, RULE
            )
            acc = times(acc, x_outer, weight_outer)
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + expert.to(tl.int64) * stride_bias_l + c * stride_bias_c, mask=in_row, other=0.0)
            acc += bias.to(BIAS_AS).to(tl.float32)[None, :]
        result = rounded(acc, out_ptr.dtype.element_ty)
        if out_desc is not None:
            store_segment(
                out_desc, begin, end - begin, (row - begin).to(tl.int32), column * BLOCK_C, result, BLOCK_P, BLOCK_C
            )
        else:
            tl.store(
                out_ptr + p[:, None] * num_columns + c[None, :], result, mask=in_segment[:, None] & in_row[None, :]
            )
    zero_rows(out_ptr, tl.load(total_ptr + 1), num_rows, num_columns, BLOCK_P, BLOCK_C)


@triton.jit(do_not_specialize=["stride_before_l", "num_experts", "d_out_share", "x_share"])
def scaled_wgrad_kernel(
    # the gradient of the output, transposed: codes; block scales along the rows; factors
    # of the sum
    d_out_ptr, stride_d_out_m, d_out_scale_ptr, stride_d_out_scale_p, stride_d_out_scale_m,
    d_out_outer_ptr, stride_d_out_outer_l, stride_d_out_outer_m, d_out_share,
    # the rows, in the same parts
    x_ptr, stride_x_n, x_scale_ptr, stride_x_scale_p, stride_x_scale_n,
    x_outer_ptr, stride_x_outer_l, stride_x_outer_n, x_share,
    # the tensor to add to, or none
    before_ptr, stride_before_l, stride_before_m, stride_before_n,
    # result, contiguous
    out_ptr,
    # descriptors of the factors, or none
    d_out_desc, x_desc,
    # plan
    segment_ptr,
    # sizes
    num_experts, num_outs, num_ins,
    RULE: tl.constexpr, D_OUT_FORMAT: tl.constexpr, X_FORMAT: tl.constexpr, FACTOR: tl.constexpr,
    SCALED_BY_HARDWARE: tl.constexpr,
    SHARED_P: tl.constexpr,  # rows that share a scale
    BLOCK_L: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """out[e] = Σ over e's rows p of d_out[p]ᵀ · x[p], added to before[e] if there is one."""
    blocks_m, blocks_n = tl.cdiv(num_outs, BLOCK_M), tl.cdiv(num_ins, BLOCK_N)
    experts = tl.arange(0, BLOCK_L)
    real = experts < num_experts  # the block is a power of two
    sizes = tl.load(segment_ptr + num_experts + experts, mask=real, other=0) - tl.load(
        segment_ptr + experts, mask=real, other=0
    )
    for work in range(tl.program_id(0), num_experts * blocks_m * blocks_n, tl.num_programs(0)):
        block_m = work % blocks_m  # programs that run together share the columns of the rows
        block_n = work // blocks_m % blocks_n
        expert = (work // blocks_m // blocks_n).to(tl.int64)
        begin, end = tl.load(segment_ptr + expert), tl.load(segment_ptr + num_experts + expert)
        tile = tl.sum(tl.where(experts < expert, tl.cdiv(sizes, TILE), 0))  # the first of the expert's
        m = block_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        n = block_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
        live_m, live_n = m < num_outs, n < num_ins  # the last blocks stick out
        if RULE == "nvfp4":
            d_out_amax = tl.load(
                d_out_outer_ptr + expert * stride_d_out_outer_l + m * stride_d_out_outer_m, mask=live_m, other=0.0
            ).to(tl.float32)
            x_amax = tl.load(x_outer_ptr + expert * stride_x_outer_l + n * stride_x_outer_n, mask=live_n, other=0.0).to(
                tl.float32
            )
        else:
            d_out_amax, x_amax = None, None
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        count = (end - begin).to(tl.int32)
        for first in range(0, count, BLOCK_P):
            place = tile * TILE + first
            if x_desc is not None:
                d_out = d_out_desc.load([block_m * BLOCK_M, place.to(tl.int32)])
                x = x_desc.load([block_n * BLOCK_N, place.to(tl.int32)])
            else:
                i = place + tl.arange(0, BLOCK_P)
                # tiles are whole
                d_out = tl.load(d_out_ptr + m[:, None] * stride_d_out_m + i[None, :], mask=live_m[:, None], other=0.0)
                x = tl.load(x_ptr + n[:, None] * stride_x_n + i[None, :], mask=live_n[:, None], other=0.0)
            if RULE == "group":
                acc = add_codes(acc, factor(d_out, D_OUT_FORMAT, FACTOR), factor(x, X_FORMAT, FACTOR), FACTOR)
            elif RULE == "amax":
                block = tile + first // SHARED_P
                d_out_scale = tl.load(
                    d_out_scale_ptr + block * stride_d_out_scale_p + m * stride_d_out_scale_m, mask=live_m, other=0.0
                )
                x_scale = tl.load(x_scale_ptr + block * stride_x_scale_p + n * stride_x_scale_n, mask=live_n, other=0.0)
                product = codes_product(factor(d_out, D_OUT_FORMAT, FACTOR), factor(x, X_FORMAT, FACTOR))
                acc += product * (d_out_scale[:, None] * x_scale[None, :])
            else:
                block, blocks = (begin + first) // SHARED_P, end // SHARED_P
                d_out_ptrs, x_ptrs = d_out_scale_ptr + m * stride_d_out_scale_m, x_scale_ptr + n * stride_x_scale_n
                d_out_stored = block_codes(d_out_ptrs, stride_d_out_scale_p, block, blocks, live_m, BLOCK_P // SHARED_P)
                x_stored = block_codes(x_ptrs, stride_x_scale_p, block, blocks, live_n, BLOCK_P // SHARED_P)
                if SCALED_BY_HARDWARE:
                    acc = add_scaled_by_hardware(acc, d_out, d_out_stored, D_OUT_FORMAT, x, x_stored, X_FORMAT, RULE)
                else:
                    left = scaled_factor(d_out, d_out_stored, d_out_amax, block, blocks, RULE, D_OUT_FORMAT, FACTOR)
                    right = scaled_factor(x, x_stored, x_amax, block, blocks, RULE, X_FORMAT, FACTOR)
                    acc = tl.dot(left, tl.trans(right), acc, input_precision="ieee")
        if RULE == "group" or RULE == "nvfp4":
            d_out_outer = outer_scale(
                d_out_outer_ptr, stride_d_out_outer_l, stride_d_out_outer_m, expert, m, live_m, d_out_share, RULE
            )
            x_outer = outer_scale(x_outer_ptr, stride_x_outer_l, stride_x_outer_n, expert, n, live_n, x_share, RULE)
            acc = times(acc, d_out_outer, x_outer)
        inside = live_m[:, None] & live_n[None, :]
        if before_ptr is not None:
            before_ptrs = (
                before_ptr + expert * stride_before_l + m[:, None] * stride_before_m + n[None, :] * stride_before_n
            )
            before = tl.load(before_ptrs, mask=inside, other=0.0)  # as above
            result = tl.where(count > 0, (before + acc).to(before.dtype), before)  # -0 + 0 is another zero than -0
        else:
            result = rounded(acc, out_ptr.dtype.element_ty)
        tl.store(out_ptr + (expert * num_outs + m[:, None]) * num_ins + n[None, :], result, mask=inside)
