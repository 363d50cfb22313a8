"""Kernels that write codes and scales of tokens into the tokens' rows
(`permutation.row_map.RowMap`).

Blocks along rows, and codes with one scale per group, are computed where the token is read, once,
and written to each of its rows. Blocks that span rows are computed at the rows: each tile gathers
its tokens.
"""

import triton
import triton.language as tl

from moe_fast.launch._rounding import number, rounded
from moe_fast.launch.specialization import jit
from moe_fast.permutation._permute import fill_places, find_gaps, find_lists, load_slot, place_lists, rows_of_gaps
from moe_fast.quantization._formats import E2M1_MAX, FLOAT32_MAX, as_float32, encoded
from moe_fast.quantization._nvfp4 import multiplier_of
from moe_fast.quantization._quantize import E4M3_MAX, E5M2_MAX, block_scale, fitting_scale, over, quantize_blocks
from moe_fast.quantization._tiles import block_amax, magnitude, place_of_tile, spread


@triton.jit
def raise_amax(amax_ptr, expert, bits, live):
    """amax = max(amax, bits), for bits of numbers ≥ 0. A plain load first saves most atomics: a
    stale value can only be too small.
    """
    current = tl.load(amax_ptr + expert, mask=live, other=0)  # of live slots only
    larger = live & (bits > current)
    tl.atomic_max(amax_ptr + expert, bits, mask=larger, sem="relaxed")
    return larger


@triton.jit
def group_scale(
    scale_ptr, stride_scale, amax_ptr, expert, real, epsilon, FORMAT: tl.constexpr, POWER_OF_TWO: tl.constexpr
):
    """The scale of each expert's rows: given, or from the expert's amax."""
    if scale_ptr is not None:
        scale = tl.load(scale_ptr + expert * stride_scale, mask=real, other=1.0)  # only for experts that exist
    else:
        amax = tl.load(amax_ptr + expert, mask=real, other=0).to(tl.float32, bitcast=True)  # as above
        scale = fitting_scale(amax, epsilon, FLOAT32_MAX, E4M3_MAX if FORMAT == "e4m3" else E5M2_MAX, POWER_OF_TWO)
    return scale


@triton.jit
def two_level_scale(amax, expert_amax, HARDWARE: tl.constexpr):
    """(multiplier, stored scale) of NVFP4 blocks along rows, each under its expert's amax."""
    encoding = fitting_scale(expert_amax, 0.0, FLOAT32_MAX, E2M1_MAX * E4M3_MAX, False)[:, None]
    stored = encoded(tl.minimum(amax * (encoding * (1 / E2M1_MAX)), FLOAT32_MAX), "e4m3", HARDWARE)
    return multiplier_of(stored, encoding), stored


@triton.jit
def store_blocks(scale_ptr, amax_ptr, stride_m, stride_n, row, block, stored, amax, in_bounds):
    """Store the scales and the amax of the blocks of rows."""
    offset = row[:, None] * stride_m + block[None, :] * stride_n
    tl.store(scale_ptr + offset, stored.to(scale_ptr.dtype.element_ty), mask=in_bounds)
    if amax_ptr is not None:
        tl.store(amax_ptr + offset, rounded(amax, amax_ptr.dtype.element_ty), mask=in_bounds)  # exact


