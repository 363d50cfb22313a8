"""HybridEP's functions on ranks that share memory: rows travel straight to where the experts read.

    count → announce → barrier → push, and zero the padding → barrier → spread          dispatch
    barrier → add up a token's rows here, send the sum home → barrier → add up          combine

The host never waits: the call gives the sizes, and every rank computes the layout and all overflows
from the counts of all ranks. This module is an implementation of three functions, and of those that
read quantised rows. Read `steps` first.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_fast.declared import COMPUTED, COPY, READ, Family
from moe_fast.dispatch import wire
from moe_fast.dispatch.exchange import check_combined, counts_of_all, size_and_rank
from moe_fast.dispatch.slabs import Room, Slab, slab_for, transport_of
from moe_fast.dispatch.steps import FREE, Handle, Programs, Transfer, advance, collect, resend, run, run_with, send
from moe_fast.launch.autograd import mark_constant, once_differentiable
from moe_fast.launch.backend import check_device
from moe_fast.quantization.quantized import codes, dequantize, scales
from moe_ref.config import (
    Combined,
    Dispatched,
    Recipe,
    check_budget,
    check_dispatch,
    check_probs,
    check_programs,
    check_tokens,
    check_wire_recipe,
    require,
)

Parts = tuple[Tensor | None, Tensor | None]  # rows or tokens, and their probs
SUMMED = (torch.bfloat16, torch.float16, torch.float32, torch.float64)  # dtypes of rows that are added


class Early(NamedTuple):
    """Tokens that are on their way to the other rank before their routing is known."""

    tokens: Tensor
    slab: Slab
    wait: Callable[[], None]  # lets later work on the current stream come after their departure


def start_early(tokens_TH: Tensor, *, num_experts: int, num_rows: int, group: Any) -> Early:
    """Copy all tokens to the other of two ranks before their routing is known. Their dispatch, with
    the same `num_rows`, then sends no rows. All ranks call it together.

    Over NVLink a copy engine moves them on a separate stream, while the gate and the router run. It
    pays if nearly every token goes to both ranks.

    Raises:
        ValueError: another number of ranks than two; see `hybridep_dispatch`.
    """
    ranks, rank = size_and_rank(group)
    require(ranks == 2, "group", f"of {ranks} ranks", "of two")
    tokens, device = tokens_TH.detach(), tokens_TH.device
    slab = slab_for(group, device, Room(ranks, num_experts, num_rows, tokens.shape[1] * tokens.element_size()))
    steps = advance(tokens, num_rows, slab, rank)
    if slab.aside is None:
        run(steps, slab)
        return Early(tokens_TH, slab, lambda: None)
    here, copy_stream = torch.cuda.current_stream(device), _copies(device)
    copy_stream.wait_stream(here)
    with torch.cuda.stream(copy_stream):
        run_with(steps, slab.aside)
    return Early(tokens_TH, slab, lambda: torch.cuda.current_stream(device).wait_stream(copy_stream))


@cache
def _copies(device: torch.device) -> Any:
    """The GPU's stream for these copies."""
    return torch.cuda.Stream(device)


