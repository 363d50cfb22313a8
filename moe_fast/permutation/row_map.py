"""The launches of the walk over the routing map, and its results in the form in which other kernels
take them.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_fast.launch import tuning
from moe_fast.launch.backend import integers, strided
from moe_fast.launch.operators import has_memory, launch, operator, record
from moe_fast.launch.tuning import at_least, ceil_div, power_of_two
from moe_fast.permutation import _row_map as kernels
from moe_fast.permutation._permute import RowMapPointers

UNBOUNDED = 1 << 62  # more rows than any buffer has
NUM_TENSORS = 4  # the first fields of a `RowMap`
LAID_TILES = 16  # tiles that a program of the layout writes at once, for each of its experts


@record
@dataclass(frozen=True)
class RowMap:
    """The rows of each token: row = base[t // tokens_per_block, expert] + rank. Rows from
    `num_rows` on are dropped.

    Without bases the lists hold rows in place of ranks. With align 4 and one block of tokens:

        expert 0 ← tokens 1, 3; expert 1 ← tokens 0, 1:   base [[0, 4]], gap [[2, 6, 8], [4, 8, 8]]
        (rank, expert):  token 0: (0, 1);  token 1: (0, 0) (1, 1);  token 2: none;  token 3: (1, 0)
    """

    # int32 or int64: rank << 16 | expert of the token's `num_slots` experts, ascending
    slots_TE: Tensor
    num_slots_T: Tensor  # int32
    base_BE: Tensor | None  # int64, of any strides
    gap_2E: Tensor  # [2,E+1] int64: begin and end of the rows without a token after each expert's, and after all
    tokens_per_block: int
    num_tokens: int
    num_experts: int
    num_rows: int
    expert_gaps: bool  # whether there may be rows without a token after an expert's
    tail_gap: bool  # whether there may be rows past the last segment

    def pointers(self) -> RowMapPointers:
        """The memory of the row map, as every kernel takes it."""
        return RowMapPointers(self.slots_TE, self.num_slots_T, self.base_BE)

    def arguments(self) -> tuple[RowMapPointers, int, int, int]:
        """`pointers`, the strides of the bases, and `tokens_per_block`, as kernels that read bases
        take them.
        """
        stride_b, stride_e = (0, 0) if self.base_BE is None else self.base_BE.stride()
        return self.pointers(), stride_b, stride_e, self.tokens_per_block

    def parts(self) -> tuple[list[Any], list[Any]]:
        """(tensors, numbers): autograd saves the tensors, which a checkpoint drops."""
        values = [*vars(self).values()]  # in the order of the fields, in less time than by their names
        return values[:NUM_TENSORS], values[NUM_TENSORS:]

    def sizes(self, hidden: int) -> tuple[int, int, int, int]:
        """The sizes that every kernel takes."""
        return self.num_tokens, self.num_experts, hidden, self.num_rows

    def without_bases(self) -> "RowMap":
        """The same row map, with memory for lists of rows, which permute_kernel is to write."""
        slots_TE = torch.empty(self.slots_TE.shape, dtype=torch.int64, device=self.slots_TE.device)
        (_, num_slots_T, _, gap_2E), numbers = self.parts()
        return RowMap(slots_TE, num_slots_T, None, gap_2E, *numbers)

    def programs(self, block_tokens: int, fill: tuning.Fill) -> tuple[int, tuple[int, int, int]]:
        """(number of programs that move rows and fill gaps, (blocks of tokens, first lane, lanes of
        the tail)).
        """
        token_blocks = ceil_div(self.num_tokens, block_tokens)
        gaps = self.num_experts if self.expert_gaps else 0
        fills = ceil_div(gaps + (fill.tail_lanes if self.tail_gap else 0), fill.lanes)
        return token_blocks + fills, (token_blocks, self.num_experts - gaps, fills * fill.lanes - gaps)


@record
@dataclass(frozen=True)
class Tiles:
    """The segments, cut into tiles of `rows` rows, in the form of
    `moe_fast.experts.segments.Plan`.
    """

    rows: int
    tile_4C: Tensor  # int64: expert, its first tile, its first row and its end, for each tile
    segment_4L: Tensor  # int64: the two rows, the first tile and the number of rows, for each expert
    total_2: Tensor  # int64: how many tiles, and rows in them

    @staticmethod
    def empty(routing_map: Tensor, num_rows: int, rows: int) -> "Tiles":
        """Memory for the tiles, which routing_layout_kernel fills; entries past the last tile are
        never read.
        """
        num_experts, device = routing_map.shape[1], routing_map.device
        capacity = num_rows // rows + min(num_rows, num_experts)  # each expert fills all its tiles but one
        sizes = ((4, capacity), (4, num_experts), (2,))
        return Tiles(rows, *(torch.empty(size, dtype=torch.int64, device=device) for size in sizes))


class Cut(NamedTuple):
    """How a routing map is cut into blocks of tokens."""

    pack: int  # 4: the map is read in words of four experts
    blocks: int
    tiles: int  # of a block
    block_tokens: int  # of a tile
    block_experts: int
    num_warps: int

    @property
    def tokens_per_block(self) -> int:
        return self.tiles * self.block_tokens


@dataclass(frozen=True)
class Walk:
    """The routing map, cut into blocks of tokens, and the counts of these blocks."""

    cut: Cut
    block_count_EB: Tensor  # uint8 or int32
    base_EB: Tensor  # int64
    count_E: Tensor  # int32

    def counted(self) -> tuple[Tensor, int, Tensor]:
        """(tokens routed to each expert before each block, tokens routed to each expert)."""
        return self.base_EB, self.cut.blocks, self.count_E

    def sizes(self, routing_map: Tensor) -> tuple[int, int, int]:
        """The sizes of the kernels after the walk, which have one expert per word and fewer tokens
        per tile.
        """
        return (*routing_map.shape, self.cut.tokens_per_block // self._tile_tokens())

    def blocking(self) -> dict[str, int]:
        """The block sizes of these kernels."""
        return {"BLOCK_T": self._tile_tokens(), "BLOCK_E": self.cut.block_experts, "num_warps": self.cut.num_warps}

    def _tile_tokens(self) -> int:
        return max(1, self.cut.block_tokens // self.cut.pack)


@dataclass(frozen=True)
class Slots:
    """The list of each token, and the layout of the segments."""

    slots_TE: Tensor
    num_slots_T: Tensor
    gap_2E: Tensor
    tokens_per_expert: Tensor
    pad_offsets: Tensor
    total: Tensor
    overflow: Tensor


def empty_slots(routing_map: Tensor) -> Slots:
    """Memory for `Slots`. Kernels write everything but the unused ends of the lists, which are
    never read.
    """
    num_tokens, num_experts = routing_map.shape

    def empty(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        # see above: by the walk and its layout, or capacity_kernel
        return torch.empty(shape, dtype=dtype, device=routing_map.device)

    return Slots(
        # every rank is less than num_tokens
        slots_TE=empty(num_tokens, num_experts, dtype=torch.int32 if num_tokens <= 1 << 15 else torch.int64),
        num_slots_T=empty(num_tokens, dtype=torch.int32),
        gap_2E=empty(2, num_experts + 1),
        tokens_per_expert=empty(num_experts),
        pad_offsets=empty(num_experts),
        total=empty(),
        overflow=empty(dtype=torch.bool),
    )


def walk_map(
    routing_map: Tensor, cut: Cut, slots: Slots | None = None, align: int = 1, num_rows: int = UNBOUNDED,
    tiles: Tiles | None = None,
) -> Walk:  # fmt: skip
    """Count the routed tokens. With `slots` also list them, lay the segments out, and cut them into
    `tiles`.
    """
    walk = plan_walk(routing_map, cut)
    count_blocks(routing_map, walk, slots)
    lay_out(walk, slots, align, num_rows, tiles)
    return walk


def cut_of(routing_map: Tensor) -> Cut:
    """The blocks of the routing map. They are computed outside of operators, because a graph of
    torch 2.11 does not know the maximum of symbolic numbers that an operator has computed.
    """
    num_tokens, num_experts = routing_map.shape
    sizes = tuning.for_device(routing_map.device).metadata
    block_experts = power_of_two(num_experts, least=8)
    for pack in (4, 1):
        width = max(1, block_experts // pack)
        block_tokens = sizes.tile_tokens(width)
        tiles = at_least(ceil_div(num_tokens, block_tokens * sizes.max_programs), 1)
        if tiles * block_tokens < 256 and _has_words(routing_map):
            break
    blocks = sizes.layout_group * at_least(ceil_div(num_tokens, block_tokens * tiles * sizes.layout_group), 1)
    return Cut(pack, blocks, tiles, block_tokens, block_experts, sizes.tile_warps(width))


def plan_walk(routing_map: Tensor, cut: Cut) -> Walk:
    """The walk over the blocks of a routing map, with memory for the counts."""
    num_experts = routing_map.shape[1]
    # counts, all of which every program of the layout reads
    counted_as = torch.uint8 if cut.tokens_per_block < 256 else torch.int32
    # routing_walk_kernel writes all of it
    block_count = torch.empty((num_experts, cut.blocks), dtype=counted_as, device=routing_map.device)
    # routing_layout_kernel writes all of it
    base = torch.empty((num_experts, cut.blocks), dtype=torch.int64, device=routing_map.device)
    count = torch.empty(num_experts, dtype=torch.int32, device=routing_map.device)  # as above
    return Walk(cut, block_count, base, count)


def _has_words(routing_map: Tensor) -> bool:
    """Whether the map has bytes that can be read four at a time, by its layout, which a compiled
    graph knows.
    """
    if routing_map.dtype != torch.bool or routing_map.stride(1) != 1:
        return False
    return routing_map.stride(0) % 4 == 0 and routing_map.shape[1] % 4 == 0


def _in_words(routing_map: Tensor) -> Tensor:
    """The map as words of four bytes; a map that does not begin at a multiple of four bytes is
    copied.
    """
    if not has_memory():
        return routing_map  # no kernel is launched
    aligned = routing_map.data_ptr() % 4 == 0 and routing_map.storage_offset() % 4 == 0
    return (routing_map if aligned else routing_map.clone()).view(torch.int32)


def count_blocks(routing_map: Tensor, walk: Walk, slots: Slots | None) -> None:
    """The first launch: count the routed tokens of each block; with `slots`, list them."""
    words = integers(routing_map) if walk.cut.pack == 1 else _in_words(routing_map)
    launch(kernels.routing_walk_kernel, (walk.cut.blocks,), routing_map)(
        *strided(words),
        *((slots.slots_TE, slots.num_slots_T) if slots else (None, None)),
        walk.block_count_EB,
        *routing_map.shape,
        walk.cut.tiles,
        PACK=walk.cut.pack,
        BLOCK_T=walk.cut.block_tokens,
        BLOCK_W=max(1, walk.cut.block_experts // walk.cut.pack),
        num_warps=walk.cut.num_warps,
    )


def lay_out(walk: Walk, slots: Slots | None, align: int, num_rows: int, tiles: Tiles | None = None) -> None:
    """The second launch: turn counts into bases. With `slots` also lay the segments out, and with
    `tiles` cut them.
    """
    sizes = tuning.for_device(walk.base_EB.device).metadata
    num_experts = len(walk.count_E)
    layout = (
        (slots.tokens_per_expert, slots.pad_offsets, slots.gap_2E, slots.total, slots.overflow.view(torch.uint8))
        if slots
        else (None,) * 5
    )
    launch(kernels.routing_layout_kernel, (max(1, ceil_div(num_experts, sizes.layout_experts)),), walk.base_EB)(
        walk.block_count_EB,
        walk.base_EB,
        walk.count_E,
        *layout,
        *((tiles.tile_4C, tiles.segment_4L, tiles.total_2) if tiles else (None, None, None)),
        walk.cut.blocks // sizes.layout_group,
        num_experts,
        align,
        num_rows,
        tiles.tile_4C.shape[1] if tiles else 0,
        SEGMENTS=slots is not None,
        TILE_ROWS=tiles.rows if tiles else 0,
        GROUP=sizes.layout_group,
        BLOCK_B=power_of_two(sizes.max_programs),
        BLOCK_E=min(walk.cut.block_experts, sizes.layout_step),
        BLOCK_L=sizes.layout_experts,
        BLOCK_T=LAID_TILES,
        num_warps=sizes.layout_warps,
    )


def place(
    routing_map: Tensor, align: int | None, num_rows: int | None, tile_rows: int | None = None
) -> tuple[RowMap, Slots, Tiles | None]:
    """(row map, slots, tiles) of `permute` without capacity. Without `num_rows` the host waits for
    the number of rows. With `tile_rows`, which needs `num_rows`, the segments are also cut into
    tiles.
    """
    bound = UNBOUNDED if num_rows is None else num_rows
    cut = cut_of(routing_map)
    slots, base_BE, tiles = _places(routing_map, cut, align or 1, bound, tile_rows)
    # by item(), because int() would ask a compiled graph for the number
    rows: Any = slots.total.item() if num_rows is None else num_rows
    gaps = {"expert_gaps": align is not None and bool(align > 1), "tail_gap": num_rows is not None}
    return _row_map(routing_map, cut, slots, base_BE, rows, **gaps), slots, tiles


@operator
def _places(
    routing_map: Tensor, cut: Cut, align: int, num_rows: int, tile_rows: int | None
) -> tuple[Slots, Tensor, Tiles | None]:
    """(slots, bases, tiles)."""
    slots = empty_slots(routing_map)
    tiles = None if tile_rows is None else Tiles.empty(routing_map, num_rows, tile_rows)
    walk = walk_map(routing_map, cut, slots, align, num_rows, tiles)
    return slots, walk.base_EB.t(), tiles


def place_in_capacity(routing_map: Tensor, capacity: int) -> tuple[RowMap, Slots]:
    """(row map, slots) of `permute` with a capacity."""
    cut, (num_tokens, num_experts) = cut_of(routing_map), routing_map.shape
    slots, base_E = _places_in_capacity(routing_map, cut, capacity)
    base_BE = base_E.expand(cut.blocks, num_experts)  # the ranks already count the tokens of all blocks
    gaps = {"expert_gaps": bool(capacity > num_tokens), "tail_gap": False}
    return _row_map(routing_map, cut, slots, base_BE, num_experts * capacity, **gaps), slots


@operator
def _places_in_capacity(routing_map: Tensor, cut: Cut, capacity: int) -> tuple[Slots, Tensor]:
    """(slots, base of each expert)."""
    slots = empty_slots(routing_map)
    walk = walk_map(routing_map, cut)
    # the first program of capacity_kernel writes all of it
    base = torch.empty(routing_map.shape[1], dtype=torch.int64, device=routing_map.device)
    launch(kernels.capacity_kernel, (walk.cut.blocks,), routing_map)(
        *strided(integers(routing_map)),
        *walk.counted(),
        slots.slots_TE,
        slots.num_slots_T,
        base,
        slots.tokens_per_expert,
        slots.gap_2E,
        slots.overflow.view(torch.uint8),
        *walk.sizes(routing_map),
        capacity,
        **walk.blocking(),
    )
    return slots, base


def _row_map(routing_map: Tensor, cut: Cut, slots: Slots, base_BE: Tensor, num_rows: int, **gaps: bool) -> RowMap:
    return RowMap(
        slots_TE=slots.slots_TE,
        num_slots_T=slots.num_slots_T,
        base_BE=base_BE,
        gap_2E=slots.gap_2E,
        tokens_per_block=cut.tokens_per_block,
        num_tokens=routing_map.shape[0],
        num_experts=routing_map.shape[1],
        num_rows=num_rows,
        **gaps,
    )
