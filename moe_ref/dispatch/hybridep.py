"""HybridEP: each token travels once to each rank that wants it, and permute and unpermute are part of the way.

Mirrors `dispatch_with_permute` and `combine_with_unpermute` of deep_ep.HybridEPBuffer, and `hybrid_ep_dispatch` and `hybrid_ep_combine` of
megatron.core.transformer.moe.fused_a2a. Whether the library fuses permutation into the transfer or runs it behind must not be seen. With
expert tensor parallelism the experts are those of `flatten_experts`.
"""

from collections.abc import Callable
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
    check_rank_probs,
    check_tokens,
    check_wire_recipe,
    require,
)
from moe_ref.dispatch.exchange import Handle, move, move_probs, plan_of, row_cells
from moe_ref.dispatch.plan import Layout, RoutePlan, plan_of_maps
from moe_ref.dispatch.trees import sum_experts_then_ranks
from moe_ref.permutation.permute import sum_rows
from moe_ref.quantization.quantize import quantize
from moe_ref.rounding import accumulator_dtype


def hybridep_dispatch(
    tokens: PerRank[Tensor],
    routing_map: PerRank[Tensor],
    *,
    probs: PerRank[Tensor] | None = None,
    align: int | None = None,
    num_rows: int | None = None,
    recipe: Recipe | None = None,
) -> list[Dispatched]:
    """Send each token to the ranks that want it, and write its copies where the experts read them.

        pad[e]     = c[e] rounded up to `align`,   c[e] the copies that local expert e is sent from all ranks
        start[e]   = Σ_{j<e} pad[j]                (of what was asked for, not of what is kept)
        slot(g, e) = start[e] + number of tokens g' < g that want e
        kept       : slot < `num_rows`;            n[e] = clamp(num_rows - start[e], 0, c[e])
        overflow   = start[last] + c[last] > num_rows

    So of a budget that is too small the last experts lose first, and of an expert the last ranks and tokens; what stays stands where it would
    stand without a budget. Padding rows are zero, with probability 0. Rows behind the last segment are unspecified (zero here).

    With a recipe the rows come as 1×128 codes and scales:

        quantized = quantize(rows, recipe, splits=tokens_per_expert)

    A scale depends on its own row alone, so that a token may as well be quantised once, before it is sent: codes and scales that travel as
    bytes are the same bits, and are about half as many as those of bfloat16. Padding has the codes and scales of zeros.

    Args:
        tokens: [T_r,H] of each rank, any dtype; copied bit by bit. HybridEP needs the same T_r everywhere, and
            Megatron makes it so by tokens that nobody wants, which change no rank's rows; here it is any.
        routing_map: [T_r,E], bool or integers 0 and 1. Its index form is `indices_to_multihot` of this.
        probs: [T_r,E] floating point (HybridEP takes float32), or None. A routed token whose probability is 0 is sent like any other.
        align: rows; a positive integer, or None for 1.
        num_rows: rows of every rank's buffer, a multiple of `align`; None for as many as needed.
        recipe: of scaling "block", or None for rows as they are. The role is "input". (HybridEP is given codes and scales by its caller.)

    Returns:
        `Dispatched` of each rank; `tokens_per_expert` are pad[e], as far as they are inside the buffer. Without a budget nothing overflows
        (HybridEP then leaves its flag unwritten). With a recipe `rows` are opaque, for `codes`, `scales` and `dequantize`; what `amax` says of
        them is unspecified, for it does not travel.

    Rounding: none in the forward, but that of `quantize`. The gradient of tokens is `hybridep_combine` of the rows' gradient, or straight
    through of that of `dequantize(rows)`, which is not quantised; that of probs is moved.

    Raises:
        ValueError: see `moe_ref.config`: check_dispatch, check_budget, check_wire_recipe.
    """
    check_dispatch(tokens, routing_map, probs)
    check_budget(align, num_rows)
    check_wire_recipe(recipe, tokens)
    plan = plan_of_maps(routing_map, Layout(align=align, num_rows=num_rows))
    row_tokens = tuple(plan.row_tokens(rank) for rank in range(plan.ranks))
    rows: list[Any] = move(tokens, row_tokens, _tree(row_tokens, plan))
    if recipe is not None:
        rows = [
            quantize(own, recipe, splits=lengths).quantized for own, lengths in zip(rows, plan.length_WL, strict=True)
        ]
    row_probs = move_probs(probs, plan)
    handles = [Handle("hybridep", rank, plan, row_tokens) for rank in range(plan.ranks)]
    return [
        Dispatched(rows[w], row_probs[w], plan.length_WL[w], handles[w], plan.overflow_W[w]) for w in range(plan.ranks)
    ]


def hybridep_cached_dispatch(tokens: PerRank[Tensor], handles: PerRank[Handle]) -> list[Tensor]:
    """The rows of `hybridep_dispatch` for other tokens of the same routing. It is the transpose of combine, and so combine's gradient.

    Raises:
        ValueError: handles of another call, or other numbers of tokens.

    Source: dispatch_with_permute with a handle.
    """
    plan = plan_of(handles, "hybridep")
    check_tokens(tokens)
    require(
        tuple(map(len, tokens)) == plan.tokens,
        "tokens",
        f"of {[len(own) for own in tokens]} rows",
        f"of {list(plan.tokens)} rows, as the handles say",
    )
    return move(tokens, handles[0].row_tokens, _tree(handles[0].row_tokens, plan))


def hybridep_combine(
    rows: PerRank[Tensor], handles: PerRank[Handle], *, probs: PerRank[Tensor] | None = None
) -> list[Combined]:
    """Add each token's rows on every rank, send the sums back, and add those. No probability is applied.

        part_w[g]   = round(Σ_{local experts e of w, ascending, (g, e) kept} rows_w[slot(g, e)])
        tokens[g]   = round(Σ_{w ascending} part_w[g])
        probs[g, e] = probs_w[slot(g, e)], 0 where that was not kept

    Args:
        rows: [P_r,H] floating point of each rank, in the order of dispatch's rows. Padding rows and those behind them are not read.
        handles: as this implementation's `hybridep_dispatch` returned them.
        probs: [P_r] floating point of each rank, or None.

    Returns:
        `Combined` of each rank. A token without rows, or all of whose rows were dropped, is 0.

    Rounding: sums in float32 (float64 for float64); after each level once, to the dtype of the rows.

    Raises:
        ValueError: handles of another call, or rows of other shapes.
    """
    plan = plan_of(handles, "hybridep", rows)
    tokens = _tree(handles[0].row_tokens, plan)(list(rows))
    if probs is None:
        return [Combined(own, None) for own in tokens]
    check_rank_probs(probs, [row.new_empty(len(row)) for row in rows])
    num_experts = plan.ranks * plan.local_experts
    cells = torch.cat([row_cells(plan, rank) for rank in range(plan.ranks)])
    prob_GE = sum_rows(torch.cat(list(probs)), cells, sum(plan.tokens) * num_experts).reshape(-1, num_experts)
    return [Combined(own, own_probs) for own, own_probs in zip(tokens, prob_GE.split(list(plan.tokens)), strict=True)]


def _tree(row_tokens: PerRank[Tensor], plan: RoutePlan) -> Callable[[list[Tensor]], list[Tensor]]:
    """Combine's tree: experts of a rank, rounded, then ranks, rounded, both in the accumulator dtype."""
    return lambda rows: sum_experts_then_ranks(rows, row_tokens, plan.tokens, accumulator_dtype(rows[0].dtype))
