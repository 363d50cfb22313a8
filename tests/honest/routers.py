"""Honest routers in plain torch that differ in everything the contract leaves open.

Autograd     torch.topk with its tie order, torch.softmax, gradients by autograd
BaseTwo      exp2(x · log₂e), ln(e^x + e^0), σ = e^x / (1 + e^x); sums of sorted terms, descending;
             closed-form gradients
Wide         float64, rounded once
OneByOne     sequential sums; choice by repeated maxima, the last of equal keys, always by scores
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType, SimpleNamespace

import torch
from torch import Tensor

from moe_ref import config

TINY = 1e-20


def ascending(x: Tensor) -> Tensor:
    return x.sum(-1, keepdim=True)


def descending(x: Tensor) -> Tensor:
    return x.sort(dim=-1, descending=True).values.cumsum(-1)[..., -1:] if x.shape[-1] else x.sum(-1, keepdim=True)


def one_by_one(x: Tensor) -> Tensor:
    total = x.new_zeros((*x.shape[:-1], 1))
    for column in x.unbind(-1):
        total = total + column[..., None]
    return total


def exp_base_two(x: Tensor) -> Tensor:
    return torch.exp2(x * math.log2(math.e))


def sigmoid_by_exp(x: Tensor) -> Tensor:
    power = torch.exp(x.clamp(max=80))
    return torch.where(x > 80, torch.ones_like(x), power / (1 + power))


def softplus_by_logaddexp(x: Tensor) -> Tensor:
    return torch.logaddexp(x, torch.zeros_like(x))


def any_of_equals(keys: Tensor, count: int) -> Tensor:
    return keys.topk(count, dim=1, sorted=False).indices


def last_of_equals(keys: Tensor, count: int) -> Tensor:
    """Top-k by repeated maxima; of equal keys the last."""
    remaining, indices = keys.clone(), []
    taken = torch.zeros_like(keys, dtype=torch.bool)
    for _ in range(count):
        best = torch.where(taken, -torch.inf, remaining).amax(1, keepdim=True)
        rank = torch.arange(1, keys.shape[1] + 1, device=keys.device).expand(keys.shape)
        at = torch.where((remaining == best) & ~taken, rank, torch.where(taken, -1, 0)).argmax(1, keepdim=True)
        indices.append(at)
        taken = taken.scatter(1, at, True)
    return torch.cat(indices, 1) if indices else torch.zeros(len(keys), 0, dtype=torch.int64, device=keys.device)


@dataclass(frozen=True)
class How:
    """The options of a variant."""

    dtype: torch.dtype = torch.float32
    exp: Callable[[Tensor], Tensor] = torch.exp
    sigmoid: Callable[[Tensor], Tensor] = torch.sigmoid
    softplus: Callable[[Tensor], Tensor] = torch.nn.functional.softplus
    total: Callable[[Tensor], Tensor] = ascending
    best: Callable[[Tensor, int], Tensor] = any_of_equals
    by_score: bool = False  # softmax over all experts: choice by scores, not logits
    closed: bool = False  # closed-form gradients

    def wide(self, x: Tensor) -> Tensor:
        return x.to(torch.float64 if x.dtype == torch.float64 else self.dtype)

    def softmax(self, x: Tensor) -> Tensor:
        if not x.shape[-1]:
            return x
        power = self.exp(x - x.amax(-1, keepdim=True).detach())
        return power / self.total(power)

    def score(self, x: Tensor, function: str) -> Tensor:
        if function == "softmax":
            return self.softmax(x)
        return self.sigmoid(x) if function == "sigmoid" else self.softplus(x).sqrt()


class Closed(torch.autograd.Function):
    """Weights of the chosen experts with a closed-form gradient."""

    @staticmethod
    def forward(ctx, x, index, function, pre, scale, variant):
        everywhere = function == "softmax" and not pre
        score = x if everywhere else variant.score(x, function)
        s = score.gather(1, index)
        normalise = function != "softmax" and index.shape[1] > 1
        total = variant.total(s) + TINY if normalise else None
        p = variant.softmax(s) if everywhere else s / total if normalise else s
        ctx.save_for_backward(x, index, score, s, p)
        ctx.total, ctx.settings = total, (function, pre, scale, variant, normalise)
        return p * scale

    @staticmethod
    def backward(ctx, g):
        if torch.is_grad_enabled():
            raise RuntimeError("differentiable once: parts of the saved tensors have no graph")
        x, index, score, s, p = ctx.saved_tensors
        function, pre, scale, variant, normalise = ctx.settings
        g = g * scale
        inner = variant.total(g * p)
        if function == "softmax":
            if not pre:
                return torch.zeros_like(x).scatter(1, index, p * (g - inner)), *[None] * 5
            spread = torch.zeros_like(x).scatter(1, index, g)
            return score * (spread - inner), *[None] * 5
        if normalise:
            g = (g - inner) / ctx.total
        at = x.gather(1, index)
        slope = s * (1 - s) if function == "sigmoid" else variant.sigmoid(at) / (2 * s)
        return torch.zeros_like(x).scatter(1, index, g * slope), *[None] * 5


def topk_indices(
    variant: How, logits, *, topk, score_function="softmax", pre_softmax=False, num_groups=None, group_topk=None,
    scaling_factor=None, expert_bias=None, precomputed_indices=None,
):  # fmt: skip
    config.check_topk_routing(
        logits, topk, score_function, num_groups, group_topk, scaling_factor, expert_bias, precomputed_indices
    )
    x, experts = variant.wide(logits), logits.shape[1]
    by_logits = score_function == "softmax" and (not pre_softmax or (not variant.by_score and num_groups is None))
    if precomputed_indices is None:
        keys = x.detach() if by_logits else variant.score(x.detach(), score_function)
        if expert_bias is not None:
            keys = keys + expert_bias.detach().to(keys.dtype)
        if num_groups is not None:
            groups = keys.unflatten(1, (num_groups, -1))
            score = variant.total(groups.topk(topk // group_topk, dim=2).values)[..., 0]
            best_groups = torch.zeros_like(score, dtype=torch.bool).scatter(1, variant.best(score, group_topk), True)
            best_groups = best_groups[..., None].expand_as(groups).flatten(1)
            keys = torch.where(best_groups, keys.clamp(min=torch.finfo(keys.dtype).min), -torch.inf)
        index = variant.best(keys, topk)
    else:
        index = precomputed_indices.long()
        in_range = bool(((index >= 0) & (index < experts)).all())
        config.require(in_range, "precomputed_indices", "out of range", f"below {experts}")
    scale = 1.0 if scaling_factor is None else scaling_factor
    if variant.closed:
        probs = Closed.apply(x, index, score_function, pre_softmax, scale, variant)
    else:
        over_all = x if score_function == "softmax" and not pre_softmax else variant.score(x, score_function)
        probs = over_all.gather(1, index)
        if score_function == "softmax":
            probs = probs if pre_softmax else variant.softmax(probs)
        elif topk > 1:
            probs = probs / (variant.total(probs) + TINY)
        probs = probs * scale
    return config.TopK(probs.to(logits.dtype), index)


def topk_routing(variant: How, logits, *, topk, **settings):
    probs, index = topk_indices(variant, logits, topk=topk, **settings)
    dense = probs.new_zeros(logits.shape).scatter(1, index, probs)
    return config.Routed(dense, torch.zeros_like(logits, dtype=torch.bool).scatter(1, index, True))


def aux_loss_scores(variant: How, logits, *, topk, score_function="softmax", padding_mask=None):
    config.check_logits(logits)
    config.check_topk(topk, logits.shape[1])
    config.check_score_function(score_function)
    config.check_padding_mask(padding_mask, len(logits))
    padding = (
        torch.zeros(len(logits), dtype=torch.bool, device=logits.device) if padding_mask is None else padding_mask != 0
    )
    x = variant.wide(logits.masked_fill(padding[:, None], 0))
    scores = variant.score(x, score_function)
    keys = scores.detach() if variant.by_score else x.detach()
    if score_function != "softmax":
        scores = scores / (variant.total(scores) + TINY)
    chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(1, variant.best(keys, topk), True)
    out = torch.float64 if logits.dtype == torch.float64 else torch.float32
    return config.AuxScores(scores.to(out).masked_fill(padding[:, None], 0), chosen & ~padding[:, None])


def z_loss(variant: How, logits, *, coeff, padding_mask=None):
    config.check_logits(logits)
    config.check_coeff(coeff)
    config.check_padding_mask(padding_mask, len(logits))
    x = variant.wide(logits if padding_mask is None else logits[padding_mask == 0])
    top = x.amax(1, keepdim=True).detach()
    lse = (variant.total(variant.exp(x - top)).log() + top)[:, 0]
    loss = coeff * variant.total((lse * lse)[None])[0, 0] / max(len(x), 1)
    return loss.to(torch.float64 if logits.dtype == torch.float64 else torch.float32)


def sinkhorn_routing(variant: How, logits, *, topk, training=True):
    config.check_logits(logits)
    config.check_topk(topk, logits.shape[1])
    x = variant.wide(logits)
    activation = variant.sigmoid(x) if topk == 1 else variant.softmax(x)
    keys = activation.detach()
    if training and len(logits):
        cost, change = variant.exp(x.detach()), math.inf
        d1 = torch.ones_like(cost[0])
        while change > 1e-4:
            previous = d1
            d0 = 1 / len(x) / (variant.total(cost * d1) + 1e-8)
            d1 = 1 / x.shape[1] / (variant.total((cost * d0).T)[:, 0] + 1e-8)
            change = float((previous - d1).abs().mean())
        keys = d1 * cost * d0
    chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(1, variant.best(keys, topk), True)
    return config.Routed(torch.where(chosen, activation, 0).to(logits.dtype), chosen)


def load_balancing_loss(variant: How, scores, tokens_per_expert, *, total_num_tokens, topk, num_experts, coeff):
    config.check_load_balancing_loss(scores, tokens_per_expert, total_num_tokens, topk, num_experts, coeff)
    at_least = torch.promote_types(scores.dtype, torch.float32)
    x, count = variant.wide(scores), variant.wide(tokens_per_expert.detach().to(at_least))
    total = float(total_num_tokens)
    factor = coeff * num_experts / (topk * total * total) if total else 0.0
    loss = variant.total((variant.total(x.T)[:, 0] * count)[None])[0, 0] * factor
    return loss.to(torch.float64 if scores.dtype == torch.float64 else torch.float32)


def drop_tokens(variant: How, probs, routing_map, *, capacity, drop_policy="probs", pad_to_capacity=False):
    config.check_drop_tokens(probs, routing_map, capacity, drop_policy)
    routed = routing_map != 0
    tokens = len(probs)
    by_place = -torch.arange(tokens, device=probs.device).double()[:, None].expand(probs.shape)
    key = torch.where(routed, probs.detach().double() if drop_policy == "probs" else by_place, -torch.inf)
    room = min(capacity, tokens)
    index = variant.best(key.T.contiguous(), room)
    chosen = torch.zeros_like(routed.T).scatter(1, index, True).T
    if not pad_to_capacity:
        chosen = chosen & routed
    return config.Routed(probs.masked_fill(~(chosen & routed), 0), chosen)


def update_expert_bias(expert_bias, tokens_per_expert, *, update_rate):
    config.check_update_expert_bias(expert_bias, tokens_per_expert, update_rate)
    count = tokens_per_expert.double() if tokens_per_expert.is_floating_point() else tokens_per_expert.long()
    return expert_bias + torch.sign(count.sum() - len(count) * count).to(expert_bias.dtype) * update_rate


def gate(x, weight, *, bias=None, router_dtype=None):
    config.check_gate(x, weight, bias, router_dtype)
    return Gate.apply(x, weight, bias, {"fp32": torch.float32, "fp64": torch.float64}.get(router_dtype, x.dtype))


def jitter(x, *, eps):
    config.check_jitter(eps)
    if x.is_contiguous():
        return x * torch.empty_like(x).uniform_(1 - eps, 1 + eps)
    return x * (1 + eps * (2 * torch.rand_like(x) - 1))


def attach_loss(x, loss, *, scale=1.0):
    config.check_loss_scale(scale)
    return Riding.apply(x, loss, scale)


def make(variant: How) -> SimpleNamespace:
    """The namespace of a variant."""
    bound = (topk_indices, topk_routing, aux_loss_scores, z_loss, sinkhorn_routing, load_balancing_loss, drop_tokens)
    functions = {function.__name__: MethodType(function, variant) for function in bound}
    unbound = (update_expert_bias, gate, jitter, attach_loss)
    return SimpleNamespace(**functions | {function.__name__: function for function in unbound})


class Gate(torch.autograd.Function):
    """GEMMs in at least float32; dbias summed from the last row up."""

    @staticmethod
    def forward(ctx, x, weight, bias, dtype):
        ctx.save_for_backward(x, weight, bias)
        at_least = torch.promote_types(dtype, torch.float32)
        out = x.to(dtype).to(at_least) @ weight.to(dtype).to(at_least).T
        return (out if bias is None else out + bias.to(dtype)).to(dtype)

    @staticmethod
    def backward(ctx, g):
        x, weight, bias = ctx.saved_tensors
        at_least = torch.promote_types(g.dtype, torch.float32)
        g_wide = g.to(at_least)
        d_x = (g_wide @ weight.to(g.dtype).to(at_least)).to(x.dtype)
        d_weight = (g_wide.T @ x.to(g.dtype).to(at_least)).to(weight.dtype)
        return d_x, d_weight, None if bias is None else g_wide.flip(0).sum(0).to(bias.dtype), None


class Riding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, loss, scale):
        ctx.scale, ctx.dtype = scale, loss.dtype
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g, torch.tensor(ctx.scale, dtype=ctx.dtype, device=g.device), None


BASE_TWO = {"exp": exp_base_two, "sigmoid": sigmoid_by_exp, "softplus": softplus_by_logaddexp}
Autograd = make(How())
BaseTwo = make(How(**BASE_TWO, total=descending, closed=True))
Wide = make(How(dtype=torch.float64))
OneByOne = make(How(total=one_by_one, best=last_of_equals, by_score=True))
