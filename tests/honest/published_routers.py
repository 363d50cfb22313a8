"""Routers as published models compute them, for what these offer.

Qwen3       softmax over all experts in float32, its K largest, divided by their sum
Mixtral     the same, multiplied by the reciprocal of the sum
Olmoe       softmax over all experts, its K largest
DeepSeekV3  σ plus a bias, the best groups by the sum of their two best, divided by the sum
Llama4      the largest logit, its σ

Gradients are torch's autograd. `supports` refuses what a model does not have.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_ref.config import Routed, TopK, check_topk_routing
from tests.honest.strangers import wide_of

Router = Callable[..., tuple[Tensor, Tensor]]
ANY = "any"
SETTINGS = ("score_function", "pre_softmax", "num_groups", "group_topk", "scaling_factor", "expert_bias")


def qwen3(logits: Tensor, topk: int, **_: Any) -> tuple[Tensor, Tensor]:
    scores = F.softmax(logits, dim=1, dtype=wide_of(logits))
    weights, indices = torch.topk(scores, topk, dim=-1)
    weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights.to(logits.dtype), indices


def mixtral(logits: Tensor, topk: int, **_: Any) -> tuple[Tensor, Tensor]:
    scores = F.softmax(logits, dim=1, dtype=wide_of(logits))
    weights, indices = torch.topk(scores, topk, dim=-1, sorted=False)
    weights = weights * (1 / weights.sum(dim=-1, keepdim=True))
    return weights.to(logits.dtype), indices


def olmoe(logits: Tensor, topk: int, **_: Any) -> tuple[Tensor, Tensor]:
    weights, indices = torch.topk(F.softmax(logits, dim=1, dtype=wide_of(logits)), topk, dim=-1)
    return weights.to(logits.dtype), indices


def deepseek_v3(
    logits: Tensor, topk: int, num_groups=None, group_topk=None, scaling_factor=None, expert_bias=None, **_: Any
) -> tuple[Tensor, Tensor]:
    scores = logits.to(wide_of(logits)).sigmoid()
    keys = scores.detach() if expert_bias is None else scores.detach() + expert_bias
    if num_groups:
        by_group = keys.view(-1, num_groups, keys.shape[1] // num_groups)
        best = by_group.topk(topk // group_topk, dim=-1)[0].sum(dim=-1)
        best_groups = torch.zeros_like(best).scatter_(1, best.topk(group_topk, dim=-1, sorted=False)[1], 1)
        keys = keys.masked_fill(~best_groups.bool()[..., None].expand_as(by_group).reshape(keys.shape), float("-inf"))
    indices = keys.topk(topk, dim=-1, sorted=False)[1]
    weights = scores.gather(1, indices)
    if topk > 1:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return (weights * (scaling_factor or 1.0)).to(logits.dtype), indices


def llama4(logits: Tensor, topk: int, **_: Any) -> tuple[Tensor, Tensor]:
    top, indices = torch.topk(logits, topk, dim=1)
    return torch.sigmoid(top.to(wide_of(logits))).to(logits.dtype), indices


def make(router: Router, most: int = 1 << 30, **offered: Any) -> SimpleNamespace:
    """The namespace of a model: its settings, each with its only value, or ANY."""

    def topk_indices(
        logits, *, topk, score_function="softmax", pre_softmax=False, num_groups=None, group_topk=None,
        scaling_factor=None, expert_bias=None,
    ):  # fmt: skip
        check_topk_routing(logits, topk, score_function, num_groups, group_topk, scaling_factor, expert_bias, None)
        settings = {"num_groups": num_groups, "group_topk": group_topk, "scaling_factor": scaling_factor}
        return TopK(*router(logits, topk, expert_bias=expert_bias, **settings))

    def topk_routing(logits, **settings):
        weights, indices = topk_indices(logits, **settings)
        routing_map = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device).scatter(1, indices, True)
        return Routed(torch.zeros_like(logits).scatter(1, indices, weights), routing_map)

    def supports(function, **arguments):
        if arguments["topk"] > most:
            return f"no topk above {most}"
        if "precomputed_indices" in arguments:
            return "no precomputed_indices"
        requested = {"score_function": "softmax"} | {name: arguments[name] for name in SETTINGS if name in arguments}
        mismatched = [name for name, value in requested.items() if offered.get(name) not in (ANY, value)]
        missing = [name for name in offered if offered[name] != ANY and name not in requested]
        return f"no other {', '.join(mismatched + missing)}" if mismatched or missing else None

    return SimpleNamespace(topk_indices=topk_indices, topk_routing=topk_routing, supports=supports)


Qwen3 = make(qwen3, score_function="softmax")
Mixtral = make(mixtral, score_function="softmax")
Olmoe = make(olmoe, score_function="softmax", pre_softmax=True)
DeepSeekV3 = make(
    deepseek_v3, score_function="sigmoid", num_groups=ANY, group_topk=ANY, scaling_factor=ANY, expert_bias=ANY
)
Llama4 = make(llama4, 1, score_function="sigmoid")
