"""Sums of each token's rows, on the rank that has them, and their total where the token came from.

See `_symmetric` for links, homes and tables.
"""

import triton
import triton.language as tl

from moe_fast.dispatch._symmetric import FIRST, NEXT, at_rank, here_or_there, slot_of
from moe_fast.launch._rounding import rounded
from moe_fast.permutation._permute import find_lists, load_rows, load_slot
from moe_fast.permutation._row_map import EXPERT, RANK


@triton.jit
def return_row(
    row, rows_ptr, stride_rows_p, stride_rows_h, probs_ptr, stride_probs, link_ptr, home_ptr, sums_table_ptr, left_ptr,
    sum_probs_ptr, num_columns, num_rows,
    ACCUMULATOR: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Add the rows here of a token that came, in order, and send the sum to its slot, or leave it;
    publish their probs.
    """
    for column in range(tl.maximum(tl.cdiv(num_columns, BLOCK_H), 1)):
        h = tl.cast(column, tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H)
        in_row = h < num_columns  # the last block sticks out
        total = tl.zeros([BLOCK_H], ACCUMULATOR)
        place = row
        while place >= 0:
            if rows_ptr is not None:
                value = tl.load(rows_ptr + place * stride_rows_p + h * stride_rows_h, mask=in_row, other=0.0)
                total += value.to(ACCUMULATOR)
            if column == 0 and probs_ptr is not None:
                tl.store(sum_probs_ptr + place, tl.load(probs_ptr + place * stride_probs))
            place = (tl.load(link_ptr + place) & NEXT).to(tl.int64) - 1
        if rows_ptr is not None:
            home = tl.load(home_ptr + row)
            left = home >> RANK >= num_rows
            element = left_ptr.dtype.element_ty
            sum_ptr = here_or_there(left, left_ptr, sums_table_ptr, home & EXPERT, True, element)
            sum_ptr += tl.where(left, row, home >> RANK) * num_columns
            tl.store(sum_ptr + h, rounded(total, element), mask=in_row)


@triton.jit(
    do_not_specialize=[
        *("stride_rows_p", "token_programs", "num_tokens", "num_experts", "local_experts", "num_rows", "own_rank")
    ]
)
def return_kernel(
    # rows, and their probs as bits
    rows_ptr, stride_rows_p, stride_rows_h, probs_ptr, stride_probs,
    # of rows that came
    link_ptr, home_ptr,
    # regions: all ranks' sums; this rank's for sums without a slot, and for probs
    sums_table_ptr, left_ptr, sum_probs_ptr,
    # this rank's part of the result, contiguous, and the map of rows
    out_ptr, row_map,
    # sizes
    token_programs, num_tokens, num_experts, local_experts, num_columns, num_rows, own_rank,
    ACCUMULATOR: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """The sums of other ranks' tokens, each sent home, and those of this rank's tokens: the
    programs of both alternate, as the link is slower than the memory.
    """
    program = tl.program_id(0)
    every = tl.num_programs(0) // tl.maximum(token_programs, 1)
    if (program % every == 0) & (program // every < token_programs):
        columns = tl.cdiv(num_columns, BLOCK_H)
        t = (program // every // columns).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
        h = (program // every % columns).to(tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H)
        in_row = (h < num_columns)[None, :]  # the last block sticks out
        lists = find_lists(row_map, 0, 0, 1, t, num_tokens, num_experts, num_rows)
        total = tl.zeros([BLOCK_T, BLOCK_H], ACCUMULATOR)
        for first in range(0, tl.max(lists.num_slots, axis=0), UNROLL):
            for j in tl.static_range(UNROLL):  # their loads are on their way together
                expert, row, live = load_slot(row_map, lists, first + j)
                own = live & (expert // local_experts == own_rank)
                value = load_rows(rows_ptr, stride_rows_p, stride_rows_h, row, h, own, in_row)
                total += value.to(ACCUMULATOR)
        inside = (t < num_tokens)[:, None] & in_row  # the last tile sticks out
        tl.store(out_ptr + t[:, None] * num_columns + h[None, :], rounded(total, out_ptr.dtype.element_ty), mask=inside)
    else:
        row = (program - tl.minimum(tl.cdiv(program, every), token_programs)).to(tl.int64)
        if tl.load(link_ptr + row) >= FIRST:
            return_row(
                row, rows_ptr, stride_rows_p, stride_rows_h, probs_ptr, stride_probs, link_ptr, home_ptr,
                sums_table_ptr, left_ptr, sum_probs_ptr, num_columns, num_rows, ACCUMULATOR, BLOCK_H,
            )  # fmt: skip


@triton.jit
def take_probs(
    probs_ptr, stride_probs, probs_table_ptr, out_probs_ptr, row_map, block, num_tokens, num_experts, local_experts,
    num_rows, own_rank,
    BLOCK_L: tl.constexpr,
):  # fmt: skip
    """The probs of a block of tokens, from here and from other ranks."""
    t = block.to(tl.int64) * BLOCK_L + tl.arange(0, BLOCK_L)
    lists = find_lists(row_map, 0, 0, 1, t, num_tokens, num_experts, num_rows)
    for j in range(tl.max(lists.num_slots, axis=0)):
        expert, row, live = load_slot(row_map, lists, j)
        rank = expert // local_experts
        own, away = live & (rank == own_rank), live & (rank != own_rank)  # one of two
        from_ptr = at_rank(probs_table_ptr, rank, away, out_probs_ptr.dtype.element_ty)
        prob = tl.load(from_ptr + row, mask=away, other=0)
        prob = tl.where(own, tl.load(probs_ptr + row * stride_probs, mask=own, other=0), prob)
        tl.store(out_probs_ptr + t * num_experts + expert, prob, mask=live)


@triton.jit(do_not_specialize=["num_tokens", "num_experts", "local_experts", "num_rows", "own_rank"])
def total_kernel(
    # this rank's sums that came, and all ranks' that were left
    sums_ptr, left_table_ptr,
    # probs as bits: this rank's, and all ranks' regions
    probs_ptr, stride_probs, probs_table_ptr,
    # results, contiguous; either may be left out
    out_ptr, out_probs_ptr,
    row_map,  # of rows
    # sizes
    num_tokens, num_experts, local_experts, num_columns, num_rows, own_rank,
    ONCE: tl.constexpr, ACCUMULATOR: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_L: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """out[t] = Σ over ranks, ascending, of t's sums there, each rounded before it is added; `out`
    holds this rank's. out_probs[t, e] is the prob of its row, 0 without one.
    """
    columns = tl.maximum(tl.cdiv(num_columns, BLOCK_H), 1)
    column = tl.program_id(0) % columns
    block = tl.program_id(0) // columns
    list_blocks = tl.cdiv(num_tokens, BLOCK_L) if out_probs_ptr is not None else 0
    if block < list_blocks:
        if column == 0 and out_probs_ptr is not None:
            take_probs(
                probs_ptr, stride_probs, probs_table_ptr, out_probs_ptr, row_map, block, num_tokens, num_experts,
                local_experts, num_rows, own_rank, BLOCK_L,
            )  # fmt: skip
    elif out_ptr is not None:
        t = (block - list_blocks).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
        h = column.to(tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H)
        in_row = (h < num_columns)[None, :]  # the last block sticks out
        inside = (t < num_tokens)[:, None] & in_row  # and so does the last tile
        here = tl.load(out_ptr + t[:, None] * num_columns + h[None, :], mask=inside, other=0.0).to(ACCUMULATOR)
        lists = find_lists(row_map, 0, 0, 1, t, num_tokens, num_experts, num_rows)
        total = tl.zeros([BLOCK_T, BLOCK_H], ACCUMULATOR)
        part = tl.zeros([BLOCK_T, BLOCK_H], ACCUMULATOR)
        last = tl.full([BLOCK_T], -1, tl.int64)
        for first in range(0, tl.max(lists.num_slots, axis=0), UNROLL):
            for j in tl.static_range(UNROLL):  # their loads are on their way together
                expert, row, live = load_slot(row_map, lists, first + j)
                rank = expert // local_experts
                new = live & (rank != last)
                away = (new if ONCE else live) & (rank != own_rank)
                slot = slot_of(t, rank, own_rank, num_experts // local_experts, ONCE)
                came = slot < num_rows
                sum_ptr = here_or_there(came, sums_ptr, left_table_ptr, rank, away, out_ptr.dtype.element_ty)
                sum_ptr += tl.where(came, slot, row) * num_columns
                value = tl.load(sum_ptr[:, None] + h[None, :], mask=away[:, None] & in_row, other=0.0).to(ACCUMULATOR)
                value = tl.where((new & (rank == own_rank))[:, None], here, value)
                total = tl.where(new[:, None], total + rounded(part, out_ptr.dtype.element_ty).to(ACCUMULATOR), total)
                part = tl.where(new[:, None], value, part + value)
                last = tl.where(live, rank, last)
        total += rounded(part, out_ptr.dtype.element_ty).to(ACCUMULATOR)
        tl.store(out_ptr + t[:, None] * num_columns + h[None, :], rounded(total, out_ptr.dtype.element_ty), mask=inside)
