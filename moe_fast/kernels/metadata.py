"""Where each routed token goes: one walk over the routing map.

A program owns a block of tokens. It counts the routed tokens of each expert as it walks, and lists for each token its experts
in ascending order with the rank of the token among the block's tokens of that expert. The last program to arrive turns the
counts of all blocks into `base`, so that the row of a token is

    row = base[block of the token, expert] + rank
"""

import triton
import triton.language as tl


@triton.jit
def load_routed(map_ptr, stride_map_t, stride_map_e, t, e, num_tokens, num_experts):
    """[BLOCK_T, BLOCK_E] booleans: a non-zero entry of the map means routed."""
    inside = (t < num_tokens)[:, None] & (e < num_experts)[None, :]  # the last tiles stick out on both sides
    return tl.load(map_ptr + t[:, None] * stride_map_t + e[None, :] * stride_map_e, mask=inside, other=0) != 0


@triton.jit
def emit_slots(slot_expert_ptr, slot_rank_ptr, slots_ptr, t, e, chosen, rank, num_tokens, num_experts):
    """List the chosen experts of each token, ascending, and how many there are."""
    one = chosen.to(tl.int32)
    cell = t[:, None] * num_experts + (tl.cumsum(one, axis=1) - one)
    tl.store(slot_expert_ptr + cell, tl.broadcast_to(e[None, :], chosen.shape).to(tl.int16), mask=chosen)  # only chosen experts have a slot
    tl.store(slot_rank_ptr + cell, rank.to(tl.int32), mask=chosen)  # likewise
    tl.store(slots_ptr + t, tl.sum(one, axis=1), mask=t < num_tokens)  # the last tile sticks out


@triton.jit
def place_segments(count, e, tokens_per_expert_ptr, pad_offsets_ptr, gap_ptr, total_ptr, overflow_ptr, align, num_rows, num_experts):
    """Lay the segments out one behind the other; returns the first row of each.

    gap[0] and gap[1] hold the begin and end of the padding behind each expert's rows, and last of the rows behind all segments.
    """
    align = tl.cast(align, tl.int64)
    num_rows = tl.cast(num_rows, tl.int64)
    real = e < num_experts  # the block is a power of two
    segment = (count + align - 1) // align * align
    end = tl.cumsum(segment, axis=0)
    start = end - segment
    total = tl.sum(segment, axis=0)
    tl.store(tokens_per_expert_ptr + e, tl.minimum(tl.maximum(num_rows - start, 0), segment), mask=real)
    tl.store(pad_offsets_ptr + e, start - (tl.cumsum(count, axis=0) - count), mask=real)
    tl.store(gap_ptr + e, start + count, mask=real)
    tl.store(gap_ptr + num_experts + 1 + e, end, mask=real)
    tl.store(gap_ptr + num_experts, total)
    tl.store(gap_ptr + 2 * num_experts + 1, num_rows)
    tl.store(total_ptr, total)
    dropped = (count > 0) & (start + count > num_rows)
    tl.store(overflow_ptr, tl.max(dropped.to(tl.int32), axis=0).to(tl.uint8))
    return start


