"""AllGather: every rank sees all tokens and picks the copies that its own experts want."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_fast.dispatch.budget import kept_copies
from moe_fast.dispatch.deduplicated import Sent, add_ranks, send_once
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
from moe_fast.dispatch.indices import columns_of_ranks
from moe_fast.permutation.permute import permute, unpermute
from moe_ref.config import Dispatched, check_budget, check_dispatch


@dataclass(frozen=True)
class Handle:
    """What combine needs to know of the dispatch."""

    exchange: Exchange
    row_map: Any
    num_rows: int
    reduce_dtype: torch.dtype | None
    sent_rows: Sent | None = None  # only with a budget


def allgather_dispatch(
    tokens_TH: Tensor,
    routing_map_TE: Tensor,
    *,
    probs: Tensor | None = None,
    expert_tensor_parallel: int = 1,
    num_rows: int | None = None,
    group: Any = None,
) -> Dispatched:
    """Gather all tokens on every rank, and permute the copies that the rank's own experts want.

    Of routing maps and probs a rank gets only the columns of its own experts. The host reads the
    counts, unless `num_rows` bounds them: then a rank gets only the tokens that it keeps, as in
    `hybridep_dispatch`, and the ranks' gradients are added in the accumulator's dtype.
    """
    ranks, rank = size_and_rank(group)
    shards = expert_tensor_parallel
    check_dispatch([tokens_TH] * ranks, [routing_map_TE] * ranks, None if probs is None else [probs] * ranks, shards)
    check_budget(None, num_rows)
    if num_rows is not None:
        return _within_budget(tokens_TH, routing_map_TE, probs, shards, num_rows, group)
    tokens_S = counts_of_all(torch.full((1,), len(tokens_TH), device=tokens_TH.device), group)[:, 0].tolist()
    exchange = exchange_of([[count] * ranks for count in tokens_S], rank, group)
    maps, columns = (
        _for_each_rank(routing_map_TE, ranks, shards),
        None if probs is None else _for_each_rank(probs, ranks, shards),
    )
    tokens_GH, map_GL, probs_GL = exchanged(exchange, replicated(tokens_TH, ranks), maps, columns)
    assert tokens_GH is not None and map_GL is not None
    permuted = permute(tokens_GH, map_GL, probs=probs_GL)
    handle = Handle(exchange, permuted.row_map, len(permuted.rows), None if probs is None else probs.dtype)
    return Dispatched(permuted.rows, permuted.probs, permuted.tokens_per_expert, handle, permuted.overflow)


def allgather_combine(rows_PH: Tensor, handle: Handle, *, group: Any = None) -> Tensor:
    """Add each token's rows on every rank, send the sums to the token's rank, and add them, ranks
    ascending.

    Raises:
        ValueError: rows of another shape than dispatch's, or another group.
    """
    check_handle(handle, Handle, group)
    check_combined(rows_PH, handle.num_rows)
    parts_GH = unpermute(rows_PH, handle.row_map, restore_shape=(sum(handle.exchange.receive), rows_PH.shape[1]))
    (sums,) = exchanged(handle.exchange.back, parts_GH)
    assert sums is not None
    between = handle.reduce_dtype or (torch.float64 if rows_PH.dtype == torch.float64 else torch.float32)
    ranks = len(handle.exchange.send)
    if handle.sent_rows is not None:
        return add_ranks(sums, handle.sent_rows, [], rows_PH.dtype, between if ranks > 1 else None)
    return added(sums.reshape(ranks, len(sums) // ranks, sums.shape[1]), between)


def _within_budget(
    tokens_TH: Tensor, routing_map_TE: Tensor, probs_TE: Tensor | None, shards: int, num_rows: int, group: Any
) -> Dispatched:
    """The dispatch with a budget: each token travels once to each rank that keeps some
    copy of it.
    """
    ranks, _ = size_and_rank(group)
    copies = kept_copies(routing_map_TE, num_rows, group, shards=shards)
    map_TWL = columns_of_ranks(copies.map_TE, ranks // shards, shards)
    sent_rows, rows = send_once(tokens_TH, map_TWL.any(2), group, num_rows)
    probs_SL = None if probs_TE is None else sent_rows.cells(columns_of_ranks(probs_TE, ranks // shards, shards))
    rows_DH, map_DL, probs_DL = exchanged(sent_rows.exchange, rows, sent_rows.cells(map_TWL), probs_SL)
    assert rows_DH is not None and map_DL is not None
    permuted = permute(rows_DH, map_DL, probs=probs_DL, num_rows=num_rows)
    handle = Handle(
        sent_rows.exchange, permuted.row_map, num_rows, None if probs_TE is None else probs_TE.dtype, sent_rows
    )
    return Dispatched(permuted.rows, permuted.probs, permuted.tokens_per_expert, handle, copies.overflow)


def _for_each_rank(x_TE: Tensor, ranks: int, shards: int) -> Tensor:
    """[W·T,L]: for each rank, the columns of its experts."""
    return columns_of_ranks(x_TE, ranks // shards, shards).transpose(0, 1).flatten(0, 1)
