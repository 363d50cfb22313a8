"""The launch of the walk over the routing map, and what the other kernels learn from it."""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from moe_fast import tuning
from moe_fast.backend import integers, launch_on
from moe_fast.kernels import metadata as kernels

UNBOUNDED = 1 << 62  # more rows than any buffer has


@dataclass(frozen=True)
class RowMap:
    """Where each token's rows are: row = base[t // tokens_per_block, expert] + rank, and dropped if that is num_rows or later."""

    slot_expert_TE: Tensor  # int16: the token's experts, ascending, in its first `slots` entries
    slot_rank_TE: Tensor  # int32: likewise
    slots_T: Tensor  # int32
    base_BE: Tensor  # int64
    gap_2E: Tensor  # [2,E+1] int64: begin and end of the rows without a token behind each expert's, and behind all segments
    tokens_per_block: int
    num_tokens: int
    num_experts: int
    num_rows: int
    expert_gaps: bool  # whether there may be rows without a token behind an expert's
    tail_gap: bool  # whether there may be rows behind the last segment

    def arguments(self) -> tuple[Tensor | int, ...]:
        """The row map as every kernel takes it."""
        return self.slot_expert_TE, self.slot_rank_TE, self.slots_T, self.base_BE, self.base_BE.stride(0), self.tokens_per_block

    def programs(self, block_tokens: int, fill: tuning.Fill) -> tuple[int, tuple[int, int, int]]:
        """How many programs move tokens and fill gaps, and how they are told apart: blocks of tokens, first lane, lanes of the tail."""
        token_blocks = triton.cdiv(self.num_tokens, block_tokens)
        gaps = self.num_experts if self.expert_gaps else 0
        fills = triton.cdiv(gaps + (fill.tail_lanes if self.tail_gap else 0), fill.lanes)
        return token_blocks + fills, (token_blocks, self.num_experts - gaps, fills * fill.lanes - gaps)


@dataclass(frozen=True)
class Walk:
    """How the routing map is cut into blocks of tokens, and what was counted in them."""

    blocks: int
    tiles: int
    block_tokens: int
    block_experts: int
    num_warps: int
    base_BE: Tensor  # int64
    count_E: Tensor  # int32

    def sizes(self, routing_map: Tensor) -> tuple[int, int, int]:
        """The sizes that every kernel of the walk takes."""
        return (*routing_map.shape, self.tiles)

    def blocking(self) -> dict[str, int]:
        """The block sizes that every kernel of the walk takes."""
        return {"BLOCK_T": self.block_tokens, "BLOCK_E": self.block_experts, "num_warps": self.num_warps}


@dataclass(frozen=True)
class Slots:
    """The lists of each token, and the layout of the segments."""

    expert_TE: Tensor
    rank_TE: Tensor
    slots_T: Tensor
    gap_2E: Tensor
    tokens_per_expert: Tensor
    pad_offsets: Tensor
    total: Tensor
    overflow: Tensor


def empty_slots(routing_map: Tensor) -> Slots:
    """Memory for `Slots`; the kernels write all of it but the entries of the lists past a token's slots, which none reads."""
    num_tokens, num_experts = routing_map.shape

    def empty(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=routing_map.device)  # see above: by emit_slots and place_segments or capacity_kernel

    return Slots(
        expert_TE=empty(num_tokens, num_experts, dtype=torch.int16),
        rank_TE=empty(num_tokens, num_experts, dtype=torch.int32),
        slots_T=empty(num_tokens, dtype=torch.int32),
        gap_2E=empty(2, num_experts + 1),
        tokens_per_expert=empty(num_experts),
        pad_offsets=empty(num_experts),
        total=empty(),
        overflow=empty(dtype=torch.bool),
    )


