"""HybridEP: each token travels once to each rank with an expert for it; permute and unpermute are
part of the transfer.

    layout   by expert, then source, then token, segments aligned, in a budget of rows
    mover    each token to each rank that wants it; its copies to their places in that rank's buffer
    tree     Σ experts of a rank → round → Σ ranks → round

Whether the library fuses permutation into the transfer or runs it afterwards does not change a bit
of the result. With expert tensor parallelism the experts come from `flatten_experts`.

Mirrors `dispatch_with_permute` and `combine_with_unpermute` of deep_ep.HybridEPBuffer, and
`hybrid_ep_dispatch` and `hybrid_ep_combine` of megatron.core.transformer.moe.fused_a2a. Differs:
docs/differences.md#dispatchers.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from moe_ref.config import (
    Combined,
    Dispatched,
    PerRank,
    Recipe,
    check_budget,
    check_dispatch,
    check_programs,
    check_rank_probs,
    check_wire_recipe,
)
from moe_ref.dispatch.exchange import Handle, Tree, check_resent, move, move_probs, plan_of
from moe_ref.dispatch.plan import Layout, RoutePlan, plan_of_maps
from moe_ref.dispatch.trees import sum_experts_then_ranks
from moe_ref.permutation.rows import sum_rows
from moe_ref.quantization.quantize import quantize
from moe_ref.rounding import accumulator_dtype


class HybridEPHandle(Handle):
    """`Handle` of `hybridep_dispatch`."""


def hybridep_dispatch(
    tokens: PerRank[Tensor],
    routing_map: PerRank[Tensor],
    *,
    probs: PerRank[Tensor] | None = None,
    align: int | None = None,
    num_rows: int | None = None,
    recipe: Recipe | None = None,
    num_sms: int | None = None,
    num_blocks: int | None = None,
) -> list[Dispatched]:
    """Send each token to the ranks that want it, and write its copies where the experts read them.

        pad[e]     = c[e] rounded up to `align`,   c[e] the copies for local expert e from all ranks
        start[e]   = Σ_{j<e} pad[j]                (of the copies routed, not of those kept)
        slot(g, e) = start[e] + number of tokens g' < g that want e
        kept       : slot < `num_rows`;            n[e] = clamp(num_rows - start[e], 0, c[e])
        overflow   = start[last] + c[last] > num_rows

    Padding rows are zero, with probability 0; rows past the last segment are unspecified (zero
    here).

    Args:
        tokens: [T_r,H] of each rank, any dtype; copied bit by bit.
        routing_map: [T_r,E], bool or integers 0 and 1.
        probs: [T_r,E] floating point, or None. A token of probability 0 is sent like any other.
        align, num_rows: rows, of each segment a multiple and of each buffer; None for 1, as needed.
        recipe: of scaling "block"; the rows are then quantize(rows, recipe,
            splits=tokens_per_expert). Scales depend on their row alone, so a token may be quantised
            once, before it is sent.
        num_sms, num_blocks: the most multiprocessors of the transfer, and thread blocks of the
            permutation; None for the implementation's choice. No value depends on them. Mirror
            moe_flex_dispatcher_num_sms and moe_hybridep_num_blocks_permute.

    Rounding: `quantize`'s. dtokens is `hybridep_combine` of drows, straight through a quantiser.

    Raises:
        ValueError: see `moe_ref.config`: check_dispatch, check_budget, check_programs,
            check_wire_recipe.
    """
    check_dispatch(tokens, routing_map, probs)
    check_budget(align, num_rows)
    check_programs(num_sms, num_blocks)
    check_wire_recipe(recipe, tokens)
    plan = plan_of_maps(routing_map, Layout(align=align, num_rows=num_rows))
    row_tokens = plan.row_tokens_of_ranks()
    rows: list[Any] = move(tokens, row_tokens, _tree(row_tokens, plan, tokens[0].dtype))
    if recipe is not None:
        segments = zip(rows, plan.length_WL, strict=True)
        rows = [quantize(rows_PH, recipe, splits=length_L).quantized for rows_PH, length_L in segments]
    row_probs = move_probs(probs, plan)
    handles = [HybridEPHandle(rank, plan, row_tokens) for rank in range(plan.ranks)]
    results = zip(rows, row_probs, plan.length_WL, handles, plan.overflow_W, strict=True)
    return [Dispatched(*fields) for fields in results]


def hybridep_cached_dispatch(tokens: PerRank[Tensor], handles: PerRank[HybridEPHandle]) -> list[Tensor]:
    """The rows of `hybridep_dispatch` for other tokens of the same routing: the transpose, and the
    gradient, of combine.

    Raises:
        ValueError: handles of another call, or other numbers of tokens.
    """
    plan, row_tokens = plan_of(handles, HybridEPHandle), handles[0].row_tokens
    check_resent(tokens, plan)
    return move(tokens, row_tokens, _tree(row_tokens, plan, tokens[0].dtype))


def hybridep_combine(
    rows: PerRank[Tensor], handles: PerRank[HybridEPHandle],
    *, probs: PerRank[Tensor] | None = None, num_sms: int | None = None, num_blocks: int | None = None,
) -> list[Combined]:  # fmt: skip
    """Add each token's rows on every rank, send the sums back, and add those. No probability is
    applied.

        part_w[g]   = round(Σ_{local experts e of w, ascending, (g, e) kept} rows_w[slot(g, e)])
        tokens[g]   = round(Σ_{w ascending} part_w[g])
        probs[g, e] = probs_w[slot(g, e)], 0 if that was not kept

    Args:
        rows: [P_r,H] floating point of each rank, in the order of dispatch's rows. Padding rows,
            and rows past the last segment, are not read.
        handles: as this implementation's `hybridep_dispatch` returned them.
        probs: [P_r] floating point of each rank, or None.
        num_sms, num_blocks: as in dispatch; blocks of the unpermutation,
            moe_hybridep_num_blocks_unpermute.

    Returns:
        `Combined` of each rank. A token without rows, or all of whose rows were dropped, is 0.

    Rounding: sums in float32 (float64 for float64); after each level once, to the dtype of the
    rows.

    Raises:
        ValueError: handles of another call, or rows of other shapes; see `check_programs`.
    """
    check_programs(num_sms, num_blocks)
    plan = plan_of(handles, HybridEPHandle, rows)
    tokens = _tree(handles[0].row_tokens, plan, rows[0].dtype)(list(rows))
    if probs is None:
        return [Combined(tokens_TH, None) for tokens_TH in tokens]
    check_rank_probs(probs, [row.new_empty(len(row)) for row in rows])
    num_experts = plan.ranks * plan.local_experts
    cells = torch.cat([plan.row_cells(rank) for rank in range(plan.ranks)])
    prob_GE = sum_rows(torch.cat(list(probs)), cells, sum(plan.tokens) * num_experts).reshape(-1, num_experts)
    return [Combined(*fields) for fields in zip(tokens, prob_GE.split(list(plan.tokens)), strict=True)]


def _tree(row_tokens: PerRank[Tensor], plan: RoutePlan, dtype: torch.dtype) -> Tree:
    """Combine's tree: experts of a rank, rounded, then ranks, rounded, both in the accumulator
    dtype.
    """
    between = accumulator_dtype(dtype)
    return partial(sum_experts_then_ranks, row_tokens=row_tokens, tokens=plan.tokens, between=between)
