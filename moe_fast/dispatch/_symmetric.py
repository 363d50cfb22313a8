"""Rows straight into other ranks' memory, and back.

Each rank has a slab that all ranks can address. A table holds the address of one region of the slab
on each rank. Row i of the region "rows" is row i of the experts' buffer. A rank's own tokens do not
pass through its slab: they are written to all their rows, and added up from them. With duplicates
removed, only the first of a token's rows on another rank travels; `link` marks it, and chains the
token's other rows:

    link[i] = FIRST · (row i travelled) + (1 + the token's next row here, or 0)       else 0

With regions for scales, rows travel as codes and scales, computed where the token is read.
"""

import triton
import triton.language as tl

from moe_fast.launch._rounding import rounded
from moe_fast.permutation._permute import fill_gaps, find_lists, load_rows, load_slot
from moe_fast.permutation._row_map import RANK, segments_of
from moe_fast.quantization._rows import BLOCK, blocks_of, encode_rows, fill_scales

FIRST = tl.constexpr(1 << 30)
NEXT = tl.constexpr((1 << 30) - 1)


@triton.jit
def at_rank(table_ptr, rank, mask, ELEMENT: tl.constexpr):
    """The addresses of a region on these ranks: multiples of 256 bytes; vectors need 16."""
    return tl.multiple_of(tl.load(table_ptr + rank, mask=mask, other=0).to(tl.pointer_type(ELEMENT)), 16)


@triton.jit
def result_at(table_ptr, own_ptr, own_rank, rank, mask, ELEMENT: tl.constexpr):
    """`at_rank`, and on the own rank the result, which begins at a multiple of 16 bytes too."""
    address = tl.load(table_ptr + rank, mask=mask, other=0)
    address = tl.where(rank == own_rank, own_ptr.to(tl.int64), address)
    return tl.multiple_of(address.to(tl.pointer_type(ELEMENT)), 16)


@triton.jit(do_not_specialize=["own_rank", "num_experts"])
def announce_kernel(count_ptr, counts_table_ptr, own_rank, num_experts, BLOCK_E: tl.constexpr):
    """This rank's counts into its row of all ranks' counts; one program per rank."""
    e = tl.arange(0, BLOCK_E)
    inside = e < num_experts  # the block is a power of two
    counts_ptr = at_rank(counts_table_ptr, tl.program_id(0), True, tl.int32)
    tl.store(counts_ptr + own_rank * num_experts + e, tl.load(count_ptr + e, mask=inside, other=0), mask=inside)


