"""DeepEP's normal mode: each token travels once to each rank with an expert for it, however many
that rank has.

    layout   each token once, by (source, token)
    mover    each token to each rank that some slot names
    tree     biases + Σ ranks → round

The rows arrive unpermuted: `indices_to_multihot` and `permute` put them in expert order,
`unpermute` adds the outputs of the rank's experts per token, and combine adds the ranks. Padding
for quantisation pads that map (`pad_routing_map`). With expert tensor parallelism the experts come
from `flatten_experts`.

Mirrors `get_dispatch_layout`, `dispatch` and `combine` of deep_ep.Buffer, and `fused_dispatch` and
`fused_combine` of megatron.core.transformer.moe.fused_a2a. Differs:
docs/differences.md#dispatchers.
"""

from collections.abc import Sequence
from typing import Any

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
    require,
)
from moe_ref.dispatch.exchange import Handle, check_resent, move, plan_of
from moe_ref.dispatch.indices import apply_index_policy
from moe_ref.dispatch.plan import RoutePlan, plan_of_indices, round_up
from moe_ref.dispatch.trees import sum_flat
from moe_ref.permutation.rows import PADDING, take_rows


class DeepEPHandle(Handle):
    """`Handle` of `deepep_dispatch`."""


def deepep_layout(indices_TK: Tensor, *, num_experts: int, ranks: int) -> DeepEPLayout:
    """Count one rank's sends, before anything is sent.

        is_token_in_rank[t, w]    = some slot of t names an expert of w
        num_tokens_per_rank[w]    = Σ_t is_token_in_rank[t, w]
        num_tokens_per_expert[e]  = slots that name e        (named twice by a token: counts twice)

    Args:
        indices_TK: integers; -1 names no expert.
        num_experts, ranks: E and W; rank w has the experts w·E/W … (w+1)·E/W - 1.

    Raises:
        ValueError: experts that do not divide among the ranks; an index outside -1 … E - 1.
    """
    check_expert_split(num_experts, ranks)
    check_index_values(indices_TK, num_experts)
    chosen_TKE = indices_TK[:, :, None] == torch.arange(num_experts, device=indices_TK.device)
    in_rank_TW = chosen_TKE.any(1).unflatten(1, (ranks, -1)).any(2)
    return DeepEPLayout(in_rank_TW.sum(0), chosen_TKE.sum((0, 1)), in_rank_TW)


def deepep_dispatch(
    tokens: PerRank[Tensor], indices: PerRank[Tensor],
    *, num_experts: int, probs: PerRank[Tensor] | None = None, scales: PerRank[Tensor] | None = None,
    policy: IndexPolicy | None = None, expert_alignment: int = 1,
    num_worst_tokens: int | None = None,
) -> list[DeepEPDispatched]:  # fmt: skip
    """Send each token once to each rank that some slot of it names.

        rows_w    = [tokens_s[t] for s in ranks for t in tokens of s if t names an expert of w]
        indices_w = [indices_s[t, k] - w·L if that is an expert of w, else -1]      columns stay
        probs_w   = [probs_s[t, k]         if that is an expert of w, else 0]

    Args:
        tokens: [T_r,H] of each rank, any dtype; copied bit by bit.
        indices: [T_r,K] integers from -1 to E - 1; -1 is an empty slot.
        num_experts: E, of all ranks together.
        probs: [T_r,K] floating point (DeepEP takes float32), or None.
        scales: [T_r,…] of each rank, moved like the tokens without a gradient; or None.
        policy: of repeated experts, empty slots and probabilities 0; None for `IndexPolicy()`.
        expert_alignment: multiple to which the counts, and only they, are rounded up.
        num_worst_tokens: rows of every rank, whatever arrives, so that no size is read from the
            device; or None. Past the received rows `indices` are -1; the rest there is unspecified.

    Rounding: none. The gradients of tokens, and of probs in slots that are not -1, are the sums of
    `deepep_combine`.

    Raises:
        ValueError: see `moe_ref.config`: check_rank_indices, check_index_values,
            check_deepep_sizes; and the policy.
    """
    check_rank_indices(tokens, indices, probs, num_experts)
    one_per_token = scales is None or [*map(len, scales)] == [*map(len, tokens)]
    require(one_per_token, "scales", "of other sizes", "a row per token")
    rank_probs: Sequence[Tensor | None] = [None] * len(tokens) if probs is None else probs
    options: dict[str, Any] = {"num_experts": num_experts, "policy": policy or IndexPolicy()}
    retained_slots = [apply_index_policy(*slots, **options) for slots in zip(indices, rank_probs, strict=True)]
    index_GK = torch.cat([kept_indices for kept_indices, _ in retained_slots])
    plan = plan_of_indices([kept_indices for kept_indices, _ in retained_slots], num_experts)
    row_tokens = [plan.distinct_tokens(rank) for rank in range(plan.ranks)]
    check_deepep_sizes(expert_alignment, num_worst_tokens, max(map(len, row_tokens)))
    if num_worst_tokens is not None:
        row_tokens = [_extended(tokens_D, num_worst_tokens) for tokens_D in row_tokens]

    rows = move(tokens, row_tokens)
    local_indices = [_local_indices(index_GK, tokens_D, rank, plan) for rank, tokens_D in enumerate(row_tokens)]
    row_probs: Sequence[Tensor | None] = [None] * plan.ranks
    if probs is not None:
        moved = move([kept_probs for _, kept_probs in retained_slots if kept_probs is not None], row_tokens)
        row_probs = [torch.where(i_DK >= 0, p_DK, 0) for i_DK, p_DK in zip(local_indices, moved, strict=True)]
    no_scales: Sequence[Tensor | None] = [None] * plan.ranks
    row_scales = no_scales if scales is None else move([scales_T.detach() for scales_T in scales], row_tokens)
    counts = round_up(plan.kept_WL, expert_alignment) if num_worst_tokens is None else [None] * plan.ranks
    handles = [DeepEPHandle(rank, plan, tuple(row_tokens)) for rank in range(plan.ranks)]
    results = zip(rows, row_scales, local_indices, row_probs, counts, handles, strict=True)
    return [DeepEPDispatched(*fields) for fields in results]


