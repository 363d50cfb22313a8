"""Kernels that move rows to their experts and back; `permutation.row_map.RowMap` holds the rows of
each token.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from moe_fast.launch._rounding import rounded
from moe_fast.launch.specialization import jit
from moe_fast.permutation._row_map import EXPERT, RANK


class RowMapPointers(NamedTuple):
    """The memory of a `RowMap` as one argument of a kernel. Integers are separate arguments,
    because Triton specialises a kernel for every integer of a record, whatever `do_not_specialize`
    says.
    """

    slots_ptr: Any
    num_slots_ptr: Any
    base_ptr: Any  # None: the lists hold rows


class Lists(NamedTuple):
    """The lists of rows of some tokens. No field is None, because a function of Triton 3.6 cannot
    return None.
    """

    t: Any
    list_t_ptr: Any
    base_t_ptr: Any  # with bases
    stride_base_e: Any
    num_slots: Any  # of each token
    num_tokens: Any
    num_experts: Any
    num_rows: Any


@triton.jit
def find_lists(row_map, stride_base_b, stride_base_e, tokens_per_block, t, num_tokens, num_experts, num_rows):
    """The lists of the tokens `t`."""
    list_t_ptr = row_map.slots_ptr + t * num_experts
    base_t_ptr = list_t_ptr
    if row_map.base_ptr is not None:
        base_t_ptr = row_map.base_ptr + t // tokens_per_block * stride_base_b
    num_slots = tl.load(row_map.num_slots_ptr + t, mask=t < num_tokens, other=0)  # the last tile sticks out
    return Lists(t, list_t_ptr, base_t_ptr, stride_base_e, num_slots, num_tokens, num_experts, num_rows)


@triton.jit
def load_slot(row_map, lists, j):
    """(expert, row, live) of slot j of each token. The list is loaded without waiting for
    `num_slots`.
    """
    live = j < lists.num_slots  # the list's end was never written
    in_bounds = (lists.t < lists.num_tokens) & (j + tl.zeros_like(lists.t) < lists.num_experts)  # both may stick out
    slot = tl.load(lists.list_t_ptr + j, mask=in_bounds, other=0).to(tl.int64)
    expert = slot & EXPERT
    row = slot >> RANK
    if row_map.base_ptr is not None:
        row += tl.load(lists.base_t_ptr + expert * lists.stride_base_e, mask=live, other=0)
    return expert, row, live & (row < lists.num_rows)  # rows past the buffer are dropped


@triton.jit
def load_rows(rows_ptr, stride_rows_p, stride_rows_h, row, h, live, in_row):
    """A tile of rows, and 0 where `live` is false: rows without a token are never read."""
    if rows_ptr is None:  # no early return, because Triton compiles the code after it anyway
        tile = live
    else:
        tile = tl.load(
            rows_ptr + row[:, None] * stride_rows_p + h[None, :] * stride_rows_h, mask=live[:, None] & in_row, other=0.0
        )
    return tile


@triton.jit
def add_rows(
    acc, first, rows_ptr, stride_rows_p, stride_rows_h, probs_ptr, stride_probs_t, stride_probs_e, row_map, lists, h,
    in_row,
    ROWS_AS: tl.constexpr, PROBS_AS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """acc plus UNROLL more rows of each token, from slot `first` on, times their probs."""
    for j in tl.static_range(UNROLL):  # their loads run at the same time
        expert, row, live = load_slot(row_map, lists, first + j)
        value = load_rows(rows_ptr, stride_rows_p, stride_rows_h, row, h, live, in_row).to(ROWS_AS).to(acc.dtype)
        if probs_ptr is not None:
            # of live slots only
            prob = tl.load(probs_ptr + lists.t * stride_probs_t + expert * stride_probs_e, mask=live, other=0.0)
            value *= prob.to(PROBS_AS).to(acc.dtype)[:, None]
        acc += value
    return acc


@triton.jit
def find_gaps(gap_ptr, first_lane, tail_lanes, num_experts, num_rows, BLOCK_G: tl.constexpr, BLOCK_R: tl.constexpr):
    """(begin, end, step) of each lane's rows without a token. A lane has the padding of one expert,
    or a share of the rows past the last segment.
    """
    lane = first_lane + tl.arange(0, BLOCK_G)
    gap = tl.minimum(lane, num_experts)
    end = tl.minimum(tl.load(gap_ptr + num_experts + 1 + gap), num_rows)
    begin = tl.load(gap_ptr + gap) + (lane - gap) * BLOCK_R
    return begin, end, tl.where(gap == num_experts, tail_lanes, 1) * BLOCK_R


@triton.jit
def rows_of_gaps(begin, end, step, i, BLOCK_G: tl.constexpr, BLOCK_R: tl.constexpr):
    """(rows of step i of the lanes, whether each lies in its lane's gap, because the gaps of other
    lanes may be longer).
    """
    row_GR = (begin + i * step)[:, None] + tl.arange(0, BLOCK_R)[None, :]
    return tl.reshape(row_GR, [BLOCK_G * BLOCK_R]), tl.reshape(row_GR < end[:, None], [BLOCK_G * BLOCK_R])


@triton.jit
def fill_gaps(
    rows_ptr, probs_ptr, gap_ptr, first_lane, column, tail_lanes, num_experts, num_columns, num_rows,
    BLOCK_G: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Write zeros into rows without a token, and into their probs."""
    begin, end, step = find_gaps(gap_ptr, first_lane, tail_lanes, num_experts, num_rows, BLOCK_G, BLOCK_R)
    h = tl.cast(column, tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H)
    for i in range(tl.max(tl.cdiv(end - begin, step), axis=0)):
        row, in_gap = rows_of_gaps(begin, end, step, i, BLOCK_G, BLOCK_R)
        in_bounds = in_gap[:, None] & (h < num_columns)[None, :]  # the last block sticks out
        tl.store(
            rows_ptr + row[:, None] * num_columns + h[None, :],
            tl.zeros([BLOCK_G * BLOCK_R, BLOCK_H], rows_ptr.dtype.element_ty),
            mask=in_bounds,
        )
        if probs_ptr is not None and column == 0:  # once per row
            tl.store(probs_ptr + row, tl.zeros([BLOCK_G * BLOCK_R], probs_ptr.dtype.element_ty), mask=in_gap)


