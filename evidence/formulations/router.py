"""The router in a second formulation: token by token and expert by expert, after the docstrings."""

from collections.abc import Sequence
from fractions import Fraction
from math import ceil, fsum, isnan
from operator import mul
from typing import Any

import torch
from torch import Tensor

from moe_ref.config import Routed, RouterConfig, RouterRanks, RouterState, TopK
from moe_ref.config.router import AuxScores, RouteOutput, RouterLosses
from moe_ref.config.state import new_state
from moe_ref.config.state import state_from as state_from
from moe_ref.config.state import state_tensors as state_tensors


def gate(x_TH: Tensor, weight_EH: Tensor, *, bias: Tensor | None = None, router_dtype: str | None = None) -> Tensor:
    """logits[t, e] = Σ_h x[t, h] · W[e, h] + b[e], with all products at once."""
    products = (x_TH[:, None] * weight_EH[None]).sum(2)
    return products if bias is None else products + bias[None]


def jitter(x_TH: Tensor, *, eps: float) -> Tensor:
    """Each element times its own number from [1 - eps, 1 + eps]."""
    uniform = torch.rand(x_TH.shape, dtype=x_TH.dtype).flatten().tolist()
    factors = [1 - eps + 2 * eps * u for u in uniform]
    return x_TH * torch.tensor(factors, dtype=x_TH.dtype).reshape(x_TH.shape)


def scores_of(x_E: Tensor, function: str) -> Tensor:
    """A token's scores by logarithms: softmax 1 / Σ_j exp(x_j - x_e), σ or √ln(1 + exp x)."""
    if function == "softmax":
        above = (x_E > -torch.inf).nonzero().flatten() if bool((x_E > -torch.inf).any()) else torch.arange(len(x_E))
        inverse = torch.logsumexp(x_E[None, above] - x_E[above, None], 1)
        return torch.zeros_like(x_E).index_copy(0, above, (-inverse).exp())
    zero = torch.zeros_like(x_E)
    if function == "sigmoid":
        return (-torch.logaddexp(zero, -x_E)).exp()
    underflows = x_E < -600  # exp(x) would; the root of it does not
    root_E = torch.logaddexp(zero, torch.where(underflows, zero, x_E)).sqrt()
    return torch.where(underflows, (torch.where(underflows, x_E, zero) / 2).exp(), root_E)


def ranked(keys: Sequence[float]) -> list[int]:
    """The positions of the keys, the largest key first.

    Of equal keys the lower position comes first, and NaN comes before all.
    """
    return sorted(range(len(keys)), key=lambda e: (0, 0.0, e) if isnan(keys[e]) else (1, -keys[e], e))


