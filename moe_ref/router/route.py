"""The router from logits to probs, map and losses, with its state.

    logits ── + z-loss ── choice (top-k | Sinkhorn) ── capacity ── + balancing losses ── counts

Mirrors `TopKRouter.routing` of megatron.core.transformer.moe.router and `RouterReplay` of
router_replay. Differs: docs/differences.md#router.
"""

from typing import Any

import torch
from torch import Tensor

from moe_ref.config import (
    Routed,
    RouteOutput,
    RouterConfig,
    RouterLosses,
    RouterRanks,
    RouterState,
    check_logits,
    check_padding_mask,
    check_route,
)
from moe_ref.config.router import expert_capacity
from moe_ref.router.balancing import attach_loss
from moe_ref.router.capacity import drop_tokens
from moe_ref.router.losses import LossTerm, balancing_terms, z_term
from moe_ref.router.selection import spread, topk_indices
from moe_ref.router.sinkhorn import sinkhorn_routing


def route(
    logits_TE: Tensor, config: RouterConfig,
    *, state: RouterState, batch_size: int = 1, padding_mask: Tensor | None = None,
    training: bool = True, loss_scale: float = 1.0, replay: str = "none",
    replay_target: Tensor | None = None, ranks: RouterRanks | None = None,
) -> RouteOutput:  # fmt: skip
    """One forward of the router after its matrix product; see the steps in its code.

    Losses (`moe_ref.router.losses`) and counts need `training` and a recording autograd: an
    evaluation, and the first pass of a recomputed layer, leave no trace.

    Args:
        logits_TE: floating point.
        state: from `new_state` or the step before. Only the returned state is valid afterwards.
        batch_size: B, sequences; a divisor of T.
        padding_mask: [T], True for padding. Padding is routed like other tokens, but counts in no
            loss and no count.
        loss_scale: factor of the training loss; the gradient of each loss.
        replay: "none" · "record": return the chosen indices · "forward": use `replay_target` and
            queue it · "backward": use the oldest queued indices and drop them from the queue.
        replay_target: [T,K] indices for "forward".
        ranks: groups of ranks over which losses count; None for this rank alone.

    Raises:
        ValueError: see `moe_ref.config.check_route`; also from the functions above.
    """
    check_logits(logits_TE)
    check_route(logits_TE, config, batch_size, replay, replay_target, len(state.replay_queue))
    check_padding_mask(padding_mask, len(logits_TE))
    ranks = ranks or RouterRanks()
    records = training and torch.is_grad_enabled()
    terms: dict[str, LossTerm] = {}

    attached_TE = logits_TE
    if records and config.z_loss_coeff:
        terms["z_loss"] = z_term(logits_TE, config, padding_mask, ranks.tp_cp)
        attached_TE = attach_loss(logits_TE, terms["z_loss"].attached, scale=loss_scale)

    chosen, indices, state = choose(attached_TE, config, state, replay, replay_target, records)
    probs_TE, map_TE = limit_tokens(chosen, config)

    if records:
        balancing, state = balancing_terms(logits_TE, config, state, batch_size, padding_mask, ranks)
        for term in balancing.values():
            probs_TE = attach_loss(probs_TE, term.attached, scale=loss_scale)
        terms |= balancing
        state = count_tokens(state, map_TE, padding_mask) if config.expert_bias else state

    losses = RouterLosses(**{name: term.value.detach() for name, term in terms.items()})
    return RouteOutput(probs_TE, map_TE, losses, indices if replay == "record" else None, state)


def choose(
    logits_TE: Tensor,
    config: RouterConfig,
    state: RouterState,
    replay: str,
    replay_target: Tensor | None,
    training: bool,
) -> tuple[Routed, Tensor | None, RouterState]:
    """The choice, its indices if it has some, and the state with the queue of replays."""
    if config.sinkhorn:
        return sinkhorn_routing(logits_TE, topk=config.topk, training=training), None, state
    queue, target = state.replay_queue, replay_target
    if replay == "forward":
        queue = (*queue, *(() if target is None else (target,)))
    if replay == "backward":
        target, *pending = queue
        queue = tuple(pending)
    bias = state.expert_bias if config.expert_bias else None
    chosen = topk_indices(logits_TE, expert_bias=bias, precomputed_indices=target, **config.selection)
    return spread(chosen, config.num_experts), chosen.indices, state._replace(replay_queue=queue)


def limit_tokens(chosen: Routed, config: RouterConfig) -> Routed:
    """The choice after capacity, if the configuration has a capacity factor."""
    if config.capacity_factor is None:
        return chosen
    tokens, experts = chosen.routing_map.shape
    sizes = {"num_experts": experts, "topk": config.topk}
    capacity = expert_capacity(tokens, capacity_factor=config.capacity_factor, **sizes)
    options: dict[str, Any] = {"drop_policy": config.drop_policy, "pad_to_capacity": config.pad_to_capacity}
    return drop_tokens(*chosen, capacity=capacity, **options)


def count_tokens(state: RouterState, routing_map_TE: Tensor, padding_mask: Tensor | None) -> RouterState:
    """The state with this step's tokens per expert added, padding left out."""
    valid_TE = routing_map_TE if padding_mask is None else routing_map_TE & (padding_mask == 0)[:, None]
    return state._replace(tokens_per_expert=state.tokens_per_expert + valid_TE.sum(0))
