"""The router from logits to probs, map and losses: the fused pieces in the order of
`moe_ref.router.route`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from moe_fast.router.balancing import attach_loss, aux_loss_scores, load_balancing_loss, update_expert_bias, z_loss
from moe_fast.router.capacity import drop_tokens, expert_capacity
from moe_fast.router.selection import topk_indices, topk_routing
from moe_ref.config import (
    MoEConfig,
    Routed,
    RouteOutput,
    RouterLosses,
    RouterState,
    check_logits,
    check_padding_mask,
    check_route,
    check_state_tensors,
    require,
)

Sum = Callable[[Tensor], Tensor]
STATE = tuple(name for name in RouterState._fields if name != "replay_queue")
PLANNED = ("sinkhorn", "quantile_balancing")  # balancing types without a fused form


def alone(x: Tensor) -> Tensor:
    """The sum over a group of one rank."""
    return x


def new_state(config: MoEConfig, device: Any = None) -> RouterState:
    """Nothing learnt, nothing counted."""
    assert config.num_moe_experts is not None
    learnt = torch.zeros(config.num_moe_experts, device=device)
    counts = torch.zeros(config.num_moe_experts, dtype=torch.int64, device=device)
    step = torch.zeros((), dtype=torch.int64, device=device)
    return RouterState(learnt, counts, counts, step, learnt, learnt, step, ())


def state_tensors(state: RouterState) -> dict[str, Tensor]:
    """The state as named tensors, to be saved."""
    queued = {f"replay_queue.{i}": indices for i, indices in enumerate(state.replay_queue)}
    return {name: getattr(state, name) for name in STATE} | queued


def state_from(tensors: Mapping[str, Tensor]) -> RouterState:
    """The inverse of `state_tensors`."""
    check_state_tensors(tensors)
    queue = tuple(tensors[f"replay_queue.{i}"] for i in range(len(tensors) - len(STATE)))
    return RouterState(**{name: tensors[name] for name in STATE}, replay_queue=queue)


def route(
    logits_TE: Tensor,
    config: MoEConfig,
    *,
    state: RouterState,
    batch_size: int = 1,
    padding_mask: Tensor | None = None,
    training: bool = True,
    loss_scale: float = 1.0,
    replay: str = "none",
    replay_target: Tensor | None = None,
    sum_tp_cp: Sum = alone,
    sum_tp_dp_cp: Sum = alone,
) -> RouteOutput:
    """One forward of the router after its matrix product; the host never waits.

    Raises:
        ValueError: also for a balancing type of `PLANNED`, which has no kernel.
    """
    check_logits(logits_TE)
    check_route(logits_TE, config, batch_size, replay, replay_target, len(state.replay_queue))
    check_padding_mask(padding_mask, len(logits_TE))
    kind = config.moe_router_load_balancing_type
    require(
        kind not in PLANNED,
        "moe_router_load_balancing_type",
        repr(kind),
        f"none of {', '.join(PLANNED)}, which are not fused",
    )
    learns = training and torch.is_grad_enabled()
    ranks = int(sum_tp_cp(torch.ones(())))
    valid: int | Tensor = len(logits_TE) if padding_mask is None else (padding_mask == 0).sum()
    losses = {}
    scored = logits_TE
    if learns and config.moe_z_loss_coeff:
        losses["z_loss"] = (
            z_loss(logits_TE, coeff=config.moe_z_loss_coeff / ranks, padding_mask=padding_mask) / config.router_repeats
        )
        tokens = valid * ranks if config.calculate_per_token_loss else 1
        scored = attach_loss(logits_TE, losses["z_loss"] * tokens, scale=loss_scale)
    chosen, indices, state = _choose(scored, config, state, replay, replay_target)
    if config.moe_expert_capacity_factor is not None:
        sizes: dict[str, Any] = {"num_experts": logits_TE.shape[1], "topk": config.moe_router_topk}
        capacity = expert_capacity(len(logits_TE), capacity_factor=config.moe_expert_capacity_factor, **sizes)
        how: dict[str, Any] = {
            "drop_policy": config.moe_token_drop_policy,
            "pad_to_capacity": config.moe_pad_expert_input_to_capacity,
        }
        chosen = drop_tokens(*chosen, capacity=capacity, **how)
    probs = chosen.probs
    if learns:
        balancing, state = _balancing_losses(
            logits_TE, config, state, batch_size, padding_mask, sum_tp_cp, sum_tp_dp_cp
        )
        share: int | Tensor = 1
        if config.calculate_per_token_loss:
            share = valid * ranks if isinstance(valid, int) else sum_tp_cp(valid)
        for name, loss in balancing.items():
            losses[name] = loss
            probs = attach_loss(probs, loss * share, scale=loss_scale)
        if config.moe_router_enable_expert_bias:
            counted = chosen.routing_map if padding_mask is None else chosen.routing_map & (padding_mask == 0)[:, None]
            state = state._replace(tokens_per_expert=state.tokens_per_expert + counted.sum(0))
    told = RouterLosses(**{name: loss.detach() for name, loss in losses.items()})
    return RouteOutput(probs, chosen.routing_map, told, indices, state)


def _choose(
    logits_TE: Tensor, config: MoEConfig, state: RouterState, replay: str, replay_target: Tensor | None
) -> tuple[Routed, Tensor | None, RouterState]:
    """The choice, its indices if they are recorded, and the state with the queue of replays."""
    bias = state.expert_bias if config.moe_router_enable_expert_bias else None
    settings = {"expert_bias": bias, **config.router_settings}
    if replay == "record":
        indices = topk_indices(logits_TE, **settings).indices
        return topk_routing(logits_TE, precomputed_indices=indices, **settings), indices, state
    if replay == "forward":
        assert replay_target is not None
        state = state._replace(replay_queue=(*state.replay_queue, replay_target))
    if replay == "backward":
        replay_target, *rest = state.replay_queue
        state = state._replace(replay_queue=tuple(rest))
    return topk_routing(logits_TE, precomputed_indices=replay_target, **settings), None, state


def _balancing_losses(
    logits_TE: Tensor,
    config: MoEConfig,
    state: RouterState,
    batch_size: int,
    padding_mask: Tensor | None,
    sum_tp_cp: Sum,
    sum_tp_dp_cp: Sum,
) -> tuple[dict[str, Tensor], RouterState]:
    """Each configured loss, and the state with the counts of the global one."""
    coefficients, topk, experts = config.load_balancing, config.moe_router_topk, logits_TE.shape[1]
    if not coefficients:
        return {}, state
    scores, chosen = aux_loss_scores(
        logits_TE, topk=topk, score_function=config.moe_router_score_function, padding_mask=padding_mask
    )

    def loss(name: str, x: Tensor, counts: Tensor, tokens: int | Tensor) -> Tensor:
        return (
            load_balancing_loss(
                x, counts, total_num_tokens=tokens, topk=topk, num_experts=experts, coeff=coefficients[name]
            )
            / config.router_repeats
        )

    found = {}
    if "aux_loss" in coefficients:
        counts = sum_tp_cp(chosen.sum(0))
        found["aux_loss"] = loss(
            "aux_loss", scores, counts, _tokens(counts, topk, padding_mask, len(logits_TE), sum_tp_cp)
        )
    if "seq_aux_loss" in coefficients:
        counts = sum_tp_cp(chosen.view(-1, batch_size * experts).sum(0))
        tokens = _tokens(counts, topk, padding_mask, len(logits_TE), sum_tp_cp)
        of_one = tokens // batch_size if isinstance(tokens, int) else tokens / batch_size
        whole = loss("seq_aux_loss", scores.view(-1, batch_size * experts), counts, of_one)
        found["seq_aux_loss"] = whole / batch_size
    if "global_aux_loss" in coefficients:
        now = sum_tp_dp_cp(chosen.sum(0))
        state = state._replace(
            global_tokens_per_expert=state.global_tokens_per_expert + now, global_steps=state.global_steps + 1
        )
        mean = state.global_tokens_per_expert.double() / state.global_steps
        found["global_aux_loss"] = loss(
            "global_aux_loss", scores, mean, _tokens(now, topk, padding_mask, len(logits_TE), sum_tp_dp_cp)
        )
    return found, state


def _tokens(counts: Tensor, topk: int, padding_mask: Tensor | None, num_tokens: int, total: Sum) -> int | Tensor:
    """The tokens of a loss: all, or with a mask the valid ones, from the counts."""
    return num_tokens * int(total(torch.ones(()))) if padding_mask is None else counts.sum() / topk


def finish_batch(
    state: RouterState, config: MoEConfig, *, frozen: bool = False, sum_tp_dp_cp: Sum = alone
) -> RouterState:
    """Move the expert bias by the global batch's counts, unless frozen, and restart the counters."""
    if config.moe_router_enable_expert_bias and not frozen:
        bias = update_expert_bias(
            state.expert_bias, sum_tp_dp_cp(state.tokens_per_expert), update_rate=config.moe_router_bias_update_rate
        )
        state = state._replace(expert_bias=bias)
    counts, steps = torch.zeros_like(state.tokens_per_expert), torch.zeros_like(state.global_steps)
    return state._replace(tokens_per_expert=counts, global_tokens_per_expert=counts, global_steps=steps)
