"""The installed megatron-core's TopKRouter, from logits to probs, map and losses.

Each call builds a router, fills its buffers from the state, calls `routing`, and reads the buffers
back. Only names, orders and result shapes are translated, with these workarounds for calls:

    current_device   the constructor always reads the current CUDA device: patched to the logits'
    torch.compile    the count for the expert bias is compiled: disabled during routing
    layer_number     without one the router records no losses: it is layer 1 of 1
    finish_batch     finalize_model_grads needs a wrapped model: its two router functions are called
    counters         float32 in the package: returned as integers if whole
    no buffer        absent without an expert bias or a global loss: the state holds zeros

Of the package's global state, each call clears the tracker of losses, sets the loss scale and
restores the list of replay objects. The tracker holds loss / coefficient.
"""

import functools
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple
from unittest import mock

import torch
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from conformance.peers.megatron_features import (
    BIAS,
    CONFIGURATION,
    GLOBAL_LOSS,
    GROUPS,
    METRICS,
    MODEL,
    NAMES,
    RESET,
    TRACKER,
    find,
    has,
    offered,
)
from conformance.peers.megatron_router import one_rank, refused
from moe_ref.config import RouteOutput, RouterConfig, RouterLosses

DECLARED: dict[str, Any] = {"accumulator": "storage", "unchecked": ("batch_size", "padding_mask")}
SCOPE = "divisor=1" + " and score!=sqrtsoftplus" * bool(refused("sqrtsoftplus"))

BUFFERS = {  # of the router, by their names in the state
    "expert_bias": "expert_bias",
    "tokens_per_expert": "local_tokens_per_expert",
    "global_tokens_per_expert": "global_tokens_per_expert",
    "global_steps": "ga_steps",
}
TRACKED = {  # names of the losses in the package's tracker
    "z_loss": "z_loss",
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}
ACTIONS = {"record": "RECORD", "forward": "REPLAY_FORWARD", "backward": "REPLAY_BACKWARD"}


class State(NamedTuple):
    """A router's state between two calls."""

    buffers: dict[str, Tensor]  # float32, by the names of BUFFERS
    queue: tuple[Tensor, ...]  # RouterReplay.replay_backward_list


def supports(config: RouterConfig | None = None, **_: Any) -> str | None:
    """Settings that the release lacks."""
    if config is None:
        return None
    if reason := refused(config.score_function):
        return reason
    if config.balancing_coeffs.get("global_aux_loss") and not has(GLOBAL_LOSS):
        return "there is no global loss"
    return "there are no repeated MTP layers" if config.loss_divisor > 1 else None


def new_state(config: RouterConfig, device: Any = None) -> State:
    """The initial buffers of a router."""
    device = torch.device(device or "cpu")
    return _state(_router(_settings(config), device), device)


def state_tensors(state: State) -> dict[str, Tensor]:
    """The buffers and the queued indices, by name."""
    queued = {f"replay_queue.{i}": indices for i, indices in enumerate(state.queue)}
    return {name: x if name == "expert_bias" else _integers_if_whole(x) for name, x in state.buffers.items()} | queued


def state_from(tensors: Mapping[str, Tensor]) -> State:
    """The inverse of `state_tensors`."""
    queue = tuple(tensors[f"replay_queue.{i}"] for i in range(len(tensors) - len(BUFFERS)))
    return State({name: tensors[name].float() for name in BUFFERS}, queue)


@offered
def route(
    logits: Tensor,
    config: RouterConfig,
    *,
    state: State,
    batch_size: int = 1,
    padding_mask: Tensor | None = None,
    training: bool = True,
    loss_scale: float = 1.0,
    replay: str = "none",
    replay_target: Tensor | None = None,
) -> RouteOutput:
    """TopKRouter.routing: logits [S,B,E], mask [S,B], losses in the tracker."""
    router = _router(_settings(config, replay != "none" or bool(state.queue)), logits.device, state).train(training)
    if replay in ACTIONS:
        action = find("transformer.moe.router_replay.RouterReplayAction")[ACTIONS[replay]]
        router.router_replay.set_router_replay_action(action)
    if replay_target is not None:
        router.router_replay.set_target_indices(replay_target)
    moe_utils.MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(loss_scale, device=logits.device))
    masked = {} if padding_mask is None else {"padding_mask": padding_mask.reshape(-1, batch_size)}
    tracker = _tracker()
    tracker.clear()
    with torch.compiler.set_stance("force_eager"):
        probs, routing_map = router.routing(logits.reshape(-1, batch_size, logits.shape[-1]), **masked)
    coefficients = {"z_loss": config.z_loss_coeff, **config.balancing_coeffs}
    losses = {
        name: _first_layer(tracker[tracker_name]) * coefficients[name]
        for name, tracker_name in TRACKED.items()
        if tracker_name in tracker
    }
    tracker.clear()
    recorded = router.router_replay.get_recorded_indices() if replay == "record" else None
    state = _state(router, logits.device)
    return RouteOutput(probs, routing_map, RouterLosses(**losses), recorded, state)  # type: ignore[arg-type]


