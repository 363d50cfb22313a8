"""AlltoAll: each copy of a token travels by itself to the rank of its expert.

Mirrors `MoEAlltoAllTokenDispatcher` of megatron.core.transformer.moe.token_dispatcher.
"""

from functools import partial

import torch
from torch import Tensor

from moe_ref.config import Dispatched, PerRank, check_dispatch
from moe_ref.dispatch.exchange import Handle, move, move_probs, plan_of
from moe_ref.dispatch.indices import flatten_experts
from moe_ref.dispatch.plan import Layout, plan_of_maps
from moe_ref.dispatch.trees import sum_flat, sum_ranks
from moe_ref.rounding import accumulator_dtype


def alltoall_dispatch(
    tokens: PerRank[Tensor],
    routing_map: PerRank[Tensor],
    *,
    probs: PerRank[Tensor] | None = None,
    expert_tensor_parallel: int = 1,
    capacity: int | None = None,
) -> list[Dispatched]:
    """Permute the copies by expert, send each chunk to the rank of its expert, and sort what arrives by local expert.

        rows_w = [tokens_s[t] for e in experts of w for s in sources for t in tokens of s if routing_map_s[t, e]]

    Ranks are r = ep · ETP + tp. Rank (ep, tp) sends to the ranks (…, tp) and gathers from the ranks (ep, …): all ETP of these then hold the
    same rows, and the sources stand in the order (tp, ep). With ETP = 1 that is the order of the ranks.

    Without `capacity` every routed copy is sent. A router that drops tokens over a capacity says so in its map, and then the same holds.
    With `capacity` (drop and pad) every source has exactly C = `capacity` rows for each expert, as in `permute`: its first C routed tokens,
    then unrouted tokens with their own values and probabilities, then rows of zeros. Their sizes are known before anything is routed.

    Args:
        tokens: [T_r,H] of each rank, any dtype; copied bit by bit. T_r differs from rank to rank and may be 0.
        routing_map: [T_r,E], bool or integers 0 and 1.
        probs: [T_r,E] floating point, or None.
        expert_tensor_parallel: ETP, a divisor of the ranks.
        capacity: rows; a positive integer or None.

    Returns:
        `Dispatched` of each rank; `tokens_per_expert` is C·W each with a capacity.

    Rounding: none in the forward. dtokens is added like combine's rows, shards first and then experts, but between shards in the tokens' dtype.
    dprobs is moved back; the shards of an expert are added in the accumulator dtype, where a reduce-scatter of real ranks adds in the probs' own.

    Raises:
        ValueError: see `moe_ref.config.check_dispatch`.
    """
    check_dispatch(tokens, routing_map, probs, expert_tensor_parallel, capacity)
    shards = expert_tensor_parallel
    flat = partial(flatten_experts, expert_parallel=len(tokens) // shards, expert_tensor_parallel=shards)
    sources = tuple(rank for tp in range(shards) for rank in range(tp, len(tokens), shards))
    plan = plan_of_maps([flat(own) for own in routing_map], Layout(sources=sources, chunk=capacity))
    row_tokens = tuple(plan.row_tokens(rank) for rank in range(plan.ranks))

    def add(gradients: list[Tensor]) -> list[Tensor]:
        return _sum_shards_then_experts(gradients, row_tokens, plan.tokens, shards, gradients[0].dtype)

    rows = move(tokens, row_tokens, add)
    row_probs = move_probs(None if probs is None else [flat(own) for own in probs], plan)
    between = None if probs is None else probs[0].dtype
    handles = [Handle("alltoall", rank, plan, row_tokens, between, shards) for rank in range(plan.ranks)]
    return [
        Dispatched(rows[w], row_probs[w], plan.length_WL[w], handles[w], plan.overflow_W[w]) for w in range(plan.ranks)
    ]


def alltoall_combine(rows: PerRank[Tensor], handles: PerRank[Handle]) -> list[Tensor]:
    """Add the shards of each row, send the rows back, and add each token's rows.

        sum[i] = round(rows_(ep,0)[i] + rows_(ep,1)[i] + …)           only with ETP > 1, in the dtype of the probs that dispatch was given
        y[g]   = round(Σ_{i: row i came from g} sum[i])               in the accumulator dtype, experts ascending

    Args:
        rows: [P_r,H] floating point of each rank, in the order of dispatch's rows.
        handles: as this implementation's `alltoall_dispatch` returned them.

    Returns:
        [T_r,H] of each rank, in the dtype of the rows. A token without rows is 0. With a capacity the rows of unrouted tokens count: it is
        their probability, 0 from any router, that keeps them silent. Rows of zeros behind them are not read.

    Rounding: as above, to the dtype of the rows; without probs shards are added in the accumulator dtype.

    Raises:
        ValueError: handles of another call, or rows of other shapes.
    """
    plan = plan_of(handles, "alltoall", rows)
    between = handles[0].reduce_dtype or accumulator_dtype(rows[0].dtype)
    return _sum_shards_then_experts(
        rows, handles[0].row_tokens, plan.tokens, handles[0].expert_tensor_parallel, between
    )


def _sum_shards_then_experts(
    rows: PerRank[Tensor], row_tokens: PerRank[Tensor], tokens: tuple[int, ...], shards: int, between: torch.dtype
) -> list[Tensor]:
    """The tree of combine. Every `shards` neighbouring ranks hold shards of the same rows."""
    if shards > 1:
        rows = [sum_ranks(rows[first : first + shards], between) for first in range(0, len(rows), shards)]
    return sum_flat(rows, row_tokens[::shards], tokens)
