"""The steps of dispatch and combine on ranks that share memory. A bar stands for a barrier.

    count → announce | push, and fill the padding | spread          dispatch
    | add up a token's rows here, and send the sum home | add up    combine

A process runs them for one rank, or for several ranks that wait for each other without a barrier.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
import triton.language as tl
from torch import Tensor

from moe_fast.dispatch import _symmetric as kernels
from moe_fast.dispatch import _symmetric_sums as kernels_of_sums
from moe_fast.dispatch import wire
from moe_fast.dispatch.slabs import Slab
from moe_fast.launch import tuning
from moe_fast.launch.arithmetic import NO_FP_FUSION
from moe_fast.launch.backend import bits, casts_in_hardware, strided
from moe_fast.launch.operators import launch
from moe_fast.launch.tuning import EXPERT_LANES, ceil_div, power_of_two
from moe_fast.permutation.row_map import RowMap, count_blocks, cut_of, empty_slots, lay_out, plan_walk
from moe_ref.config import FP8_BLOCK, Recipe

X = TypeVar("X")
Steps = Generator[None, None, X]  # a generator that yields where all ranks must have arrived


class Programs(NamedTuple):
    """The largest number of programs of the kernels between ranks, and of those within a rank;
    None: one program per piece of work.
    """

    num_sms: int | None = None
    num_blocks: int | None = None


FREE = Programs()


class Transfer(NamedTuple):
    """How tokens go to the rows of all ranks: the same on every rank."""

    num_rows: int  # of the largest buffer of a rank
    align: int = 1  # each expert has a multiple of as many rows
    once: bool = True  # whether a token travels once to a rank, and is copied there
    most: Programs = FREE
    recipe: Recipe | None = None  # by which tokens travel as codes


class Layout(NamedTuple):
    """Where tokens go whose routing is new."""

    start_E: Tensor  # each expert's first row, on its rank
    ranked: RowMap  # with bases within an expert


@dataclass(frozen=True)
class Handle:
    """What combine needs to know of the dispatch."""

    group: Any
    ranks: int
    rank: int
    lists: RowMap  # the rows of each token
    own_rows: int  # rows of this rank's buffer; `lists` has the largest number of all ranks
    link_C: Tensor  # for each row, whether it has travelled, and the next row of its token
    home_C: Tensor  # for each row that has travelled, the slot and the rank that it came from
    own_T: Tensor  # for each token, its rows on this rank: the slot of the first one << 16 | how many
    ranks_T: Tensor  # for each token, a bit for each of up to 64 ranks that has rows of it
    gap_2L: Tensor  # begin and end of each local expert's padding
    overflow_W: Tensor  # whether rows of each rank were dropped
    local_experts: int
    once: bool


@dataclass(frozen=True)
class Results:
    """What dispatch returns: push_kernel writes the rows of this rank's tokens, spread_kernel all
    other rows.
    """

    rows: Tensor
    scale: Tensor | None  # in the layout of `quantize`
    probs: Tensor | None

    @staticmethod
    def empty(like: Tensor, prob_dtype: torch.dtype | None, num_rows: int, recipe: Recipe | None) -> "Results":
        hidden, device = like.shape[1], like.device
        # push_kernel and spread_kernel write all of it
        rows = torch.empty((num_rows, hidden), dtype=like.dtype if recipe is None else torch.uint8, device=device)
        scale = None
        if recipe is not None:
            scale = torch.empty((ceil_div(hidden, FP8_BLOCK), num_rows), dtype=torch.float32, device=device).T
        probs = None if prob_dtype is None else torch.empty(num_rows, dtype=prob_dtype, device=device)
        return Results(rows, scale, probs)

    def pointers(self) -> tuple[Any, ...]:
        """The results as kernels take them: the rows, the scales with their strides,
        and the probs.
        """
        return bits(self.rows), *strided(self.scale), None if self.probs is None else bits(self.probs)

    def returned(self) -> tuple[Any, Tensor | None]:
        """Rows, or their form, and probs."""
        return self.rows if self.scale is None else wire.form_of(self.rows, self.scale), self.probs


def run(steps: Steps[X], slab: Slab) -> X:
    """Run one rank's steps, with the slab's barrier between them."""
    return run_with(steps, slab.barrier)


def run_with(steps: Steps[X], barrier: Callable[[], None]) -> X:
    """Run the steps with another barrier between them."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value
        barrier()


