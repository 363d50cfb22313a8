"""The steps of dispatch and combine on ranks that share memory, with a barrier at each bar.

    count → announce | push | spread, and fill the padding          dispatch
    | add up a token's rows here | pull                             combine

They run on one rank, or on several in one process that wait for each other by other means.
"""

from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch
import triton.language as tl
from torch import Tensor

from moe_fast.dispatch import _symmetric as kernels
from moe_fast.dispatch import wire
from moe_fast.dispatch.slabs import Slab
from moe_fast.launch import tuning
from moe_fast.launch.arithmetic import NO_FP_FUSION
from moe_fast.launch.backend import bits, casts_in_hardware, launch_on, strided
from moe_fast.launch.tuning import ceil_div, power_of_two
from moe_fast.permutation.row_map import RowMap, empty_slots, walk_map
from moe_ref.config import FP8_BLOCK, Recipe

X = TypeVar("X")
Steps = Generator[None, None, X]  # yields where all ranks must have come


class Programs(NamedTuple):
    """The most programs of the kernels between ranks, and of those within one; None: one per piece
    of work.
    """

    num_sms: int | None = None
    num_blocks: int | None = None


FREE = Programs()


@dataclass(frozen=True)
class Handle:
    """What combine needs of its dispatch."""

    group: Any
    ranks: int
    lists: RowMap  # of rows: where each token's are
    own_rows: int  # of this rank's buffer; the lists' are the largest of all ranks
    link_C: Tensor  # which rows have travelled, and the next of the same token
    gap_2L: Tensor  # begin and end of each local expert's padding
    overflow_W: Tensor  # of all ranks
    local_experts: int
    once: bool


