"""Sinkhorn routing in plain torch, because the number of rounds depends on the logits."""

import torch
from torch import Tensor

from moe_fast.launch.operators import has_memory, operator, traceable
from moe_ref.config import Routed, check_logits, check_topk

LEAST = 1e-8  # added to the sums
TOLERANCE = 1e-4  # mean change of the experts' factors that ends the rounds


@traceable
def sinkhorn_routing(logits_TE: Tensor, *, topk: int, training: bool = True) -> Routed:
    """Choose by a balanced plan, with two sums over the matrix per round. The host waits for the
    change of each round; in evaluation it never waits. Of equal keys the lowest experts are chosen.
    """
    check_logits(logits_TE)
    check_topk(topk, logits_TE.shape[1])
    wide_TE = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
    activation_TE = wide_TE.sigmoid() if topk == 1 else wide_TE.softmax(1)
    map_TE = _chosen(wide_TE.detach() if training else activation_TE.detach(), topk, training)
    return Routed(torch.where(map_TE, activation_TE, 0).to(logits_TE.dtype), map_TE)


@operator
def _chosen(x_TE: Tensor, topk: int, by_plan: bool) -> Tensor:
    """[T,E] bool: the K largest of each row of x, or of its plan."""
    if not has_memory():
        return torch.empty_like(x_TE, dtype=torch.bool, memory_format=torch.contiguous_format)
    keys_TE = _plan(x_TE) if by_plan and x_TE.shape[0] else x_TE
    order_TE = keys_TE.sort(dim=1, descending=True, stable=True).indices
    chosen_TE = torch.zeros(x_TE.shape, dtype=torch.bool, device=x_TE.device)
    return chosen_TE.scatter_(1, order_TE[:, :topk], True)


def _plan(x_TE: Tensor) -> Tensor:
    """exp(x), with rows and columns scaled until the shares of the experts are equal.

    Each expert's sum is that of a row in memory. So equal columns have equal sums, which a product
    of a matrix and a vector would not guarantee.
    """
    cost_TE = x_TE.exp()
    cost_ET = cost_TE.T.contiguous()
    tokens, experts = cost_TE.shape
    expert_E, changed = cost_TE.new_ones(experts), True
    token_T = cost_TE.new_ones(tokens)
    while changed:
        previous_E = expert_E
        token_T = (torch.mv(cost_TE, expert_E) + LEAST).reciprocal() / tokens
        expert_E = ((cost_ET * token_T).sum(1) + LEAST).reciprocal() / experts
        changed = bool((previous_E - expert_E).abs().mean() > TOLERANCE)  # a NaN ends it too
    return expert_E * cost_TE * token_T[:, None]
