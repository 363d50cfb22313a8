"""HybridEP's functions on ranks that can address each other's memory: rows travel straight to where the experts read them.

    count → tell all ranks → barrier → push → barrier → spread, and zero the padding          dispatch
    barrier → add up a token's rows here → barrier → pull                                     combine

The host is never asked and never asks: sizes are given, and every rank computes the layout, and who overflows, from everybody's counts.

This module is a namespace like `moe_fast`, of three of its functions.
"""

from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_fast import tuning
from moe_fast.backend import bits, check_device, launch_on
from moe_fast.dispatch.exchange import check_combined, counts_of_all, size_and_rank
from moe_fast.dispatch.slabs import Room, Slab, slab_for
from moe_fast.kernels import symmetric as kernels
from moe_fast.metadata import RowMap, empty_slots, walk_map
from moe_fast.tuning import ceil_div, power_of_two
from moe_ref.config import Combined, Dispatched, check_budget, check_dispatch, check_probs, check_tokens, require

SUMMED = (torch.bfloat16, torch.float16, torch.float32, torch.float64)  # dtypes of rows that are added

X = TypeVar("X")
Steps = Generator[None, None, X]  # yields where all ranks must have come


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


def hybridep_dispatch(
    tokens_TH: Tensor,
    routing_map_TE: Tensor,
    *,
    probs: Tensor | None = None,
    align: int | None = None,
    num_rows: int | None = None,
    deduplicate: bool = True,
    group: Any = None,
) -> Dispatched:
    """Send each token to the ranks that want it, and write its copies where the experts read them.

    Slots, padding, budget and the tree of the gradient are those of `moe_ref.hybridep_dispatch`. The device is not waited for; the call can
    be captured in a graph, once the group has met.

    Args:
        num_rows: of every rank's buffer, the same on all; None: as many as there are, which the device is waited for to learn.
        deduplicate: a token travels once to a rank and is copied there; otherwise once for each of its experts. The results are the same.
        group: of ranks on one NVLink host, or of processes of one CPU.

    Returns:
        `Dispatched` of this rank; `handle.overflow_W` says of every rank whether it overflows.

    Raises:
        ValueError: see `moe_ref.config`: check_dispatch, check_budget; also for 2^30 rows, or where NVLink multicast is on.
    """
    ranks, rank = size_and_rank(group)
    check_dispatch([tokens_TH] * ranks, [routing_map_TE] * ranks, None if probs is None else [probs] * ranks)
    check_budget(align, num_rows)
    check_device("tokens", tokens_TH)
    whole = [num_rows] * ranks if num_rows is not None else _rows_of_ranks(routing_map_TE, align or 1, ranks, group)
    most = max(whole)
    require(most < 1 << 30, "num_rows", most, "below 2^30")
    room = Room(ranks, routing_map_TE.shape[1], most, tokens_TH.shape[1] * tokens_TH.element_size())
    slab = slab_for(group, tokens_TH.device, room)
    rows, row_probs, counts, handle = _Dispatch.apply(tokens_TH, probs, routing_map_TE, align or 1, most, slab, rank, group, deduplicate)
    rows, row_probs = rows[: whole[rank]], None if row_probs is None else row_probs[: whole[rank]]
    handle = replace(handle, own_rows=whole[rank])
    return Dispatched(rows, row_probs, counts, handle, handle.overflow_W[rank])


def hybridep_cached_dispatch(tokens_TH: Tensor, handle: Handle, *, group: Any = None) -> Tensor:
    """The rows of `hybridep_dispatch` for other tokens of the same routing. No gradient passes.

    Raises:
        ValueError: another group, or another number of tokens.
    """
    _check(handle, group)
    check_tokens([tokens_TH])
    right = len(tokens_TH) == handle.lists.num_tokens
    require(right, "tokens", f"of {len(tokens_TH)} rows", f"of {handle.lists.num_tokens} rows, as the handle says")
    rows, _ = _resend(tokens_TH, None, handle)
    assert rows is not None
    return rows


