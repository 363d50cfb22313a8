"""permute, unpermute and sort_chunks: rows in the order of their tokens, and of their experts."""

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from moe_fast.launch import tuning
from moe_fast.launch.arithmetic import accumulator
from moe_fast.launch.autograd import mark_constant, once_differentiable
from moe_fast.launch.backend import bits, check_device, integers, movable, strided
from moe_fast.launch.legal import unless_known
from moe_fast.launch.operators import as_operators, launch, operator, traceable
from moe_fast.launch.tuning import ceil_div, power_of_two
from moe_fast.permutation import _chunks as chunk_kernels
from moe_fast.permutation import _permute as kernels
from moe_fast.permutation.row_map import RowMap, Tiles, place, place_in_capacity
from moe_ref.config import Permuted, SortedChunks, check_permute, check_sort_chunks, check_unpermute, require

SUMMED = (torch.float32, torch.bfloat16, torch.float16)  # dtypes that unpermute sums
MERGING = (*SUMMED, torch.float64)  # dtypes of probs that unpermute multiplies by


@traceable
def permute(
    tokens_TH: Tensor, routing_map_TE: Tensor, *, probs: Tensor | None = None,
    align: int | None = None, capacity: int | None = None, num_rows: int | None = None,
) -> Permuted:  # fmt: skip
    """Copy each token once for every expert it is routed to, grouped by expert.

    Two launches find the places (three with `capacity`), one moves the rows and writes the zeros.
    The host waits once, for the number of rows, if neither `capacity` nor `num_rows` is given.

    Raises:
        ValueError: also for elements of 16 bytes, and for tokens outside `MERGING` that require a
            gradient.
    """
    settings = {"align": align, "capacity": capacity, "num_rows": num_rows}
    return permute_in_tiles(tokens_TH, routing_map_TE, probs=probs, **settings)[0]


def permute_in_tiles(
    tokens_TH: Tensor, routing_map_TE: Tensor, *, probs: Tensor | None = None,
    align: int | None = None, capacity: int | None = None, num_rows: int | None = None,
    tile_rows: int | None = None,
) -> tuple[Permuted, Tiles | None]:  # fmt: skip
    """(`permute`, tiles). With `tile_rows` the second launch also cuts the experts' rows into tiles
    of that many rows; this needs `num_rows` and no capacity.
    """
    _check_permute(tokens_TH, routing_map_TE, probs, align, capacity, num_rows)
    tiles = None
    if capacity is None:
        row_map, slots, tiles = place(routing_map_TE, align, num_rows, tile_rows)
    else:
        row_map, slots = place_in_capacity(routing_map_TE, capacity)
    lists, row_map = row_map, row_map.without_bases()
    rows, row_probs = _Permute.apply(tokens_TH, probs, lists, row_map)
    pad_offsets = None if align is None else slots.pad_offsets
    return Permuted(rows, row_probs, row_map, slots.tokens_per_expert, pad_offsets, slots.overflow), tiles


@traceable
def unpermute(
    rows_PH: Tensor, row_map: RowMap, *, restore_shape: tuple[int, int] | None = None, probs: Tensor | None = None
) -> Tensor:
    """Add each token's rows together, back in token order: one launch, and one for the gradient.

    Raises:
        ValueError: also for rows outside `SUMMED` and probs outside `MERGING`.
    """
    _check_unpermute(rows_PH, row_map, restore_shape, probs)
    return _Unpermute.apply(rows_PH, probs, row_map)


@traceable
def sort_chunks(rows_RH: Tensor, chunk_sizes: Tensor, order: Tensor, *, probs: Tensor | None = None) -> SortedChunks:
    """Cut the rows into consecutive chunks and put the chunks into another order: one launch.

    The host reads neither sizes nor order. Where the sizes are illegal the result is NaN, of
    integers all bits 1; where the order is no permutation it is unspecified.

    Raises:
        ValueError: also for elements of 16 bytes.
    """
    check_sort_chunks(rows_RH, chunk_sizes, order, probs)
    check_device("rows", rows_RH)
    check_movable("rows", rows_RH)
    sizes, order = (integers(vector).to(rows_RH.device, non_blocking=True) for vector in (chunk_sizes, order))
    return SortedChunks(*_SortChunks.apply(rows_RH, probs, sizes, order))


@unless_known
def _check_permute(tokens_TH: Tensor, *settings: Any) -> None:
    check_permute(tokens_TH, *settings)
    check_device("tokens", tokens_TH)
    check_movable("tokens", tokens_TH)
    check_summable(tokens_TH)


@unless_known
def _check_unpermute(
    rows_PH: Tensor, row_map: RowMap, restore_shape: tuple[int, int] | None, probs: Tensor | None
) -> None:
    check_unpermute(rows_PH, row_map.num_rows, row_map.num_tokens, row_map.num_experts, restore_shape, probs)
    check_device("rows", rows_PH)
    check_merged(rows_PH, probs)


