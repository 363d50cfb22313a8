"""AlltoAll: each copy of a token travels by itself to the rank of its expert.

    layout   by expert, tensor rank, source, token; with a capacity, chunks of that size
    mover    each copy to the rank of its expert, and to all ranks that hold shards of it
    tree     Σ shards in the probs' dtype → round → Σ experts → round

Mirrors `MoEAlltoAllTokenDispatcher` of megatron.core.transformer.moe.token_dispatcher. Differs:
docs/differences.md#dispatchers.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from moe_ref.config import Dispatched, PerRank, check_dispatch, check_one_size
from moe_ref.dispatch.exchange import Handle, move, move_probs, plan_of
from moe_ref.dispatch.indices import flatten_experts
from moe_ref.dispatch.plan import Layout, plan_of_maps
from moe_ref.dispatch.trees import sum_flat, sum_ranks
from moe_ref.rounding import accumulator_dtype


@dataclass(frozen=True)
class AllToAllHandle(Handle):
    """`Handle`, with the shards of an expert and the dtype in which they add: the probs', or None
    without probs.
    """

    reduce_dtype: torch.dtype | None
    shards: int


def alltoall_dispatch(
    tokens: PerRank[Tensor],
    routing_map: PerRank[Tensor],
    *,
    probs: PerRank[Tensor] | None = None,
    expert_tensor_parallel: int = 1,
    capacity: int | None = None,
    num_rows: int | None = None,
) -> list[Dispatched]:
    """Permute the copies by expert, send each chunk to the rank of its expert, and sort arrivals by
    local expert.

        rows_w = [tokens_s[t] for e in experts of w for s in sources for t if routing_map_s[t, e]]

    Ranks are r = ep · ETP + tp. Rank (ep, tp) sends to the ranks (…, tp) and gathers from the ranks
    (ep, …), which then hold the same rows; sources are in the order (tp, ep). With `capacity` (drop
    and pad) every source has exactly that many rows per expert, chosen as in `permute`; their sizes
    are known before anything is routed.

    Args:
        tokens: [T_r,H] of each rank, any dtype; copied bit by bit. T_r differs between ranks and
            may be 0.
        routing_map: [T_r,E], bool or integers 0 and 1.
        probs: [T_r,E] floating point, or None.
        expert_tensor_parallel: ETP, a divisor of the ranks.
        capacity: rows; a positive integer or None.
        num_rows: rows of each buffer, a budget as `hybridep_dispatch`'s; None for as many as are
            needed, and with a capacity.

    Rounding: none. dtokens takes combine's tree, but adds shards in the tokens' dtype. dprobs is
    moved back; shards are added in the accumulator dtype.

    Raises:
        ValueError: see `moe_ref.config`: check_dispatch, check_one_size.
    """
    check_dispatch(tokens, routing_map, probs, expert_tensor_parallel, capacity)
    check_one_size(capacity, num_rows)
    shards = expert_tensor_parallel
    flat = partial(flatten_experts, expert_parallel=len(tokens) // shards, expert_tensor_parallel=shards)
    sources = tuple(rank for tp in range(shards) for rank in range(tp, len(tokens), shards))
    layout = Layout(sources=sources, chunk=capacity, num_rows=num_rows)
    plan = plan_of_maps([flat(map_TE) for map_TE in routing_map], layout)
    row_tokens = plan.row_tokens_of_ranks()
    tree = partial(_sum_shards_then_experts, row_tokens=row_tokens, tokens=plan.tokens, shards=shards)
    rows = move(tokens, row_tokens, partial(tree, between=tokens[0].dtype))
    row_probs = move_probs(None if probs is None else [flat(probs_TE) for probs_TE in probs], plan)
    between = None if probs is None else probs[0].dtype
    handles = [AllToAllHandle(rank, plan, row_tokens, between, shards) for rank in range(plan.ranks)]
    results = zip(rows, row_probs, plan.length_WL, handles, plan.overflow_W, strict=True)
    return [Dispatched(*fields) for fields in results]


def alltoall_combine(rows: PerRank[Tensor], handles: PerRank[AllToAllHandle]) -> list[Tensor]:
    """Add the shards of each row, send the rows back, and add each token's rows.

        sum[i] = round(rows_(ep,0)[i] + rows_(ep,1)[i] + …)        with ETP > 1, in the probs' dtype
        y[g]   = round(Σ_{i: row i came from g} sum[i])            in the accumulator, ascending

    Args:
        rows: [P_r,H] floating point of each rank, in the order of dispatch's rows.
        handles: as this implementation's `alltoall_dispatch` returned them.

    Returns:
        [T_r,H] of each rank, in the dtype of the rows. A token without rows is 0. With a capacity
        the rows of unrouted
        tokens count: a router gives them probability 0. Rows of zeros after them are not read.

    Rounding: as above, to the dtype of the rows; without probs shards are added in the accumulator
    dtype.

    Raises:
        ValueError: handles of another call, or rows of other shapes.
    """
    plan, handle = plan_of(handles, AllToAllHandle, rows), handles[0]
    between = handle.reduce_dtype or accumulator_dtype(rows[0].dtype)
    return _sum_shards_then_experts(rows, handle.row_tokens, plan.tokens, handle.shards, between)


def _sum_shards_then_experts(
    rows: PerRank[Tensor], row_tokens: PerRank[Tensor], tokens: tuple[int, ...], shards: int, between: torch.dtype
) -> list[Tensor]:
    """The tree of combine. Every `shards` neighbouring ranks hold shards of the same rows."""
    if shards > 1:
        rows = [sum_ranks(rows[first : first + shards], between) for first in range(0, len(rows), shards)]
    return sum_flat(rows, row_tokens[::shards], tokens)
