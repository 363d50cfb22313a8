"""Kernels that find the row of each routed token, by one walk over the routing map.

A program takes a block of tokens. It counts the routed tokens of each expert, and lists each
token's experts in ascending order, with the token's rank among the block's tokens of that expert. A
second launch turns the counts of all blocks into `base`, and the row of a token is

    row = base[block of the token, expert] + rank

It is a second launch, because otherwise the last program of the walk would do the work of all
experts alone, and the counter by which it knows that it is the last would need a launch to be
zeroed.
"""

import triton
import triton.language as tl

from moe_fast.launch._tiles import put_tiles

RANK = tl.constexpr(16)  # bits of a slot that hold the expert; the rank is above them
EXPERT = tl.constexpr(0xFFFF)


@triton.jit
def load_routed(map_ptr, stride_map_t, stride_map_e, t, e, num_tokens, num_experts):
    """[BLOCK_T, BLOCK_E] booleans: a non-zero entry of the map means routed."""
    in_bounds = (t < num_tokens)[:, None] & (e < num_experts)[None, :]  # the last tiles stick out on both sides
    return tl.load(map_ptr + t[:, None] * stride_map_t + e[None, :] * stride_map_e, mask=in_bounds, other=0) != 0


@triton.jit
def put_slots(slots_ptr, t, e, chosen, position, rank, num_experts):
    """Write the chosen experts at their positions in the token's list, with the rank in the bits
    from `RANK` on.
    """
    slot = (rank.to(slots_ptr.dtype.element_ty) << RANK) | e[None, :].to(slots_ptr.dtype.element_ty)
    tl.store(slots_ptr + (t * num_experts)[:, None] + position, slot, mask=chosen)  # only chosen experts have a slot


@triton.jit
def load_words(map_ptr, stride_map_t, stride_map_e, t, w, num_tokens, num_words, PACK: tl.constexpr):
    """[BLOCK_T, BLOCK_W] int32: for each expert 1 if it is routed; or for four experts a word with
    one byte each.
    """
    in_bounds = (t < num_tokens)[:, None] & (w < num_words)[None, :]  # the last tiles stick out on both sides
    words = tl.load(map_ptr + t[:, None] * stride_map_t + w[None, :] * stride_map_e, mask=in_bounds, other=0)
    if PACK == 1:
        words = (words != 0).to(tl.int32)
    return words


@triton.jit
def field(words, i: tl.constexpr, PACK: tl.constexpr):
    """Byte i of a word of four experts; the whole word if it is one expert's."""
    if PACK == 1:
        return words
    return (words >> (8 * i)) & 0xFF