def check_movable(argument: str, payload: Tensor) -> None:
    """Raise `ValueError` for elements that are as wide as no integer, because rows are copied as
    integers.
    """
    require(movable(payload.dtype), argument, f"of dtype {payload.dtype}", "of at most 8 bytes per element")


def check_summable(tokens: Tensor) -> None:
    """Raise `ValueError` for tokens whose gradient no kernel sums."""
    summable = not tokens.requires_grad or tokens.dtype in MERGING
    require(summable, "tokens", f"of dtype {tokens.dtype} and requires a gradient", f"one of {MERGING} for that")


def check_merged(rows: Tensor, probs: Tensor | None) -> None:
    """Raise `ValueError` for rows that no kernel sums, or for probs by which no kernel
    multiplies.
    """
    require(rows.dtype in SUMMED, "rows", f"of dtype {rows.dtype}", f"one of {SUMMED}")
    if probs is not None:
        require(probs.dtype in MERGING, "probs", f"of dtype {probs.dtype}", f"one of {MERGING}")


@as_operators
class _Permute(torch.autograd.Function):
    """The copy of `permute`. Its gradient is `unpermute` of the rows' gradient, and the probs'
    gradient moved back.
    """

    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, probs: Tensor | None, lists: RowMap, row_map: RowMap
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        tensors, ctx.numbers = row_map.parts()
        ctx.save_for_backward(*tensors)
        rows, row_probs = move_to_rows(tokens, probs, lists, row_map.slots_TE)
        mark_constant(ctx, rows, row_probs)
        return rows, row_probs

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, drows: Tensor | None, drow_probs: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None, None]:
        drows = drows if ctx.needs_input_grad[0] else None
        drow_probs = drow_probs if ctx.needs_input_grad[1] else None
        return *sum_rows(drows, None, drow_probs, RowMap(*ctx.saved_tensors, *ctx.numbers)), None, None


@as_operators
class _Unpermute(torch.autograd.Function):
    """The sum of `unpermute`. Without probs its gradient is `permute` of the sums' gradient."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, probs: Tensor | None, row_map: RowMap) -> Tensor:
        tensors, ctx.numbers = row_map.parts()
        ctx.merging = probs is not None
        ctx.save_for_backward(rows if ctx.needs_input_grad[1] else None, probs, *tensors)
        out, _ = sum_rows(rows, probs, None, row_map)
        assert out is not None
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        rows, probs, *tensors = ctx.saved_tensors
        row_map = RowMap(*tensors, *ctx.numbers)
        if not ctx.merging:
            drows, _ = move_to_rows(dout, None, row_map)
            return drows, None, None
        return *merge_backward(dout, rows, probs, row_map, ctx.needs_input_grad[0]), None


@as_operators
class _SortChunks(torch.autograd.Function):
    """The gather of `sort_chunks`; its gradient is the gather of the inverse order."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, probs: Tensor | None, sizes: Tensor, order: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(sizes, order)
        out, out_probs = _gather_chunks(rows, probs, sizes, order, inverse=False)
        mark_constant(ctx, out, out_probs)
        assert out is not None
        return out, out_probs

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dout: Tensor | None, dout_probs: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None, None]:
        sizes, order = ctx.saved_tensors
        dout = dout if ctx.needs_input_grad[0] else None
        dout_probs = dout_probs if ctx.needs_input_grad[1] else None
        return *_gather_chunks(dout, dout_probs, sizes, order, inverse=True), None, None


def _arithmetic(rows: Tensor | None, probs: Tensor | None) -> dict[str, tl.dtype]:
    """The dtypes in which kernels hold rows, probs and sums."""
    return {"ROWS_AS": accumulator(rows), "PROBS_AS": accumulator(probs), "ACCUMULATOR": accumulator(rows, probs)}


