"""AllGather: every rank sees all tokens and picks those that its experts want.

Mirrors `MoEAllGatherTokenDispatcher` of megatron.core.transformer.moe.token_dispatcher.
"""

from functools import partial

from torch import Tensor

from moe_ref.config import Dispatched, PerRank, check_dispatch
from moe_ref.dispatch.exchange import Handle, move, move_probs, plan_of
from moe_ref.dispatch.indices import flatten_experts
from moe_ref.dispatch.plan import plan_of_maps
from moe_ref.dispatch.trees import sum_experts_then_ranks
from moe_ref.rounding import accumulator_dtype


def allgather_dispatch(
    tokens: PerRank[Tensor],
    routing_map: PerRank[Tensor],
    *,
    probs: PerRank[Tensor] | None = None,
    expert_tensor_parallel: int = 1,
) -> list[Dispatched]:
    """Gather all tokens on every rank, and permute the copies that the rank's own experts want.

        rows_w = [tokens_s[t] for e in experts of w for s in ranks for t in tokens of s if routing_map_s[t, e]]

    Ranks are r = ep · ETP + tp: with expert tensor parallelism the ETP ranks of one ep hold shards of the same experts and get the same rows.

    Args:
        tokens: [T_r,H] of each rank, any dtype; copied bit by bit. T_r differs from rank to rank and may be 0; Megatron needs the same everywhere.
        routing_map: [T_r,E], bool or integers 0 and 1.
        probs: [T_r,E] floating point, or None. A routed token whose probability is 0 is sent like any other.
        expert_tensor_parallel: ETP, a divisor of the ranks.

    Returns:
        `Dispatched` of each rank, without padding; nothing is ever dropped.

    Rounding: none in the forward. dtokens is added like combine's rows, experts first and then ranks, but between ranks in the tokens' dtype.
    dprobs is moved back; the shards of an expert are added in the accumulator dtype.

    Raises:
        ValueError: see `moe_ref.config.check_dispatch`.
    """
    check_dispatch(tokens, routing_map, probs, expert_tensor_parallel)
    flat = partial(
        flatten_experts,
        expert_parallel=len(tokens) // expert_tensor_parallel,
        expert_tensor_parallel=expert_tensor_parallel,
    )
    plan = plan_of_maps([flat(own) for own in routing_map])
    row_tokens = tuple(plan.row_tokens(rank) for rank in range(plan.ranks))

    def add(gradients: list[Tensor]) -> list[Tensor]:
        return sum_experts_then_ranks(gradients, row_tokens, plan.tokens, gradients[0].dtype)

    rows = move(tokens, row_tokens, add)
    row_probs = move_probs(None if probs is None else [flat(own) for own in probs], plan)
    between = None if probs is None else probs[0].dtype
    return [
        Dispatched(
            rows[w],
            row_probs[w],
            plan.length_WL[w],
            Handle("allgather", w, plan, row_tokens, between),
            plan.overflow_W[w],
        )
        for w in range(plan.ranks)
    ]


def allgather_combine(rows: PerRank[Tensor], handles: PerRank[Handle]) -> list[Tensor]:
    """Add each token's rows on every rank, and reduce-scatter the sums.

        part_w[g] = round(Σ_{i: row i of w came from g} rows_w[i])        in the accumulator dtype, experts ascending
        y[g]      = round(part_0[g] + part_1[g] + …)                      in the dtype of the probs that dispatch was given

    Args:
        rows: [P_r,H] floating point of each rank, in the order of dispatch's rows.
        handles: as this implementation's `allgather_dispatch` returned them.

    Returns:
        [T_r,H] of each rank, in the dtype of the rows. A token without rows is 0.

    Rounding: as above, to the dtype of the rows, and every partial sum over ranks to the dtype of the probs: without probs to the accumulator
    dtype; on one rank nothing is sent, and no sum is taken. A real reduce-scatter adds in an order of its own.

    Raises:
        ValueError: handles of another call, or rows of other shapes.
    """
    plan = plan_of(handles, "allgather", rows)
    narrow = handles[0].reduce_dtype
    between = accumulator_dtype(rows[0].dtype) if narrow is None or plan.ranks == 1 else narrow
    return sum_experts_then_ranks(rows, handles[0].row_tokens, plan.tokens, between)
