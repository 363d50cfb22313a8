"""The router from logits to probs, map and losses: the fused functions, in the order of
`moe_ref.router.route`.
"""

from typing import Any

import torch
from torch import Tensor

from moe_fast.launch.legal import unless_known
from moe_fast.launch.operators import traceable
from moe_fast.router.balancing import AttachLoss, ScoresOfAll, ZLoss, balancing_loss, update_expert_bias
from moe_fast.router.capacity import dropped
from moe_fast.router.selection import check_rows, sinkhorn_routing, topk_indices, topk_routing
from moe_ref.config import (
    RankGroup,
    Routed,
    RouteOutput,
    RouterConfig,
    RouterLosses,
    RouterRanks,
    RouterState,
    check_coeff,
    check_logits,
    check_loss_scale,
    check_padding_mask,
    check_route,
    require,
)
from moe_ref.config.router import DROP_POLICIES, expert_capacity


@traceable
def route(
    logits_TE: Tensor, config: RouterConfig,
    *, state: RouterState, batch_size: int = 1, padding_mask: Tensor | None = None,
    training: bool = True, loss_scale: float = 1.0, replay: str = "none",
    replay_target: Tensor | None = None, ranks: RouterRanks | None = None,
) -> RouteOutput:  # fmt: skip
    """One forward of the router after its matrix product. The host never waits, except for the
    rounds of Sinkhorn.
    """
    _check(logits_TE, padding_mask, loss_scale, config, batch_size, replay, replay_target, len(state.replay_queue))
    ranks = ranks or RouterRanks()
    learns = training and torch.is_grad_enabled()
    valid: int | Tensor = logits_TE.shape[0] if padding_mask is None else (padding_mask == 0).sum()
    losses = {}
    scored = logits_TE
    if learns and config.z_loss_coeff:
        coeff = config.z_loss_coeff / ranks.tp_cp.size
        losses["z_loss"] = ZLoss.apply(logits_TE, padding_mask, coeff) / config.loss_divisor
        tokens = valid * ranks.tp_cp.size if config.loss_per_token else 1
        scored = AttachLoss.apply(logits_TE, losses["z_loss"] * tokens, loss_scale)
    chosen, indices, state = _choose(scored, config, state, replay, replay_target, learns)
    if config.capacity_factor is not None:
        sizes: dict[str, Any] = {"num_experts": logits_TE.shape[1], "topk": config.topk}
        capacity = expert_capacity(logits_TE.shape[0], capacity_factor=config.capacity_factor, **sizes)
        chosen = dropped(*chosen, capacity, config.drop_policy, config.pad_to_capacity)
    probs = chosen.probs
    if learns:
        balancing, state = _balancing_losses(logits_TE, config, state, batch_size, padding_mask, ranks)
        share: int | Tensor = 1
        if config.loss_per_token:
            share = valid * ranks.tp_cp.size if isinstance(valid, int) else ranks.tp_cp.sum(valid)
        for loss in balancing.values():
            probs = AttachLoss.apply(probs, loss * share, loss_scale)
        losses |= balancing
        if config.expert_bias:
            counted = chosen.routing_map if padding_mask is None else chosen.routing_map & (padding_mask == 0)[:, None]
            state = state._replace(tokens_per_expert=state.tokens_per_expert + counted.sum(0))
    reported = RouterLosses(**{name: loss.detach() for name, loss in losses.items()})
    return RouteOutput(probs, chosen.routing_map, reported, indices, state)


@unless_known
def _check(
    logits_TE: Tensor, padding_mask: Tensor | None, loss_scale: float, config: RouterConfig, *settings: Any
) -> None:
    """Raise `ValueError` for an illegal call, as far as no stage does; `check_route` takes the
    logits, the configuration and `settings`.
    """
    check_logits(logits_TE)
    check_route(logits_TE, config, *settings)
    check_padding_mask(padding_mask, logits_TE.shape[0])
    check_loss_scale(loss_scale)
    policies = f"one of {', '.join(DROP_POLICIES)}"
    require(config.drop_policy in DROP_POLICIES, "drop_policy", repr(config.drop_policy), policies)
    if config.z_loss_coeff:
        check_rows(logits_TE)
    for coeff in (config.z_loss_coeff or 0.0, *config.balancing_coeffs.values()):
        check_coeff(coeff)


