"""The choice of experts, and their weights.

    keys     one number per expert, by which the K best are chosen; only here act bias and groups
    weights  the factors of the chosen experts' outputs

Mirrors `topk_routing_with_score_function` and `group_limited_topk` of
megatron.core.transformer.moe.moe_utils, and `fused_topk_with_score_function` of
transformer_engine.pytorch.router. Differs: docs/differences.md#router.
"""

import torch
from torch import Tensor

from moe_ref.config import Routed, TopK, check_topk_routing, require
from moe_ref.rounding import accumulator_dtype, round_to
from moe_ref.router.scores import SCORES, normalised, softmax


def topk_indices(
    logits_TE: Tensor,
    *, topk: int, score_function: str = "softmax", pre_softmax: bool = False,
    num_groups: int | None = None, group_topk: int | None = None,
    scaling_factor: float | None = None, expert_bias: Tensor | None = None,
    precomputed_indices: Tensor | None = None,
) -> TopK:  # fmt: skip
    """Choose K experts per token and weigh them.

        score function   key of expert e          weight of a chosen expert e of S
        softmax          x_e                      exp(x_e) / Σ_{i∈S} exp(x_i)
        softmax, pre     softmax(x)_e over E      softmax(x)_e
        sigmoid          σ(x_e) + bias_e          σ(x_e) / (Σ_{i∈S} σ(x_i) + 1e-20); σ(x_e) if K = 1
        sqrtsoftplus     √ln(1+exp x_e) + bias_e  as sigmoid

    S holds the K largest keys; of equal keys the lower expert. With G groups of E/G consecutive
    experts, S is chosen in the `group_topk` groups with the largest Σ of their K // group_topk
    largest keys; of equal groups the lower. Weights are multiplied by `scaling_factor`. Bias and
    choice get no gradient.

    -∞ is a key like others, of weight 0. A row with NaN or +∞, or softmax of -∞ alone, gives K
    different experts of unspecified weights; sqrtsoftplus of a logit below -87 has no specified
    gradient.

    Args:
        logits_TE: floating point.
        topk: K, from 1 to E.
        score_function, pre_softmax: "softmax", which `pre_softmax` takes before the choice,
            "sigmoid" or "sqrtsoftplus".
        num_groups, group_topk: G, which divides E, and the number of groups; None for no groups.
        scaling_factor: of the weights; None for 1.
        expert_bias: [E], not with softmax.
        precomputed_indices: [T,K] experts to use instead of choosing, all different (not checked).

    Rounding: in float32 (float64 for float64 logits); the weight once, to the logits' dtype.

    Raises:
        ValueError: see `moe_ref.config.check_topk_routing`; also if a precomputed index is outside
            0 … E-1, which an implementation that must not read the device may declare unchecked.
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
        illegal = (index_TK < 0) | (index_TK >= logits_TE.shape[1])
        requirement = f"from 0 to {logits_TE.shape[1] - 1}"
        require(not bool(illegal.any()), "precomputed_indices", index_TK[illegal].tolist()[:4], requirement)
    weights_TK = _weights(scores_TE.gather(1, index_TK), score_function, pre_softmax)
    if scaling_factor is not None:
        weights_TK = weights_TK * scaling_factor
    return TopK(round_to(weights_TK, logits_TE.dtype), index_TK)


def topk_routing(logits_TE: Tensor, *, topk: int, **settings) -> Routed:
    """`topk_indices`, spread over all experts.

    probs[t, e] = weight of e if e was chosen for t, else 0;   routing_map[t, e] = e was chosen for
    t

    In a row of unspecified weights, experts that were not chosen may have NaN.
    """
    chosen = topk_indices(logits_TE, topk=topk, **settings)
    return spread(chosen, logits_TE.shape[1])


def spread(chosen: TopK, num_experts: int) -> Routed:
    """The dense form of the choice."""
    probs = chosen.probs.new_zeros((len(chosen.probs), num_experts)).scatter(1, chosen.indices, chosen.probs)
    routing_map = torch.zeros_like(probs, dtype=torch.bool).scatter(1, chosen.indices, True)
    return Routed(probs, routing_map)


def best(keys: Tensor, count: int) -> Tensor:
    """[rows, count] columns of the largest keys in descending order; of equal keys the lower
    column; NaN before all.
    """
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

    An expert of a kept group whose own key is -∞ comes after all others of kept groups, but before
    those.
    """
    by_group = keys_TE.unflatten(1, (num_groups, -1))
    score_TG = by_group.sort(dim=2, descending=True).values[..., :counted].sum(2)
    kept_TG = torch.zeros_like(score_TG, dtype=torch.bool).scatter(1, best(score_TG, group_topk), True)
    kept_TE = kept_TG[..., None].expand_as(by_group).flatten(1)
    lowest = torch.finfo(keys_TE.dtype).min
    return torch.where(kept_TE, keys_TE.clamp(min=lowest), -torch.inf)
