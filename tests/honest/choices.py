"""Routers in the styles of other teams.

Grouped   groups by topk of sums of topk, the map by one-hot rows; expit, softplus; autograd
Losses    softmax by log-softmax; losses as sums of products; loads compared as integers, drops by
          rank; plans of matrix products; jitter drawn in its range
Online    repeated maxima; a softmax that goes column by column, from the last
"""

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_ref import config
from tests.honest.strangers import refusing, wide_of

TINY = 1e-20


def widened(x: Tensor) -> Tensor:
    return x.to(wide_of(x))


def scores_of(x: Tensor, function: str) -> Tensor:
    if function == "softmax":
        return F.softmax(x, -1)
    return torch.special.expit(x) if function == "sigmoid" else F.softplus(x, threshold=30).sqrt()


# ---- Grouped


def in_best_groups(key: Tensor, groups: int, group_topk: int, counted: int) -> Tensor:
    """The keys, -∞ outside the best groups."""
    totals = key.unflatten(1, (groups, -1)).topk(counted, -1).values.sum(-1)
    best = torch.zeros(totals.shape, dtype=torch.bool).scatter(1, totals.topk(group_topk, 1).indices, True)
    is_outside = ~best.repeat_interleave(key.shape[1] // groups, 1)
    return key.clamp(min=torch.finfo(key.dtype).min).masked_fill(is_outside, -torch.inf)


def grouped_indices(
    logits, *, expert_bias=None, score_function="softmax", scaling_factor=None, num_groups=None, group_topk=None,
    topk, pre_softmax=False, precomputed_indices=None,
):  # fmt: skip
    config.check_topk_routing(
        logits, topk, score_function, num_groups, group_topk, scaling_factor, expert_bias, precomputed_indices
    )
    x, late = widened(logits), score_function == "softmax" and not pre_softmax
    scores = x if late else scores_of(x, score_function)
    if precomputed_indices is not None:
        index = precomputed_indices.long()
        in_range = bool(((index >= 0) & (index < x.shape[1])).all())
        config.require(in_range, "precomputed_indices", "outside", f"from 0 to {x.shape[1] - 1}")
    else:
        key = scores.detach() if expert_bias is None else scores.detach() + expert_bias.detach().to(x.dtype)
        key = torch.where(key.isnan(), torch.inf, key)
        if num_groups is not None:
            key = in_best_groups(key, num_groups, group_topk, topk // group_topk)
        index = key.topk(topk, 1, sorted=False).indices
    weights = scores.gather(1, index)
    if late:
        weights = F.softmax(weights, -1)
    elif score_function != "softmax" and topk > 1:
        weights = weights / (weights.sum(-1, keepdim=True) + TINY)
    return config.TopK((weights if scaling_factor is None else weights.mul(scaling_factor)).to(logits.dtype), index)


def grouped_routing(
    logits, *, topk, expert_bias=None, score_function="softmax", scaling_factor=None, num_groups=None,
    group_topk=None, pre_softmax=False, precomputed_indices=None,
):  # fmt: skip
    probs, index = grouped_indices(
        logits, topk=topk, expert_bias=expert_bias, score_function=score_function, scaling_factor=scaling_factor,
        num_groups=num_groups, group_topk=group_topk, pre_softmax=pre_softmax, precomputed_indices=precomputed_indices,
    )  # fmt: skip
    one_hot = index[..., None] == torch.arange(logits.shape[1])
    return config.Routed(torch.where(one_hot, probs[..., None], 0).sum(1), one_hot.any(1))


# ---- Losses


def indices_by_logarithm(logits, *, topk, pre_softmax=False, scaling_factor=None):
    config.check_topk_routing(logits, topk, "softmax", None, None, scaling_factor, None, None)
    x = widened(logits)
    if pre_softmax:
        weights, index = F.log_softmax(x, -1).exp().topk(topk, -1)
    else:
        chosen, index = x.topk(topk, -1)
        weights = F.log_softmax(chosen, -1).exp()
    weights = weights if scaling_factor is None else weights * scaling_factor
    return {"probs": weights.to(logits.dtype), "indices": index.int()}


def gate(x, weight, *, bias=None, router_dtype=None):
    config.check_gate(x, weight, bias, router_dtype)
    dtype = {"fp32": torch.float32, "fp64": torch.float64}.get(router_dtype or "", x.dtype)
    if dtype.itemsize > 2:
        return F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
    logits = F.linear(x.float(), weight.to(dtype).float()).to(dtype)
    return logits if bias is None else logits + bias.to(dtype)


def jitter(x, *, eps):
    config.check_jitter(eps)
    return x * torch.empty_like(x).uniform_(1 - eps, 1 + eps)


def z_loss(logits, *, coeff, padding_mask=None):
    config.check_logits(logits)
    config.check_coeff(coeff)
    config.check_padding_mask(padding_mask, len(logits))
    valid = torch.ones(len(logits), dtype=torch.bool) if padding_mask is None else padding_mask == 0
    x = torch.where(valid[:, None], widened(logits), 0)
    top = x.detach().amax(1, keepdim=True).nan_to_num(neginf=0.0)
    square = (top[:, 0] + (x - top).exp().sum(1).log()).square()
    return torch.where(valid, square, 0).sum() / valid.sum().clamp(min=1) * coeff


def load_balancing_loss(scores, tokens_per_expert, *, total_num_tokens, topk, num_experts, coeff):
    config.check_load_balancing_loss(scores, tokens_per_expert, total_num_tokens, topk, num_experts, coeff)
    x = widened(scores)
    total = torch.as_tensor(total_num_tokens).reshape(()).to(x.dtype)
    factor = (coeff * num_experts / topk) / total.square() if total > 0 else torch.zeros_like(total)
    return (x * tokens_per_expert.to(x.dtype)).sum() * factor


def aux_loss_scores(logits, *, topk, score_function="softmax", padding_mask=None):
    config.check_logits(logits)
    config.check_topk(topk, logits.shape[1])
    config.check_score_function(score_function)
    config.check_padding_mask(padding_mask, len(logits))
    padding = torch.zeros(len(logits), 1, dtype=torch.bool) if padding_mask is None else (padding_mask != 0)[:, None]
    scores = scores_of(widened(logits).masked_fill(padding, 0), score_function)
    scores = scores if score_function == "softmax" else scores / (scores.sum(-1, keepdim=True) + TINY)
    chosen = torch.zeros(scores.shape, dtype=torch.bool).scatter(1, scores.detach().topk(topk, 1).indices, True)
    return config.AuxScores(scores.masked_fill(padding, 0), chosen & ~padding)


def update_expert_bias(expert_bias, tokens_per_expert, *, update_rate):
    config.check_update_expert_bias(expert_bias, tokens_per_expert, update_rate)
    count = tokens_per_expert.double() if tokens_per_expert.is_floating_point() else tokens_per_expert.long()
    overloaded, underloaded = count * len(count) > count.sum(), count * len(count) < count.sum()
    step = torch.full_like(expert_bias, update_rate)
    return torch.where(underloaded, expert_bias + step, torch.where(overloaded, expert_bias - step, expert_bias))


def drop_tokens(probs, routing_map, *, capacity, drop_policy="probs", pad_to_capacity=False):
    config.check_drop_tokens(probs, routing_map, capacity, drop_policy)
    on = routing_map != 0
    key = probs.detach().double() if drop_policy == "probs" else torch.zeros(on.shape, dtype=torch.float64)
    by_key = torch.where(on, key, -torch.inf).argsort(dim=0, descending=True, stable=True)
    order = by_key.gather(0, (~on.gather(0, by_key)).byte().argsort(dim=0, stable=True))  # routed ones first
    rank = torch.where(on, order.argsort(dim=0), (~on).cumsum(0) - 1 + on.sum(0))
    chosen = (rank < capacity) & (on | pad_to_capacity)
    return config.Routed(probs.masked_fill(~(chosen & on), 0), chosen)


class _Attached(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, loss: Tensor, scale: float) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: Tensor) -> None:
        ctx.like = inputs[1].shape, inputs[2], inputs[1].dtype

    @staticmethod
    def backward(ctx: Any, g: Tensor):
        shape, scale, dtype = ctx.like
        return g.clone(), torch.full(shape, float(scale), dtype=dtype), None


def attach_loss(x, loss, *, scale=1.0):
    config.check_loss_scale(scale)
    return _Attached.apply(x, loss, scale)


def plan_of(x: Tensor) -> Tensor:
    cost, (tokens, experts) = x.exp(), x.shape
    share, change = cost.new_ones(experts), torch.inf
    while change > 1e-4:
        row_share = (1.0 / tokens) / (cost @ share + 1e-8)
        previous_share, share = share, (1.0 / experts) / (row_share @ cost + 1e-8)
        change = float((share - previous_share).abs().mean())
    return cost * row_share[:, None] * share


def sinkhorn_routing(logits, *, topk, training=True):
    config.check_logits(logits)
    config.check_topk(topk, logits.shape[1])
    x = widened(logits)
    weights = torch.sigmoid(x) if topk == 1 else torch.softmax(x, -1)
    keys = plan_of(x.detach()) if training and len(x) else weights.detach()
    index = keys.nan_to_num(nan=torch.inf).topk(topk, 1).indices
    chosen = torch.zeros(x.shape, dtype=torch.bool).scatter(1, index, True)
    return weights.masked_fill(~chosen, 0).to(logits.dtype), chosen


# ---- Online


class _Online(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, index: Tensor, scale: float) -> Tensor:
        x = widened(logits.detach()).gather(1, index)
        top, total = torch.full((len(x),), -torch.inf, dtype=x.dtype), x.new_zeros(len(x))
        for column in reversed(x.unbind(1)):
            previous_top, top = top, torch.maximum(top, column)
            finite = torch.where(top == -torch.inf, 0, top)
            total = total * (previous_top - finite).exp() + (column - finite).exp()
        weights = (x - top[:, None]).exp() * total.reciprocal()[:, None]
        ctx.save_for_backward(weights, index)
        ctx.like = logits.shape, logits.dtype, scale
        return (weights * scale).to(logits.dtype)

    @staticmethod
    @refusing
    def backward(ctx: Any, g: Tensor):
        (weights, index), (shape, dtype, scale) = ctx.saved_tensors, ctx.like
        g = g.to(weights.dtype) * scale
        d = weights * g - weights * (weights * g).sum(1, keepdim=True)
        return torch.zeros(shape, dtype=dtype).scatter(1, index, d.to(dtype)), None, None


def online_indices(logits, *, topk, scaling_factor=None):
    config.check_topk_routing(logits, topk, "softmax", None, None, scaling_factor, None, None)
    key = torch.where(logits.isnan(), torch.inf, logits.detach())
    available, index = torch.ones(key.shape, dtype=torch.bool), []
    for _ in range(topk):
        largest = key.masked_fill(~available, -torch.inf).argmax(1, keepdim=True)
        column = torch.where(available.gather(1, largest), largest, available.int().argmax(1, keepdim=True))
        available = available.scatter(1, column, False)
        index.append(column)
    chosen = torch.cat(index, 1)
    return _Online.apply(logits, chosen, 1.0 if scaling_factor is None else scaling_factor), chosen


Grouped = SimpleNamespace(topk_indices=grouped_indices, topk_routing=grouped_routing)
Online = SimpleNamespace(topk_indices=online_indices)
LOSSES = (
    gate, jitter, z_loss, load_balancing_loss, aux_loss_scores, update_expert_bias, drop_tokens, attach_loss,
    sinkhorn_routing,
)  # fmt: skip
Losses = SimpleNamespace(topk_indices=indices_by_logarithm, **{f.__name__: f for f in LOSSES})
