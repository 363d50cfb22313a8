"""Sinkhorn routing: a choice by a balanced plan.

Mirrors `sinkhorn` of megatron.core.transformer.moe.moe_utils and
`TopKRouter.sinkhorn_load_balancing`.
"""

import torch
from torch import Tensor

from moe_ref.config import Routed, check_logits, check_topk
from moe_ref.rounding import accumulator_dtype, round_to
from moe_ref.router.scores import sigmoid, softmax
from moe_ref.router.selection import best


def sinkhorn_routing(logits_TE: Tensor, *, topk: int, training: bool = True) -> Routed:
    """Choose by a balanced plan: rows and columns of exp(logits) scaled until the experts' shares
    are even.

        C = exp(x),  d1 = 1
        repeat  d0 = (1/T) / (C d1 + 1e-8),  d1 = (1/E) / (Cᵀ d0 + 1e-8)  until mean |Δd1| ≤ 1e-4
        routing_map = the K largest d1_e · C_te · d0_t of each token, of equal ones the lower
                      expert    (in evaluation: of the activations)
        probs = activation · routing_map,   activation = σ(x) if K = 1, else softmax(x) over E

    The plan is computed in float32 and gets no gradient; weights are not renormalised. A logit
    above 88 makes the plan NaN, and the choice unspecified. If all of a token's logits are below
    -9, 1e-8 outweighs its row, and there may be millions of rounds.

    Args:
        logits_TE: floating point.
        topk: K.
        training: False chooses by the activations.

    Raises:
        ValueError: see `moe_ref.config`: check_logits, check_topk.
    """
    check_logits(logits_TE)
    check_topk(topk, logits_TE.shape[1])
    activation_TE = sigmoid(logits_TE) if topk == 1 else softmax(logits_TE)
    keys_TE = _plan(logits_TE.detach()) if training else activation_TE.detach()
    map_TE = torch.zeros_like(keys_TE, dtype=torch.bool).scatter(1, best(keys_TE, topk), True)
    return Routed(round_to(torch.where(map_TE, activation_TE, 0), logits_TE.dtype), map_TE)


def _plan(logits_TE: Tensor) -> Tensor:
    """d1 · C · d0 of `sinkhorn_routing`."""
    num_tokens, num_experts = logits_TE.shape
    if num_tokens == 0:
        return logits_TE
    cost_TE = round_to(logits_TE, accumulator_dtype(logits_TE.dtype)).exp()
    cost_ET = cost_TE.T.contiguous()  # torch sums equal rows alike, and equal columns not always
    d0_T, d1_E = cost_TE.new_ones(num_tokens), cost_TE.new_ones(num_experts)
    change = torch.inf
    while change > 1e-4:  # a NaN ends it too
        before_E = d1_E
        d0_T = 1 / num_tokens / ((cost_TE * d1_E).sum(1) + 1e-8)
        d1_E = 1 / num_experts / ((cost_ET * d0_T).sum(1) + 1e-8)
        change = float((before_E - d1_E).abs().mean())
    return d1_E * cost_TE * d0_T[:, None]