@triton.jit(do_not_specialize=["own_rank", "ranks", "num_experts", "local_experts", "align", "num_rows"])
def slab_layout_kernel(
    counts_ptr,
    # results: this rank's first row for each expert; for its own experts, and for each rank
    start_ptr, tokens_per_expert_ptr, gap_ptr, overflow_ptr,
    # sizes
    own_rank, ranks, num_experts, local_experts, align, num_rows,
    BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Lay out the segments of all ranks' buffers, on every rank alike: all see each overflow."""
    e = tl.arange(0, BLOCK_E)
    inside = e < num_experts  # the block is a power of two
    total = tl.zeros([BLOCK_E], tl.int64)
    before = tl.zeros([BLOCK_E], tl.int64)
    for source in range(ranks):
        count = tl.load(counts_ptr + source * num_experts + e, mask=inside, other=0).to(tl.int64)
        before = tl.where(source < own_rank, before + count, before)
        total += count
    segment = segments_of(total, align)
    holder = e // local_experts
    start = tl.zeros([BLOCK_E], tl.int64)
    for rank in range(ranks):
        here = inside & (holder == rank)
        own_segment = tl.where(here, segment, 0)
        start = tl.where(here, tl.cumsum(own_segment, axis=0) - own_segment, start)
        lost = here & (total > 0) & (start + total > num_rows)
        tl.store(overflow_ptr + rank, tl.max(lost.to(tl.int32), axis=0).to(tl.uint8))
        if rank == own_rank:
            rows = tl.sum(own_segment, axis=0)
            tl.store(gap_ptr + local_experts, rows)
            tl.store(gap_ptr + 2 * local_experts + 1, num_rows)
    tl.store(start_ptr + e, start + before, mask=inside)
    local = inside & (holder == own_rank)
    place = e - own_rank * local_experts
    tl.store(tokens_per_expert_ptr + place, tl.minimum(tl.maximum(num_rows - start, 0), segment), mask=local)
    tl.store(gap_ptr + place, start + total, mask=local)
    tl.store(gap_ptr + local_experts + 1 + place, start + segment, mask=local)


@triton.jit
def push_lists(
    probs_ptr, stride_probs_t, stride_probs_e, start_ptr, probs_table_ptr, row_probs_ptr, link_table_ptr, row_slots_ptr,
    row_map, stride_base_b, stride_base_e, tokens_per_block, block, num_tokens, num_experts, local_experts, num_rows,
    own_rank,
    ONCE: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    """The probs of a block of tokens to all ranks, links to others, and their lists here."""
    t = block.to(tl.int64) * BLOCK_L + tl.arange(0, BLOCK_L)
    lists = find_lists(
        row_map, stride_base_b, stride_base_e, tokens_per_block, t, num_tokens, num_experts, 1 << 62
    )  # dropped by find_row
    last = tl.full([BLOCK_L], -1, tl.int64)
    for j in range(tl.max(lists.num_slots, axis=0)):
        expert, row, live = find_row(row_map, lists, start_ptr, j, num_rows)
        next_expert, next_row, next_live = find_row(row_map, lists, start_ptr, j + 1, num_rows)
        rank = expert // local_experts
        if probs_ptr is not None:
            # live only
            prob = tl.load(probs_ptr + t * stride_probs_t + expert * stride_probs_e, mask=live, other=0)
            to_ptr = result_at(probs_table_ptr, row_probs_ptr, own_rank, rank, live, probs_ptr.dtype.element_ty)
            tl.store(to_ptr + row, prob, mask=live)
        if row_slots_ptr is not None:
            if ONCE:
                follows = next_live & (next_expert // local_experts == rank)
                link = tl.where(rank != last, FIRST, 0) + tl.where(follows, next_row + 1, 0)
            else:
                link = tl.full([BLOCK_L], FIRST, tl.int64)
            away = live & (rank != own_rank)  # own rows have no links
            tl.store(at_rank(link_table_ptr, rank, away, tl.int32) + row, link.to(tl.int32), mask=away)
            # dropped rows too
            tl.store(row_slots_ptr + t * num_experts + j, (row << RANK) | expert, mask=j < lists.num_slots)
        last = tl.where(live, rank, last)


@triton.jit(
    do_not_specialize=[
        *("num_tokens", "num_experts", "local_experts", "num_rows", "stride_probs_t", "stride_probs_e", "epsilon"),
        *("infinity", "stride_base_b", "stride_base_e", "tokens_per_block", "own_rank"),
    ]
)
def push_kernel(
    # tokens, as bits unless they are quantised, and probs, as bits
    tokens_ptr, stride_tokens_t, stride_tokens_h, probs_ptr, stride_probs_t, stride_probs_e,
    start_ptr,  # each expert's offset of rows, or none
    # regions of all ranks; links, and the lists of rows, only where the lists hold ranks
    rows_table_ptr, scales_table_ptr, probs_table_ptr, link_table_ptr, row_slots_ptr,
    # this rank's results, contiguous but for scales
    rows_ptr, scale_ptr, stride_scale_m, stride_scale_n, row_probs_ptr,
    row_map, stride_base_b, stride_base_e, tokens_per_block,
    # sizes
    num_tokens, num_experts, local_experts, num_columns, num_rows, own_rank,
    # numbers, as bits of a float64
    epsilon, infinity,
    POWER_OF_TWO: tl.constexpr, HARDWARE: tl.constexpr,
    ONCE: tl.constexpr,  # a token's first row on each other rank alone
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    """Read each token once, write it to its rows on all ranks: on this one into the results, on
    others into the slabs; first probs, links and lists.
    """
    columns = tl.maximum(tl.cdiv(num_columns, BLOCK_H), 1)
    column = tl.program_id(0) % columns
    block = tl.program_id(0) // columns
    list_blocks = tl.cdiv(num_tokens, BLOCK_L)
    if block < list_blocks:
        if column == 0:
            push_lists(
                probs_ptr, stride_probs_t, stride_probs_e, start_ptr, probs_table_ptr, row_probs_ptr, link_table_ptr,
                row_slots_ptr, row_map, stride_base_b, stride_base_e, tokens_per_block, block, num_tokens, num_experts,
                local_experts, num_rows, own_rank, ONCE, BLOCK_L,
            )  # fmt: skip
    else:
        t = (block - list_blocks).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
        h = column.to(tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H)
        in_row = (h < num_columns)[None, :]  # the last block sticks out
        inside = (t < num_tokens)[:, None] & in_row  # and so does the last tile
        token = tl.load(tokens_ptr + t[:, None] * stride_tokens_t + h[None, :] * stride_tokens_h, mask=inside, other=0)
        if scales_table_ptr is not None:
            sent_as, stored = encode_rows(token, epsilon, infinity, POWER_OF_TWO, HARDWARE)
            b, in_blocks = blocks_of(column, num_columns, BLOCK_H)
        else:
            sent_as = token
        lists = find_lists(
            row_map, stride_base_b, stride_base_e, tokens_per_block, t, num_tokens, num_experts, 1 << 62
        )  # dropped by find_row
        last = tl.full([BLOCK_T], -1, tl.int64)
        for j in range(tl.max(lists.num_slots, axis=0)):
            expert, row, live = find_row(row_map, lists, start_ptr, j, num_rows)
            rank = expert // local_experts
            sent = live & ((rank != last) | (rank == own_rank)) if ONCE else live
            to_ptr = result_at(rows_table_ptr, rows_ptr, own_rank, rank, sent, sent_as.dtype)
            # others are not written
            tl.store(to_ptr[:, None] + row[:, None] * num_columns + h[None, :], sent_as, mask=sent[:, None] & in_row)
            if scales_table_ptr is not None:
                to_ptr = result_at(scales_table_ptr, scale_ptr, own_rank, rank, sent, tl.float32)
                place = place_scales(row, b, num_columns, rank == own_rank, stride_scale_m, stride_scale_n)
                tl.store(to_ptr[:, None] + place, stored, mask=sent[:, None] & in_blocks[None, :])  # as above
            last = tl.where(live, rank, last)


@triton.jit
def place_scales(row, b, num_columns, own, stride_scale_m, stride_scale_n):
    """Where these rows' scales of blocks b are: on another rank a row's are together."""
    stride_m = tl.where(own, stride_scale_m, tl.cdiv(num_columns, BLOCK))
    stride_n = tl.where(own, stride_scale_n, 1)
    return row[:, None] * stride_m[:, None] + b[None, :] * stride_n[:, None]


@triton.jit
def find_row(row_map, lists, start_ptr, j, num_rows):
    """(expert, row, live) of each token's slot j, with the expert's start added to the row."""
    expert, row, live = load_slot(row_map, lists, j)
    if start_ptr is not None:
        row += tl.load(start_ptr + expert, mask=live, other=0)  # the list's end was never written
    return expert, row, live & (row < num_rows)  # rows past the buffer are dropped


@triton.jit(do_not_specialize=["tail_lanes", "local_experts", "num_rows", "epsilon", "infinity"])
def spread_kernel(
    # what has arrived in the slab, as bits
    arrived_ptr, arrived_scales_ptr, arrived_probs_ptr, link_ptr,
    # results, contiguous but for scales
    rows_ptr, scale_ptr, stride_scale_m, stride_scale_n, row_probs_ptr, kept_link_ptr,
    # rows without a token
    gap_ptr,
    # sizes
    tail_lanes, local_experts, num_columns, num_rows,
    # numbers, as bits of a float64
    epsilon, infinity,
    POWER_OF_TWO: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Each row that has travelled is copied to all rows of its token, by one program. The last
    programs write zeros into the padding and past the segments; scales past the segments are not
    written.
    """
    columns = tl.maximum(tl.cdiv(num_columns, BLOCK_H), 1)
    row = tl.program_id(0).to(tl.int64)
    if row < num_rows:
        link = tl.load(link_ptr + row)
        if kept_link_ptr is not None:
            tl.store(kept_link_ptr + row, link)
        if link >= FIRST:
            for column in range(columns):
                h = tl.cast(column, tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H)
                in_row = h < num_columns  # the last block sticks out
                tile = tl.load(arrived_ptr + row * num_columns + h, mask=in_row, other=0)
                if scale_ptr is not None:
                    b, in_blocks = blocks_of(column, num_columns, BLOCK_H)
                    scales_row_ptr = arrived_scales_ptr + row * tl.cdiv(num_columns, BLOCK)
                    stored = tl.load(scales_row_ptr + b, mask=in_blocks, other=0.0)
                place = row
                while place >= 0:
                    tl.store(rows_ptr + place * num_columns + h, tile, mask=in_row)
                    if scale_ptr is not None:
                        tl.store(scale_ptr + place * stride_scale_m + b * stride_scale_n, stored, mask=in_blocks)
                    if column == 0 and row_probs_ptr is not None:
                        tl.store(row_probs_ptr + place, tl.load(arrived_probs_ptr + place))
                    place = (tl.load(link_ptr + place) & NEXT).to(tl.int64) - 1
    else:
        lane = (row - num_rows) // columns
        column = (row - num_rows) % columns
        fill_gaps(
            rows_ptr, row_probs_ptr, gap_ptr, lane, column, tail_lanes, local_experts, num_columns, num_rows, 1,
            BLOCK_R, BLOCK_H,
        )  # fmt: skip
        if scale_ptr is not None:
            fill_scales(
                scale_ptr, stride_scale_m, stride_scale_n, gap_ptr, lane, column, local_experts, num_columns, num_rows,
                epsilon, infinity, POWER_OF_TWO, BLOCK_R, BLOCK_H,
            )  # fmt: skip


@triton.jit(do_not_specialize=["stride_rows_p", "num_rows"])
def gather_kernel(
    # rows, and their probs as bits
    rows_ptr, stride_rows_p, stride_rows_h, probs_ptr, stride_probs, link_ptr,
    # regions of this rank's slab
    sums_ptr, sum_probs_ptr,
    # sizes
    num_columns, num_rows,
    ACCUMULATOR: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Add the rows here of each token that came, in order, into the place of the first; publish
    their probs.
    """
    row = tl.program_id(0).to(tl.int64)
    if tl.load(link_ptr + row) >= FIRST:
        for column in range(tl.maximum(tl.cdiv(num_columns, BLOCK_H), 1)):
            h = tl.cast(column, tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H)
            in_row = h < num_columns  # the last block sticks out
            total = tl.zeros([BLOCK_H], ACCUMULATOR)
            place = row
            while place >= 0:
                if rows_ptr is not None:
                    total += tl.load(rows_ptr + place * stride_rows_p + h * stride_rows_h, mask=in_row, other=0.0).to(
                        ACCUMULATOR
                    )
                if column == 0 and probs_ptr is not None:
                    tl.store(sum_probs_ptr + place, tl.load(probs_ptr + place * stride_probs))
                place = (tl.load(link_ptr + place) & NEXT).to(tl.int64) - 1
            if rows_ptr is not None:
                tl.store(sums_ptr + row * num_columns + h, rounded(total, sums_ptr.dtype.element_ty), mask=in_row)


@triton.jit(do_not_specialize=["stride_rows_p", "num_tokens", "num_experts", "local_experts", "num_rows", "own_rank"])
def pull_kernel(
    # regions of all ranks
    sums_table_ptr, probs_table_ptr,
    # this rank's rows, and their probs as bits
    rows_ptr, stride_rows_p, stride_rows_h, probs_ptr, stride_probs,
    # results, contiguous; either may be left out
    out_ptr, out_probs_ptr,
    row_map,  # of rows
    # sizes
    num_tokens, num_experts, local_experts, num_columns, num_rows, own_rank,
    ONCE: tl.constexpr, ACCUMULATOR: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_L: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """out[t] = Σ over ranks, ascending, of t's sums there, each rounded before it is added: this
    rank's are of its rows. out_probs[t, e] is the prob of its row, 0 without one.
    """
    columns = tl.maximum(tl.cdiv(num_columns, BLOCK_H), 1)
    column = tl.program_id(0) % columns
    block = tl.program_id(0) // columns
    list_blocks = tl.cdiv(num_tokens, BLOCK_L) if out_probs_ptr is not None else 0
    if block < list_blocks:
        if column == 0 and out_probs_ptr is not None:
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
    elif out_ptr is not None:
        t = (block - list_blocks).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
        h = column.to(tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H)
        in_row = (h < num_columns)[None, :]  # the last block sticks out
        lists = find_lists(row_map, 0, 0, 1, t, num_tokens, num_experts, num_rows)
        total = tl.zeros([BLOCK_T, BLOCK_H], ACCUMULATOR)
        part = tl.zeros([BLOCK_T, BLOCK_H], ACCUMULATOR)
        last = tl.full([BLOCK_T], -1, tl.int64)
        for first in range(0, tl.max(lists.num_slots, axis=0), UNROLL):
            for j in tl.static_range(UNROLL):  # their loads are on their way together
                expert, row, live = load_slot(row_map, lists, first + j)
                rank = expert // local_experts
                new = live & (rank != last)
                own = live & (rank == own_rank)
                away = (new if ONCE else live) & (rank != own_rank)
                sums_ptr = at_rank(sums_table_ptr, rank, away, out_ptr.dtype.element_ty)
                value = tl.load(
                    sums_ptr[:, None] + row[:, None] * num_columns + h[None, :], mask=away[:, None] & in_row, other=0.0
                )
                here = load_rows(rows_ptr, stride_rows_p, stride_rows_h, row, h, own, in_row)
                value = tl.where(own[:, None], here, value).to(ACCUMULATOR)
                total = tl.where(new[:, None], total + rounded(part, out_ptr.dtype.element_ty).to(ACCUMULATOR), total)
                part = tl.where(new[:, None], value, part + value)
                last = tl.where(live, rank, last)
        total += rounded(part, out_ptr.dtype.element_ty).to(ACCUMULATOR)
        inside = (t < num_tokens)[:, None] & in_row  # the last tile sticks out
        tl.store(out_ptr + t[:, None] * num_columns + h[None, :], rounded(total, out_ptr.dtype.element_ty), mask=inside)