def send(
    tokens: Tensor, routing_map: Tensor, probs: Tensor | None, transfer: Transfer, slab: Slab, rank: int,
    group: Any = None, advanced: Callable[[], None] | None = None,
) -> Steps[tuple[Any, Tensor | None, Tensor, Handle]]:  # fmt: skip
    """The steps of dispatch: rows (with a recipe their form), probs, tokens per expert, handle.

    Args:
        advanced: waits until the tokens have travelled, by `advance` of all ranks.
    """
    num_rows, align, once, most, recipe = transfer
    copied_early = advanced is not None
    (num_tokens, num_experts), ranks, device = routing_map.shape, slab.room.ranks, tokens.device
    local = num_experts // ranks
    slots, walk = empty_slots(routing_map), plan_walk(routing_map, cut_of(routing_map))
    count_blocks(routing_map, walk, slots)
    lay_out(walk, None, 1, 0)  # bases within an expert, because no rank has the layout yet
    link = slab.region("link", torch.int32, num_rows).zero_()
    launch(kernels.announce_kernel, (ranks,), tokens)(
        walk.count_E,
        slab.tables["counts"],
        rank,
        num_experts,
        BLOCK_E=power_of_two(num_experts, least=EXPERT_LANES),
    )
    yield

    start = torch.empty(num_experts, dtype=torch.int64, device=device)  # slab_layout_kernel writes these four
    tokens_per_expert = torch.empty(local, dtype=torch.int64, device=device)
    gap = torch.empty((2, local + 1), dtype=torch.int64, device=device)
    overflow = torch.empty(ranks, dtype=torch.bool, device=device)
    all_counts = slab.region("counts", torch.int32, ranks * num_experts)
    sizes = (rank, ranks, num_experts, local, align, num_rows)
    laid_out = (start, tokens_per_expert, gap, overflow.view(torch.uint8))
    launch(kernels.slab_layout_kernel, (1,), tokens)(
        all_counts, *laid_out, *sizes, BLOCK_E=power_of_two(num_experts, least=EXPERT_LANES)
    )
    per_block, sizes_of_map = walk.cut.tokens_per_block, (num_tokens, num_experts, num_rows, True, False)
    ranked = RowMap(slots.slots_TE, slots.num_slots_T, walk.base_EB.t(), gap, per_block, *sizes_of_map)
    lists = ranked.without_bases()
    kept_link = torch.empty(num_rows, dtype=torch.int32, device=device)  # spread_kernel writes this and the next
    kept_home = torch.empty(num_rows, dtype=torch.int64, device=device)
    local_rows = torch.empty(num_tokens, dtype=torch.int32, device=device)  # push_kernel writes this and the next
    rank_bits = torch.empty(num_tokens, dtype=torch.int64, device=device)
    of_rows, of_tokens = (kept_link, kept_home), (local_rows, rank_bits)
    handle = Handle(group, ranks, rank, lists, num_rows, *of_rows, *of_tokens, gap, overflow, local, once)
    results = Results.empty(tokens, None if probs is None else probs.dtype, num_rows, recipe)
    push(tokens, probs, Layout(start, ranked), slab, handle, results, most, recipe, copied_early)
    if advanced is not None:
        advanced()
    yield

    spread(tokens, link, slab, handle, results, True, most, recipe, copied_early)
    return *results.returned(), tokens_per_expert, handle


def resend(
    tokens: Tensor | None, probs: Tensor | None, handle: Handle, slab: Slab, most: Programs = FREE
) -> Steps[tuple[Tensor | None, Tensor | None]]:
    """The steps of a dispatch whose routing is known; it is the transpose of combine."""
    yield  # from here on no rank reads an earlier dispatch
    some = tokens if tokens is not None else probs.new_empty((handle.lists.num_tokens, 0))  # type: ignore[union-attr]
    results = Results.empty(some, None if probs is None else probs.dtype, handle.lists.num_rows, None)
    push(some, probs, None, slab, handle, results, most)
    yield
    spread(some, handle.link_C, slab, handle, results, False, most)
    return None if tokens is None else results.rows, results.probs


