"""AllGather: every rank sees all tokens and picks the copies for its own experts.

    layout   by expert, then source, then token
    mover    all tokens to all ranks; each rank keeps the copies that its experts read
    tree     Σ experts of a rank → round → Σ ranks in the probs' dtype → round

Mirrors `MoEAllGatherTokenDispatcher` of megatron.core.transformer.moe.token_dispatcher.
Differs: docs/differences.md#dispatchers.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from moe_ref.config import Dispatched, PerRank, check_budget, check_dispatch
from moe_ref.dispatch.exchange import Handle, move, move_probs, plan_of
from moe_ref.dispatch.indices import flatten_experts
from moe_ref.dispatch.plan import Layout, plan_of_maps
from moe_ref.dispatch.trees import sum_experts_then_ranks
from moe_ref.rounding import accumulator_dtype


@dataclass(frozen=True)
class AllGatherHandle(Handle):
    """`Handle`, and the dtype in which ranks add: the probs', or None without probs."""

    reduce_dtype: torch.dtype | None


def allgather_dispatch(
    tokens: PerRank[Tensor],
    routing_map: PerRank[Tensor],
    *,
    probs: PerRank[Tensor] | None = None,
    expert_tensor_parallel: int = 1,
    num_rows: int | None = None,
) -> list[Dispatched]:
    """Gather all tokens on every rank, and permute the copies that the rank's own experts read.

        rows_w = [tokens_s[t] for e in experts of w for s in ranks for t if routing_map_s[t, e]]

    Ranks are r = ep · ETP + tp: the ETP ranks of one ep hold shards of the same experts and get the
    same rows.

    Args:
        tokens: [T_r,H] of each rank, any dtype; copied bit by bit. T_r differs between ranks and
            may be 0.
        routing_map: [T_r,E], bool or integers 0 and 1.
        probs: [T_r,E] floating point, or None. A routed token of probability 0 is sent like any
            other.
        expert_tensor_parallel: ETP, a divisor of the ranks.
        num_rows: rows of each buffer, a budget as `hybridep_dispatch`'s; None for as many as are
            needed.

    Returns:
        `Dispatched` of each rank, without padding; no copy is dropped without a budget.

    Rounding: none. dtokens takes combine's tree, but adds ranks in the tokens' dtype. dprobs is
    moved back; the shards of an expert are added in the accumulator dtype.

    Raises:
        ValueError: see `moe_ref.config`: check_dispatch, check_budget.
    """
    check_dispatch(tokens, routing_map, probs, expert_tensor_parallel)
    check_budget(None, num_rows)
    groups = len(tokens) // expert_tensor_parallel
    flat = partial(flatten_experts, expert_parallel=groups, expert_tensor_parallel=expert_tensor_parallel)
    plan = plan_of_maps([flat(map_TE) for map_TE in routing_map], Layout(num_rows=num_rows))
    row_tokens = plan.row_tokens_of_ranks()
    tree = partial(sum_experts_then_ranks, row_tokens=row_tokens, tokens=plan.tokens, between=tokens[0].dtype)
    rows = move(tokens, row_tokens, tree)
    row_probs = move_probs(None if probs is None else [flat(probs_TE) for probs_TE in probs], plan)
    between = None if probs is None else probs[0].dtype
    handles = [AllGatherHandle(rank, plan, row_tokens, between) for rank in range(plan.ranks)]
    results = zip(rows, row_probs, plan.length_WL, handles, plan.overflow_W, strict=True)
    return [Dispatched(*fields) for fields in results]


def allgather_combine(rows: PerRank[Tensor], handles: PerRank[AllGatherHandle]) -> list[Tensor]:
    """Add each token's rows on every rank, and reduce-scatter the sums.

        part_w[g] = round(Σ_{i: row i of w came from g} rows_w[i])     in the accumulator, ascending
        y[g]      = round(part_0[g] + part_1[g] + …)                   in the dtype of the probs

    Args:
        rows: [P_r,H] floating point of each rank, in the order of dispatch's rows.
        handles: as this implementation's `allgather_dispatch` returned them.

    Returns:
        [T_r,H] of each rank, in the dtype of the rows. A token without rows is 0.

    Rounding: to the dtype of the rows, and every partial sum over ranks to the dtype of the probs:
    the accumulator's without probs. On one rank no sum is taken. A real reduce-scatter has its own
    order of ranks.

    Raises:
        ValueError: handles of another call, or rows of other shapes.
    """
    plan = plan_of(handles, AllGatherHandle, rows)
    narrow = handles[0].reduce_dtype
    between = accumulator_dtype(rows[0].dtype) if narrow is None or plan.ranks == 1 else narrow
    return sum_experts_then_ranks(rows, handles[0].row_tokens, plan.tokens, between)