def finish_batch(state: State, config: RouterConfig, *, frozen: bool = False) -> State:
    """finalize_model_grads' _update_router_expert_bias and reset_model_temporary_tensors.

    Raises:
        NotImplementedError: a frozen bias; the package updates every router's.
    """
    if frozen and config.expert_bias:
        raise NotImplementedError("there is no frozen expert bias")
    settings, device = _settings(config), state.buffers["expert_bias"].device
    router = _router(settings, device, state)
    if settings.moe_router_enable_expert_bias:  # as finalize_model_grads asks
        find(BIAS)([router], settings)
    if has(RESET):  # before 0.15 the update resets the counts
        find(RESET)(settings, [router])
    return _state(router, device)._replace(queue=state.queue)


@functools.lru_cache(maxsize=64)
def _settings(config: RouterConfig, replays: bool = False) -> TransformerConfig:
    """The package's configuration; several losses are lists."""
    read = {theirs: getattr(config, name) for name, theirs in NAMES.items()}
    read["moe_z_loss_coeff"] = config.z_loss_coeff or None
    if has(CONFIGURATION, "moe_enable_routing_replay"):
        read["moe_enable_routing_replay"] = replays
    losses = config.balancing_coeffs
    read["moe_router_load_balancing_type"] = "sinkhorn" if config.sinkhorn else list(losses) or "none"
    read["moe_aux_loss_coeff"] = list(losses.values()) or 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the package's defaults
        return TransformerConfig(**MODEL, **read)


def _router(settings: TransformerConfig, device: torch.device, state: State | None = None) -> TopKRouter:
    """A router with the buffers of the state, kept out of the package's list of replay objects."""
    one_rank()
    with mock.patch.object(torch.cuda, "current_device", lambda: device):
        router = TopKRouter(settings, next(find(name) for name in GROUPS if has(name))())
    router.set_layer_number(1)
    if replays := getattr(router, "router_replay", None):
        type(replays).global_router_replay_instances.remove(replays)
        replays.replay_backward_list = list(state.queue) if state else []
    for name, buffer in BUFFERS.items():
        if state and getattr(router, buffer, None) is not None:
            getattr(router, buffer).copy_(state.buffers[name])
    return router


def _state(router: TopKRouter, device: torch.device) -> State:
    """The state of a router."""
    zero = {name: torch.zeros(() if name == "global_steps" else router.num_experts, device=device) for name in BUFFERS}
    buffers = {name: getattr(router, buffer, None) for name, buffer in BUFFERS.items()}
    replays = getattr(router, "router_replay", None)
    queue = replays.replay_backward_list if replays else ()
    return State({name: zero[name] if x is None else x for name, x in buffers.items()}, tuple(queue))


def _tracker() -> dict[str, Any]:
    """The package's record of losses; from 0.18 on the old function returns a copy of it."""
    if has(METRICS):
        return find(METRICS)().metrics  # type: ignore[no-any-return]
    return find(TRACKER)()  # type: ignore[no-any-return]


def _first_layer(entry: Any) -> Tensor:
    """The first layer's loss in an entry of the record: a dict, or from 0.18 on an object."""
    values: Tensor = entry["values"] if isinstance(entry, dict) else entry.values
    return values[0]


def _integers_if_whole(x: Tensor) -> Tensor:
    """Counts as integers; values that are not whole stay as they are."""
    return x.long() if torch.equal(x, x.round()) else x
