"""Transformer Engine's fused router as its sources document it, computed in torch.

choice    K times the largest key, then it becomes -∞. Of equal keys the first in the order of a
          warp's lanes: expert i by the reversed five bits of i mod 32, then by i div 32. Where
          all keys are -∞ the first of all is chosen, again if need be. NaN is never chosen. By
          radix (2.15, 16 experts or more): of equal keys the lower index, NaN above all.
weights   (s + bias) - bias, rounded after each step: a large bias destroys them
"""

import os
from types import SimpleNamespace

import torch
from torch import Tensor

from moe_ref.rounding import round_to
from moe_ref.router.scores import SCORES, normalised, softmax

LANES = 32
RADIX_FROM = 16


def lane_order(num_experts: int) -> Tensor:
    """[E] experts in the order in which the lanes of a warp are compared."""

    def place(i: int) -> tuple[int, int]:
        return int(f"{i % LANES:05b}"[::-1], 2), i // LANES

    return torch.tensor(sorted(range(num_experts), key=place))


def best(keys: Tensor, topk: int, radix: bool) -> Tensor:
    """[N,K] experts in the order in which they are chosen."""
    if radix:
        return keys.sort(dim=1, descending=True, stable=True).indices[:, :topk]
    order = lane_order(keys.shape[1]).to(keys.device)
    ranked = keys.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)[:, order]
    value, index = ranked.sort(dim=1, descending=True, stable=True)
    return torch.where(value == -torch.inf, order[0], order[index])[:, :topk]


class Router:
    """The functions of one release, with the newest names of their arguments."""

    def __init__(self, behaviour: SimpleNamespace) -> None:
        self.behaviour = behaviour

    def fused_topk_with_score_function(
        self, logits, topk, use_pre_softmax, num_groups, group_topk, scaling_factor, score_function, expert_bias,
        topk_indices=None,
    ):  # fmt: skip
        """(probs [N,E] in the logits' dtype, routing_map [N,E] bool, or topk_indices if given)."""
        x = self._read(logits, score_function)
        scores = x if score_function == "softmax" and not use_pre_softmax else SCORES[score_function](x)
        keys = scores.detach() if expert_bias is None else scores.detach() + expert_bias
        if num_groups and group_topk:
            keys = self._in_best_groups(keys, num_groups, group_topk, topk // group_topk)
        index = best(keys, topk, self._radix(topk))
        weights = scores.gather(1, index)
        if expert_bias is not None:
            exact = weights.detach()
            weights = weights + ((exact + expert_bias[index]) - expert_bias[index] - exact)
        if score_function == "softmax":
            weights = weights if use_pre_softmax else softmax(weights)
        elif topk > 1:
            weights = normalised(weights)
        weights = weights * (1.0 if scaling_factor is None else scaling_factor)
        probs = torch.zeros_like(logits).scatter(1, index, round_to(weights, logits.dtype))
        if topk_indices is not None:
            return probs, topk_indices.copy_(index)
        return probs, torch.zeros_like(logits, dtype=torch.bool).scatter(1, index, True)

    def fused_compute_score_for_moe_aux_loss(
        self, logits: Tensor, topk: int, score_function: str
    ) -> tuple[Tensor, Tensor]:
        """(routing_map [N,E] bool, scores [N,E]): the map comes first."""
        scores = SCORES[score_function](self._read(logits, score_function))
        if score_function != "softmax" and (topk > 1 or self.behaviour.normalises_one):
            scores = normalised(scores)
        index = best(scores.detach(), topk, self._radix(topk))
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(1, index, True)
        return chosen, scores if self.behaviour.float32_router else round_to(scores, logits.dtype)

    def fused_moe_aux_loss(self, probs, tokens_per_expert, total_num_tokens, num_experts, topk, coeff):
        """coeff · E / (K N²) · Σ_j tokens_per_expert[j] · Σ_t probs[t, j]."""
        if not isinstance(total_num_tokens, int) and not self.behaviour.tensor_total:
            raise TypeError(f"total_num_tokens is of {type(total_num_tokens).__name__}; it must be an int")
        tokens = torch.as_tensor(total_num_tokens, device=probs.device)
        if tokens.is_floating_point() or not -(2**31) <= int(tokens) < 2**31:
            raise TypeError(f"total_num_tokens is {float(tokens)}; it must be a 32-bit integer")
        factor = torch.tensor(coeff * num_experts / topk, device=probs.device) / tokens / tokens
        return round_to((probs.float().sum(0) * tokens_per_expert.float()).sum() * factor, probs.dtype)

    def _read(self, logits: Tensor, score_function: str) -> Tensor:
        if logits.dtype == torch.float64 or logits.numel() == 0:
            raise ValueError(f"logits are {logits.dtype} of shape {tuple(logits.shape)}; no float64, no empty tensor")
        if score_function == "sqrtsoftplus" and not self.behaviour.sqrtsoftplus:
            raise ValueError(f"score_function is {score_function!r}; it must be softmax or sigmoid")
        return logits.contiguous().float()

    def _radix(self, topk: int) -> bool:
        return bool(self.behaviour.radix) and topk >= int(os.environ.get("NVTE_RADIX_TOPK_THRESHOLD", RADIX_FROM))

    def _in_best_groups(self, keys: Tensor, num_groups: int, group_topk: int, counted: int) -> Tensor:
        by_group = keys.unflatten(1, (num_groups, -1))
        if self.behaviour.checks_groups and counted > by_group.shape[2]:
            raise ValueError(f"topk / group_topk is {counted}; a group has {by_group.shape[2]} experts")
        score = by_group.sort(dim=2, descending=True).values[..., :counted].sum(2)
        best_groups = torch.zeros_like(score, dtype=torch.bool).scatter(1, best(score, group_topk, False), True)
        return torch.where(best_groups[..., None].expand_as(by_group).flatten(1), keys, -torch.inf)
