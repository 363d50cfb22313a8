"""Kernels that write rows straight into the memory of other ranks; those of `_symmetric_sums` bring
them back.

Each rank has a slab that all ranks can address. A table holds the address of one region of the slab
on each rank. Row i of the region "rows" is row i of the experts' buffer. A rank's own tokens do not
pass through its slab: they are written to all their rows directly, and added up from them. If
duplicates are removed, only the first of a token's rows on another rank travels; `link` marks it,
and chains the token's other rows:

    link[i] = FIRST · (row i travelled) + (1 + the token's next row here, or 0)       else 0
    home[i] = where row i came from: slot << RANK | rank

The sum of such a token's rows travels to its slot on the rank that it came from, if that rank has
so many slots.

If there are regions for scales, rows travel as codes and scales, which are computed where the token
is read.

With SHARED the kernels over tokens and rows divide their pieces of work among any number of
programs.
"""

import triton
import triton.language as tl

from moe_fast.permutation._permute import fill_gaps, find_lists, load_slot
from moe_fast.permutation._row_map import RANK, segments_of
from moe_fast.quantization._rows import BLOCK, blocks_of, encode_rows, fill_scales

FIRST = tl.constexpr(1 << 30)
NEXT = tl.constexpr((1 << 30) - 1)
FIRST_SLOT = tl.constexpr(1 << 16)  # above a token's number of own rows
NO_SLOT = tl.constexpr(1 << 40)  # past all rows


@triton.jit
def at_rank(table_ptr, rank, mask, ELEMENT: tl.constexpr):
    """The addresses of a region on these ranks. They are multiples of 256 bytes; vectors need
    multiples of 16.
    """
    return tl.multiple_of(tl.load(table_ptr + rank, mask=mask, other=0).to(tl.pointer_type(ELEMENT)), 16)


@triton.jit
def turns_of(pieces):
    """How many of `pieces` pieces of work this program does."""
    return tl.cdiv(pieces - tl.program_id(0), tl.num_programs(0))


@triton.jit
def here_or_there(here, here_ptr, table_ptr, rank, mask, ELEMENT: tl.constexpr):
    """`here_ptr` where `here` is true, else the address of the region on that rank, as `at_rank`.
    Both are multiples of 16 bytes.
    """
    address = tl.load(table_ptr + rank, mask=mask, other=0)
    address = tl.where(here, here_ptr.to(tl.int64), address)
    return tl.multiple_of(address.to(tl.pointer_type(ELEMENT)), 16)


@triton.jit(do_not_specialize=["own_rank", "num_experts"])
def announce_kernel(count_ptr, counts_table_ptr, own_rank, num_experts, BLOCK_E: tl.constexpr):
    """Write this rank's counts, [E] int32, into its row of the table of all ranks' counts; program
    r writes to rank r.
    """
    e = tl.arange(0, BLOCK_E)
    in_bounds = e < num_experts  # the block is a power of two
    counts_ptr = at_rank(counts_table_ptr, tl.program_id(0), True, tl.int32)
    tl.store(counts_ptr + own_rank * num_experts + e, tl.load(count_ptr + e, mask=in_bounds, other=0), mask=in_bounds)