def _choose(
    logits_TE: Tensor,
    config: RouterConfig,
    state: RouterState,
    replay: str,
    replay_target: Tensor | None,
    learns: bool,
) -> tuple[Routed, Tensor | None, RouterState]:
    """(choice, its indices if they are to be recorded, the state with the queue of replays)."""
    if config.sinkhorn:
        return sinkhorn_routing(logits_TE, topk=config.topk, training=learns), None, state
    bias = state.expert_bias if config.expert_bias else None
    settings = {"expert_bias": bias, **config.selection}
    if replay == "record":
        indices = topk_indices(logits_TE, **settings).indices
        return topk_routing(logits_TE, precomputed_indices=indices, **settings), indices, state
    if replay == "forward":
        assert replay_target is not None
        state = state._replace(replay_queue=(*state.replay_queue, replay_target))
    if replay == "backward":
        replay_target, *remaining_queue = state.replay_queue
        state = state._replace(replay_queue=tuple(remaining_queue))
    return topk_routing(logits_TE, precomputed_indices=replay_target, **settings), None, state


def _balancing_losses(
    logits_TE: Tensor,
    config: RouterConfig,
    state: RouterState,
    batch_size: int,
    padding_mask: Tensor | None,
    ranks: RouterRanks,
) -> tuple[dict[str, Tensor], RouterState]:
    """(each configured loss, the state with the counts of the global loss)."""
    coeffs, topk, experts = config.balancing_coeffs, config.topk, config.num_experts
    if not coeffs:
        return {}, state
    scores, chosen = ScoresOfAll.apply(logits_TE, padding_mask, topk, config.score_function)

    def loss(name: str, counts: Tensor, tokens: int | Tensor, sequences: int = 1) -> Tensor:
        x = scores.view(-1, sequences * experts)
        return balancing_loss(x, counts, tokens, coeffs[name] * experts / topk) / sequences / config.loss_divisor

    def tokens_of(counts: Tensor, group: RankGroup, sequences: int = 1) -> int | Tensor:
        if padding_mask is None:
            return logits_TE.shape[0] // sequences * group.size
        return counts.sum(dtype=torch.float64) / topk / sequences  # the valid ones: each is counted topk times

    losses = {}
    if "aux_loss" in coeffs:
        counts = ranks.tp_cp.sum(chosen.sum(0))
        losses["aux_loss"] = loss("aux_loss", counts, tokens_of(counts, ranks.tp_cp))
    if "seq_aux_loss" in coeffs:
        counts = ranks.tp_cp.sum(chosen.view(-1, batch_size * experts).sum(0))
        losses["seq_aux_loss"] = loss("seq_aux_loss", counts, tokens_of(counts, ranks.tp_cp, batch_size), batch_size)
    if "global_aux_loss" in coeffs:
        now = ranks.tp_dp_cp.sum(chosen.sum(0))
        total, steps = state.global_tokens_per_expert + now, state.global_steps + 1
        state = state._replace(global_tokens_per_expert=total, global_steps=steps)
        losses["global_aux_loss"] = loss("global_aux_loss", total.double() / steps, tokens_of(now, ranks.tp_dp_cp))
    return losses, state


@traceable
def finish_batch(
    state: RouterState, config: RouterConfig, *, frozen: bool = False, ranks: RouterRanks | None = None
) -> RouterState:
    """Move the expert bias by the counts of the global batch, unless it is frozen, and restart the
    counters.
    """
    if config.expert_bias and not frozen:
        counts = (ranks or RouterRanks()).tp_dp_cp.sum(state.tokens_per_expert)
        bias = update_expert_bias(state.expert_bias, counts, update_rate=config.bias_update_rate)
        state = state._replace(expert_bias=bias)
    zero = torch.zeros_like  # separate tensors: a graph that was compiled for two tensors does not serve one
    return state._replace(
        tokens_per_expert=zero(state.tokens_per_expert),
        global_tokens_per_expert=zero(state.global_tokens_per_expert),
        global_steps=zero(state.global_steps),
    )
