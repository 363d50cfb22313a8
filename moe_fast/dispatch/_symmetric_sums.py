"""Kernels that add up each token's rows on the rank that has them, and add these sums on the rank
that the token came from.

See `_symmetric` for links, homes and tables.
"""

import triton
import triton.language as tl

from moe_fast.dispatch._symmetric import FIRST, FIRST_SLOT, NEXT, at_rank, here_or_there, slot_of, turns_of
from moe_fast.launch._rounding import rounded
from moe_fast.permutation._permute import find_lists, load_rows, load_slot
from moe_fast.permutation._row_map import EXPERT, RANK


@triton.jit
def return_row(
    row, rows_ptr, stride_rows_p, stride_rows_h, probs_ptr, stride_probs, link_ptr, home_ptr, sums_table_ptr, left_ptr,
    sum_probs_ptr, num_columns, num_rows,
    ACCUMULATOR: tl.constexpr, BLOCK_H: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Add the rows here of a token from another rank, in order, and send the sum to its slot; a sum
    without a slot is stored in this rank's slab. Publish the probs of these rows.
    """
    if probs_ptr is not None:
        token_row = row
        while token_row >= 0:
            tl.store(sum_probs_ptr + token_row, tl.load(probs_ptr + token_row * stride_probs))
            token_row = (tl.load(link_ptr + token_row) & NEXT).to(tl.int64) - 1
    if rows_ptr is not None:
        home = tl.load(home_ptr + row)
        has_no_slot = home >> RANK >= num_rows
        element = left_ptr.dtype.element_ty
        sum_ptr = here_or_there(has_no_slot, left_ptr, sums_table_ptr, home & EXPERT, True, element)
        sum_ptr += tl.where(has_no_slot, row, home >> RANK) * num_columns
        for column in range(tl.cdiv(num_columns, BLOCK_H)):
            h = tl.cast(column, tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H)
            in_row = h < num_columns  # the last block sticks out
            total = tl.zeros([BLOCK_H], ACCUMULATOR)
            token_row = row
            while token_row >= 0:
                for _ in tl.static_range(UNROLL):  # their loads run at the same time
                    in_bounds = in_row & (token_row + tl.zeros_like(h) >= 0)  # false after the last row
                    value = tl.load(rows_ptr + token_row * stride_rows_p + h * stride_rows_h, mask=in_bounds, other=0.0)
                    total += value.to(ACCUMULATOR)
                    link = tl.load(link_ptr + token_row, mask=token_row >= 0, other=0)  # as above
                    token_row = (link & NEXT).to(tl.int64) - 1
            tl.store(sum_ptr + h, rounded(total, element), mask=in_row)


@triton.jit
def add_own(
    t, rows_ptr, stride_rows_p, stride_rows_h, local_rows_ptr, out_ptr, row_map, num_tokens, num_experts, num_columns,
    ACCUMULATOR: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Add the rows on this rank of tokens of this rank; a token's list has these rows
    side by side.
    """
    in_tokens = t < num_tokens  # the last tile sticks out
    local_rows = tl.load(local_rows_ptr + t, mask=in_tokens, other=0).to(tl.int64)
    list_ptr = row_map.slots_ptr + t * num_experts + local_rows // FIRST_SLOT
    count = local_rows % FIRST_SLOT
    for column in range(tl.cdiv(num_columns, BLOCK_H)):
        h = tl.cast(column, tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H)
        in_row = (h < num_columns)[None, :]  # the last block sticks out
        total = tl.zeros([BLOCK_T, BLOCK_H], ACCUMULATOR)
        for first in range(0, tl.max(count, axis=0), UNROLL):
            for j in tl.static_range(UNROLL):  # their loads run at the same time
                live = first + j < count  # other tokens may have more rows
                row = tl.load(list_ptr + first + j, mask=live, other=0) >> RANK
                value = load_rows(rows_ptr, stride_rows_p, stride_rows_h, row, h, live, in_row)
                total += value.to(ACCUMULATOR)
        offset = t[:, None] * num_columns + h[None, :]
        tl.store(out_ptr + offset, rounded(total, out_ptr.dtype.element_ty), mask=in_tokens[:, None] & in_row)


@triton.jit(
    do_not_specialize=["stride_rows_p", "pieces", "row_pieces", "token_pieces", "num_tokens", "num_experts", "num_rows"]
)
def return_kernel(
    # rows, and their probs as bits
    rows_ptr, stride_rows_p, stride_rows_h, probs_ptr, stride_probs,
    # of the rows that came from other ranks
    link_ptr, home_ptr,
    # regions: all ranks' sums; this rank's for sums without a slot, and for probs
    sums_table_ptr, left_ptr, sum_probs_ptr,
    # this rank's part of the result, contiguous, and where its rows are
    out_ptr, local_rows_ptr, row_map,
    # sizes
    pieces, row_pieces, token_pieces, num_tokens, num_experts, num_columns, num_rows,
    ACCUMULATOR: tl.constexpr, SHARED: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr,
    UNROLL: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Add up the rows of other ranks' tokens, and send each sum home; and add up the rows of this
    rank's tokens.

    Programs of both kinds alternate, because the link between the ranks is slower than the memory.
    A piece of work of the first kind is GROUP rows that are far from each other, because the first
    rows of tokens crowd in the first experts.
    """
    interval = pieces // tl.maximum(token_pieces, 1)
    for turn in range(turns_of(pieces) if SHARED else 1):
        piece = tl.program_id(0) + turn * tl.num_programs(0)
        if (piece % interval == 0) & (piece // interval < token_pieces):
            t = (piece // interval).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
            if out_ptr is not None:
                add_own(
                    t, rows_ptr, stride_rows_p, stride_rows_h, local_rows_ptr, out_ptr, row_map, num_tokens,
                    num_experts, num_columns, ACCUMULATOR, BLOCK_T, BLOCK_H, UNROLL,
                )  # fmt: skip
        else:
            first = (piece - tl.minimum(tl.cdiv(piece, interval), token_pieces)).to(tl.int64)
            for i in range(GROUP):
                row = first + tl.cast(i, tl.int64) * row_pieces
                if tl.load(link_ptr + row, mask=row < num_rows, other=0) >= FIRST:  # the last group sticks out
                    return_row(
                        row, rows_ptr, stride_rows_p, stride_rows_h, probs_ptr, stride_probs, link_ptr, home_ptr,
                        sums_table_ptr, left_ptr, sum_probs_ptr, num_columns, num_rows, ACCUMULATOR, BLOCK_H, UNROLL,
                    )  # fmt: skip


@triton.jit
def take_probs(
    probs_ptr, stride_probs, probs_table_ptr, out_probs_ptr, row_map, block, num_tokens, num_experts, local_experts,
    num_rows, own_rank,
    BLOCK_L: tl.constexpr,
):  # fmt: skip
    """Read the probs of a block of tokens from this rank's rows and from those of other ranks."""
    t = block.to(tl.int64) * BLOCK_L + tl.arange(0, BLOCK_L)
    lists = find_lists(row_map, 0, 0, 1, t, num_tokens, num_experts, num_rows)
    for j in range(tl.max(lists.num_slots, axis=0)):
        expert, row, live = load_slot(row_map, lists, j)
        rank = expert // local_experts
        is_local, is_remote = live & (rank == own_rank), live & (rank != own_rank)  # exactly one of both
        from_ptr = at_rank(probs_table_ptr, rank, is_remote, out_probs_ptr.dtype.element_ty)
        prob = tl.load(from_ptr + row, mask=is_remote, other=0)
        prob = tl.where(is_local, tl.load(probs_ptr + row * stride_probs, mask=is_local, other=0), prob)
        tl.store(out_probs_ptr + t * num_experts + expert, prob, mask=live)


@triton.jit
def total_by_ranks(t, h, here, sums_ptr, ranks_ptr, num_tokens, num_columns, own_rank, ranks, in_row):
    """The sum over ranks of a token's sums, where every sum has a slot and has arrived; `here` is
    this rank's.
    """
    rank_bits = tl.load(ranks_ptr + t, mask=t < num_tokens, other=0)  # the last tile sticks out
    total = tl.zeros_like(here)
    for rank in range(ranks):
        there = (rank_bits >> rank) & 1 != 0
        if rank == own_rank:
            total += tl.where(there[:, None], here, 0.0)
        else:
            slot = t * (ranks - 1) + rank - tl.where(rank > own_rank, 1, 0)
            value = tl.load(
                sums_ptr + slot[:, None] * num_columns + h[None, :], mask=there[:, None] & in_row, other=0.0
            )
            total += value.to(here.dtype)
    return total


@triton.jit
def total_by_slots(
    t, h, here, sums_ptr, left_table_ptr, row_map, num_tokens, num_experts, local_experts, num_columns, num_rows,
    own_rank, in_row, element: tl.constexpr, ONCE: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """The sum over ranks of a token's sums, some of which have arrived in a slot, while others are
    read from the rank that computed them. Without ONCE each row is a sum of its own.
    """
    lists = find_lists(row_map, 0, 0, 1, t, num_tokens, num_experts, num_rows)
    total = tl.zeros_like(here)
    rank_sum = tl.zeros_like(here)
    last = tl.zeros_like(t) - 1
    for first in range(0, tl.max(lists.num_slots, axis=0), UNROLL):
        for j in tl.static_range(UNROLL):  # their loads run at the same time
            expert, row, live = load_slot(row_map, lists, first + j)
            rank = expert // local_experts
            new = live & (rank != last)
            away = (new if ONCE else live) & (rank != own_rank)
            slot = slot_of(t, rank, own_rank, num_experts // local_experts, ONCE)
            came = slot < num_rows
            sum_ptr = here_or_there(came, sums_ptr, left_table_ptr, rank, away, element)
            sum_ptr += tl.where(came, slot, row) * num_columns
            value = tl.load(sum_ptr[:, None] + h[None, :], mask=away[:, None] & in_row, other=0.0).to(here.dtype)
            value = tl.where((new & (rank == own_rank))[:, None], here, value)
            total = tl.where(new[:, None], total + rounded(rank_sum, element).to(here.dtype), total)
            rank_sum = tl.where(new[:, None], value, rank_sum + value)
            last = tl.where(live, rank, last)
    return total + rounded(rank_sum, element).to(here.dtype)


@triton.jit
def total_of_tile(
    block, column, sums_ptr, left_table_ptr, out_ptr, ranks_ptr, row_map, num_tokens, num_experts, local_experts,
    num_columns, num_rows, own_rank,
    ONCE: tl.constexpr, CAME: tl.constexpr, ACCUMULATOR: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """The totals of a block of tokens, for a block of columns."""
    t = block.to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    h = column.to(tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H)
    in_row = (h < num_columns)[None, :]  # the last block sticks out
    in_bounds = (t < num_tokens)[:, None] & in_row  # and so does the last tile
    element = out_ptr.dtype.element_ty
    here = tl.load(out_ptr + t[:, None] * num_columns + h[None, :], mask=in_bounds, other=0.0).to(ACCUMULATOR)
    if CAME:
        total = total_by_ranks(
            t, h, here, sums_ptr, ranks_ptr, num_tokens, num_columns, own_rank, num_experts // local_experts,
            in_row,
        )  # fmt: skip
    else:
        total = total_by_slots(
            t, h, here, sums_ptr, left_table_ptr, row_map, num_tokens, num_experts, local_experts, num_columns,
            num_rows, own_rank, in_row, element, ONCE, UNROLL,
        )  # fmt: skip
    tl.store(out_ptr + t[:, None] * num_columns + h[None, :], rounded(total, element), mask=in_bounds)


@triton.jit(do_not_specialize=["pieces", "num_tokens", "num_experts", "local_experts", "num_rows", "own_rank"])
def total_kernel(
    # this rank's sums that came, and all ranks' that were left
    sums_ptr, left_table_ptr,
    # probs as bits: this rank's, and all ranks' regions
    probs_ptr, stride_probs, probs_table_ptr,
    # results, contiguous; either may be left out
    out_ptr, out_probs_ptr,
    # of tokens: a bit for each rank, and the map of rows
    ranks_ptr, row_map,
    # sizes
    pieces, num_tokens, num_experts, local_experts, num_columns, num_rows, own_rank,
    ONCE: tl.constexpr,
    CAME: tl.constexpr,  # every sum has a slot
    ACCUMULATOR: tl.constexpr, SHARED: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_L: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """out[t] = Σ over ranks, ascending, of the sum of t's rows there, each rounded before it is
    added. At the launch `out` holds this rank's sums. out_probs[t, e] is the prob of the row of t
    and e, or 0 if there is none. A piece of work is a tile of tokens, or the probs of a block of
    tokens.
    """
    columns = tl.maximum(tl.cdiv(num_columns, BLOCK_H), 1)
    list_blocks = tl.cdiv(num_tokens, BLOCK_L) if out_probs_ptr is not None else 0
    for turn in range(turns_of(pieces) if SHARED else 1):
        work = tl.program_id(0) + turn * tl.num_programs(0)
        column, block = work % columns, work // columns
        if block < list_blocks:
            if column == 0 and out_probs_ptr is not None:
                take_probs(
                    probs_ptr, stride_probs, probs_table_ptr, out_probs_ptr, row_map, block, num_tokens, num_experts,
                    local_experts, num_rows, own_rank, BLOCK_L,
                )  # fmt: skip
        elif out_ptr is not None:
            total_of_tile(
                block - list_blocks, column, sums_ptr, left_table_ptr, out_ptr, ranks_ptr, row_map, num_tokens,
                num_experts, local_experts, num_columns, num_rows, own_rank, ONCE, CAME, ACCUMULATOR, BLOCK_T,
                BLOCK_H, UNROLL,
            )  # fmt: skip