# a stride of 1 would cost a change of layout at each list
@triton.jit(do_not_specialize=["stride_map_t", "stride_map_e", "num_tokens", "num_experts", "tiles"])
def routing_walk_kernel(
    # the map, or words of four experts of it
    map_ptr, stride_map_t, stride_map_e,
    # for each token
    slots_ptr, num_slots_ptr,
    # for each block of tokens
    block_count_ptr,
    # sizes
    num_tokens, num_experts, tiles,
    PACK: tl.constexpr,  # 4: a block has fewer than 256 tokens, so that no byte of a sum overflows
    BLOCK_T: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Count each expert's routed tokens in a block of tokens, one block per program; with
    `slots_ptr` also list each token's experts.

    A row of the tile walks over consecutive tokens, and its count so far is their rank. The rows of
    the tile are added up once for the block. The lists read the map a second time, from the cache.
    """
    b = tl.program_id(0).to(tl.int64)
    w = tl.arange(0, BLOCK_W).to(tl.int64)
    num_words = num_experts // PACK
    t = (b * BLOCK_T + tl.arange(0, BLOCK_T)) * tiles
    count = tl.zeros([BLOCK_T, BLOCK_W], tl.int32)
    for i in range(tiles):
        count += load_words(map_ptr, stride_map_t, stride_map_e, t + i, w, num_tokens, num_words, PACK)
    of_block = tl.sum(count, axis=0)
    for k in tl.static_range(PACK):
        cell = (w * PACK + k) * tl.num_programs(0) + b
        tl.store(
            block_count_ptr + cell, field(of_block, k, PACK).to(block_count_ptr.dtype.element_ty), mask=w < num_words
        )  # a power of two
    if slots_ptr is not None:
        rank = tl.cumsum(count, axis=0) - count
        for i in range(tiles):
            words = load_words(map_ptr, stride_map_t, stride_map_e, t + i, w, num_tokens, num_words, PACK)
            up_to = words if PACK == 1 else words * 0x01010101  # byte k: the number of routed experts in bytes 0 … k
            ones = field(up_to, PACK - 1, PACK)
            position = tl.cumsum(ones, axis=1) - ones
            for k in tl.static_range(PACK):
                routed_ones = field(words, k, PACK)
                put_slots(
                    slots_ptr, t + i, w * PACK + k, routed_ones != 0, position + field(up_to, k, PACK) - routed_ones,
                    field(rank, k, PACK), num_experts,
                )  # fmt: skip
            tl.store(num_slots_ptr + t + i, tl.sum(ones, axis=1), mask=t + i < num_tokens)  # the last tile sticks out
            rank += words


@triton.jit
def load_counts(block_count_ptr, e, end, block, num_blocks):
    """[experts, blocks] int32: the number of tokens of each expert in each block, and 0 from expert
    `end` on.
    """
    in_bounds = (e < end)[:, None] & (block < num_blocks)[None, :]  # the last tile sticks out on both sides
    return tl.load(block_count_ptr + e[:, None] * num_blocks + block[None, :], mask=in_bounds, other=0).to(tl.int32)


@triton.jit
def segments_of(count, align):
    """How many rows each expert has, with padding."""
    return (count.to(tl.int64) + align - 1) // align * align


@triton.jit
def rows_in_buffer(segment, start, num_rows):
    """How many rows of each segment lie within a buffer of `num_rows` rows."""
    return tl.minimum(tl.maximum(num_rows - start, 0), segment)


@triton.jit
def count_before(
    block_count_ptr, first_expert, block, num_blocks, align, num_rows, TILE_ROWS: tl.constexpr, BLOCK_E: tl.constexpr
):
    """(tokens, rows, tiles) of the experts before the first one of a program; tiles only with
    TILE_ROWS.
    """
    tokens, rows, tiles = tl.zeros([1], tl.int64), tl.zeros([1], tl.int64), tl.zeros([1], tl.int64)
    for first in range(0, first_expert, BLOCK_E):
        e = first + tl.arange(0, BLOCK_E)
        count = tl.sum(load_counts(block_count_ptr, e, first_expert, block, num_blocks), axis=1)
        segment = segments_of(count, align)
        if TILE_ROWS:
            rows_kept = rows_in_buffer(segment, rows + tl.cumsum(segment, axis=0) - segment, num_rows)
            tiles += tl.sum(tl.cdiv(rows_kept, TILE_ROWS), axis=0)
        tokens += tl.sum(count, axis=0)
        rows += tl.sum(segment, axis=0)
    return tokens, rows, tiles


@triton.jit
def cut_segments(
    tile_ptr, segment_ptr, totals_ptr, capacity, e, num_experts, start, rows_kept, tiles_before, num_rows, total,
    TILE_ROWS: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Cut the rows of some experts into tiles, after the `tiles_before` tiles of the experts before
    them. The last program also writes the totals.
    """
    tiles = tl.cdiv(rows_kept, TILE_ROWS)
    first = tiles_before + tl.cumsum(tiles, axis=0) - tiles
    begin = tl.minimum(start, num_rows)
    real = e < num_experts  # the last program sticks out
    put_tiles(tile_ptr, capacity, e, first, tiles, begin, begin + rows_kept, BLOCK_T)
    tl.store(segment_ptr + e, begin, mask=real)
    tl.store(segment_ptr + num_experts + e, begin + rows_kept, mask=real)
    tl.store(segment_ptr + 2 * num_experts + e, first, mask=real)
    tl.store(segment_ptr + 3 * num_experts + e, rows_kept, mask=real)
    if tl.program_id(0) == tl.num_programs(0) - 1:
        lane = tl.arange(0, 1)
        tl.store(totals_ptr + lane, tiles_before + tl.sum(tiles, axis=0))
        tl.store(totals_ptr + 1 + lane, tl.minimum(total, num_rows))


@triton.jit(do_not_specialize=["block_groups", "align", "num_rows", "capacity"])
def routing_layout_kernel(
    # counts of the walk
    block_count_ptr,
    # for each block of tokens
    base_ptr,
    # for each expert, and in all
    count_ptr, tokens_per_expert_ptr, pad_offsets_ptr, gap_ptr, total_ptr, overflow_ptr,
    # with TILE_ROWS, for each tile, for each expert, and in all: see `row_map.Tiles`
    tile_ptr, segment_ptr, totals_ptr,
    # sizes
    block_groups, num_experts, align, num_rows, capacity,
    SEGMENTS: tl.constexpr,  # otherwise only `count`, and in `base` the tokens of the blocks before
    TILE_ROWS: tl.constexpr,  # 0: no tiles
    GROUP: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Lay out the segments of BLOCK_L experts per program, and cut them into tiles. Each program
    itself counts the rows of the experts before.

    gap[0] and gap[1] are the begin and the end of the padding after each expert's rows, and at last
    of the rows past all segments.
    """
    num_blocks = block_groups * GROUP  # so that a row of counts is a multiple of a load
    block = tl.arange(0, BLOCK_B)
    first_expert = tl.program_id(0) * BLOCK_L
    e = first_expert + tl.arange(0, BLOCK_L)
    real = e < num_experts  # the last program sticks out
    counts = load_counts(block_count_ptr, e, num_experts, block, num_blocks)
    count = tl.sum(counts, axis=1)
    tl.store(count_ptr + e, count, mask=real)
    start = tl.zeros([BLOCK_L], tl.int64)
    if SEGMENTS:
        tokens_before, rows_before, tiles_before = count_before(
            block_count_ptr, first_expert, block, num_blocks, align, num_rows, TILE_ROWS, BLOCK_E
        )
        segment = segments_of(count, align)
        start = rows_before + tl.cumsum(segment, axis=0) - segment
        rows_kept = rows_in_buffer(segment, start, num_rows)
        tl.store(tokens_per_expert_ptr + e, rows_kept, mask=real)
        tl.store(pad_offsets_ptr + e, start - (tokens_before + tl.cumsum(count, axis=0) - count), mask=real)
        tl.store(gap_ptr + e, start + count, mask=real)
        tl.store(gap_ptr + num_experts + 1 + e, start + segment, mask=real)
        total = rows_before + tl.sum(segment, axis=0)
        if TILE_ROWS:
            cut_segments(
                tile_ptr, segment_ptr, totals_ptr, capacity, e, num_experts, start, rows_kept, tiles_before, num_rows,
                total, TILE_ROWS, BLOCK_T,
            )  # fmt: skip
        if tl.program_id(0) == tl.num_programs(0) - 1:
            lane = tl.arange(0, 1)
            tl.store(gap_ptr + num_experts + lane, total)
            tl.store(gap_ptr + 2 * num_experts + 1 + lane, num_rows)
            tl.store(total_ptr + lane, total)
            # rows are dropped in multiples of align, so never padding alone
            tl.store(overflow_ptr + lane, (total > num_rows).to(tl.uint8))
    base = start[:, None] + (tl.cumsum(counts, axis=1) - counts)
    tl.store(
        base_ptr + e[:, None] * num_blocks + block[None, :], base, mask=real[:, None] & (block < num_blocks)[None, :]
    )  # the last tile sticks out


@triton.jit(do_not_specialize=["num_tokens", "tiles", "capacity"])
def capacity_kernel(
    # the map
    map_ptr, stride_map_t, stride_map_e,
    # counts of the walk
    earlier_count_ptr, stride_earlier_count_e, count_ptr,
    # for each token
    slots_ptr, num_slots_ptr,
    # for each expert, and in all
    base_ptr, tokens_per_expert_ptr, gap_ptr, overflow_ptr,
    # sizes
    num_tokens, num_experts, tiles, capacity,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """List each token's experts for a capacity C, one block of tokens per program. An expert takes
    its first C routed tokens; if there are fewer, then unrouted ones, whose ranks follow those of
    the routed ones.
    """
    b = tl.program_id(0).to(tl.int64)
    capacity = tl.cast(capacity, tl.int64)
    e = tl.arange(0, BLOCK_E).to(tl.int64)
    real = e < num_experts  # the block is a power of two
    count = tl.load(count_ptr + e, mask=real, other=0)
    earlier_count = tl.load(earlier_count_ptr + e * stride_earlier_count_e + b, mask=real, other=0)
    for i in range(tiles):
        t = (b * tiles + i) * BLOCK_T + tl.arange(0, BLOCK_T)
        routed = load_routed(map_ptr, stride_map_t, stride_map_e, t, e, num_tokens, num_experts)
        routed_ones = routed.to(tl.int32)
        routed_before = earlier_count[None, :] + tl.cumsum(routed_ones, axis=0) - routed_ones
        rank = tl.where(routed, routed_before, count[None, :] + t[:, None] - routed_before)
        # outside the map no token is routed, nor fills a segment
        in_map = (t < num_tokens)[:, None] & real[None, :]
        chosen = in_map & (rank < capacity)
        listed = chosen.to(tl.int32)
        put_slots(slots_ptr, t, e, chosen, tl.cumsum(listed, axis=1) - listed, rank, num_experts)
        tl.store(num_slots_ptr + t, tl.sum(listed, axis=1), mask=t < num_tokens)  # the last tile sticks out
        earlier_count += tl.sum(routed_ones, axis=0)
    if b == 0:
        tl.store(base_ptr + e, e * capacity, mask=real)
        tl.store(tokens_per_expert_ptr + e, tl.broadcast_to(capacity, [BLOCK_E]), mask=real)
        tl.store(gap_ptr + e, e * capacity + tl.minimum(capacity, tl.cast(num_tokens, tl.int64)), mask=real)
        tl.store(gap_ptr + num_experts + 1 + e, (e + 1) * capacity, mask=real)
        tl.store(gap_ptr + num_experts, num_experts * capacity)
        tl.store(gap_ptr + 2 * num_experts + 1, num_experts * capacity)
        tl.store(overflow_ptr, tl.max((count > capacity).to(tl.int32), axis=0).to(tl.uint8))


@triton.jit(do_not_specialize=["num_tokens", "tiles", "align"])
def pad_routing_map_kernel(
    # the map
    map_ptr, stride_map_t, stride_map_e,
    # counts of the walk
    earlier_count_ptr, stride_earlier_count_e, count_ptr,
    # results
    out_ptr, unreached_ptr,
    # sizes
    num_tokens, num_experts, tiles, align,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Route more tokens to each expert, until its count is a multiple of `align`; one block of
    tokens per program. An unrouted token t becomes routed if t - (routed tokens before t) is less
    than the number that is missing.
    """
    b = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK_E).to(tl.int64)
    real = e < num_experts  # the block is a power of two
    count = tl.load(count_ptr + e, mask=real, other=0)
    earlier_count = tl.load(earlier_count_ptr + e * stride_earlier_count_e + b, mask=real, other=0)
    missing = (align - count % align) % align
    for i in range(tiles):
        t = (b * tiles + i) * BLOCK_T + tl.arange(0, BLOCK_T)
        routed = load_routed(map_ptr, stride_map_t, stride_map_e, t, e, num_tokens, num_experts)
        routed_ones = routed.to(tl.int32)
        routed_before = earlier_count[None, :] + tl.cumsum(routed_ones, axis=0) - routed_ones
        padded = routed | (t[:, None] - routed_before < missing[None, :])
        in_map = (t < num_tokens)[:, None] & real[None, :]  # the last tiles stick out on both sides
        tl.store(out_ptr + t[:, None] * num_experts + e[None, :], padded.to(tl.uint8), mask=in_map)
        earlier_count += tl.sum(routed_ones, axis=0)
    if b == 0:
        reached = count + tl.minimum(missing, num_tokens - count)
        tl.store(unreached_ptr + e, (reached % align != 0).to(tl.uint8), mask=real)
