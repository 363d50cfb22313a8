"""A Mixture-of-Experts layer in plain loops, for somebody who has never seen one.

A dense layer multiplies every token by all of its weights. A Mixture-of-Experts layer has E small
networks, the experts, and a router that sends each token to K of them: it has the weights of all
experts, but the arithmetic of K.

    route      which K experts does each token go to, and with which weights?
    permute    the tokens of expert 0 become the first rows, those of expert 1 the next, …
    experts    each expert reads its own rows, and nothing else
    combine    each token's K rows come back and are added, multiplied by their weights

For example, with 3 tokens, E = 2 experts and K = 1, let tokens 0 and 2 choose expert 1. Then the
rows are those of tokens 1, 0, 2; expert 0 reads the first, and expert 1 the two others.

A name ends in its shape: T tokens, H numbers per token, E experts, K experts per token, F the width
of an expert, P = T·K rows. `moe_ref.moe_layer` computes the same with tensors in place of loops,
and has the options of real models: capacities, padding, biases, several ranks, 8-bit numbers.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Row(NamedTuple):
    """A row of an expert: its token, its expert, and which of the token's K choices it is."""

    token: int
    expert: int
    choice: int


def moe_layer(
    x_TH: Tensor,  # [T,H]: the tokens
    router_weight_EH: Tensor,  # [E,H]
    fc1_weight_EFH: Tensor,  # [E,2F,H]: of each expert F gates, then F values
    fc2_weight_EHF: Tensor,  # [E,H,F]
    *,
    topk: int,
    score_function: str = "softmax",
) -> Tensor:
    """y[t] = Σ_k weight[t, k] · expert(x[t]), over the K experts of token t: [T,H]."""
    experts_TK, weights_TK = route(x_TH, router_weight_EH, topk, score_function)

    rows = permute(experts_TK, num_experts=len(router_weight_EH))  # P of them
    outputs_PH = []
    for row in rows:
        expert_weights = fc1_weight_EFH[row.expert], fc2_weight_EHF[row.expert]
        outputs_PH.append(swiglu_expert(x_TH[row.token], *expert_weights))

    y_TH = torch.zeros_like(x_TH)
    for row, output_H in zip(rows, outputs_PH, strict=True):
        y_TH[row.token] += weights_TK[row.token][row.choice] * output_H
    return y_TH


def route(
    x_TH: Tensor, router_weight_EH: Tensor, topk: int, score_function: str
) -> tuple[list[list[int]], list[list[Tensor]]]:
    """The K experts of each token, the best first, and their weights."""
    experts_TK, weights_TK = [], []
    for x_H in x_TH:
        logits_E = router_weight_EH @ x_H  # [E]: how well each expert suits the token
        ranking = sorted(range(len(logits_E)), key=lambda e: float(logits_E[e]), reverse=True)
        experts_K = ranking[:topk]  # of equal logits the lower expert comes first
        experts_TK.append(experts_K)
        weights_TK.append(weigh(logits_E[experts_K], score_function))
    return experts_TK, weights_TK


def weigh(logits_K: Tensor, score_function: str) -> list[Tensor]:
    """The K weights of a token, which sum to 1: scores above 0, divided by their sum.

    A single sigmoid is the weight itself: divided by its sum it would be 1 whatever the logit is,
    and the router could not learn.
    """
    if score_function == "softmax":
        scores_K = torch.exp(logits_K - logits_K.max())  # without the maximum a large logit would overflow
    else:
        scores_K = torch.sigmoid(logits_K)
        if len(scores_K) == 1:
            return list(scores_K)
    return list(scores_K / scores_K.sum())


def permute(experts_TK: list[list[int]], num_experts: int) -> list[Row]:
    """The rows in the order of experts, and of tokens within an expert."""
    rows = []
    for expert in range(num_experts):
        for token, experts_K in enumerate(experts_TK):
            if expert in experts_K:
                rows.append(Row(token, expert, experts_K.index(expert)))
    return rows


def swiglu_expert(x_H: Tensor, fc1_weight_FH: Tensor, fc2_weight_HF: Tensor) -> Tensor:
    """One expert on one row: up to the width F, a gated activation, and back to H."""
    gates_F, values_F = (fc1_weight_FH @ x_H).chunk(2)  # [2F] as two times [F]
    activation_F = gates_F * torch.sigmoid(gates_F) * values_F
    return fc2_weight_HF @ activation_F  # [H]