def hybridep_combine(rows_PH: Tensor, handle: Handle, *, probs: Tensor | None = None, group: Any = None) -> Combined:
    """Add each token's rows on every rank, and pull the sums. No probability is applied.

    Trees and rounding are those of `moe_ref.hybridep_combine`.

    Args:
        probs: [P] floating point, or None; they come back as [T,E].

    Raises:
        ValueError: rows of another shape than dispatch's, or another group.
    """
    _check(handle, group)
    check_combined(rows_PH, handle.own_rows)
    if probs is not None:
        check_probs(probs, (len(rows_PH),), rows_PH)
    return Combined(*_Combine.apply(rows_PH, probs, handle))


def supports(function: str, *arguments: Any, **settings: Any) -> str | None:
    """Why a call is not supported, or None."""
    payload = arguments[0] if arguments else next((settings[name] for name in ("tokens", "rows") if name in settings), None)
    if isinstance(payload, Tensor) and payload.dtype not in SUMMED and (function == "hybridep_combine" or payload.requires_grad):
        return f"a payload of dtype {payload.dtype}: sums are taken of {SUMMED}"
    return None


def declares(function: str) -> dict[str, Any]:
    """What this implementation promises about a function, beyond the reference's contract."""
    promised = {"deterministic": True, "host_sync_free": True, "graph_capturable": True, "noncontiguous": True}  # where num_rows is given
    return promised | {"accumulator": "float32", "differentiable": function != "hybridep_cached_dispatch"}


class _Dispatch(torch.autograd.Function):
    """`hybridep_dispatch`; its gradient is a combine."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, probs: Tensor | None, routing_map: Tensor, align: int, num_rows: int, slab: Slab, *where: Any) -> Any:
        ctx.set_materialize_grads(False)
        rows, row_probs, counts, handle = run(send(tokens, routing_map, probs, align, num_rows, slab, *where), slab)
        ctx.handle = handle
        ctx.mark_non_differentiable(counts, *(x for x in (rows,) if not x.is_floating_point() or x.element_size() == 1))
        return rows, row_probs, counts, handle

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_rows: Tensor | None, d_probs: Tensor | None, *_: Any) -> Any:
        return *_collect(d_rows, d_probs, ctx.handle), *(None,) * 7


class _Combine(torch.autograd.Function):
    """`hybridep_combine`; its gradient is a dispatch."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, probs: Tensor | None, handle: Handle) -> Any:
        ctx.set_materialize_grads(False)
        ctx.handle = handle
        return _collect(rows, probs, handle)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_tokens: Tensor | None, d_probs_TE: Tensor | None) -> Any:
        return *_resend(d_tokens, d_probs_TE, ctx.handle), None


def _collect(rows: Tensor | None, probs: Tensor | None, handle: Handle) -> tuple[Tensor | None, Tensor | None]:
    slab = _slab(handle, rows, probs)
    return run(collect(rows, probs, handle, slab), slab) if slab else (None, None)


def _resend(tokens: Tensor | None, probs: Tensor | None, handle: Handle) -> tuple[Tensor | None, Tensor | None]:
    slab = _slab(handle, tokens, probs)
    rows, row_probs = run(resend(tokens, probs, handle, slab), slab) if slab else (None, None)
    return None if rows is None else rows[: handle.own_rows], None if row_probs is None else row_probs[: handle.own_rows]


def _slab(handle: Handle, rows: Tensor | None, probs: Tensor | None) -> Slab | None:
    """The group's slab, with room for such rows; None if there are neither rows nor probs, as on every rank alike."""
    some = rows if rows is not None else probs
    if some is None:
        return None
    wide = 0 if rows is None else rows.shape[1] * rows.element_size()
    return slab_for(handle.group, some.device, Room(handle.ranks, handle.lists.num_experts, handle.lists.num_rows, wide))