def deepep_cached_dispatch(tokens: PerRank[Tensor], handles: PerRank[DeepEPHandle]) -> list[Tensor]:
    """The rows of `deepep_dispatch` for other tokens of the same routing: the transpose, and the
    gradient, of combine.

    Raises:
        ValueError: handles of another call, or other numbers of tokens.
    """
    check_resent(tokens, plan_of(handles, DeepEPHandle))
    return move(tokens, handles[0].row_tokens)


def deepep_combine(
    rows: PerRank[Tensor],
    handles: PerRank[DeepEPHandle],
    *,
    probs: PerRank[Tensor] | None = None,
    biases: Sequence[PerRank[Tensor]] = (),
) -> list[Combined]:
    """Send each row back and add the rows of each token. No probability is applied.

        tokens[t]   = round(bias_0[t] + bias_1[t] + Σ_{w ascending} row of t on w)
        probs[t, k] = round(Σ_{w ascending} probs_w[row of t on w, k])

    A rank's row is a sum already, rounded by the caller; so the whole sum rounds twice. Probs are
    added in slots of -1 too: dispatch made those 0, so that its probs come back bit by bit.

    Args:
        rows: [D_r,H] floating point of each rank, in the order of dispatch's rows. Rows past the
            received are not read.
        handles: as this implementation's `deepep_dispatch` returned them.
        probs: [D_r,K] floating point of each rank, or None.
        biases: up to two lists of [T_r,H].

    Returns:
        `Combined` of each rank. A token that was sent to no rank is its biases, or 0.

    Rounding: sums in float32 (float64 for float64), once, to the dtype of the rows or of the probs.

    Raises:
        ValueError: handles of another call, rows of other shapes, or more than two biases.
    """
    plan = plan_of(handles, DeepEPHandle, rows)
    row_tokens = handles[0].row_tokens
    require(len(biases) <= 2, "biases", f"{len(biases)} lists", "at most two")
    token_shapes = [(count, rows[0].shape[1]) for count in plan.tokens]
    for bias in biases:
        shapes = [tuple(bias_TH.shape) for bias_TH in bias]
        require(shapes == token_shapes, "biases", shapes, str(token_shapes))
    tokens = sum_flat(rows, row_tokens, plan.tokens, biases)
    no_probs: Sequence[Tensor | None] = [None] * plan.ranks
    if probs is not None:
        check_rank_probs(probs, [row.new_empty((len(row), probs[0].shape[-1])) for row in rows])
    summed_probs = no_probs if probs is None else sum_flat(probs, row_tokens, plan.tokens)
    return [Combined(*fields) for fields in zip(tokens, summed_probs, strict=True)]


def _extended(tokens_D: Tensor, length: int) -> Tensor:
    """The row tokens, extended by PADDING."""
    return torch.cat([tokens_D, tokens_D.new_full((length - len(tokens_D),), PADDING)])


def _local_indices(index_GK: Tensor, row_token: Tensor, rank: int, plan: RoutePlan) -> Tensor:
    """[D,K]: the slots of each received token, numbered by the rank's own experts; -1 for others
    and past those rows.
    """
    first = rank * plan.local_experts
    index_DK = take_rows(index_GK, row_token)
    mine = (index_DK >= first) & (index_DK < first + plan.local_experts) & (row_token != PADDING)[:, None]
    return torch.where(mine, index_DK - first, PADDING)
