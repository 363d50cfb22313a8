"""AllGather: every rank sees all tokens and picks the copies that its own experts want."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

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
from moe_fast.permutation.permute import permute, unpermute
from moe_ref.config import Dispatched, check_dispatch


@dataclass(frozen=True)
class Handle:
    """What combine needs of its dispatch."""

    exchange: Exchange
    row_map: Any
    num_rows: int
    reduce_dtype: torch.dtype | None


def allgather_dispatch(
    tokens_TH: Tensor,
    routing_map_TE: Tensor,
    *,
    probs: Tensor | None = None,
    expert_tensor_parallel: int = 1,
    group: Any = None,
) -> Dispatched:
    """Gather all tokens on every rank, and permute the copies that the rank's own experts want.

    With its tokens a rank gets only its own experts' columns of routing maps and probs. The host
    reads the counts.
    """
    ranks, rank = size_and_rank(group)
    shards = expert_tensor_parallel
    check_dispatch([tokens_TH] * ranks, [routing_map_TE] * ranks, None if probs is None else [probs] * ranks, shards)
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
    return added(sums.reshape(ranks, len(sums) // ranks, sums.shape[1]), between)


def _for_each_rank(x_TE: Tensor, ranks: int, shards: int) -> Tensor:
    """[W·T,L]: for each rank the columns of its experts."""
    columns = x_TE.unflatten(1, (ranks // shards, -1)).transpose(0, 1)  # [EP,T,L]
    return columns.repeat_interleave(shards, 0).flatten(0, 1)