def move_to_rows(
    tokens: Tensor, probs: Tensor | None, row_map: RowMap, row_slots: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """rows[row of t] = tokens[t], and 0 in rows without a token. With `row_slots` the lists of rows
    and the probs are written too.
    """
    sizes = tuning.for_device(tokens.device)
    hidden = tokens.shape[1]
    # permute_kernel writes all of it: a token's rows, and the gaps
    rows = torch.empty((row_map.num_rows, hidden), dtype=tokens.dtype, device=tokens.device)
    row_probs = None if probs is None else torch.empty(row_map.num_rows, dtype=probs.dtype, device=probs.device)
    programs, program_layout = row_map.programs(sizes.permute.tokens, sizes.fill)
    columns = ceil_div(hidden, sizes.permute.columns)
    # lists are written, and probs move, also when the rows are empty
    columns = columns if row_slots is None else max(1, columns)
    programs += 0 if row_slots is None else ceil_div(row_map.num_tokens, sizes.list_tokens)
    if programs * columns == 0:
        return rows, row_probs
    launch(kernels.permute_kernel, (programs * columns,), tokens)(
        *strided(bits(tokens)),
        *strided(None if probs is None else bits(probs)),
        bits(rows),
        None if row_probs is None else bits(row_probs),
        row_slots,
        *row_map.arguments(),
        row_map.gap_2E,
        *program_layout,
        *row_map.sizes(hidden),
        **sizes.permute.blocks("T", "H"),
        BLOCK_G=sizes.fill.lanes,
        BLOCK_R=sizes.fill.rows,
        BLOCK_L=sizes.list_tokens,
    )
    return rows, row_probs


@operator
def sum_rows(
    rows: Tensor | None, probs: Tensor | None, drow_probs: Tensor | None, row_map: RowMap
) -> tuple[Tensor | None, Tensor | None]:
    """(out, dprobs): out[t] = Σ over t's rows of rows · probs, and dprobs[t, e] = drow_probs[row of
    t and e].
    """
    some = rows if rows is not None else drow_probs
    if some is None:
        return None, None
    sizes = tuning.for_device(some.device)
    hidden = 0 if rows is None else rows.shape[1]
    # unpermute_kernel writes all of it
    out = None if rows is None else torch.empty((row_map.num_tokens, hidden), dtype=rows.dtype, device=rows.device)
    dprobs = None
    if drow_probs is not None:
        # all by its last column of programs
        dprobs = torch.empty((row_map.num_tokens, row_map.num_experts), dtype=drow_probs.dtype, device=some.device)
    columns = ceil_div(hidden, sizes.unpermute.columns) + int(dprobs is not None)
    programs = ceil_div(row_map.num_tokens, sizes.unpermute.tokens) * columns
    if programs == 0:
        return out, dprobs
    launch(kernels.unpermute_kernel, (programs,), some)(
        *strided(rows),
        *strided(probs),
        out,
        *strided(None if drow_probs is None else bits(drow_probs), 1),
        None if dprobs is None else bits(dprobs),
        *row_map.arguments(),
        *row_map.sizes(hidden),
        **_arithmetic(rows, probs),
        **sizes.unpermute.blocks("T", "H"),
        BLOCK_E=sizes.prob_columns,
        UNROLL=sizes.unpermute_slots,
    )
    return out, dprobs


def merge_backward(
    dout: Tensor, rows: Tensor | None, probs: Tensor, row_map: RowMap, needs_rows: bool
) -> tuple[Tensor | None, Tensor | None]:
    """(drows, dprobs) of `unpermute` with probs. `rows` is None unless dprobs is needed."""
    sizes = tuning.for_device(dout.device)
    hidden = dout.shape[1]
    # all: tokens' rows, and the gaps
    drows = torch.empty((row_map.num_rows, hidden), dtype=dout.dtype, device=dout.device) if needs_rows else None
    # the same kernel writes all of it
    dprobs = None if rows is None else torch.empty(probs.shape, dtype=probs.dtype, device=dout.device)
    block_experts = power_of_two(row_map.num_experts, least=8)
    block_tokens = min(sizes.unpermute_backward.tokens, sizes.unpermute_backward_probs.tile_tokens(block_experts))
    programs, program_layout = row_map.programs(block_tokens, sizes.fill)
    if programs == 0:
        return drows, dprobs
    launch(kernels.unpermute_backward_kernel, (programs,), dout)(
        *strided(dout),
        *strided(rows),
        *strided(probs),
        drows,
        dprobs,
        *row_map.arguments(),
        row_map.gap_2E,
        *program_layout,
        *row_map.sizes(hidden),
        **_arithmetic(dout, probs),
        BLOCK_T=block_tokens,
        BLOCK_H=sizes.unpermute_backward.columns,
        BLOCK_E=block_experts,
        BLOCK_G=sizes.fill.lanes,
        BLOCK_R=sizes.fill.rows,
        num_warps=sizes.unpermute_backward.num_warps,
    )
    return drows, dprobs


def _gather_chunks(
    rows: Tensor | None, probs: Tensor | None, sizes: Tensor, order: Tensor, *, inverse: bool
) -> tuple[Tensor | None, Tensor | None]:
    """The rows and probs of the chunks in their new order, or with the inverse in the old one."""
    some = rows if rows is not None else probs
    if some is None:
        return None, None
    blocks = tuning.for_device(some.device)
    num_rows = some.shape[0]
    hidden = 0 if rows is None else rows.shape[1]
    # sort_chunks_kernel writes all of it
    out = None if rows is None else torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
    out_probs = None if probs is None else torch.empty(probs.shape, dtype=probs.dtype, device=probs.device)  # as above
    if num_rows == 0:
        return out, out_probs
    sizes, order = sizes.to(torch.int64), order.to(torch.int64)  # one kernel for both dtypes
    launch(chunk_kernels.sort_chunks_kernel, (ceil_div(num_rows, blocks.sort_chunks.tokens),), some)(
        *strided(None if rows is None else bits(rows)),
        *strided(None if probs is None else bits(probs), 1),
        *strided(sizes, 1),
        *strided(order, 1),
        None if out is None else bits(out),
        None if out_probs is None else bits(out_probs),
        num_rows,
        hidden,
        sizes.shape[0],
        int(inverse),
        **blocks.sort_chunks.blocks("R", "H"),
        BLOCK_S=blocks.chunk_columns,
    )
    return out, out_probs