def collect(
    rows: Tensor | None, probs: Tensor | None, handle: Handle, slab: Slab, most: Programs = FREE
) -> Steps[tuple[Tensor | None, Tensor | None]]:
    """The steps of combine."""
    yield  # from here on no rank reads an earlier combine
    some = rows if rows is not None else probs
    assert some is not None
    shape = (handle.lists.num_tokens, 0 if rows is None else rows.shape[1])
    # return_kernel writes all of it: whole rows of tokens
    out = None if rows is None else torch.empty(shape, dtype=rows.dtype, device=some.device)
    return_sums(some, rows, probs, out, handle, slab, most)
    yield

    out_probs = None if probs is None else probs.new_zeros((handle.lists.num_tokens, handle.lists.num_experts))
    add_sums(some, probs, out, out_probs, handle, slab, most)
    return out, out_probs


def return_sums(
    some: Tensor, rows: Tensor | None, probs: Tensor | None, out: Tensor | None, handle: Handle, slab: Slab,
    most: Programs,
) -> None:  # fmt: skip
    """Send the sums of other ranks' tokens home, and write those of this rank's tokens
    into `out`.
    """
    lists, sizes = handle.lists, tuning.for_device(some.device).symmetric
    hidden = 0 if out is None else out.shape[1]
    row_pieces = ceil_div(lists.num_rows, sizes.group)
    token_pieces = ceil_div(lists.num_tokens, sizes.tokens) if hidden else 0
    pieces = row_pieces + token_pieces
    launch(kernels_of_sums.return_kernel, _grid(pieces, most.num_sms), some)(
        *strided(rows),
        *strided(None if probs is None else bits(probs), 1),
        handle.link_C,
        handle.home_C,
        slab.tables["sums"],
        None if rows is None else slab.region("rows", rows.dtype, lists.num_rows * hidden),
        None if probs is None else bits(slab.region("sum_probs", probs.dtype, lists.num_rows)),
        out,
        handle.own_T,
        lists.pointers(),
        pieces,
        row_pieces,
        token_pieces,
        lists.num_tokens,
        lists.num_experts,
        hidden,
        lists.num_rows,
        GROUP=sizes.group,
        SHARED=most.num_sms is not None,
        **_sum_settings(sizes, out),
    )


def add_sums(
    some: Tensor, probs: Tensor | None, out: Tensor | None, out_probs: Tensor | None, handle: Handle, slab: Slab,
    most: Programs,
) -> None:  # fmt: skip
    """Add the sums of all ranks up in `out`, and return the probs by token and expert."""
    lists, sizes = handle.lists, tuning.for_device(some.device).symmetric
    hidden = 0 if out is None else out.shape[1]
    blocks = ceil_div(lists.num_tokens, sizes.lists) if probs is not None else 0
    blocks += ceil_div(lists.num_tokens, sizes.tokens) if hidden else 0
    pieces = blocks * max(1, ceil_div(hidden, sizes.columns))
    launch(kernels_of_sums.total_kernel, _grid(pieces, most.num_blocks), some)(
        None if out is None else slab.region("sums", out.dtype, lists.num_rows * hidden),
        slab.tables["rows"],
        *strided(None if probs is None else bits(probs), 1),
        slab.tables["sum_probs"],
        out if hidden else None,
        None if out_probs is None else bits(out_probs),
        handle.ranks_T,
        lists.pointers(),
        pieces,
        lists.num_tokens,
        lists.num_experts,
        handle.local_experts,
        hidden,
        lists.num_rows,
        handle.rank,
        ONCE=handle.once,
        CAME=handle.once and handle.ranks < 64 and lists.num_tokens * (handle.ranks - 1) <= lists.num_rows,
        BLOCK_L=sizes.lists,
        SHARED=most.num_blocks is not None,
        **_sum_settings(sizes, out),
    )


def _sum_settings(sizes: tuning.Symmetric, out: Tensor | None) -> dict[str, Any]:
    is_float64 = out is not None and out.dtype == torch.float64
    return sizes.blocks("T", "H") | {"ACCUMULATOR": tl.float64 if is_float64 else tl.float32, "UNROLL": sizes.unroll}


def advance(tokens: Tensor, num_rows: int, slab: Slab, rank: int) -> Steps[None]:
    """The steps by which each of two ranks copies its tokens to the other, before their routing is
    known. Only tokens that have a slot are copied.
    """
    yield  # from here on no rank reads its sums or earlier tokens
    slotted_tokens = tokens[:num_rows]
    slab.region("sums", tokens.dtype, slotted_tokens.numel(), 1 - rank).view(slotted_tokens.shape).copy_(slotted_tokens)


