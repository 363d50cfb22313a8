"""Which experts a token goes to, and with which weights.

    keys     one number an expert, by which the K best are chosen (bias and groups act here, and only here)
    weights  what the chosen experts' outputs are multiplied by

Mirrors `topk_routing_with_score_function` and `group_limited_topk` of megatron.core.transformer.moe.moe_utils, and
`fused_topk_with_score_function` of transformer_engine.pytorch.router.
"""

import torch
from torch import Tensor

from moe_ref.config import Routed, TopK, check_topk_routing, require
from moe_ref.rounding import accumulator_dtype, round_to
from moe_ref.router.scores import SCORES, normalised, softmax


def topk_indices(
    logits_TE: Tensor,
    *,
    topk: int,
    score_function: str = "softmax",
    pre_softmax: bool = False,
    num_groups: int | None = None,
    group_topk: int | None = None,
    scaling_factor: float | None = None,
    expert_bias: Tensor | None = None,
    precomputed_indices: Tensor | None = None,
) -> TopK:
    """Choose K experts a token and weigh them.

        score function   key of expert e          weight of a chosen expert e, S the chosen set
        softmax          x_e                      exp(x_e) / Σ_{i∈S} exp(x_i)
        softmax, pre     softmax(x)_e over E      softmax(x)_e
        sigmoid          σ(x_e) + bias_e          σ(x_e) / (Σ_{i∈S} σ(x_i) + 1e-20); σ(x_e) itself if K = 1
        sqrtsoftplus     √ln(1+exp x_e) + bias_e  as sigmoid

    S holds the K largest keys; of equal keys the lower expert. With groups, E/G experts in sequence each, a group's score is
    the sum of its K // group_topk largest keys, the `group_topk` best groups are kept (of equal ones the lower), and S is
    chosen among their experts. Weights are multiplied by `scaling_factor`. The bias has no influence on weights and
    gets no gradient; nor does the choice.

    Corners: -∞ is a number like others: an expert of logit -∞ is chosen when there are no K better ones, with weight 0, and the K
    experts are different ones even so. A row with NaN or +∞, or softmax where all chosen logits are -∞: K different experts, which
    ones and with which weights is not specified; other rows do not notice. sqrtsoftplus has no specified gradient in a row with a
    logit below -87, where exp(x) underflows in float32. K = 1 with softmax gives weight 1 and gradient 0. `pre_softmax` means nothing
    to the other score functions.

    Args:
        logits_TE: floating point.
        topk: K.
        num_groups, group_topk: G and g, together or not at all; K ≤ g · E/G.
        scaling_factor: positive, or None. (Megatron takes 0.0 for None, Transformer Engine for zero: it is refused.)
        expert_bias: [E], not with softmax.
        precomputed_indices: [T,K] experts to use instead of choosing, all different in a row (not checked). Keys, groups and
            bias then play no part.

    Returns:
        `TopK`, slots in descending order of key.

    Rounding: everything in float32 (float64 for float64 logits), the weight once to the logits' dtype.

    Raises:
        ValueError: see `moe_ref.config.check_topk_routing`; also if a precomputed index is outside 0 … E-1, which an
            implementation that must not read the device may declare unchecked.

    Source: moe_utils.topk_routing_with_score_function(dense_output=True). Megatron accepts group settings under which fewer
    than K experts are left and then returns -∞ or NaN weights; they are refused here.
    """
    check_topk_routing(
        logits_TE, topk, score_function, num_groups, group_topk, scaling_factor, expert_bias, precomputed_indices
    )
    scores_TE = _scores(logits_TE, score_function, pre_softmax)
    if precomputed_indices is None:
        keys_TE = (
            scores_TE.detach() if expert_bias is None else scores_TE.detach() + expert_bias.detach().to(scores_TE.dtype)
        )
        if num_groups is not None and group_topk is not None:
            keys_TE = _only_best_groups(keys_TE, num_groups, group_topk, topk // group_topk)
        index_TK = best(keys_TE, topk)
    else:
        index_TK = precomputed_indices.long()
        outside = (index_TK < 0) | (index_TK >= logits_TE.shape[1])
        require(
            not bool(outside.any()),
            "precomputed_indices",
            index_TK[outside].tolist()[:4],
            f"from 0 to {logits_TE.shape[1] - 1}",
        )
    weights_TK = _weights(scores_TE.gather(1, index_TK), score_function, pre_softmax)
    if scaling_factor is not None:
        weights_TK = weights_TK * scaling_factor
    return TopK(round_to(weights_TK, logits_TE.dtype), index_TK)


def topk_routing(logits_TE: Tensor, *, topk: int, **settings) -> Routed:
    """`topk_indices`, spread over all experts.

        probs[t, e] = weight of e if e was chosen for t, else 0;   routing_map[t, e] = e was chosen for t

    Source: moe_utils.topk_routing_with_score_function, its default form.
    """
    chosen = topk_indices(logits_TE, topk=topk, **settings)
    return spread(chosen, logits_TE.shape[1])


def spread(chosen: TopK, num_experts: int) -> Routed:
    """The dense form of the choice."""
    probs = chosen.probs.new_zeros((len(chosen.probs), num_experts)).scatter(1, chosen.indices, chosen.probs)
    routing_map = torch.zeros_like(probs, dtype=torch.bool).scatter(1, chosen.indices, True)
    return Routed(probs, routing_map)


def best(keys: Tensor, count: int) -> Tensor:
    """[rows, count] columns of the largest keys in descending order; of equal keys the lower column; NaN before all."""
    return keys.sort(dim=1, descending=True, stable=True).indices[:, :count]


def _scores(logits_TE: Tensor, score_function: str, pre_softmax: bool) -> Tensor:
    if score_function == "softmax" and not pre_softmax:
        return round_to(logits_TE, accumulator_dtype(logits_TE.dtype))
    return SCORES[score_function](logits_TE)


def _weights(scores_TK: Tensor, score_function: str, pre_softmax: bool) -> Tensor:
    if score_function == "softmax":
        return scores_TK if pre_softmax else softmax(scores_TK)
    return normalised(scores_TK) if scores_TK.shape[1] > 1 else scores_TK


def _only_best_groups(keys_TE: Tensor, num_groups: int, group_topk: int, counted: int) -> Tensor:
    """The keys with -∞ in place of those in groups that are not kept.

    An expert of a kept group whose own key is -∞ stands behind all others but before those: the kept are moved up by rank.
    """
    by_group = keys_TE.unflatten(1, (num_groups, -1))
    score_TG = by_group.sort(dim=2, descending=True).values[..., :counted].sum(2)
    kept_TG = torch.zeros_like(score_TG, dtype=torch.bool).scatter(1, best(score_TG, group_topk), True)
    kept_TE = kept_TG[..., None].expand_as(by_group).flatten(1)
    lowest = torch.finfo(keys_TE.dtype).min
    return torch.where(kept_TE, keys_TE.clamp(min=lowest), -torch.inf)