def run(steps: Steps[X], slab: Slab) -> X:
    """One rank's steps, with a barrier between them."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value
        slab.barrier()


def send(
    tokens: Tensor, routing_map: Tensor, probs: Tensor | None, align: int, num_rows: int,
    slab: Slab, rank: int, group: Any = None, once: bool = True, most: Programs = FREE,
    recipe: Recipe | None = None,
) -> Steps[tuple[Any, Tensor | None, Tensor, Handle]]:  # fmt: skip
    """The steps of dispatch: rows (with a recipe their form), probs, tokens per expert, handle."""
    (num_tokens, num_experts), ranks, device = routing_map.shape, slab.room.ranks, tokens.device
    local = num_experts // ranks
    slots = empty_slots(routing_map)
    walk = walk_map(routing_map, slots)  # the layout that it makes is of one rank's buffer, and not used
    counts = torch.empty(num_experts, dtype=torch.int32, device=device).copy_(walk.count_E)
    link = slab.region("link", torch.int32, num_rows).zero_()
    with launch_on(tokens):
        kernels.announce_kernel[(ranks,)](
            counts, slab.tables["counts"], rank, num_experts, BLOCK_E=power_of_two(num_experts, least=8)
        )
    yield

    start = torch.empty(num_experts, dtype=torch.int64, device=device)  # these four: all by slab_layout_kernel
    tokens_per_expert = torch.empty(local, dtype=torch.int64, device=device)
    gap = torch.empty((2, local + 1), dtype=torch.int64, device=device)
    overflow = torch.empty(ranks, dtype=torch.bool, device=device)
    all_counts = slab.region("counts", torch.int32, ranks * num_experts)
    sizes = (rank, ranks, num_experts, local, align, num_rows)
    with launch_on(tokens):
        results = (start, tokens_per_expert, gap, overflow.view(torch.uint8))
        kernels.slab_layout_kernel[(1,)](all_counts, *results, *sizes, BLOCK_E=power_of_two(num_experts, least=8))
    ranked = RowMap(
        slots.slots_TE,
        slots.num_slots_T,
        walk.base_EB.t(),
        gap,
        walk.tiles * walk.block_tokens,
        num_tokens,
        num_experts,
        num_rows,
        True,
        False,
    )
    lists = ranked.without_bases()
    # the walk's bases count within this rank's own layout: less the first block's, they are what
    # stands before in the same expert
    ranked = replace(ranked, base_BE=ranked.base_BE - ranked.base_BE[:1])  # type: ignore[operator,index]
    push(tokens, probs, start, ranked, lists.slots_TE, slab, local, once, most.num_sms, recipe)
    yield

    kept_link = torch.empty(num_rows, dtype=torch.int32, device=device)  # all by spread_kernel
    dtype = None if probs is None else probs.dtype
    rows, row_probs = spread(tokens, dtype, link, kept_link, gap, slab, num_rows, local, False, most.num_blocks, recipe)
    return (
        rows,
        row_probs,
        tokens_per_expert,
        Handle(group, ranks, lists, num_rows, kept_link, gap, overflow, local, once),
    )


def resend(
    tokens: Tensor | None, probs: Tensor | None, handle: Handle, slab: Slab, most: Programs = FREE
) -> Steps[tuple[Tensor | None, Tensor | None]]:
    """The steps of a dispatch whose routing is known: the transpose of combine."""
    yield  # no rank reads an earlier dispatch
    some = tokens if tokens is not None else probs.new_empty((handle.lists.num_tokens, 0))  # type: ignore[union-attr]
    push(some, probs, None, handle.lists, None, slab, handle.local_experts, handle.once, most.num_sms)
    yield
    dtype = None if probs is None else probs.dtype
    num_rows, local = handle.lists.num_rows, handle.local_experts
    rows, row_probs = spread(
        some, dtype, handle.link_C, None, handle.gap_2L, slab, num_rows, local, True, most.num_blocks
    )
    return None if tokens is None else rows, row_probs


def collect(
    rows: Tensor | None, probs: Tensor | None, handle: Handle, slab: Slab, most: Programs = FREE
) -> Steps[tuple[Tensor | None, Tensor | None]]:
    """The steps of combine."""
    yield  # no rank pulls from an earlier combine
    some = rows if rows is not None else probs
    assert some is not None
    lists = handle.lists
    hidden = 0 if rows is None else rows.shape[1]
    sizes = tuning.for_device(some.device).symmetric
    columns = max(1, ceil_div(hidden, sizes.columns))
    accumulator = tl.float64 if rows is not None and rows.dtype == torch.float64 else tl.float32
    sums = None if rows is None else slab.region("sums", rows.dtype, lists.num_rows * hidden)
    sum_probs = None if probs is None else bits(slab.region("sum_probs", probs.dtype, lists.num_rows))
    if lists.num_rows:
        with launch_on(some):
            kernels.gather_kernel[_grid(lists.num_rows * columns, most.num_blocks)](
                *strided(rows),
                *strided(None if probs is None else bits(probs), 1),
                handle.link_C,
                sums,
                sum_probs,
                hidden,
                lists.num_rows,
                ACCUMULATOR=accumulator,
                SHARED=most.num_blocks is not None,
                BLOCK_H=sizes.columns,
                num_warps=sizes.num_warps,
            )
    yield

    shape = (lists.num_tokens, hidden)
    # all by pull_kernel: whole rows of tokens
    out = None if rows is None else torch.empty(shape, dtype=rows.dtype, device=some.device)
    out_probs = None if probs is None else probs.new_zeros((lists.num_tokens, lists.num_experts))
    programs = columns * (
        (ceil_div(lists.num_tokens, sizes.lists) if probs is not None else 0)
        + (ceil_div(lists.num_tokens, sizes.tokens) if hidden else 0)
    )
    if programs:
        with launch_on(some):
            kernels.pull_kernel[_grid(programs, most.num_sms)](
                slab.tables["sums"],
                slab.tables["sum_probs"],
                out if hidden else None,
                None if out_probs is None else bits(out_probs),
                lists.pointers(),
                lists.num_tokens,
                lists.num_experts,
                handle.local_experts,
                hidden,
                lists.num_rows,
                ONCE=handle.once,
                ACCUMULATOR=accumulator,
                SHARED=most.num_sms is not None,
                **sizes.blocks("T", "H"),
                BLOCK_L=sizes.lists,
                UNROLL=sizes.unroll,
            )
    return out, out_probs


def push(
    tokens: Tensor, probs: Tensor | None, start: Tensor | None, row_map: RowMap,
    row_slots: Tensor | None, slab: Slab, local: int, once: bool, most: int | None, recipe: Recipe | None = None,
) -> None:  # fmt: skip
    """Tokens (with a recipe their codes and scales) and probs to their rows on all ranks; with
    `row_slots` also links there and lists here.
    """
    sizes, hidden = tuning.for_device(tokens.device).symmetric, tokens.shape[1]
    columns, num_warps = _tile(sizes, recipe)
    numbers, settings = wire.rule_of(recipe, tokens)
    blocks = ceil_div(row_map.num_tokens, sizes.lists) + ceil_div(row_map.num_tokens, sizes.tokens)
    if blocks == 0:
        return
    with launch_on(tokens):
        kernels.push_kernel[_grid(blocks * max(1, ceil_div(hidden, columns)), most)](
            bits(tokens) if recipe is None else tokens.resolve_neg(),
            *tokens.stride(),
            *strided(None if probs is None else bits(probs)),
            start,
            slab.tables["rows"],
            None if recipe is None else slab.tables["scales"],
            slab.tables["probs"],
            slab.tables["link"],
            row_slots,
            *row_map.arguments(),
            row_map.num_tokens,
            row_map.num_experts,
            local,
            hidden,
            row_map.num_rows,
            *numbers,
            **settings,
            HARDWARE=casts_in_hardware(tokens.device),
            ONCE=once,
            SHARED=most is not None,
            BLOCK_T=sizes.tokens,
            BLOCK_H=columns,
            BLOCK_L=sizes.lists,
            num_warps=num_warps,
            **NO_FP_FUSION,
        )


def spread(
    like: Tensor, prob_dtype: torch.dtype | None, link: Tensor, kept_link: Tensor | None,
    gap: Tensor, slab: Slab, num_rows: int, local: int, whole: bool, most: int | None, recipe: Recipe | None = None,
) -> tuple[Any, Tensor | None]:  # fmt: skip
    """The arrived rows, copied to all rows of their tokens; zeros in the padding and, for `whole`,
    past the segments. With a recipe, a form.
    """
    sizes, hidden, device = tuning.for_device(like.device).symmetric, like.shape[1], like.device
    columns, num_warps = _tile(sizes, recipe)
    numbers, settings = wire.rule_of(recipe, like)
    tail = sizes.tail_lanes if whole else 0
    dtype = like.dtype if recipe is None else torch.uint8
    rows = torch.empty((num_rows, hidden), dtype=dtype, device=device)  # by spread_kernel, all rows of tokens
    row_probs = None if prob_dtype is None else torch.empty(num_rows, dtype=prob_dtype, device=device)  # as above
    blocks = 0 if recipe is None else ceil_div(hidden, FP8_BLOCK)
    # by spread_kernel; in the layout of `quantize`
    scale = torch.empty((blocks, num_rows), dtype=torch.float32, device=device).T
    with launch_on(like):
        kernels.spread_kernel[_grid((num_rows + local + tail) * max(1, ceil_div(hidden, columns)), most)](
            bits(slab.region("rows", dtype, num_rows * hidden)),
            None if recipe is None else slab.region("scales", torch.float32, num_rows * blocks),
            None if prob_dtype is None else bits(slab.region("probs", prob_dtype, num_rows)),
            link,
            bits(rows),
            *strided(None if recipe is None else scale),
            None if row_probs is None else bits(row_probs),
            kept_link,
            gap,
            local + tail,
            max(tail, 1),
            local,
            hidden,
            num_rows,
            *numbers,
            **settings,
            SHARED=most is not None,
            BLOCK_H=columns,
            BLOCK_R=sizes.fill_rows,
            num_warps=num_warps,
            **NO_FP_FUSION,
        )
    return rows if recipe is None else wire.form_of(rows, scale), row_probs


def _grid(work: int, most: int | None) -> tuple[int]:
    return (work if most is None else min(work, most),)


def _tile(sizes: tuning.Symmetric, recipe: Recipe | None) -> tuple[int, int]:
    """(columns, warps). Codes are one byte each: half as many lanes write them, by whole blocks."""
    return (
        (sizes.columns, sizes.num_warps)
        if recipe is None
        else (max(sizes.columns, FP8_BLOCK), max(1, sizes.num_warps // 2))
    )