@triton.jit(do_not_specialize=["num_tokens", "tiles", "align", "num_rows"])
def routing_metadata_kernel(
    # the map
    map_ptr,
    stride_map_t,
    stride_map_e,
    # for each token
    slot_expert_ptr,
    slot_rank_ptr,
    slots_ptr,
    # for each block of tokens
    block_count_ptr,
    base_ptr,
    # for each expert, and in all
    tokens_per_expert_ptr,
    pad_offsets_ptr,
    gap_ptr,
    total_ptr,
    overflow_ptr,
    # routed tokens of each expert, and programs that are through; 0 at the launch
    count_ptr,
    arrivals_ptr,
    # sizes
    num_tokens,
    num_experts,
    tiles,
    align,
    num_rows,
    SEGMENTS: tl.constexpr,  # else only `count` and, in `base`, how many of it are in the blocks before
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    num_blocks = tl.num_programs(0)
    e = tl.arange(0, BLOCK_E).to(tl.int64)
    running = tl.zeros([BLOCK_E], tl.int32)
    for i in range(tiles):
        t = (b * tiles + i) * BLOCK_T + tl.arange(0, BLOCK_T)
        routed = load_routed(map_ptr, stride_map_t, stride_map_e, t, e, num_tokens, num_experts)
        one = routed.to(tl.int32)
        if SEGMENTS:
            rank = running[None, :] + tl.cumsum(one, axis=0) - one
            emit_slots(slot_expert_ptr, slot_rank_ptr, slots_ptr, t, e, routed, rank, num_tokens, num_experts)
        running += tl.sum(one, axis=0)
    real = e < num_experts  # the block is a power of two
    tl.store(block_count_ptr + b * num_experts + e, running, mask=real)
    tl.atomic_add(count_ptr + e, running, mask=real, sem="relaxed")

    tl.debug_barrier()  # every thread has stored before the arrival is told
    arrived = tl.atomic_add(arrivals_ptr, 1, sem="acq_rel")
    if arrived == num_blocks - 1:
        before = tl.zeros([BLOCK_E], tl.int64)
        if SEGMENTS:
            count = tl.load(count_ptr + e, mask=real, other=0, cache_modifier=".cg").to(tl.int64)  # past this multiprocessor's cache: others wrote
            before += place_segments(count, e, tokens_per_expert_ptr, pad_offsets_ptr, gap_ptr, total_ptr, overflow_ptr, align, num_rows, num_experts)
        for first in range(0, num_blocks, BLOCK_B):
            block = first + tl.arange(0, BLOCK_B).to(tl.int64)
            cell = block[:, None] * num_experts + e[None, :]
            inside = (block < num_blocks)[:, None] & real[None, :]  # the last blocks stick out
            counts = tl.load(block_count_ptr + cell, mask=inside, other=0, cache_modifier=".cg").to(tl.int64)  # likewise
            tl.store(base_ptr + cell, before[None, :] + tl.cumsum(counts, axis=0) - counts, mask=inside)
            before += tl.sum(counts, axis=0)


@triton.jit(do_not_specialize=["num_tokens", "tiles", "capacity"])
def capacity_kernel(
    # the map
    map_ptr,
    stride_map_t,
    stride_map_e,
    # what the walk counted
    before_ptr,
    count_ptr,
    # for each token
    slot_expert_ptr,
    slot_rank_ptr,
    slots_ptr,
    # for each expert, and in all
    base_ptr,
    tokens_per_expert_ptr,
    gap_ptr,
    overflow_ptr,
    # sizes
    num_tokens,
    num_experts,
    tiles,
    capacity,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """An expert takes its first C routed tokens, then its first unrouted ones: those have rank count + (t - routed before t)."""
    b = tl.program_id(0).to(tl.int64)
    capacity = tl.cast(capacity, tl.int64)
    e = tl.arange(0, BLOCK_E).to(tl.int64)
    real = e < num_experts  # the block is a power of two
    count = tl.load(count_ptr + e, mask=real, other=0).to(tl.int64)
    before = tl.load(before_ptr + b * num_experts + e, mask=real, other=0)
    for i in range(tiles):
        t = (b * tiles + i) * BLOCK_T + tl.arange(0, BLOCK_T)
        routed = load_routed(map_ptr, stride_map_t, stride_map_e, t, e, num_tokens, num_experts)
        one = routed.to(tl.int64)
        routed_before = before[None, :] + tl.cumsum(one, axis=0) - one
        rank = tl.where(routed, routed_before, count[None, :] + t[:, None] - routed_before)
        inside = (t < num_tokens)[:, None] & real[None, :]  # outside the map nothing is routed, and nothing fills either
        emit_slots(slot_expert_ptr, slot_rank_ptr, slots_ptr, t, e, inside & (rank < capacity), rank, num_tokens, num_experts)
        before += tl.sum(one, axis=0)
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
    map_ptr,
    stride_map_t,
    stride_map_e,
    # what the walk counted
    before_ptr,
    count_ptr,
    # results
    out_ptr,
    unreached_ptr,
    # sizes
    num_tokens,
    num_experts,
    tiles,
    align,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """An unrouted token has rank t - (routed before t) among the unrouted; those of the first `missing` ranks become routed."""
    b = tl.program_id(0).to(tl.int64)
    align = tl.cast(align, tl.int64)
    e = tl.arange(0, BLOCK_E).to(tl.int64)
    real = e < num_experts  # the block is a power of two
    count = tl.load(count_ptr + e, mask=real, other=0).to(tl.int64)
    before = tl.load(before_ptr + b * num_experts + e, mask=real, other=0)
    missing = (align - count % align) % align
    for i in range(tiles):
        t = (b * tiles + i) * BLOCK_T + tl.arange(0, BLOCK_T)
        routed = load_routed(map_ptr, stride_map_t, stride_map_e, t, e, num_tokens, num_experts)
        one = routed.to(tl.int64)
        routed_before = before[None, :] + tl.cumsum(one, axis=0) - one
        padded = routed | (t[:, None] - routed_before < missing[None, :])
        inside = (t < num_tokens)[:, None] & real[None, :]  # the last tiles stick out on both sides
        tl.store(out_ptr + t[:, None] * num_experts + e[None, :], padded.to(tl.uint8), mask=inside)
        before += tl.sum(one, axis=0)
    if b == 0:
        reached = count + tl.minimum(missing, tl.cast(num_tokens, tl.int64) - count)
        tl.store(unreached_ptr + e, (reached % align != 0).to(tl.uint8), mask=real)