def walk_map(routing_map: Tensor, slots: Slots | None = None, align: int = 1, num_rows: int = UNBOUNDED) -> Walk:
    """Count the routed tokens; with `slots`, list them too and lay the segments out."""
    num_tokens, num_experts = routing_map.shape
    sizes = tuning.for_device(routing_map.device).metadata
    block_experts = triton.next_power_of_2(num_experts)
    block_tokens = sizes.tile_tokens(block_experts)
    tiles = max(1, triton.cdiv(num_tokens, block_tokens * sizes.max_programs))
    blocks = max(1, triton.cdiv(num_tokens, block_tokens * tiles))
    device = routing_map.device
    base = torch.empty((blocks, num_experts), dtype=torch.int64, device=device)  # all by the last program
    block_count = torch.empty((blocks, num_experts), dtype=torch.int32, device=device)  # a row by each program
    zeros = torch.zeros(num_experts + 1, dtype=torch.int32, device=device)
    count, arrivals = zeros[:-1], zeros[-1:]
    walk = Walk(blocks, tiles, block_tokens, block_experts, sizes.num_warps, base, count)
    lists = (slots.expert_TE, slots.rank_TE, slots.slots_T) if slots else (None, None, None)
    layout = (slots.tokens_per_expert, slots.pad_offsets, slots.gap_2E, slots.total, slots.overflow.view(torch.uint8)) if slots else (None,) * 5
    with launch_on(routing_map):
        kernels.routing_metadata_kernel[(blocks,)](
            integers(routing_map),
            *routing_map.stride(),
            *lists,
            block_count,
            base,
            *layout,
            count,
            arrivals,
            *walk.sizes(routing_map),
            align,
            num_rows,
            SEGMENTS=slots is not None,
            BLOCK_B=block_tokens,
            **walk.blocking(),
        )
    return walk


def place(routing_map: Tensor, align: int | None, num_rows: int | None) -> tuple[RowMap, Slots]:
    """The row map of `permute` without capacity. Waits for the device once, to learn the number of rows, if it is not given."""
    slots = empty_slots(routing_map)
    walk = walk_map(routing_map, slots, align or 1, UNBOUNDED if num_rows is None else num_rows)
    rows = int(slots.total) if num_rows is None else num_rows
    return _row_map(routing_map, walk, slots, walk.base_BE, rows, expert_gaps=align is not None and align > 1, tail_gap=num_rows is not None), slots


def place_in_capacity(routing_map: Tensor, capacity: int) -> tuple[RowMap, Slots]:
    """The row map of `permute` with drop and pad."""
    num_tokens, num_experts = routing_map.shape
    slots = empty_slots(routing_map)
    walk = walk_map(routing_map)
    base = torch.empty(num_experts, dtype=torch.int64, device=routing_map.device)  # all by the first program of capacity_kernel
    with launch_on(routing_map):
        kernels.capacity_kernel[(walk.blocks,)](
            integers(routing_map),
            *routing_map.stride(),
            walk.base_BE,
            walk.count_E,
            slots.expert_TE,
            slots.rank_TE,
            slots.slots_T,
            base,
            slots.tokens_per_expert,
            slots.gap_2E,
            slots.overflow.view(torch.uint8),
            *walk.sizes(routing_map),
            capacity,
            **walk.blocking(),
        )
    base_BE = base.expand(walk.blocks, num_experts)  # the ranks already count all blocks
    return _row_map(routing_map, walk, slots, base_BE, num_experts * capacity, expert_gaps=capacity > num_tokens, tail_gap=False), slots


def _row_map(routing_map: Tensor, walk: Walk, slots: Slots, base_BE: Tensor, num_rows: int, *, expert_gaps: bool, tail_gap: bool) -> RowMap:
    return RowMap(
        slot_expert_TE=slots.expert_TE,
        slot_rank_TE=slots.rank_TE,
        slots_T=slots.slots_T,
        base_BE=base_BE,
        gap_2E=slots.gap_2E,
        tokens_per_block=walk.tiles * walk.block_tokens,
        num_tokens=routing_map.shape[0],
        num_experts=routing_map.shape[1],
        num_rows=num_rows,
        expert_gaps=expert_gaps,
        tail_gap=tail_gap,
    )
