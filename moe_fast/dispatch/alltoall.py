"""AlltoAll: each copy of a token travels by itself to the rank of its expert."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_fast.dispatch.budget import into_slabs, kept_copies, out_of_slabs
from moe_fast.dispatch.exchange import (
    Exchange,
    added,
    check_combined,
    check_handle,
    counts_of_all,
    exchange_of,
    exchanged,
    replicated,
    size_and_rank,
)
from moe_fast.permutation.permute import permute, sort_chunks, unpermute
from moe_ref.config import Dispatched, check_dispatch, check_one_size


@dataclass(frozen=True)
class Handle:
    """What combine needs to know of the dispatch."""

    exchange: Exchange
    row_map: Any  # of the permutation in front
    num_tokens: int
    arrived_sizes: Tensor  # rows of each (source, local expert), in the order of arrival
    order: Tensor  # of those chunks after sorting
    blocks: tuple[int, ...]  # rows of each group of shards, where they leave
    shards: int
    reduce_dtype: torch.dtype | None
    num_rows: int | None = None  # the budget, which is the rows of each slab
    sent_sizes: Tensor | None = None  # with a budget: rows that each group of shards keeps of this rank's


def alltoall_dispatch(
    tokens_TH: Tensor,
    routing_map_TE: Tensor,
    *,
    probs: Tensor | None = None,
    expert_tensor_parallel: int = 1,
    capacity: int | None = None,
    num_rows: int | None = None,
    group: Any = None,
) -> Dispatched:
    """Permute the copies by expert, send each chunk to its expert's rank, and sort what arrives by
    local expert.

    The gradients of the probs from several shards are added in the dtype of the probs. Each copy
    travels to all shards of its expert, in one collective. The host reads the counts, unless
    `capacity` gives the sizes or `num_rows` bounds them: then every rank sends `num_rows` rows to
    each, see `budget`.
    """
    ranks, rank = size_and_rank(group)
    shards = expert_tensor_parallel
    check_dispatch(
        [tokens_TH] * ranks, [routing_map_TE] * ranks, None if probs is None else [probs] * ranks, shards, capacity
    )
    check_one_size(capacity, num_rows)
    if num_rows is not None:
        return _within_budget(tokens_TH, routing_map_TE, probs, shards, num_rows, group)
    holders = ranks // shards  # groups of shards
    local = routing_map_TE.shape[1] // holders
    permuted = permute(tokens_TH, routing_map_TE, probs=probs, capacity=capacity)
    asked_SE = counts_of_all((routing_map_TE != 0).sum(0), group)
    if capacity is None:
        sent_SE = asked_SE
        counts = asked_SE.unflatten(1, (holders, local)).sum(2).tolist()
    else:
        sent_SE = torch.full_like(asked_SE, capacity)
        counts = [[capacity * local] * holders] * ranks
    exchange = exchange_of([[count for count in row for _ in range(shards)] for row in counts], rank, group)
    blocks = tuple(counts[rank])
    rows, row_probs = exchanged(
        exchange, _to_shards(permuted.rows, blocks, shards), _to_shards(permuted.probs, blocks, shards)
    )
    local_columns = slice(rank // shards * local, (rank // shards + 1) * local)
    sizes, order = sent_SE[:, local_columns].flatten(), _by_expert(holders, shards, local, tokens_TH.device)
    assert rows is not None
    sorted_rows = sort_chunks(rows, sizes, order, probs=row_probs)
    reduce_dtype = None if probs is None else probs.dtype
    handle = Handle(exchange, permuted.row_map, len(tokens_TH), sizes, order, blocks, shards, reduce_dtype)
    return Dispatched(
        sorted_rows.rows,
        sorted_rows.probs,
        sent_SE[:, local_columns].sum(0),
        handle,
        (asked_SE[:, local_columns] > sent_SE[:, local_columns]).any(),
    )


def alltoall_combine(rows_PH: Tensor, handle: Handle, *, group: Any = None) -> Tensor:
    """Sort the rows back, send them home, add the shards of each, and add each token's rows.

    Raises:
        ValueError: rows of another shape than dispatch's, or another group.
    """
    check_handle(handle, Handle, group)
    arriving, num_rows = sum(handle.exchange.receive), handle.num_rows
    check_combined(rows_PH, arriving if num_rows is None else num_rows)
    sorted_rows = rows_PH
    if num_rows is not None:
        sorted_rows = torch.cat([rows_PH, rows_PH.new_zeros((arriving - num_rows, rows_PH.shape[1]))])
    inverse = handle.order.argsort()
    arrived = sort_chunks(sorted_rows, handle.arrived_sizes[handle.order], inverse).rows
    (home,) = exchanged(handle.exchange.back, arrived)
    assert home is not None
    between = handle.reduce_dtype or (torch.float64 if rows_PH.dtype == torch.float64 else torch.float32)
    sums = _from_shards(home, handle.blocks, handle.shards, between)
    if num_rows is not None and handle.sent_sizes is not None:
        sums = out_of_slabs(sums, handle.sent_sizes, num_rows)
    return unpermute(sums, handle.row_map, restore_shape=(handle.num_tokens, rows_PH.shape[1]))


def _within_budget(
    tokens_TH: Tensor, routing_map_TE: Tensor, probs: Tensor | None, shards: int, num_rows: int, group: Any
) -> Dispatched:
    """The dispatch with a budget: copies that have a row travel in slabs of `num_rows` rows."""
    ranks, rank = size_and_rank(group)
    holders, device = ranks // shards, tokens_TH.device
    sources = torch.arange(ranks, device=device).reshape(holders, shards).T.flatten()
    copies = kept_copies(routing_map_TE, num_rows, group, shards=shards, sources=sources)
    permuted = permute(tokens_TH, copies.map_TE, probs=probs, num_rows=holders * num_rows)
    sent_sizes = copies.count_SE[rank].unflatten(0, (holders, -1)).sum(1)
    slabs = into_slabs(permuted.rows, sent_sizes, num_rows, permuted.probs)
    exchange, blocks = exchange_of([[num_rows] * ranks] * ranks, rank, group), (num_rows,) * holders
    slab_tensors = [_to_shards(tensor, blocks, shards) for tensor in (slabs.rows, slabs.probs)]
    rows, row_probs = exchanged(exchange, *slab_tensors)
    arrived_SL = copies.count_SE[:, copies.columns]
    sizes = torch.cat([arrived_SL, num_rows - arrived_SL.sum(1, keepdim=True)], 1).flatten()
    order = _by_expert(holders, shards, len(copies.length_L) + 1, device)  # last what is free in the slabs
    assert rows is not None
    sorted_rows = sort_chunks(rows, sizes, order, probs=row_probs)
    reduce_dtype = None if probs is None else probs.dtype
    handle = Handle(
        exchange, permuted.row_map, len(tokens_TH), sizes, order, blocks, shards, reduce_dtype, num_rows, sent_sizes
    )
    row_probs = None if sorted_rows.probs is None else sorted_rows.probs[:num_rows]
    return Dispatched(sorted_rows.rows[:num_rows], row_probs, copies.length_L, handle, copies.overflow)


def _by_expert(holders: int, shards: int, chunks: int, device: torch.device) -> Tensor:
    """The order that sorts the arrived chunks, one for each source and local expert: by expert,
    then by the source's tensor rank, then by its group.
    """
    places = torch.arange(holders * shards * chunks, device=device).reshape(holders, shards, chunks)
    return places.permute(2, 1, 0).flatten()


def _to_shards(x: Tensor | None, blocks: tuple[int, ...], shards: int) -> Tensor | None:
    """x, with each block repeated for each of its shards."""
    if x is None or shards == 1:
        return x
    return torch.cat([replicated(block, shards) for block in x.split(list(blocks))])


def _from_shards(x: Tensor, blocks: tuple[int, ...], shards: int, between: torch.dtype) -> Tensor:
    """The sum of each block over its shards."""
    if shards == 1:
        return x
    pieces = x.split([count * shards for count in blocks])
    return torch.cat(
        [
            added(piece.unflatten(0, (shards, -1)) if len(piece) else piece.reshape(shards, 0, x.shape[1]), between)
            for piece in pieces
        ]
    )