@triton.jit(do_not_specialize=["own_rank", "ranks", "num_experts", "local_experts", "align", "num_rows"])
def slab_layout_kernel(
    counts_ptr,
    # results: this rank's first row for each expert; for its own experts, and for each rank
    start_ptr, tokens_per_expert_ptr, gap_ptr, overflow_ptr,
    # sizes
    own_rank, ranks, num_experts, local_experts, align, num_rows,
    BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Lay out the segments of all ranks' buffers. The grid is one program. Every rank computes the
    layout of every other rank, so that all ranks know each overflow.
    """
    e = tl.arange(0, BLOCK_E)
    in_bounds = e < num_experts  # the block is a power of two
    total = tl.zeros([BLOCK_E], tl.int64)
    earlier_rows = tl.zeros([BLOCK_E], tl.int64)
    for source in range(ranks):
        count = tl.load(counts_ptr + source * num_experts + e, mask=in_bounds, other=0).to(tl.int64)
        earlier_rows = tl.where(source < own_rank, earlier_rows + count, earlier_rows)
        total += count
    segment = segments_of(total, align)
    holder = e // local_experts
    start = tl.zeros([BLOCK_E], tl.int64)
    for rank in range(ranks):
        here = in_bounds & (holder == rank)
        own_segment = tl.where(here, segment, 0)
        start = tl.where(here, tl.cumsum(own_segment, axis=0) - own_segment, start)
        lost = here & (total > 0) & (start + total > num_rows)
        tl.store(overflow_ptr + rank, tl.max(lost.to(tl.int32), axis=0).to(tl.uint8))
        if rank == own_rank:
            rows = tl.sum(own_segment, axis=0)
            tl.store(gap_ptr + local_experts, rows)
            tl.store(gap_ptr + 2 * local_experts + 1, num_rows)
    tl.store(start_ptr + e, start + earlier_rows, mask=in_bounds)
    local = in_bounds & (holder == own_rank)
    local_expert = e - own_rank * local_experts
    tl.store(tokens_per_expert_ptr + local_expert, tl.minimum(tl.maximum(num_rows - start, 0), segment), mask=local)
    tl.store(gap_ptr + local_expert, start + total, mask=local)
    tl.store(gap_ptr + local_experts + 1 + local_expert, start + segment, mask=local)


@triton.jit
def push_lists(
    probs_ptr, stride_probs_t, stride_probs_e, start_ptr, probs_table_ptr, row_probs_ptr, link_table_ptr,
    home_table_ptr, row_slots_ptr, local_rows_ptr, ranks_ptr, row_map, stride_base_b, stride_base_e, tokens_per_block,
    block, num_tokens, num_experts, local_experts, num_rows, own_rank,
    ONCE: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    """For a block of tokens, write the probs to all ranks, the links to the other ranks, and the
    lists of rows here.
    """
    t = block.to(tl.int64) * BLOCK_L + tl.arange(0, BLOCK_L)
    lists = find_lists(
        row_map, stride_base_b, stride_base_e, tokens_per_block, t, num_tokens, num_experts, 1 << 62
    )  # dropped by find_row
    last = tl.full([BLOCK_L], -1, tl.int64)
    local_rows = tl.zeros([BLOCK_L], tl.int64)
    rank_bits = tl.zeros([BLOCK_L], tl.int64)
    for j in range(tl.max(lists.num_slots, axis=0)):
        expert, row, live = find_row(row_map, lists, start_ptr, j, num_rows)
        next_expert, next_row, next_live = find_row(row_map, lists, start_ptr, j + 1, num_rows)
        rank = expert // local_experts
        if probs_ptr is not None:
            # of live slots only
            prob = tl.load(probs_ptr + t * stride_probs_t + expert * stride_probs_e, mask=live, other=0)
            element = probs_ptr.dtype.element_ty
            to_ptr = here_or_there(rank == own_rank, row_probs_ptr, probs_table_ptr, rank, live, element)
            tl.store(to_ptr + row, prob, mask=live)
        if row_slots_ptr is not None:
            if ONCE:
                follows = next_live & (next_expert // local_experts == rank)
                link = tl.where(rank != last, FIRST, 0) + tl.where(follows, next_row + 1, 0)
            else:
                link = tl.full([BLOCK_L], FIRST, tl.int64)
            away = live & (rank != own_rank)  # own rows have no links
            tl.store(at_rank(link_table_ptr, rank, away, tl.int32) + row, link.to(tl.int32), mask=away)
            home = (slot_of(t, rank, own_rank, num_experts // local_experts, ONCE) << RANK) | own_rank
            tl.store(at_rank(home_table_ptr, rank, away, tl.int64) + row, home, mask=away)
            # also of dropped rows
            tl.store(row_slots_ptr + t * num_experts + j, (row << RANK) | expert, mask=j < lists.num_slots)
            local_rows += tl.where(
                live & (rank == own_rank), tl.where(local_rows == 0, tl.cast(j, tl.int64) * FIRST_SLOT + 1, 1), 0
            )
            rank_bits |= tl.where(live, tl.zeros_like(rank) + 1 << (rank & 63), 0)
        last = tl.where(live, rank, last)
    if row_slots_ptr is not None:
        tl.store(local_rows_ptr + t, local_rows.to(tl.int32), mask=t < num_tokens)  # the last block sticks out
        tl.store(ranks_ptr + t, rank_bits, mask=t < num_tokens)  # as above


@triton.jit
def push_rows(
    tokens_ptr, stride_tokens_t, stride_tokens_h, start_ptr, rows_table_ptr, scales_table_ptr, rows_ptr, scale_ptr,
    stride_scale_m, stride_scale_n, row_map, stride_base_b, stride_base_e, tokens_per_block, block, column,
    num_tokens, num_experts, local_experts, num_columns, num_rows, own_rank, epsilon, infinity,
    POWER_OF_TWO: tl.constexpr, HARDWARE: tl.constexpr, ONCE: tl.constexpr, EARLY: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Read a tile of tokens once, and write it to its rows on all ranks."""
    t = block.to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    h = column.to(tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H)
    in_row = (h < num_columns)[None, :]  # the last block sticks out
    in_bounds = (t < num_tokens)[:, None] & in_row  # and so does the last tile
    token = tl.load(tokens_ptr + t[:, None] * stride_tokens_t + h[None, :] * stride_tokens_h, mask=in_bounds, other=0)
    if scales_table_ptr is not None:
        sent_as, stored = encode_rows(token, epsilon, infinity, POWER_OF_TWO, HARDWARE)
        b, in_blocks = blocks_of(column, num_columns, BLOCK_H)
    else:
        sent_as = token
    per_block = tokens_per_block
    lists = find_lists(row_map, stride_base_b, stride_base_e, per_block, t, num_tokens, num_experts, 1 << 62)
    last = tl.full([BLOCK_T], -1, tl.int64)
    for j in range(tl.max(lists.num_slots, axis=0)):
        expert, row, live = find_row(row_map, lists, start_ptr, j, num_rows)
        rank = expert // local_experts
        is_written = live & is_sent(t, rank, last, own_rank, num_experts // local_experts, num_rows, ONCE, EARLY)
        to_ptr = here_or_there(rank == own_rank, rows_ptr, rows_table_ptr, rank, is_written, sent_as.dtype)
        # other rows are not written
        tl.store(to_ptr[:, None] + row[:, None] * num_columns + h[None, :], sent_as, mask=is_written[:, None] & in_row)
        if scales_table_ptr is not None:
            to_ptr = here_or_there(rank == own_rank, scale_ptr, scales_table_ptr, rank, is_written, tl.float32)
            scale_offset = place_scales(row, b, num_columns, rank == own_rank, stride_scale_m, stride_scale_n)
            tl.store(to_ptr[:, None] + scale_offset, stored, mask=is_written[:, None] & in_blocks[None, :])  # as above
        last = tl.where(live, rank, last)


@triton.jit(
    do_not_specialize=[
        *("num_tokens", "num_experts", "local_experts", "num_rows", "stride_probs_t", "stride_probs_e", "epsilon"),
        *("infinity", "stride_base_b", "stride_base_e", "tokens_per_block", "own_rank", "tail_lanes", "pieces"),
    ]
)
def push_kernel(
    # tokens, as bits unless they are quantised, and probs, as bits
    tokens_ptr, stride_tokens_t, stride_tokens_h, probs_ptr, stride_probs_t, stride_probs_e,
    start_ptr,  # each expert's offset of rows, or none
    # regions of all ranks; links, homes, and the lists of rows, only where the lists hold ranks
    rows_table_ptr, scales_table_ptr, probs_table_ptr, link_table_ptr, home_table_ptr, row_slots_ptr,
    # with the lists, see `steps.Handle`
    local_rows_ptr, ranks_ptr,
    # this rank's results, contiguous but for scales
    rows_ptr, scale_ptr, stride_scale_m, stride_scale_n, row_probs_ptr,
    row_map, stride_base_b, stride_base_e, tokens_per_block,
    # this rank's rows without a token
    gap_ptr, tail_lanes,
    # sizes
    pieces, num_tokens, num_experts, local_experts, num_columns, num_rows, own_rank,
    # numbers, as bits of a float64
    epsilon, infinity,
    POWER_OF_TWO: tl.constexpr, HARDWARE: tl.constexpr, SHARED: tl.constexpr,
    ONCE: tl.constexpr,  # a token's first row on each other rank alone
    EARLY: tl.constexpr,  # tokens with a slot have travelled
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Read each token once, and write it to its rows on all ranks: on this rank into the results,
    on the others into their slabs. The first programs write zeros where this rank has no token, the
    next ones probs, links and lists, and the others one tile of tokens each.
    """
    columns = tl.maximum(tl.cdiv(num_columns, BLOCK_H), 1)
    lanes = local_experts + tail_lanes
    list_blocks = tl.cdiv(num_tokens, BLOCK_L) + lanes
    for turn in range(turns_of(pieces) if SHARED else 1):
        work = tl.program_id(0) + turn * tl.num_programs(0)
        column, block = work % columns, work // columns
        if block < lanes:
            fill(
                rows_ptr, scale_ptr, stride_scale_m, stride_scale_n, row_probs_ptr, gap_ptr, block.to(tl.int64),
                column, tail_lanes, local_experts, num_columns, num_rows, epsilon, infinity, POWER_OF_TWO, BLOCK_H,
                BLOCK_R,
            )  # fmt: skip
        elif block < list_blocks:
            if column == 0:
                push_lists(
                    probs_ptr, stride_probs_t, stride_probs_e, start_ptr, probs_table_ptr, row_probs_ptr,
                    link_table_ptr, home_table_ptr, row_slots_ptr, local_rows_ptr, ranks_ptr, row_map, stride_base_b,
                    stride_base_e, tokens_per_block, block - lanes, num_tokens, num_experts, local_experts, num_rows,
                    own_rank, ONCE, BLOCK_L,
                )  # fmt: skip
        else:
            push_rows(
                tokens_ptr, stride_tokens_t, stride_tokens_h, start_ptr, rows_table_ptr, scales_table_ptr, rows_ptr,
                scale_ptr, stride_scale_m, stride_scale_n, row_map, stride_base_b, stride_base_e, tokens_per_block,
                block - list_blocks, column, num_tokens, num_experts, local_experts, num_columns, num_rows, own_rank,
                epsilon, infinity, POWER_OF_TWO, HARDWARE, ONCE, EARLY, BLOCK_T, BLOCK_H,
            )  # fmt: skip


@triton.jit
def fill(
    rows_ptr, scale_ptr, stride_scale_m, stride_scale_n, row_probs_ptr, gap_ptr, lane, column, tail_lanes,
    local_experts, num_columns, num_rows, epsilon, infinity,
    POWER_OF_TWO: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Write zeros into the padding and, if there are lanes for it, past the segments; no scale is
    written there.
    """
    fill_gaps(
        rows_ptr, row_probs_ptr, gap_ptr, lane, column, tl.maximum(tail_lanes, 1), local_experts, num_columns,
        num_rows, 1, BLOCK_R, BLOCK_H,
    )  # fmt: skip
    if scale_ptr is not None:
        fill_scales(
            scale_ptr, stride_scale_m, stride_scale_n, gap_ptr, lane, column, local_experts, num_columns, num_rows,
            epsilon, infinity, POWER_OF_TWO, BLOCK_R, BLOCK_H,
        )  # fmt: skip


@triton.jit
def is_sent(t, rank, last, own_rank, ranks, num_rows, ONCE: tl.constexpr, EARLY: tl.constexpr):
    """Whether a slot's row is written: always on this rank; on another rank only the token's first
    row there (ONCE), unless the token has travelled before its routing was known (EARLY).
    """
    is_written = rank >= 0
    if ONCE:
        is_written = (rank != last) | (rank == own_rank)
    if EARLY:
        is_written = is_written & ((rank == own_rank) | (slot_of(t, rank, own_rank, ranks, ONCE) >= num_rows))
    return is_written


@triton.jit
def slot_of(t, rank, source, ranks, ONCE: tl.constexpr):
    """The slot in which rank `source` gets the sum of its token t's rows on `rank`. Rows that are
    not added up have no slot.
    """
    return t * (ranks - 1) + rank - (rank > source).to(tl.int64) if ONCE else t * 0 + NO_SLOT


@triton.jit
def place_scales(row, b, num_columns, is_local, stride_scale_m, stride_scale_n):
    """The offsets of the scales of blocks b of these rows. On another rank the scales of one row
    lie together.
    """
    stride_m = tl.where(is_local, stride_scale_m, tl.cdiv(num_columns, BLOCK))
    stride_n = tl.where(is_local, stride_scale_n, 1)
    return row[:, None] * stride_m[:, None] + b[None, :] * stride_n[:, None]


@triton.jit
def find_row(row_map, lists, start_ptr, j, num_rows):
    """(expert, row, live) of each token's slot j, with the expert's start added to the row."""
    expert, row, live = load_slot(row_map, lists, j)
    if start_ptr is not None:
        row += tl.load(start_ptr + expert, mask=live, other=0)  # the list's end was never written
    return expert, row, live & (row < num_rows)  # rows past the buffer are dropped


@triton.jit
def spread_row(
    row, arrived_ptr, early_ptr, arrived_scales_ptr, arrived_probs_ptr, link_ptr, home_ptr, rows_ptr, scale_ptr,
    stride_scale_m, stride_scale_n, row_probs_ptr, num_columns, num_rows,
    BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Copy a row that has travelled to all rows of its token."""
    if row_probs_ptr is not None:
        token_row = row
        while token_row >= 0:
            tl.store(row_probs_ptr + token_row, tl.load(arrived_probs_ptr + token_row))
            token_row = (tl.load(link_ptr + token_row) & NEXT).to(tl.int64) - 1
    from_ptr = arrived_ptr + row * num_columns
    if early_ptr is not None:
        slot = tl.load(home_ptr + row) >> RANK
        if slot < num_rows:
            from_ptr = early_ptr + slot * num_columns
    for column in range(tl.cdiv(num_columns, BLOCK_H)):
        h = tl.cast(column, tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H)
        in_row = h < num_columns  # the last block sticks out
        tile = tl.load(from_ptr + h, mask=in_row, other=0)
        if scale_ptr is not None:
            b, in_blocks = blocks_of(column, num_columns, BLOCK_H)
            stored = tl.load(arrived_scales_ptr + row * tl.cdiv(num_columns, BLOCK) + b, mask=in_blocks, other=0.0)
        token_row = row
        while token_row >= 0:
            tl.store(rows_ptr + token_row * num_columns + h, tile, mask=in_row)
            if scale_ptr is not None:
                tl.store(scale_ptr + token_row * stride_scale_m + b * stride_scale_n, stored, mask=in_blocks)
            token_row = (tl.load(link_ptr + token_row) & NEXT).to(tl.int64) - 1


@triton.jit(do_not_specialize=["pieces", "num_rows"])
def spread_kernel(
    # what has arrived in the slab, as bits: with the routing, and before
    arrived_ptr, early_ptr, arrived_scales_ptr, arrived_probs_ptr, link_ptr, home_ptr,
    # results, contiguous but for scales
    rows_ptr, scale_ptr, stride_scale_m, stride_scale_n, row_probs_ptr, kept_link_ptr, kept_home_ptr,
    # sizes
    pieces, num_columns, num_rows,
    SHARED: tl.constexpr, BLOCK_H: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Copy each row that has travelled to all rows of its token on this rank. A piece of work is
    GROUP rows.
    """
    for i in range(turns_of(pieces) * GROUP if SHARED else GROUP):
        piece = tl.program_id(0) + tl.cast(i // GROUP, tl.int64) * tl.num_programs(0)
        row = piece * GROUP + i % GROUP
        in_bounds = row < num_rows  # the last group sticks out
        link = tl.load(link_ptr + row, mask=in_bounds, other=0)
        if kept_link_ptr is not None:
            tl.store(kept_link_ptr + row, link, mask=in_bounds)
            tl.store(kept_home_ptr + row, tl.load(home_ptr + row, mask=in_bounds, other=0), mask=in_bounds)
        if link >= FIRST:
            spread_row(
                row, arrived_ptr, early_ptr, arrived_scales_ptr, arrived_probs_ptr, link_ptr, home_ptr, rows_ptr,
                scale_ptr, stride_scale_m, stride_scale_n, row_probs_ptr, num_columns, num_rows, BLOCK_H,
            )  # fmt: skip