def hybridep_dispatch(
    tokens_TH: Tensor, routing_map_TE: Tensor,
    *, probs: Tensor | None = None, align: int | None = None, num_rows: int | None = None,
    recipe: Recipe | None = None, num_sms: int | None = None, num_blocks: int | None = None,
    deduplicate: bool = True, group: Any = None,
    early: Early | None = None,
) -> Dispatched:  # fmt: skip
    """Write each token straight to its rows on the ranks that want it; `num_rows` is the same on
    all ranks.

    The host never waits, unless `num_rows` is None, and the call can be captured in a graph once
    the group has met with as much room (`slabs.slab_for`). A GPU waits for a missing rank for
    `slabs.BARRIER_MS`, then gives up with an error. With a recipe each token is quantised where it
    is read: the bits are those of rows quantised on arrival. With `deduplicate` a token travels
    once to a rank and is copied there; the results are the same. `early` is what `start_early` of
    the same tokens has returned on all ranks.

    `num_sms` is the most programs, and so multiprocessors, of the kernel that writes to other
    ranks; `num_blocks` of the one that copies rows here. The backward's kernels have as many.

    Raises:
        ValueError: also for 2^30 rows, where NVLink multicast is on, or over several hosts.
    """
    ranks, rank = size_and_rank(group)
    check_dispatch([tokens_TH] * ranks, [routing_map_TE] * ranks, None if probs is None else [probs] * ranks)
    check_budget(align, num_rows)
    check_programs(num_sms, num_blocks)
    check_wire_recipe(recipe, [tokens_TH])
    check_device("tokens", tokens_TH)
    buffer_rows = (
        [num_rows] * ranks if num_rows is not None else _rows_of_ranks(routing_map_TE, align or 1, ranks, group)
    )
    most_rows = max(buffer_rows)
    require(most_rows < 1 << 30, "num_rows", most_rows, "below 2^30")
    room = Room(ranks, routing_map_TE.shape[1], most_rows, tokens_TH.shape[1] * tokens_TH.element_size())
    slab = slab_for(group, tokens_TH.device, room)
    transfer = Transfer(most_rows, align or 1, deduplicate, Programs(num_sms, num_blocks), recipe)
    rank_rows = slice(buffer_rows[rank])
    if early is not None:
        is_usable = recipe is None and deduplicate and early.slab is slab and early.tokens is tokens_TH
        require(
            is_usable,
            "early",
            "of other tokens or rows, or with a recipe or duplicates",
            "None, or as start_early says",
        )
    if recipe is None:
        waits = None if early is None else early.wait
        inputs = (tokens_TH, probs, routing_map_TE, buffer_rows[rank], waits)
        rows, row_probs, counts, handle = _Dispatch.apply(*inputs, transfer, slab, rank, group)
        return Dispatched(rows, row_probs, counts, handle, handle.overflow_W[rank])
    steps = send(tokens_TH.detach(), routing_map_TE, probs, transfer, slab, rank, group)
    form, row_probs, counts, handle = run(steps, slab)
    handle = replace(handle, own_rows=buffer_rows[rank])
    own_probs = None if row_probs is None else row_probs[rank_rows]
    source, row_probs = _Place.apply(tokens_TH, probs, own_probs, handle, transfer.most)
    rows = wire.rows_of(
        wire.form_of(form.codes_MN[rank_rows], form.scale[rank_rows]), recipe, tokens_TH.dtype, counts, source
    )
    return Dispatched(rows, row_probs, counts, handle, handle.overflow_W[rank])


def hybridep_cached_dispatch(tokens_TH: Tensor, handle: Handle, *, group: Any = None) -> Tensor:
    """The rows of `hybridep_dispatch` for other tokens of the same routing. No gradient passes.

    Raises:
        ValueError: another group, or another number of tokens.
    """
    _check(handle, group)
    check_tokens([tokens_TH])
    has_all_tokens = len(tokens_TH) == handle.lists.num_tokens
    require(
        has_all_tokens, "tokens", f"of {len(tokens_TH)} rows", f"of {handle.lists.num_tokens} rows, as the handle says"
    )
    rows, _ = _resend(tokens_TH, None, handle, FREE)
    assert rows is not None
    return rows


def hybridep_combine(
    rows_PH: Tensor, handle: Handle,
    *, probs: Tensor | None = None, num_sms: int | None = None, num_blocks: int | None = None, group: Any = None,
) -> Combined:  # fmt: skip
    """Add each token's rows on every rank, and the sums at home; no probability is applied.

    Probs, [P] or None, come back as [T,E]. `num_sms` is the most programs of the kernel that writes
    to other ranks, `num_blocks` of the one that adds up here; as in dispatch.

    Raises:
        ValueError: rows of another shape than dispatch's, or another group.
    """
    _check(handle, group)
    check_combined(rows_PH, handle.own_rows)
    if probs is not None:
        check_probs(probs, (len(rows_PH),), rows_PH)
    check_programs(num_sms, num_blocks)
    return Combined(*_Combine.apply(rows_PH, probs, handle, Programs(num_sms, num_blocks)))


class _Dispatch(torch.autograd.Function):
    """`hybridep_dispatch`; its gradient is a combine."""

    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, probs: Tensor | None, routing_map: Tensor, own_rows: int,
        waits: Callable[[], None] | None, transfer: Transfer, slab: Slab, rank: int, group: Any,
    ) -> Any:  # fmt: skip
        ctx.set_materialize_grads(False)
        ctx.most = transfer.most
        steps = send(tokens, routing_map, probs, transfer, slab, rank, group, advanced=waits)
        rows, row_probs, counts, handle = run(steps, slab)
        # here: a slice of the results would copy their gradients
        rows, row_probs = rows[:own_rows], None if row_probs is None else row_probs[:own_rows]
        ctx.handle = handle = replace(handle, own_rows=own_rows)
        ctx.mark_non_differentiable(counts, *(x for x in (rows,) if not x.is_floating_point() or x.element_size() == 1))
        return rows, row_probs, counts, handle

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_rows: Tensor | None, d_probs: Tensor | None, *_: Any) -> Any:
        return *_collect(d_rows, d_probs, ctx.handle, ctx.most), *(None,) * 7