@triton.jit
def fill_places(
    probs_ptr, source_ptr, gap_ptr, first_lane, tail_lanes, num_experts, num_rows,
    BLOCK_G: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Write probs of 0 and sources of -1 for rows without a token; either result may be
    left out.
    """
    begin, end, step = find_gaps(gap_ptr, first_lane, tail_lanes, num_experts, num_rows, BLOCK_G, BLOCK_R)
    for i in range(tl.max(tl.cdiv(end - begin, step), axis=0)):
        row, in_gap = rows_of_gaps(begin, end, step, i, BLOCK_G, BLOCK_R)
        if probs_ptr is not None:
            tl.store(probs_ptr + row, tl.zeros([BLOCK_G * BLOCK_R], probs_ptr.dtype.element_ty), mask=in_gap)
        if source_ptr is not None:
            tl.store(source_ptr + row, tl.full([BLOCK_G * BLOCK_R], -1, source_ptr.dtype.element_ty), mask=in_gap)


@triton.jit
def place_lists(
    probs_ptr, stride_probs_t, stride_probs_e, row_probs_ptr, row_slots_ptr, source_ptr,
    row_map, stride_base_b, stride_base_e, tokens_per_block, block, num_tokens, num_experts, num_rows,
    BLOCK_L: tl.constexpr,
):  # fmt: skip
    """For a block of tokens, write the prob and, if asked for, the token of each row; and the
    tokens' lists of rows.
    """
    t = block.to(tl.int64) * BLOCK_L + tl.arange(0, BLOCK_L)
    lists = find_lists(row_map, stride_base_b, stride_base_e, tokens_per_block, t, num_tokens, num_experts, num_rows)
    for j in range(tl.max(lists.num_slots, axis=0)):
        expert, row, live = load_slot(row_map, lists, j)
        if probs_ptr is not None:
            # of live slots only
            prob = tl.load(probs_ptr + t * stride_probs_t + expert * stride_probs_e, mask=live, other=0)
            tl.store(row_probs_ptr + row, prob, mask=live)  # as above
        if source_ptr is not None:
            tl.store(source_ptr + row, t.to(source_ptr.dtype.element_ty), mask=live)
        # also of dropped rows
        tl.store(row_slots_ptr + t * num_experts + j, (row << RANK) | expert, mask=j < lists.num_slots)


@triton.jit(
    do_not_specialize=[
        *("list_blocks", "first_lane", "tail_lanes", "num_tokens", "num_experts", "num_rows", "stride_probs_t"),
        *("stride_probs_e", "stride_base_b", "stride_base_e", "tokens_per_block"),
    ],
)
def place_kernel(
    # probs, as bits
    probs_ptr, stride_probs_t, stride_probs_e,
    # results by row, and the lists of rows
    row_probs_ptr, source_ptr, row_slots_ptr, row_map, stride_base_b, stride_base_e, tokens_per_block, gap_ptr,
    # programs: lists of tokens, then lanes that fill gaps
    list_blocks, first_lane, tail_lanes,
    # sizes
    num_tokens, num_experts, num_rows,
    BLOCK_G: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    """As `permute_kernel`, but without writing rows: each row's prob and token, or 0 and -1 for a
    row without a token.
    """
    block = tl.program_id(0)
    if block < list_blocks:
        place_lists(
            probs_ptr, stride_probs_t, stride_probs_e, row_probs_ptr, row_slots_ptr, source_ptr, row_map,
            stride_base_b, stride_base_e, tokens_per_block, block, num_tokens, num_experts, num_rows, BLOCK_L,
        )  # fmt: skip
    else:
        lane = first_lane + (block - list_blocks) * BLOCK_G
        fill_places(row_probs_ptr, source_ptr, gap_ptr, lane, tail_lanes, num_experts, num_rows, BLOCK_G, BLOCK_R)


@jit(
    together=[("stride_tokens_t", "num_columns")],
    along=["stride_tokens_h"],
    do_not_specialize=[
        *("token_blocks", "first_lane", "tail_lanes", "num_tokens", "num_experts", "num_rows", "stride_probs_t"),
        *("stride_probs_e", "stride_base_b", "stride_base_e", "tokens_per_block"),
    ],
)
def permute_kernel(
    # tokens and probs, as bits
    tokens_ptr, stride_tokens_t, stride_tokens_h, probs_ptr, stride_probs_t, stride_probs_e,
    # rows, contiguous
    rows_ptr, row_probs_ptr, row_slots_ptr, row_map, stride_base_b, stride_base_e, tokens_per_block, gap_ptr,
    # programs: lists of tokens, lanes that fill gaps, then blocks of tokens
    token_blocks, first_lane, tail_lanes,
    # sizes
    num_tokens, num_experts, num_columns, num_rows,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    """Read each token once, and write it to each of its rows. The first programs move the probs,
    the next ones write zeros into rows without a token, and the others move one tile of tokens
    each.

    `row_slots` gets the tokens' lists with rows in place of ranks, so that later kernels need no
    bases. Probs are moved only if there is a `row_slots`.
    """
    # lists are written even if there are no columns
    columns = tl.cdiv(num_columns, BLOCK_H) if row_slots_ptr is None else tl.maximum(tl.cdiv(num_columns, BLOCK_H), 1)
    column = tl.program_id(0) % columns  # programs that run together finish whole rows
    block = tl.program_id(0) // columns
    list_blocks = tl.cdiv(num_tokens, BLOCK_L) if row_slots_ptr is not None else 0
    fills = tl.num_programs(0) // columns - token_blocks - list_blocks
    if block < list_blocks:
        if column == 0 and row_slots_ptr is not None:
            place_lists(
                probs_ptr, stride_probs_t, stride_probs_e, row_probs_ptr, row_slots_ptr, None, row_map, stride_base_b,
                stride_base_e, tokens_per_block, block, num_tokens, num_experts, num_rows, BLOCK_L,
            )  # fmt: skip
    elif block < list_blocks + fills:
        lane = first_lane + (block - list_blocks) * BLOCK_G
        fill_gaps(
            rows_ptr, row_probs_ptr, gap_ptr, lane, column, tail_lanes, num_experts, num_columns, num_rows,
            BLOCK_G, BLOCK_R, BLOCK_H,
        )  # fmt: skip
    else:
        t = (block - list_blocks - fills).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
        h = column.to(tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H)
        in_row = (h < num_columns)[None, :]  # the last block sticks out
        in_bounds = (t < num_tokens)[:, None] & in_row  # and so does the last tile
        token = tl.load(
            tokens_ptr + t[:, None] * stride_tokens_t + h[None, :] * stride_tokens_h, mask=in_bounds, other=0
        )
        lists = find_lists(
            row_map, stride_base_b, stride_base_e, tokens_per_block, t, num_tokens, num_experts, num_rows
        )
        _, row, live = load_slot(row_map, lists, 0)
        for j in range(tl.max(lists.num_slots, axis=0)):
            following = load_slot(row_map, lists, j + 1)  # the load runs while this row is written
            # dropped rows are not written
            tl.store(rows_ptr + row[:, None] * num_columns + h[None, :], token, mask=live[:, None] & in_row)
            _, row, live = following


@jit(
    together=[("stride_rows_p", "num_columns"), ("num_experts",)],
    along=["stride_rows_h"],
    do_not_specialize=[
        *("num_tokens", "num_rows", "stride_row_dprobs", "stride_probs_t", "stride_probs_e"),
        *("stride_base_b", "stride_base_e", "tokens_per_block"),
    ],
)
def unpermute_kernel(
    # rows to sum, merging probs, result
    rows_ptr, stride_rows_p, stride_rows_h, probs_ptr, stride_probs_t, stride_probs_e, out_ptr,
    # the gradient of permute's probs, as bits: of the rows' probs, and of [T,E]
    row_dprobs_ptr, stride_row_dprobs, dprobs_ptr, row_map, stride_base_b, stride_base_e, tokens_per_block,
    # sizes
    num_tokens, num_experts, num_columns, num_rows,
    # the last two hold rows and probs exactly: bfloat16 has no direct way to and from float64
    ACCUMULATOR: tl.constexpr, ROWS_AS: tl.constexpr, PROBS_AS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_E: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Add up each token's rows, in the order of their experts. A program sums one tile of [tokens,
    columns]; if the probs have a gradient, the programs past the last column move it.
    """
    columns = tl.cdiv(num_columns, BLOCK_H) + (1 if dprobs_ptr is not None else 0)
    column = tl.program_id(0) % columns  # programs that run together finish whole rows
    t = (tl.program_id(0) // columns).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    lists = find_lists(row_map, stride_base_b, stride_base_e, tokens_per_block, t, num_tokens, num_experts, num_rows)
    in_time = (t < num_tokens)[:, None]  # the last tile sticks out
    if column < tl.cdiv(num_columns, BLOCK_H):
        if rows_ptr is not None:
            h = column.to(tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H)
            in_row = (h < num_columns)[None, :]  # the last block sticks out
            acc = tl.zeros([BLOCK_T, BLOCK_H], ACCUMULATOR)
            acc = add_rows(
                acc, 0, rows_ptr, stride_rows_p, stride_rows_h, probs_ptr, stride_probs_t, stride_probs_e,
                row_map, lists, h, in_row, ROWS_AS, PROBS_AS, UNROLL,
            )  # fmt: skip
            for first in range(UNROLL, tl.max(lists.num_slots, axis=0), UNROLL):
                acc = add_rows(
                    acc, first, rows_ptr, stride_rows_p, stride_rows_h, probs_ptr, stride_probs_t,
                    stride_probs_e, row_map, lists, h, in_row, ROWS_AS, PROBS_AS, UNROLL,
                )  # fmt: skip
            tl.store(
                out_ptr + t[:, None] * num_columns + h[None, :],
                rounded(acc.to(ROWS_AS), out_ptr.dtype.element_ty),
                mask=in_time & in_row,
            )
    elif dprobs_ptr is not None:
        for first in range(0, num_experts, BLOCK_E):
            e = first + tl.arange(0, BLOCK_E)
            dprobs = tl.zeros([BLOCK_T, BLOCK_E], dprobs_ptr.dtype.element_ty)
            for j in range(tl.max(lists.num_slots, axis=0)):
                expert, row, live = load_slot(row_map, lists, j)
                dprob = tl.load(row_dprobs_ptr + row * stride_row_dprobs, mask=live, other=0)  # of live slots only
                dprobs = tl.where((expert[:, None] == e[None, :]) & live[:, None], dprob[:, None], dprobs)
            tl.store(
                dprobs_ptr + t[:, None] * num_experts + e[None, :], dprobs, mask=in_time & (e < num_experts)[None, :]
            )  # the last block sticks out


@jit(
    together=[("stride_dout_t", "stride_rows_p", "num_columns"), ("num_experts",)],
    along=["stride_dout_h", "stride_rows_h"],
    do_not_specialize=[
        *("token_blocks", "first_lane", "tail_lanes", "num_tokens", "num_rows", "stride_probs_t", "stride_probs_e"),
        *("stride_base_b", "stride_base_e", "tokens_per_block"),
    ],
)
def unpermute_backward_kernel(
    # the gradient of the sums; rows and probs of the forward
    dout_ptr, stride_dout_t, stride_dout_h, rows_ptr, stride_rows_p, stride_rows_h, probs_ptr, stride_probs_t,
    stride_probs_e,
    drows_ptr, dprobs_ptr, row_map, stride_base_b, stride_base_e, tokens_per_block, gap_ptr,  # results: contiguous
    # programs: lanes that fill gaps, then blocks of tokens; sizes
    token_blocks, first_lane, tail_lanes, num_tokens, num_experts, num_columns, num_rows,
    # the last two hold rows and probs exactly: bfloat16 has no direct way to and from float64
    ACCUMULATOR: tl.constexpr, ROWS_AS: tl.constexpr, PROBS_AS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """drows[row] = dout[t] · p and dprobs[t, e] = Σ_h rows[row, h] · dout[t, h], for each row of
    token t and expert e. The first programs write zeros into rows without a token, the others take
    BLOCK_T whole tokens each.
    """
    block = tl.program_id(0)
    fills = tl.num_programs(0) - token_blocks
    if block >= fills:
        t = (block - fills).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
        e = tl.arange(0, BLOCK_E)
        lists = find_lists(
            row_map, stride_base_b, stride_base_e, tokens_per_block, t, num_tokens, num_experts, num_rows
        )
        dprobs = tl.zeros([BLOCK_T, BLOCK_E], ACCUMULATOR)
        in_time = (t < num_tokens)[:, None]  # the last tile sticks out
        for first in range(0, num_columns, BLOCK_H):
            h = first + tl.arange(0, BLOCK_H).to(tl.int64)
            in_row = (h < num_columns)[None, :]  # the last block sticks out
            dout_ptrs = dout_ptr + t[:, None] * stride_dout_t + h[None, :] * stride_dout_h
            dout = tl.load(dout_ptrs, mask=in_time & in_row, other=0.0)
            expert, row, live = load_slot(row_map, lists, 0)
            token_probs_ptr = probs_ptr + t * stride_probs_t
            prob = tl.load(token_probs_ptr + expert * stride_probs_e, mask=live, other=0.0)  # of live slots only
            value = load_rows(rows_ptr, stride_rows_p, stride_rows_h, row, h, live, in_row)
            next_expert, next_row, next_live = load_slot(row_map, lists, 1)
            for j in range(tl.max(lists.num_slots, axis=0)):  # the next row and the slot after it are on their way
                next_prob = tl.load(
                    token_probs_ptr + next_expert * stride_probs_e, mask=next_live, other=0.0
                )  # as above
                next_value = load_rows(rows_ptr, stride_rows_p, stride_rows_h, next_row, h, next_live, in_row)
                following = load_slot(row_map, lists, j + 2)
                d = dout.to(ROWS_AS).to(ACCUMULATOR)
                if drows_ptr is not None:
                    product = d * prob.to(PROBS_AS).to(ACCUMULATOR)[:, None]
                    drow = rounded(product.to(ROWS_AS), drows_ptr.dtype.element_ty)
                    # dropped rows are not written
                    tl.store(drows_ptr + row[:, None] * num_columns + h[None, :], drow, mask=live[:, None] & in_row)
                if dprobs_ptr is not None:
                    dot = tl.sum(d * value.to(ROWS_AS).to(ACCUMULATOR), axis=1)
                    dprobs += tl.where((expert[:, None] == e[None, :]) & live[:, None], dot[:, None], 0.0)
                expert, row, live, prob, value = next_expert, next_row, next_live, next_prob, next_value
                next_expert, next_row, next_live = following
        if dprobs_ptr is not None:
            in_bounds = in_time & (e < num_experts)[None, :]  # experts are padded to a power of two
            result = rounded(dprobs.to(PROBS_AS), dprobs_ptr.dtype.element_ty)
            tl.store(dprobs_ptr + t[:, None] * num_experts + e[None, :], result, mask=in_bounds)
    elif drows_ptr is not None:
        lane = first_lane + block * BLOCK_G
        for column in range(tl.cdiv(num_columns, BLOCK_H)):
            fill_gaps(
                drows_ptr, None, gap_ptr, lane, column, tail_lanes, num_experts, num_columns, num_rows, BLOCK_G,
                BLOCK_R, BLOCK_H,
            )  # fmt: skip