def _rows_of_ranks(routing_map_TE: Tensor, align: int, ranks: int, group: Any) -> list[int]:
    """Rows of each rank's buffer, padding included: all ranks count, and the host reads it."""
    asked_E = counts_of_all((routing_map_TE != 0).sum(0), group).sum(0)
    return list((-(-asked_E // align) * align).unflatten(0, (ranks, -1)).sum(1).tolist())


def run(steps: Steps[X], slab: Slab) -> X:
    """One rank's steps, with a barrier between them."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value
        slab.barrier()


def send(
    tokens: Tensor, routing_map: Tensor, probs: Tensor | None, align: int, num_rows: int, slab: Slab, rank: int, group: Any = None, once: bool = True
) -> Steps[tuple[Tensor, Tensor | None, Tensor, Handle]]:
    """The steps of dispatch."""
    (num_tokens, num_experts), ranks, device = routing_map.shape, slab.room.ranks, tokens.device
    local = num_experts // ranks
    slots = empty_slots(routing_map)
    walk = walk_map(routing_map, slots)  # the layout that it makes is of one rank's buffer, and not used
    counts = torch.empty(num_experts, dtype=torch.int32, device=device).copy_(walk.count_E)
    link = slab.region("link", torch.int32, num_rows).zero_()
    with launch_on(tokens):
        kernels.announce_kernel[(ranks,)](counts, slab.tables["counts"], rank, num_experts, BLOCK_E=power_of_two(num_experts))
    yield

    start = torch.empty(num_experts, dtype=torch.int64, device=device)  # these four: all by slab_layout_kernel
    tokens_per_expert = torch.empty(local, dtype=torch.int64, device=device)
    gap = torch.empty((2, local + 1), dtype=torch.int64, device=device)
    overflow = torch.empty(ranks, dtype=torch.bool, device=device)
    all_counts = slab.region("counts", torch.int32, ranks * num_experts)
    sizes = (rank, ranks, num_experts, local, align, num_rows)
    with launch_on(tokens):
        results = (start, tokens_per_expert, gap, overflow.view(torch.uint8))
        kernels.slab_layout_kernel[(1,)](all_counts, *results, *sizes, BLOCK_E=power_of_two(num_experts))
    ranked = RowMap(slots.slots_TE, slots.num_slots_T, walk.base_EB.t(), gap, walk.tiles * walk.block_tokens, num_tokens, num_experts, num_rows, True, False)
    lists = ranked.without_bases()
    # the walk's bases count within this rank's own layout: less the first block's, they are what stands before in the same expert
    ranked = replace(ranked, base_BE=ranked.base_BE - ranked.base_BE[:1])  # type: ignore[operator,index]
    _push(tokens, probs, start, ranked, lists.slots_TE, slab, local, once)
    yield

    kept_link = torch.empty(num_rows, dtype=torch.int32, device=device)  # all by spread_kernel
    rows, row_probs = _spread(tokens, None if probs is None else probs.dtype, link, kept_link, gap, slab, num_rows, local, whole=False)
    return rows, row_probs, tokens_per_expert, Handle(group, ranks, lists, num_rows, kept_link, gap, overflow, local, once)


def resend(tokens: Tensor | None, probs: Tensor | None, handle: Handle, slab: Slab) -> Steps[tuple[Tensor | None, Tensor | None]]:
    """The steps of a dispatch whose routing is known: the transpose of combine."""
    yield  # nobody reads an earlier dispatch any more
    some = tokens if tokens is not None else probs.new_empty((handle.lists.num_tokens, 0))  # type: ignore[union-attr]
    _push(some, probs, None, handle.lists, None, slab, handle.local_experts, handle.once)
    yield
    dtype = None if probs is None else probs.dtype
    rows, row_probs = _spread(some, dtype, handle.link_C, None, handle.gap_2L, slab, handle.lists.num_rows, handle.local_experts, whole=True)
    return None if tokens is None else rows, row_probs


def collect(rows: Tensor | None, probs: Tensor | None, handle: Handle, slab: Slab) -> Steps[tuple[Tensor | None, Tensor | None]]:
    """The steps of combine."""
    yield  # nobody pulls from an earlier combine any more
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
            kernels.gather_kernel[(lists.num_rows * columns,)](
                *((None, 0, 0) if rows is None else (rows.resolve_neg(), *rows.stride())),
                *((None, 0) if probs is None else (bits(probs), probs.stride(0))),
                handle.link_C,
                sums,
                sum_probs,
                hidden,
                lists.num_rows,
                ACCUMULATOR=accumulator,
                BLOCK_H=sizes.columns,
                num_warps=sizes.num_warps,
            )
    yield

    shape = (lists.num_tokens, hidden)
    out = None if rows is None else torch.empty(shape, dtype=rows.dtype, device=some.device)  # all by pull_kernel: whole rows of tokens
    out_probs = None if probs is None else probs.new_zeros((lists.num_tokens, lists.num_experts))
    programs = columns * ((ceil_div(lists.num_tokens, sizes.lists) if probs is not None else 0) + (ceil_div(lists.num_tokens, sizes.tokens) if hidden else 0))
    if programs:
        with launch_on(some):
            kernels.pull_kernel[(programs,)](
                slab.tables["sums"],
                slab.tables["sum_probs"],
                out if hidden else None,
                None if out_probs is None else bits(out_probs),
                lists.slots_TE,
                lists.num_slots_T,
                lists.num_tokens,
                lists.num_experts,
                handle.local_experts,
                hidden,
                lists.num_rows,
                ONCE=handle.once,
                ACCUMULATOR=accumulator,
                BLOCK_T=sizes.tokens,
                BLOCK_H=sizes.columns,
                BLOCK_L=sizes.lists,
                UNROLL=sizes.unroll,
                num_warps=sizes.num_warps,
            )
    return out, out_probs


def _push(tokens: Tensor, probs: Tensor | None, start: Tensor | None, row_map: RowMap, row_slots: Tensor | None, slab: Slab, local: int, once: bool) -> None:
    """Tokens and probs to their rows on all ranks; with `row_slots`, links there and lists here too."""
    sizes, hidden = tuning.for_device(tokens.device).symmetric, tokens.shape[1]
    blocks = ceil_div(row_map.num_tokens, sizes.lists) + ceil_div(row_map.num_tokens, sizes.tokens)
    if blocks == 0:
        return
    with launch_on(tokens):
        kernels.push_kernel[(blocks * max(1, ceil_div(hidden, sizes.columns)),)](
            bits(tokens),
            *tokens.stride(),
            *((None, 0, 0) if probs is None else (bits(probs), *probs.stride())),
            start,
            slab.tables["rows"],
            slab.tables["probs"],
            slab.tables["link"],
            row_slots,
            *row_map.arguments(),
            row_map.num_tokens,
            row_map.num_experts,
            local,
            hidden,
            row_map.num_rows,
            ONCE=once,
            BLOCK_T=sizes.tokens,
            BLOCK_H=sizes.columns,
            BLOCK_L=sizes.lists,
            num_warps=sizes.num_warps,
        )


def _spread(
    like: Tensor, prob_dtype: torch.dtype | None, link: Tensor, kept_link: Tensor | None, gap: Tensor, slab: Slab, num_rows: int, local: int, whole: bool
) -> tuple[Tensor, Tensor | None]:
    """What has arrived, in the rows of all its experts; zeros in the padding, and, for the whole of it, behind the segments."""
    sizes, hidden = tuning.for_device(like.device).symmetric, like.shape[1]
    tail = sizes.tail_lanes if whole else 0
    rows = torch.empty((num_rows, hidden), dtype=like.dtype, device=like.device)  # by spread_kernel; what is left out is nobody's
    row_probs = None if prob_dtype is None else torch.empty(num_rows, dtype=prob_dtype, device=like.device)  # likewise
    with launch_on(like):
        kernels.spread_kernel[((num_rows + local + tail) * max(1, ceil_div(hidden, sizes.columns)),)](
            bits(slab.region("rows", like.dtype, num_rows * hidden)),
            None if prob_dtype is None else bits(slab.region("probs", prob_dtype, num_rows)),
            link,
            bits(rows),
            None if row_probs is None else bits(row_probs),
            kept_link,
            gap,
            max(tail, 1),
            local,
            hidden,
            num_rows,
            BLOCK_H=sizes.columns,
            BLOCK_R=sizes.fill_rows,
            num_warps=sizes.num_warps,
        )
    return rows, row_probs


def _check(handle: Any, group: Any) -> None:
    require(isinstance(handle, Handle), "handle", type(handle).__name__, "what this module's hybridep_dispatch returned")
    require(handle.group is group, "group", group, "the group that dispatch was given")
