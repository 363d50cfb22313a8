"""DeepEP's normal mode: each token travels once to each rank that wants it, however many experts of that rank do.

Mirrors `get_dispatch_layout`, `dispatch` and `combine` of deep_ep.Buffer, and `fused_dispatch` and `fused_combine` of
megatron.core.transformer.moe.fused_a2a. The rows come back unpermuted: `indices_to_multihot` and `permute` put them in expert order,
`unpermute` adds up what the rank's experts made of each token, and combine adds up the ranks. Where Megatron pads for quantisation it pads
that map (`pad_routing_map`). With expert tensor parallelism the experts are those of `flatten_experts`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_ref.config import (
    Combined,
    DeepEPDispatched,
    DeepEPLayout,
    IndexPolicy,
    PerRank,
    check_deepep_sizes,
    check_expert_split,
    check_index_values,
    check_rank_indices,
    check_rank_probs,
    check_tokens,
    require,
)
from moe_ref.dispatch.exchange import Handle, move, plan_of, take_rows
from moe_ref.dispatch.indices import apply_index_policy
from moe_ref.dispatch.plan import NOWHERE, RoutePlan, plan_of_indices, round_up
from moe_ref.rounding import accumulator_dtype, round_to


def deepep_layout(indices_TK: Tensor, *, num_experts: int, ranks: int) -> DeepEPLayout:
    """Count, before anything is sent, what one rank's tokens will do.

        is_token_in_rank[t, w]    = some slot of t names an expert of w
        num_tokens_per_rank[w]    = Σ_t is_token_in_rank[t, w]
        num_tokens_per_expert[e]  = slots that name e                     (an expert named twice by a token counts twice)

    Raises:
        ValueError: experts that do not divide among the ranks; an index outside -1 … E - 1 (DeepEP ignores those above).

    Source: Buffer.get_dispatch_layout.
    """
    check_expert_split(num_experts, ranks)
    check_index_values(indices_TK, num_experts)
    chosen_TKE = indices_TK[:, :, None] == torch.arange(num_experts, device=indices_TK.device)
    in_rank_TW = chosen_TKE.any(1).unflatten(1, (ranks, -1)).any(2)
    return DeepEPLayout(in_rank_TW.sum(0), chosen_TKE.sum((0, 1)), in_rank_TW)


def deepep_dispatch(
    tokens: PerRank[Tensor],
    indices: PerRank[Tensor],
    *,
    num_experts: int,
    probs: PerRank[Tensor] | None = None,
    scales: PerRank[Tensor] | None = None,
    policy: IndexPolicy | None = None,
    expert_alignment: int = 1,
    num_worst_tokens: int | None = None,
) -> list[DeepEPDispatched]:
    """Send each token once to each rank that some slot of it names.

        rows_w    = [tokens_s[t] for s in ranks for t in tokens of s if t names an expert of w]
        indices_w = [indices_s[t, k] - w·L if that is an expert of w, else -1]       for the same t; every slot keeps its column
        probs_w   = [probs_s[t, k]        if that is an expert of w, else 0]

    Args:
        tokens: [T_r,H] of each rank, any dtype; copied bit by bit.
        indices: [T_r,K] integers from -1 to E - 1; -1 is an empty slot.
        num_experts: E, of all ranks together.
        probs: [T_r,K] floating point (DeepEP takes float32), or None.
        scales: [T_r,…] of each rank, moved like the tokens without a gradient; or None.
        policy: of repeated experts, empty slots and probabilities 0; None for `IndexPolicy()`.
        expert_alignment: what the counts, and only they, are rounded up to.
        num_worst_tokens: rows that every rank gets, whatever arrives, so that no size has to be read; or None. Behind the received rows
            `indices` are -1; the rest there is unspecified.

    Returns:
        `DeepEPDispatched` of each rank.

    Rounding: none in the forward. The gradients of tokens and probs are `deepep_combine` of theirs, of the probs' in slots that are not -1: ranks
    ascending in the accumulator dtype, one rounding.

    Raises:
        ValueError: see `moe_ref.config`: check_rank_indices, check_index_values, check_deepep_sizes; and what the policy rejects.

    Source: Buffer.dispatch.
    """
    check_rank_indices(tokens, indices, probs, num_experts)
    require(
        scales is None or [len(own) for own in scales] == [len(own) for own in tokens],
        "scales",
        "of other sizes",
        "a row for each token",
    )
    policed = [
        apply_index_policy(
            own, None if probs is None else probs[rank], num_experts=num_experts, policy=policy or IndexPolicy()
        )
        for rank, own in enumerate(indices)
    ]
    kept = [own for own, _ in policed]
    plan = plan_of_indices(kept, num_experts)
    row_tokens = [plan.distinct_tokens(rank) for rank in range(plan.ranks)]
    check_deepep_sizes(expert_alignment, num_worst_tokens, max(map(len, row_tokens)))
    if num_worst_tokens is not None:
        row_tokens = [torch.cat([own, own.new_full((num_worst_tokens - len(own),), NOWHERE)]) for own in row_tokens]

    rows = move(tokens, row_tokens)
    local = [_local_indices(torch.cat(kept), own, rank, plan) for rank, own in enumerate(row_tokens)]
    row_probs: list[Tensor | None] = [None] * plan.ranks
    if probs is not None:
        moved = move([own for _, own in policed if own is not None], row_tokens)
        row_probs = [
            torch.where(own >= 0, moved[rank], torch.zeros_like(moved[rank])) for rank, own in enumerate(local)
        ]
    row_scales = (
        [None] * plan.ranks if scales is None else [take_rows(torch.cat(list(scales)), own) for own in row_tokens]
    )
    counts_WL = round_up(plan.kept_WL, expert_alignment)
    handles = [Handle("deepep", rank, plan, tuple(row_tokens)) for rank in range(plan.ranks)]
    return [
        DeepEPDispatched(
            rows[w],
            row_scales[w],
            local[w],
            row_probs[w],
            None if num_worst_tokens is not None else counts_WL[w],
            handles[w],
        )
        for w in range(plan.ranks)
    ]


def deepep_cached_dispatch(tokens: PerRank[Tensor], handles: PerRank[Handle]) -> list[Tensor]:
    """The rows of `deepep_dispatch` for other tokens of the same routing. It is the transpose of combine, and so combine's gradient.

    Raises:
        ValueError: handles of another call, or other numbers of tokens.

    Source: Buffer.dispatch with a handle.
    """
    plan = plan_of(handles, "deepep")
    check_tokens(tokens)
    require(
        tuple(map(len, tokens)) == plan.tokens,
        "tokens",
        f"of {[len(own) for own in tokens]} rows",
        f"of {list(plan.tokens)} rows, as the handles say",
    )
    return move(tokens, handles[0].row_tokens)


def deepep_combine(
    rows: PerRank[Tensor],
    handles: PerRank[Handle],
    *,
    probs: PerRank[Tensor] | None = None,
    biases: Sequence[PerRank[Tensor]] = (),
) -> list[Combined]:
    """Send each row back and add what the ranks made of each token. No probability is applied.

        tokens[t]   = round(bias_0[t] + bias_1[t] + Σ_{w ascending} row of t on w)
        probs[t, k] = round(Σ_{w ascending} probs_w[row of t on w, k])

    Each rank's row is one row already, rounded by the caller; so the whole sum rounds twice. The probs are added blindly, slots that hold -1
    included: after dispatch those are 0, so that what dispatch gave comes back bit by bit.

    Args:
        rows: [D_r,H] floating point of each rank, in the order of dispatch's rows. Rows behind those received are not read.
        handles: as this implementation's `deepep_dispatch` returned them.
        probs: [D_r,K] floating point of each rank, or None.
        biases: up to two lists of [T_r,H].

    Returns:
        `Combined` of each rank. A token that went nowhere is its biases, or 0.

    Rounding: sums in float32 (float64 for float64), once, to the dtype of the rows or of the probs.

    Raises:
        ValueError: handles of another call, rows of other shapes, or more than two biases.

    Source: Buffer.combine.
    """
    plan = plan_of(handles, "deepep", rows)
    row_tokens = handles[0].row_tokens
    require(len(biases) <= 2, "biases", f"{len(biases)} lists", "at most two")
    for bias in biases:
        right = [(count, rows[0].shape[1]) for count in plan.tokens]
        require([tuple(own.shape) for own in bias] == right, "biases", [tuple(own.shape) for own in bias], str(right))
    tokens = _sum_over_ranks(rows, row_tokens, plan, [torch.cat(list(bias)) for bias in biases])
    if probs is None:
        return [Combined(own, None) for own in tokens]
    check_rank_probs(probs, [row.new_empty((len(row), probs[0].shape[-1])) for row in rows])
    return [
        Combined(own, own_probs)
        for own, own_probs in zip(tokens, _sum_over_ranks(probs, row_tokens, plan, []), strict=True)
    ]


def _sum_over_ranks(
    rows: PerRank[Tensor], row_tokens: PerRank[Tensor], plan: RoutePlan, biases: list[Tensor]
) -> list[Tensor]:
    """round(biases + Σ_w rows_w): from left to right, ranks ascending."""
    every, source = torch.cat(list(rows)), torch.cat(list(row_tokens))
    real = source != NOWHERE
    total = every.new_zeros((sum(plan.tokens), *every.shape[1:]), dtype=accumulator_dtype(every.dtype))
    for bias in biases:
        total = total + bias.to(total.dtype)
    total = total.index_add(0, source[real], every[real].to(total.dtype))
    return list(round_to(total, every.dtype).split(list(plan.tokens)))


def _local_indices(index_GK: Tensor, row_token: Tensor, rank: int, plan: RoutePlan) -> Tensor:
    """[D,K]: the slots of each received token, counted among the rank's own experts; -1 for others' and behind the received rows."""
    first = rank * plan.local_experts
    index_DK = take_rows(index_GK, row_token)
    own = (index_DK >= first) & (index_DK < first + plan.local_experts) & (row_token != NOWHERE)[:, None]
    return torch.where(own, index_DK - first, NOWHERE)
