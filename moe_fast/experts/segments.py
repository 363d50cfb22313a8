"""The plan of the tiles of segments, descriptors of memory that end with a segment, and the sums of
segments.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

import torch
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from moe_fast.experts import _linear as kernels
from moe_fast.experts._linear import SEGMENT_ROWS
from moe_fast.launch import backend, descriptors, tuning
from moe_fast.launch.backend import strided
from moe_fast.launch.operators import has_memory, launch
from moe_fast.launch.tuning import EXPERT_LANES, GroupedTile, ceil_div, power_of_two
from moe_fast.permutation.row_map import Tiles

X = TypeVar("X")
DESCRIBED_SIZE = 0x7FFF0000  # the length of a side that is as long as possible; coordinates are int32


@dataclass(frozen=True)
class Plan:
    """Each expert's rows and the tiles that they are cut into. Only kernels read how many there
    are.
    """

    tile: GroupedTile
    tile_4C: Tensor  # int64: expert, its first tile, its first row and its end, for each tile
    segment_3L: Tensor  # int64: the two rows and the first tile, for each expert
    total_2: Tensor  # int64: how many tiles, and rows in them
    num_rows: int
    multiple: int = 1
    other_cuts: dict[int, "Plan"] = field(default_factory=dict, repr=False)  # by the number of rows of a tile

    @property
    def capacity(self) -> int:
        """The largest number of tiles that the plan may have."""
        return self.tile_4C.shape[1]

    @property
    def num_experts(self) -> int:
        return self.segment_3L.shape[1]

    def cut(self, rows: int, tokens_per_expert: Tensor) -> "Plan":
        """The plan of the same segments in tiles of `rows` rows. Each is made once."""
        if rows == self.tile.rows:
            return self
        if rows not in self.other_cuts:
            tile = replace(self.tile, rows=rows)
            self.other_cuts[rows] = make_plan(tokens_per_expert, self.num_rows, tile, self.multiple)
        return self.other_cuts[rows]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The plan's tensors and those of its other cuts, for autograd to save."""
        other_cuts = (tensor for plan in self.other_cuts.values() for tensor in plan.tensors)
        return self.tile_4C, self.segment_3L, self.total_2, *other_cuts

    def without_tensors(self) -> "Plan":
        """The plan without its tensors, for a node of autograd to keep: a tensor there would
        outlive its checkpoint.
        """
        other_cuts = {rows: plan.without_tensors() for rows, plan in self.other_cuts.items()}
        nothing = torch.empty(0)
        return replace(self, tile_4C=nothing, segment_3L=nothing, total_2=nothing, other_cuts=other_cuts)

    def with_tensors(self, tensors: Sequence[Tensor]) -> "Plan":
        """The inverse of `without_tensors`: the plan with these tensors."""
        tile, segment, total, *tensors_of_cuts = tensors
        triples = zip(
            tensors_of_cuts[::3], tensors_of_cuts[1::3], tensors_of_cuts[2::3], strict=True
        )  # other cuts have no cuts of their own
        other_cuts = {
            r: plan.with_tensors(three) for (r, plan), three in zip(self.other_cuts.items(), triples, strict=True)
        }
        return replace(self, tile_4C=tile, segment_3L=segment, total_2=total, other_cuts=other_cuts)


_ready: ContextVar[Mapping[tuple[Any, ...], Any]] = ContextVar("plans made before", default=MappingProxyType({}))
_shared: ContextVar[dict[tuple[Any, ...], Any] | None] = ContextVar("shared plans", default=None)


@contextmanager
def plans_shared() -> Iterator[None]:
    """A context within which products of the same counts share one plan, and one copy of the
    counts. The caller keeps the counts alive, and does not change them.
    """
    token = _shared.set(dict(_ready.get()))
    try:
        yield
    finally:
        _shared.reset(token)


@contextmanager
def plan_ready(counts: Tensor, tile: GroupedTile, tiles: Tiles, num_rows: int) -> Iterator[None]:
    """A context within which products of these counts use `tiles` as their plan, which
    `permute_in_tiles` has made. The caller keeps the counts alive, and does not change them.
    """
    copy = tiles.segment_4L[3]
    plan = Plan(tile, tiles.tile_4C, tiles.segment_4L[:3], tiles.total_2, num_rows)
    plans = {_key(key_counts, num_rows, tile, plan.multiple): plan for key_counts in (counts, copy)}
    token = _ready.set(plans | {_key(counts, "copy"): copy})
    try:
        yield
    finally:
        _ready.reset(token)


def _key(counts: Tensor, *settings: Any) -> tuple[Any, ...]:
    return counts.data_ptr(), counts.dtype, *settings


def _made_once(make: Callable[[], X], counts: Tensor, *settings: Any) -> X:
    """make(), or its earlier result for the same counts and settings within `plans_shared`."""
    shared = _shared.get()
    if shared is None or not has_memory():
        return make()
    key = _key(counts, *settings)
    if key not in shared:
        shared[key] = make()
    result: X = shared[key]
    return result