def push(
    tokens: Tensor, probs: Tensor | None, layout: Layout | None, slab: Slab, handle: Handle, results: Results,
    most: Programs, recipe: Recipe | None = None, copied_early: bool = False,
) -> None:  # fmt: skip
    """Write tokens (with a recipe their codes and scales) and probs to their rows on all ranks, on
    this rank into the results, with zeros in the padding. With a `layout` also write the links
    there and the lists of rows here; without, as in a later dispatch of the same routing, zeros
    past the segments.
    """
    start, row_map, row_slots = (None, handle.lists, None) if layout is None else (*layout, handle.lists.slots_TE)
    sizes, hidden = tuning.for_device(tokens.device).symmetric, tokens.shape[1]
    columns, num_warps = _tile(sizes, recipe)
    numbers, settings = wire.rule_of(recipe, tokens)
    tail = sizes.tail_lanes if row_slots is None else 0
    blocks = ceil_div(row_map.num_tokens, sizes.lists) + ceil_div(row_map.num_tokens, sizes.tokens)
    pieces = (blocks + handle.local_experts + tail) * max(1, ceil_div(hidden, columns))
    launch(kernels.push_kernel, _grid(pieces, most.num_sms), tokens)(
        bits(tokens) if recipe is None else tokens.resolve_neg(),
        *tokens.stride(),
        *strided(None if probs is None else bits(probs)),
        start,
        slab.tables["rows"],
        None if recipe is None else slab.tables["scales"],
        slab.tables["probs"],
        slab.tables["link"],
        slab.tables["home"],
        row_slots,
        handle.own_T,
        handle.ranks_T,
        *results.pointers(),
        *row_map.arguments(),
        handle.gap_2L,
        tail,
        pieces,
        row_map.num_tokens,
        row_map.num_experts,
        handle.local_experts,
        hidden,
        row_map.num_rows,
        handle.rank,
        *numbers,
        **settings,
        HARDWARE=casts_in_hardware(tokens.device),
        SHARED=most.num_sms is not None,
        ONCE=handle.once,
        EARLY=copied_early,
        BLOCK_T=sizes.tokens,
        BLOCK_H=columns,
        BLOCK_L=sizes.lists,
        BLOCK_R=sizes.fill_rows,
        num_warps=num_warps,
        **NO_FP_FUSION,
    )


def spread(
    like: Tensor, link: Tensor, slab: Slab, handle: Handle, results: Results, first: bool,
    most: Programs, recipe: Recipe | None = None, copied_early: bool = False,
) -> None:  # fmt: skip
    """Copy the arrived rows to all rows of their tokens. The first time for a routing, also fill
    the handle.
    """
    sizes, hidden, num_rows = tuning.for_device(like.device).symmetric, like.shape[1], handle.lists.num_rows
    columns, num_warps = _tile(sizes, recipe)
    blocks, pieces, probs = ceil_div(hidden, FP8_BLOCK), ceil_div(num_rows, sizes.group), results.probs
    launch(kernels.spread_kernel, _grid(pieces, most.num_blocks), like)(
        bits(slab.region("rows", results.rows.dtype, num_rows * hidden)),
        bits(slab.region("sums", results.rows.dtype, num_rows * hidden)) if copied_early else None,
        None if recipe is None else slab.region("scales", torch.float32, num_rows * blocks),
        None if probs is None else bits(slab.region("probs", probs.dtype, num_rows)),
        link,
        slab.region("home", torch.int64, num_rows) if first else None,
        *results.pointers(),
        *((handle.link_C, handle.home_C) if first else (None, None)),
        pieces,
        hidden,
        num_rows,
        SHARED=most.num_blocks is not None,
        BLOCK_H=columns,
        GROUP=sizes.group,
        num_warps=num_warps,
    )


def _grid(pieces: int, most: int | None) -> tuple[int]:
    return (pieces if most is None else min(pieces, most),)


def _tile(sizes: tuning.Symmetric, recipe: Recipe | None) -> tuple[int, int]:
    """(columns, warps) of a tile. A code has one byte, so half as many lanes write them; a tile has
    whole blocks.
    """
    return (
        (sizes.columns, sizes.num_warps)
        if recipe is None
        else (max(sizes.columns, FP8_BLOCK), max(1, sizes.num_warps // 2))
    )