def chosen(keys: list[float], topk: int, num_groups: int | None, group_topk: int | None) -> list[int]:
    """The K best experts; with groups, among the experts of the groups with the best sums."""
    if num_groups is None or group_topk is None:
        return ranked(keys)[:topk]
    size = len(keys) // num_groups
    groups = [range(g * size, (g + 1) * size) for g in range(num_groups)]
    sums = [sum(sorted((keys[e] for e in group), reverse=True)[: topk // group_topk]) for group in groups]
    kept_experts = sorted(e for g in ranked(sums)[:group_topk] for e in groups[g])
    return [kept_experts[index] for index in ranked([keys[e] for e in kept_experts])][:topk]


def topk_indices(
    logits_TE: Tensor, *, topk: int, score_function: str = "softmax", pre_softmax: bool = False,
    num_groups: int | None = None, group_topk: int | None = None, scaling_factor: float | None = None,
    expert_bias: Tensor | None = None, precomputed_indices: Tensor | None = None,
) -> TopK:  # fmt: skip
    """For each token: keys, choice, weights."""
    weights, indices = [], []
    late = score_function == "softmax" and not pre_softmax
    for t, x_E in enumerate(logits_TE):
        score_E = x_E if late else scores_of(x_E, score_function)
        if precomputed_indices is None:
            bias = [0.0] * len(x_E) if expert_bias is None else expert_bias.tolist()
            keys = [s + b for s, b in zip(score_E.tolist(), bias, strict=True)]
            places = chosen(keys, topk, num_groups, group_topk)
        else:
            places = precomputed_indices[t].tolist()
        weight_K = scores_of(x_E[places], "softmax") if late else score_E[places]
        if score_function != "softmax" and len(places) > 1:
            weight_K = weight_K / (sum(weight_K) + 1e-20)
        weights.append(weight_K if scaling_factor is None else weight_K * scaling_factor)
        indices.append(places)
    index_TK = torch.tensor(indices, dtype=torch.int64).reshape(-1, topk)
    return TopK(torch.stack(weights) if weights else logits_TE.new_zeros((0, topk)), index_TK)


def topk_routing(logits_TE: Tensor, **settings: Any) -> Routed:
    """`topk_indices`, as the sum of a one-hot matrix per slot."""
    weight_TK, index_TK = topk_indices(logits_TE, **settings)
    hot_TKE = index_TK[:, :, None] == torch.arange(logits_TE.shape[1])
    return Routed(torch.where(hot_TKE, weight_TK[:, :, None], 0.0).sum(1), hot_TKE.any(1))


def sinkhorn_routing(logits_TE: Tensor, *, topk: int, training: bool = True) -> Routed:
    """The plan number by number, each sum rounded once."""
    tokens, experts = logits_TE.shape
    rows = [scores_of(x_E, "sigmoid" if topk == 1 else "softmax") for x_E in logits_TE]
    activation = torch.stack(rows) if rows else logits_TE
    keys = activation.detach()
    if training and tokens:
        cost = logits_TE.detach().exp().tolist()
        row_factors, column_factors, change = [1.0] * tokens, [1.0] * experts, 1.0
        while change > 1e-4:
            earlier, columns = column_factors, zip(*cost, strict=True)
            row_factors = [1 / (fsum(map(mul, row, column_factors)) + 1e-8) / tokens for row in cost]
            column_factors = [1 / (fsum(map(mul, column, row_factors)) + 1e-8) / experts for column in columns]
            change = fsum(abs(a - b) for a, b in zip(column_factors, earlier, strict=True)) / experts
        rows_of_plan = zip(row_factors, cost, strict=True)
        plan = [[a * c * b for c, b in zip(row, column_factors, strict=True)] for a, row in rows_of_plan]
        keys = torch.tensor(plan, dtype=torch.float64)
    routing_map = torch.zeros(tokens, experts, dtype=torch.bool)
    for t in range(tokens):
        for e in ranked(keys[t].tolist())[:topk]:
            routing_map[t, e] = True
    return Routed(activation * routing_map, routing_map)


def drop_tokens(
    probs_TE: Tensor, routing_map_TE: Tensor, *, capacity: int, drop_policy: str = "probs",
    pad_to_capacity: bool = False,
) -> Routed:  # fmt: skip
    """A queue for each expert: its own tokens first, then the others if they may fill it."""
    tokens, experts = probs_TE.shape
    kept_map = torch.zeros(tokens, experts, dtype=torch.bool)
    routed = routing_map_TE != 0
    for e in range(experts):
        queue = [t for t in range(tokens) if routed[t, e]]
        if drop_policy == "probs":
            queue.sort(key=lambda t: -float(probs_TE.detach()[t, e]))
        if pad_to_capacity:
            queue += [t for t in range(tokens) if not routed[t, e]]
        for t in queue[:capacity]:
            kept_map[t, e] = True
    return Routed(torch.where(kept_map & routed, probs_TE, 0.0), kept_map)


def aux_loss_scores(
    logits_TE: Tensor, *, topk: int, score_function: str = "softmax", padding_mask: Tensor | None = None
) -> AuxScores:
    """For each token that is no padding, the scores of all experts and the K best."""
    rows, routing_map = [], torch.zeros(logits_TE.shape, dtype=torch.bool)
    for t, x_E in enumerate(logits_TE):
        if padding_mask is not None and padding_mask[t]:
            rows.append(torch.zeros_like(x_E))
            continue
        score_E = scores_of(x_E, score_function)
        rows.append(score_E if score_function == "softmax" else score_E / (sum(score_E) + 1e-20))
        routing_map[t, ranked(rows[-1].tolist())[:topk]] = True
    return AuxScores(torch.stack(rows) if rows else logits_TE, routing_map)


def load_balancing_loss(
    scores: Tensor, tokens_per_expert: Tensor, *, total_num_tokens: Any, topk: int, num_experts: int, coeff: float
) -> Tensor:
    """coeff · E / (K · N²) · Σ_t Σ_j scores[t, j] · tokens_per_expert[j]"""
    tokens = float(total_num_tokens)
    total = torch.einsum("tj,j->", scores, tokens_per_expert.to(scores.dtype))
    return total * (coeff * num_experts / (topk * tokens**2) if tokens > 0 else 0.0)


def z_loss(logits_TE: Tensor, *, coeff: float, padding_mask: Tensor | None = None) -> Tensor:
    """The mean over tokens of (ln Σ exp)², one at a time."""
    squares = []
    for t, x_E in enumerate(logits_TE):
        if padding_mask is None or not padding_mask[t]:
            top = x_E.detach().max()
            total = top + (x_E - top).exp().sum().log() if bool(top.isfinite()) else torch.logsumexp(x_E, 0)
            squares.append(total**2)
    return coeff * sum(squares, logits_TE.new_zeros(())) / max(len(squares), 1)


class _Ride(torch.autograd.Function):
    """The function x, on which a loss gets `scale` as its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, scale: float) -> Tensor:
        ctx.scale, ctx.dtype = scale, loss.dtype
        return x.clone()

    @staticmethod
    def backward(ctx: Any, d_x: Tensor) -> tuple[Tensor, Tensor, None]:
        return d_x, torch.tensor(ctx.scale, dtype=ctx.dtype), None


def attach_loss(x: Tensor, loss: Tensor, *, scale: float = 1.0) -> Tensor:
    """x, with the loss attached."""
    return _Ride.apply(x, loss, scale)


def update_expert_bias(expert_bias: Tensor, tokens_per_expert: Tensor, *, update_rate: float) -> Tensor:
    """A step up for loads below the exact mean, a step down for loads above it."""
    counts = [Fraction(count) for count in tokens_per_expert.tolist()]
    mean = sum(counts, Fraction()) / len(counts)
    steps = [(mean > count) - (mean < count) for count in counts]
    return torch.stack([b + update_rate * step for b, step in zip(expert_bias, steps, strict=True)])


# ---- one step of routing


def route(
    logits_TE: Tensor, config: RouterConfig, *, state: RouterState, batch_size: int = 1,
    padding_mask: Tensor | None = None, training: bool = True, loss_scale: float = 1.0, replay: str = "none",
    replay_target: Tensor | None = None, ranks: RouterRanks | None = None,
) -> RouteOutput:  # fmt: skip
    """z-loss, choice, capacity, balancing losses and counts, of the functions above."""
    ranks, records = ranks or RouterRanks(), training and torch.is_grad_enabled()
    mask = torch.zeros(len(logits_TE), dtype=torch.bool) if padding_mask is None else padding_mask != 0
    losses: dict[str, Tensor] = {}
    carrier = logits_TE
    if records and config.z_loss_coeff:
        value = z_loss(logits_TE, coeff=config.z_loss_coeff, padding_mask=mask)
        losses["z_loss"] = value / (ranks.tp_cp.size * config.loss_divisor)
        tokens = int((~mask).sum()) * ranks.tp_cp.size if config.loss_per_token else 1
        carrier = attach_loss(carrier, losses["z_loss"] * tokens, scale=loss_scale)

    queue, target = list(state.replay_queue), replay_target
    if replay == "forward" and target is not None:
        queue.append(target)
    elif replay == "backward":
        target = queue.pop(0)
    if config.sinkhorn:
        routed, indices = sinkhorn_routing(carrier, topk=config.topk, training=records), None
        queue = list(state.replay_queue)
    else:
        bias = state.expert_bias if config.expert_bias else None
        options: dict[str, Any] = config.selection | {"expert_bias": bias, "precomputed_indices": target}
        routed, indices = topk_routing(carrier, **options), topk_indices(logits_TE.detach(), **options).indices
    if config.capacity_factor is not None:
        exact = Fraction(len(logits_TE) * config.topk, config.num_experts) * Fraction(str(config.capacity_factor))
        policy: dict[str, Any] = {"drop_policy": config.drop_policy, "pad_to_capacity": config.pad_to_capacity}
        routed = drop_tokens(*routed, capacity=ceil(exact), **policy)

    probs_TE, state = routed.probs, state._replace(replay_queue=tuple(queue))
    if records:
        terms, state = _balancing(logits_TE, config, state, batch_size, mask, padding_mask is not None, ranks)
        for name, (value, factor) in terms.items():
            losses[name] = value
            probs_TE = attach_loss(probs_TE, value * factor, scale=loss_scale)
        if config.expert_bias:
            rank_counts = routed.routing_map[~mask].sum(0)
            state = state._replace(tokens_per_expert=state.tokens_per_expert + rank_counts)
    logged = RouterLosses(**{name: value.detach() for name, value in losses.items()})
    return RouteOutput(probs_TE, routed.routing_map, logged, indices if replay == "record" else None, state)


def _balancing(
    logits_TE: Tensor, config: RouterConfig, state: RouterState, batch_size: int, mask: Tensor, masked: bool,
    ranks: RouterRanks,
) -> tuple[dict[str, tuple[Tensor, Any]], RouterState]:  # fmt: skip
    """Each balancing loss with the factor of its part in the training loss; the next state."""
    if not config.balancing_coeffs:
        return {}, state
    topk, experts = config.topk, config.num_experts
    scores, hot = aux_loss_scores(logits_TE, topk=topk, score_function=config.score_function, padding_mask=mask)
    factor = ranks.tp_cp.sum((~mask).sum()) if config.loss_per_token else 1
    factored_losses = {}
    for name, coeff in config.balancing_coeffs.items():
        group = ranks.tp_dp_cp if name == "global_aux_loss" else ranks.tp_cp
        num_sequences = batch_size if name == "seq_aux_loss" else 1
        now = [group.sum(hot[b::num_sequences].sum(0)) for b in range(num_sequences)]
        length = (
            sum(float(n.sum()) for n in now) / topk / num_sequences
            if masked
            else len(hot) // num_sequences * group.size
        )
        counts = [n.double() for n in now]
        if name == "global_aux_loss":
            total, steps = state.global_tokens_per_expert + now[0], state.global_steps + 1
            state = state._replace(global_tokens_per_expert=total, global_steps=steps)
            counts = [total.double() / float(steps)]
        sizes: dict[str, Any] = {"total_num_tokens": length, "topk": topk, "num_experts": experts, "coeff": coeff}
        sequence_losses = [load_balancing_loss(scores[b::num_sequences], n, **sizes) for b, n in enumerate(counts)]
        factored_losses[name] = (
            sum(sequence_losses[1:], sequence_losses[0]) / (num_sequences * config.loss_divisor),
            factor,
        )
    return factored_losses, state


def finish_batch(
    state: RouterState, config: RouterConfig, *, frozen: bool = False, ranks: RouterRanks | None = None
) -> RouterState:
    """The bias takes its step, and all counters are set to 0."""
    bias = state.expert_bias
    if config.expert_bias and not frozen:
        counts = (ranks or RouterRanks()).tp_dp_cp.sum(state.tokens_per_expert)
        bias = update_expert_bias(bias, counts, update_rate=config.bias_update_rate)
    return new_state(config)._replace(expert_bias=bias, replay_queue=state.replay_queue)