def shared_totals() -> Tensor | None:
    """`total_2` of the first plan made within `plans_shared`; None if there is none, as in a
    compiled graph.
    """
    return next((plan.total_2 for plan in (_shared.get() or {}).values() if isinstance(plan, Plan)), None)


def copy_of(tokens_per_expert: Tensor) -> Tensor:
    """A copy of the counts for a backward, because the caller may change its counts before."""
    return _made_once(tokens_per_expert.clone, tokens_per_expert, "copy")


def tile_of(like: Tensor, num_rows: int, num_experts: int) -> GroupedTile:
    """The tile that suits `num_rows` rows with the dtype and device of `like`."""
    return tuning.for_device(like.device).grouped.tile(num_rows, num_experts, like.dtype.itemsize)


def plan_of(tokens_per_expert: Tensor, rows: Tensor, multiple: int = 1) -> Plan:
    """The plan for these rows, with tiles that suit their number and dtype."""
    num_rows = rows.shape[0]
    return make_plan(tokens_per_expert, num_rows, tile_of(rows, num_rows, len(tokens_per_expert)), multiple)


def make_plan(tokens_per_expert: Tensor, num_rows: int, tile: GroupedTile, multiple: int = 1) -> Plan:
    """The plan for rows in segments of these sizes, which are multiples of `multiple`.

    The host does not read the counts. If one is negative or no multiple, or if all together exceed
    the rows, the products with this plan are NaN.
    """
    make = partial(_make_plan, tokens_per_expert, num_rows, tile, multiple)
    return _made_once(make, tokens_per_expert, num_rows, tile, multiple)


def _make_plan(tokens_per_expert: Tensor, num_rows: int, tile: GroupedTile, multiple: int) -> Plan:
    sizes = tuning.for_device(tokens_per_expert.device).grouped
    num_experts = len(tokens_per_expert)
    capacity = num_rows // tile.rows + min(num_rows, num_experts)  # each expert fills all of its tiles but one
    device = tokens_per_expert.device
    # plan_kernel writes it up to the total; no kernel reads more
    tiles = torch.empty((4, capacity), dtype=torch.int64, device=device)
    bounds = torch.empty((3, num_experts), dtype=torch.int64, device=device)  # plan_kernel writes all of it
    total = torch.empty(2, dtype=torch.int64, device=device)  # its last program writes all of it
    launch(kernels.plan_kernel, (num_experts,), tokens_per_expert)(
        *strided(tokens_per_expert),
        tiles,
        bounds,
        total,
        capacity,
        num_rows,
        num_experts,
        multiple,
        BLOCK_P=tile.rows,
        BLOCK_E=power_of_two(num_experts, least=EXPERT_LANES),
        BLOCK_T=sizes.plan_tiles,
        num_warps=4,
    )
    return Plan(tile, tiles, bounds, total, num_rows, multiple)


def segment_sums(rows_PC: Tensor, dtype: torch.dtype, plan: Plan) -> Tensor:
    """[L,C] in `dtype`: out[e] = Σ over e's rows."""
    rows, tile = rows_PC.resolve_neg(), tuning.for_device(rows_PC.device).grouped.sums
    num_columns = rows.shape[1]
    # segment_sums_kernel writes all of it
    out = torch.empty((plan.num_experts, num_columns), dtype=dtype, device=rows.device)
    if out.numel() == 0 or not has_memory():
        return out
    launch(kernels.segment_sums_kernel, (plan.num_experts * ceil_div(num_columns, tile.columns),), rows)(
        *strided(rows, 2),
        out,
        plan.segment_3L,
        plan.num_experts,
        num_columns,
        ACCUMULATOR=tl.float64 if rows.dtype == torch.float64 else tl.float32,
        RESULT_AS=tl.float64 if dtype == torch.float64 else tl.float32,
        **tile.blocks("P", "C"),
    )
    return out


def programs(pieces: int, device: torch.device) -> int:
    """How many programs share `pieces` pieces of work."""
    most = tuning.for_device(device).grouped.programs
    return min(pieces, backend.multiprocessors(device) if most is None else most)


def have_descriptors(*tensors: Tensor) -> bool:
    """Whether descriptors can move tiles of these tensors and end with an expert's rows: see
    `expert_slices`.
    """
    for tensor in tensors:
        if len(tensor) > SEGMENT_ROWS:
            return False
    return descriptors.have_descriptors(*tensors)


def expert_slices(rows_PC: Tensor, block: list[int]) -> TensorDescriptor:
    """A descriptor of rows that ends where an expert's rows end, wherever that is.

        [S, end, S - count + row, c]  lies at  S (2³⁴ - s) + end · s + (S - count + row) s + c
                                               =  (end - count + row) s + c  mod 2⁶⁴

    with S = 2³⁰ rows, s their stride: an address is 64 bits. The third side is S long, so that it
    ends at row = count.

    Source: triton.tools.ragged_tma.
    """
    stride, num_columns = rows_PC.stride(0), rows_PC.shape[1]
    shape, strides = [DESCRIBED_SIZE, DESCRIBED_SIZE, SEGMENT_ROWS, num_columns], [2**34 - stride, stride, stride, 1]
    return TensorDescriptor(rows_PC, shape, strides, [1, 1, *block])