@triton.jit
def fill_padding(
    codes_ptr, scale_ptr, amax_ptr, stride_scale_m, stride_scale_n, row_probs_ptr, source_ptr, gap_ptr,
    first_lane, column, tail_lanes, num_experts, num_columns, num_rows,
    RULE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Write codes, scales and probs of zeros, and sources of -1, into rows without a token."""
    if column == 0:
        fill_places(row_probs_ptr, source_ptr, gap_ptr, first_lane, tail_lanes, num_experts, num_rows, BLOCK_G, BLOCK_R)
    begin, end, step = find_gaps(gap_ptr, first_lane, tail_lanes, num_experts, num_rows, BLOCK_G, BLOCK_R)
    h = column.to(tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H)
    for i in range(tl.max(tl.cdiv(end - begin, step), axis=0)):
        row, in_gap = rows_of_gaps(begin, end, step, i, BLOCK_G, BLOCK_R)
        in_bounds = in_gap[:, None] & (h < num_columns)[None, :]  # the last block sticks out
        tl.store(
            codes_ptr + row[:, None] * num_columns + h[None, :],
            tl.zeros([BLOCK_G * BLOCK_R, BLOCK_H], tl.uint8),
            mask=in_bounds,
        )
        if RULE == "mxfp8" or RULE == "nvfp4":
            b = column.to(tl.int64) * (BLOCK_H // BLOCK) + tl.arange(0, BLOCK_H // BLOCK)
            amax = tl.zeros([BLOCK_G * BLOCK_R, BLOCK_H // BLOCK], tl.float32)
            in_bounds = in_gap[:, None] & (b * BLOCK < num_columns)[None, :]  # as above
            # zeros have a scale of 0
            store_blocks(scale_ptr, amax_ptr, stride_scale_m, stride_scale_n, row, b, amax, amax, in_bounds)


@triton.jit
def scatter_tokens(
    tokens_ptr, stride_tokens_t, stride_tokens_h, delayed_scale_ptr, stride_delayed_scale, group_amax_ptr,
    history_ptr, stride_history, codes_ptr, scale_ptr, amax_ptr, stride_scale_m, stride_scale_n,
    row_map, stride_base_b, stride_base_e, tokens_per_block, block, column,
    num_tokens, num_experts, num_columns, num_rows, least, most,
    RULE: tl.constexpr, FORMAT: tl.constexpr, POWER_OF_TWO: tl.constexpr, HARDWARE: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Quantise a tile of tokens, and write it to all of their rows."""
    t = block.to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    h = column.to(tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H)
    b = column.to(tl.int64) * (BLOCK_H // BLOCK) + tl.arange(0, BLOCK_H // BLOCK)
    in_row = (h < num_columns)[None, :]  # the last block sticks out
    in_bounds = (t < num_tokens)[:, None] & in_row  # and so does the last tile
    x = as_float32(
        tl.load(tokens_ptr + t[:, None] * stride_tokens_t + h[None, :] * stride_tokens_h, mask=in_bounds, other=0.0)
    )
    lists = find_lists(row_map, stride_base_b, stride_base_e, tokens_per_block, t, num_tokens, num_experts, num_rows)
    expert, row, live = load_slot(row_map, lists, 0)
    amax = block_amax(x, 1, BLOCK_H if RULE == "group" else BLOCK)
    if RULE == "amax" or RULE == "mxfp8":
        multiplier, stored = block_scale(amax, least, most, RULE, FORMAT, POWER_OF_TWO)
        code = encoded(x * spread(multiplier, 1, BLOCK), FORMAT, HARDWARE)
    if RULE == "amax":
        there = (t < num_tokens)[:, None] & (b * BLOCK < num_columns)[None, :]  # as above
        store_blocks(scale_ptr, amax_ptr, stride_scale_m, stride_scale_n, t, b, stored, amax, there)
    for j in range(tl.max(lists.num_slots, axis=0)):
        following = load_slot(row_map, lists, j + 1)  # the load runs while this row is written
        if RULE == "group":
            scale = group_scale(
                delayed_scale_ptr, stride_delayed_scale, group_amax_ptr, expert, live, least, FORMAT, POWER_OF_TWO
            )
            code = encoded(x * scale[:, None], FORMAT, HARDWARE)
            if delayed_scale_ptr is not None:
                bits = tl.reshape(amax, [BLOCK_T]).to(tl.int32, bitcast=True)
                larger = raise_amax(group_amax_ptr, expert, bits, live)
                tl.atomic_max(history_ptr + expert * stride_history, bits, mask=larger, sem="relaxed")
        elif RULE == "nvfp4":
            # of live slots only
            expert_amax = tl.load(group_amax_ptr + expert, mask=live, other=0).to(tl.float32, bitcast=True)
            multiplier, stored = two_level_scale(amax, expert_amax, HARDWARE)
            code = encoded(x * spread(multiplier, 1, BLOCK), FORMAT, HARDWARE)
        # dropped rows are not written
        tl.store(codes_ptr + row[:, None] * num_columns + h[None, :], code, mask=live[:, None] & in_row)
        if RULE == "mxfp8" or RULE == "nvfp4":
            there = live[:, None] & (b * BLOCK < num_columns)[None, :]  # as above
            store_blocks(scale_ptr, amax_ptr, stride_scale_m, stride_scale_n, row, b, stored, amax, there)
        expert, row, live = following


@jit(
    together=[("stride_tokens_t", "num_columns")],
    along=["stride_tokens_h"],
    do_not_specialize=[
        *("fills", "first_lane", "tail_lanes", "num_tokens", "num_experts", "num_rows", "stride_probs_t"),
        *("stride_probs_e", "stride_delayed_scale", "stride_history", "stride_scale_m", "stride_scale_n"),
        *("stride_base_b", "stride_base_e", "tokens_per_block", "epsilon", "infinity"),
    ],
)
def scatter_kernel(
    # tokens, and probs as bits
    tokens_ptr, stride_tokens_t, stride_tokens_h, probs_ptr, stride_probs_t, stride_probs_e,
    # by expert: scales of earlier steps, the amax as integers (read, or with scales given a result,
    # and zeros before), its history, 1/s as a result
    delayed_scale_ptr, stride_delayed_scale, group_amax_ptr, history_ptr, stride_history, inverse_ptr,
    # results; codes are contiguous
    codes_ptr, scale_ptr, amax_ptr, stride_scale_m, stride_scale_n, row_probs_ptr, row_slots_ptr, source_ptr,
    row_map, stride_base_b, stride_base_e, tokens_per_block, gap_ptr,
    # programs: lists of tokens, `fills` whose lanes fill gaps, then blocks
    fills, first_lane, tail_lanes,
    # sizes
    num_tokens, num_experts, num_columns, num_rows,
    # numbers, as the bits of a float64: 0, or an integer of 64 bits
    epsilon: tl.int64, infinity: tl.int64,
    RULE: tl.constexpr,  # a rule of blocks; "nvfp4"; "group": one scale per expert
    FORMAT: tl.constexpr, POWER_OF_TWO: tl.constexpr, HARDWARE: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_L: tl.constexpr,
):  # fmt: skip
    """Read each token once, and write its codes to each of its rows. The first programs move the
    probs, the next ones write padding, and the others take one tile of tokens each.

    `row_slots` gets the tokens' lists with rows in place of ranks, and `source` the token of each
    row, or -1. With rule "amax" the scales are stored by token: in the layout of rows, the scales
    of one row are far apart, and `row_scales_kernel` writes them.
    """
    columns = tl.maximum(tl.cdiv(num_columns, BLOCK_H), 1)  # lists are written even if there are no columns
    column = tl.program_id(0) % columns  # programs that run together finish whole rows
    block = tl.program_id(0) // columns
    list_blocks = tl.cdiv(num_tokens, BLOCK_L)
    least = number(epsilon, tl.float32)
    most = number(infinity, tl.float32)
    if RULE == "group" and tl.program_id(0) == 0:
        e = tl.arange(0, BLOCK_E).to(tl.int64)
        scale_E = group_scale(
            delayed_scale_ptr, stride_delayed_scale, group_amax_ptr, e, e < num_experts, least, FORMAT, POWER_OF_TWO
        )
        tl.store(inverse_ptr + e, over(1.0, scale_E), mask=e < num_experts)  # experts are padded to a power of two
    if block < list_blocks:
        if column == 0:
            place_lists(
                probs_ptr, stride_probs_t, stride_probs_e, row_probs_ptr, row_slots_ptr, source_ptr, row_map,
                stride_base_b, stride_base_e, tokens_per_block, block, num_tokens, num_experts, num_rows, BLOCK_L,
            )  # fmt: skip
    elif block < list_blocks + fills:
        fill_padding(
            codes_ptr, scale_ptr, amax_ptr, stride_scale_m, stride_scale_n, row_probs_ptr, source_ptr, gap_ptr,
            first_lane + (block - list_blocks) * BLOCK_G, column, tail_lanes, num_experts, num_columns, num_rows,
            RULE, BLOCK, BLOCK_G, BLOCK_R, BLOCK_H,
        )  # fmt: skip
    else:
        scatter_tokens(
            tokens_ptr, stride_tokens_t, stride_tokens_h, delayed_scale_ptr, stride_delayed_scale, group_amax_ptr,
            history_ptr, stride_history, codes_ptr, scale_ptr, amax_ptr, stride_scale_m, stride_scale_n, row_map,
            stride_base_b, stride_base_e, tokens_per_block, block - list_blocks - fills, column, num_tokens,
            num_experts, num_columns, num_rows, least, most, RULE, FORMAT, POWER_OF_TWO, HARDWARE, BLOCK, BLOCK_T,
            BLOCK_H,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", "epsilon", "infinity"])
def row_scales_kernel(
    # by row, its token; by token, results of scatter_kernel, contiguous
    source_ptr, token_scale_ptr, token_amax_ptr,
    # results
    scale_ptr, amax_ptr, stride_m, stride_n,
    # sizes
    num_rows, num_blocks,
    # numbers, as the bits of a float64: 0, or an integer of 64 bits
    epsilon: tl.int64, infinity: tl.int64,
    FORMAT: tl.constexpr, POWER_OF_TWO: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """The scale and amax of each row's blocks: those of its token, or of zeros. A program writes a
    tile of [rows, blocks]; rows lie side by side.
    """
    column_blocks = tl.cdiv(num_blocks, BLOCK_B)
    row = (tl.program_id(0) // column_blocks).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    b = (tl.program_id(0) % column_blocks) * BLOCK_B + tl.arange(0, BLOCK_B)
    source = tl.load(source_ptr + row, mask=row < num_rows, other=-1).to(tl.int64)  # the last tile sticks out
    in_bounds = (source >= 0)[:, None] & (b < num_blocks)[None, :]  # on both sides; and padding has no token
    offset = source[:, None] * num_blocks + b[None, :]
    amax = tl.load(token_amax_ptr + offset, mask=in_bounds, other=0.0)
    stored = tl.load(token_scale_ptr + offset, mask=in_bounds, other=0.0)
    zero = tl.zeros([BLOCK_M, BLOCK_B], tl.float32)
    of_zero = block_scale(
        zero, number(epsilon, tl.float32), number(infinity, tl.float32), "amax", FORMAT, POWER_OF_TWO
    )[1]
    in_bounds = (row < num_rows)[:, None] & (b < num_blocks)[None, :]  # as above
    offset = row[:, None] * stride_m + b[None, :] * stride_n
    tl.store(scale_ptr + offset, tl.where((source >= 0)[:, None], stored, of_zero), mask=in_bounds)
    tl.store(amax_ptr + offset, amax, mask=in_bounds)


@triton.jit(
    do_not_specialize=[
        *("num_tokens", "num_experts", "num_rows", "stride_base_b", "stride_base_e", "tokens_per_block"),
    ]
)
def expert_amax_kernel(
    tokens_ptr, stride_tokens_t, stride_tokens_h,
    # result, as integers; zeros at the launch
    amax_ptr, row_map, stride_base_b, stride_base_e, tokens_per_block,
    # sizes
    num_tokens, num_experts, num_columns, num_rows,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """max |x| over each expert's rows. A program reads BLOCK_T tokens once, and raises the amax of
    each of their experts.
    """
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    lists = find_lists(row_map, stride_base_b, stride_base_e, tokens_per_block, t, num_tokens, num_experts, num_rows)
    largest = tl.zeros([BLOCK_T, BLOCK_H], tl.float32)
    for first in range(0, num_columns, BLOCK_H):
        h = first + tl.arange(0, BLOCK_H).to(tl.int64)
        in_bounds = (t < num_tokens)[:, None] & (h < num_columns)[None, :]  # the last tiles stick out on both sides
        x = tl.load(tokens_ptr + t[:, None] * stride_tokens_t + h[None, :] * stride_tokens_h, mask=in_bounds, other=0.0)
        largest = tl.maximum(largest, magnitude(as_float32(x)))
    bits = tl.max(largest, axis=1).to(tl.int32, bitcast=True)
    for j in range(tl.max(lists.num_slots, axis=0)):
        expert, _, live = load_slot(row_map, lists, j)
        raise_amax(amax_ptr, expert, bits, live)


@triton.jit(do_not_specialize=["num_rows", "num_groups", "tiles", "steps", "epsilon", "infinity"])
def gather_kernel(
    tokens_ptr, stride_tokens_t, stride_tokens_h,
    # by row, its token; by expert, the rows of its segment
    source_ptr, splits_ptr,
    # the result
    form, stride_form_m, stride_form_n,
    # sizes; a program takes `steps` along the columns of one of `tiles`
    num_rows, num_columns, num_groups, tiles, steps,
    # numbers, as the bits of a float64: 0, or an integer of 64 bits
    epsilon: tl.int64, infinity: tl.int64,
    RULE: tl.constexpr, FORMAT: tl.constexpr, POWER_OF_TWO: tl.constexpr, HARDWARE: tl.constexpr,
    ALIGNED: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_G: tl.constexpr, SLAB: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """As `quantize_blocks_kernel`, for one form in blocks that span rows, where rows are still
    tokens. A program quantises `steps` tiles side by side.

    SLAB programs that run together finish the same rows of a slab of columns, and all tiles of a
    slab come before those of the next. So tokens stay in the L2 cache from one of their rows to the
    next.
    """
    slab = tl.program_id(0) // (tiles * SLAB)
    tile = tl.program_id(0) // SLAB % tiles
    column_program = slab * SLAB + tl.program_id(0) % SLAB
    _, first, read, _, written = place_of_tile(splits_ptr, 1, num_rows, num_groups, tile, ALIGNED, BLOCK_M, BLOCK_G)
    row = first + tl.arange(0, BLOCK_M)
    source = tl.load(source_ptr + row, mask=row < read, other=-1).to(tl.int64)  # the last tile sticks out
    least = number(epsilon, tl.float32)
    most = number(infinity, tl.float32)
    begin = column_program.to(tl.int64) * (steps * BLOCK_N)
    for i in tl.range(0, tl.where((first < written) & (begin < num_columns), steps, 0), num_stages=STAGES):
        column = begin + i * BLOCK_N
        n = column + tl.arange(0, BLOCK_N)
        # padding has no token; the last block sticks out
        in_bounds = (source >= 0)[:, None] & (n < num_columns)[None, :]
        x = as_float32(
            tl.load(
                tokens_ptr + source[:, None] * stride_tokens_t + n[None, :] * stride_tokens_h, mask=in_bounds, other=0.0
            )
        )
        quantize_blocks(
            x, form, stride_form_m, stride_form_n, tile, first, written, column, num_columns, least, most,
            RULE, FORMAT, POWER_OF_TWO, HARDWARE, BLOCK_R, BLOCK_C,
        )  # fmt: skip