class _Place(torch.autograd.Function):
    """The node in autograd's graph of rows that arrived as codes, whose values are never read, and
    of their probs.
    """

    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, probs: Tensor | None, row_probs: Tensor | None, handle: Handle, most: Programs
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        ctx.handle, ctx.most = handle, most
        source = tokens.new_empty(()).expand(handle.own_rows, tokens.shape[1])  # it takes no memory
        moved = None if row_probs is None else row_probs.view_as(row_probs)
        mark_constant(ctx, source, moved)
        return source, moved

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, d_rows: Tensor | None, d_probs: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        return *_collect(d_rows, d_probs, ctx.handle, ctx.most), None, None, None


class _Combine(torch.autograd.Function):
    """`hybridep_combine`; its gradient is a dispatch."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, probs: Tensor | None, handle: Handle, most: Programs) -> Any:
        ctx.set_materialize_grads(False)
        ctx.handle, ctx.most = handle, most
        return _collect(rows, probs, handle, most)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_tokens: Tensor | None, d_probs_TE: Tensor | None) -> Any:
        return *_resend(d_tokens, d_probs_TE, ctx.handle, ctx.most), None, None


def _collect(rows: Tensor | None, probs: Tensor | None, handle: Handle, most: Programs) -> Parts:
    slab = _slab(handle, rows, probs)
    return run(collect(rows, probs, handle, slab, most), slab) if slab else (None, None)


def _resend(tokens: Tensor | None, probs: Tensor | None, handle: Handle, most: Programs) -> Parts:
    slab, local_rows = _slab(handle, tokens, probs), slice(handle.own_rows)
    rows, row_probs = run(resend(tokens, probs, handle, slab, most), slab) if slab else (None, None)
    return None if rows is None else rows[local_rows], None if row_probs is None else row_probs[local_rows]


def _slab(handle: Handle, rows: Tensor | None, probs: Tensor | None) -> Slab | None:
    """The group's slab, with room for these rows; None if there are neither rows nor probs, which
    is so on all ranks or on none.
    """
    some = rows if rows is not None else probs
    if some is None:
        return None
    row_bytes = 0 if rows is None else rows.shape[1] * rows.element_size()
    return slab_for(
        handle.group, some.device, Room(handle.ranks, handle.lists.num_experts, handle.lists.num_rows, row_bytes)
    )


def _rows_of_ranks(routing_map_TE: Tensor, align: int, ranks: int, group: Any) -> list[int]:
    """Rows of each rank's buffer, padding included: all ranks count, and the host reads it."""
    asked_E = counts_of_all((routing_map_TE != 0).sum(0), group).sum(0)
    return list((-(-asked_E // align) * align).unflatten(0, (ranks, -1)).sum(1).tolist())


def _check(handle: Any, group: Any) -> None:
    require(
        isinstance(handle, Handle), "handle", type(handle).__name__, "what this module's hybridep_dispatch returned"
    )
    require(handle.group is group, "group", group, "the group that dispatch was given")


def transport(function: str, group: Any) -> str:
    """How a group's ranks reach each other's memory, as the conformance suite reports it."""
    return transport_of(group)


def _check_summed(function: str, payload: Tensor, settings: dict[str, Any]) -> None:
    if function == "hybridep_combine" or payload.requires_grad:
        require(payload.dtype in SUMMED, "payload", f"of dtype {payload.dtype}", f"one of {SUMMED}, which are summed")


_family = Family(
    {
        hybridep_dispatch: COMPUTED,  # the host does not wait if num_rows is given
        hybridep_cached_dispatch: COMPUTED | {"differentiable": False},
        hybridep_combine: COMPUTED,
        codes: COPY,
        scales: READ,
        dequantize: COMPUTED,
    },
    _check_summed,
)
declares, supports = _family.declares, _family.supports
__all__ = [*_family.names, "transport"]
