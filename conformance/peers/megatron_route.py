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
from megatron.core.distributed.finalize_model_grads import _update_router_expert_bias, reset_model_temporary_tensors
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from conformance.peers.megatron_router import one_rank
from moe_ref.config import RouteOutput, RouterConfig, RouterLosses

DECLARED: dict[str, Any] = {"accumulator": "storage", "unchecked": ("batch_size", "padding_mask")}

NAMES = {  # of the settings, in the package's configuration
    "num_experts": "num_moe_experts",
    "topk": "moe_router_topk",
    "score_function": "moe_router_score_function",
    "pre_softmax": "moe_router_pre_softmax",
    "num_groups": "moe_router_num_groups",
    "group_topk": "moe_router_group_topk",
    "scaling_factor": "moe_router_topk_scaling_factor",
    "expert_bias": "moe_router_enable_expert_bias",
    "bias_update_rate": "moe_router_bias_update_rate",
    "capacity_factor": "moe_expert_capacity_factor",
    "drop_policy": "moe_token_drop_policy",
    "pad_to_capacity": "moe_pad_expert_input_to_capacity",
    "loss_per_token": "calculate_per_token_loss",
}
MODEL = {
    "moe_token_dispatcher_type": "alltoall",
    "num_layers": 1,
    "num_attention_heads": 1,
    "hidden_size": 1,
    "ffn_hidden_size": 1,
    "moe_ffn_hidden_size": 1,
    "add_bias_linear": False,
}
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
ACTIONS = {
    "record": RouterReplayAction.RECORD,
    "forward": RouterReplayAction.REPLAY_FORWARD,
    "backward": RouterReplayAction.REPLAY_BACKWARD,
}


class State(NamedTuple):
    """A router's state between two calls."""

    buffers: dict[str, Tensor]  # float32, by the names of BUFFERS
    queue: tuple[Tensor, ...]  # RouterReplay.replay_backward_list


def supports(config: RouterConfig | None = None, **_: Any) -> str | None:
    """Settings that 0.16.1 lacks."""
    if config is None:
        return None
    if config.score_function == "sqrtsoftplus":
        return "score_function is softmax or sigmoid"
    return "there are no repeated MTP layers" if config.loss_divisor > 1 else None


def new_state(config: RouterConfig, device: Any = None) -> State:
    """The initial buffers of a router."""
    device = torch.device(device or "cpu")
    return _state(_router(_settings(config), device), device)


def state_tensors(state: State) -> dict[str, Tensor]:
    """The buffers and the queued indices, by name."""
    queued = {f"replay_queue.{i}": indices for i, indices in enumerate(state.queue)}
    return {name: x if name == "expert_bias" else _whole(x) for name, x in state.buffers.items()} | queued


def state_from(tensors: Mapping[str, Tensor]) -> State:
    """The inverse of `state_tensors`."""
    queue = tuple(tensors[f"replay_queue.{i}"] for i in range(len(tensors) - len(BUFFERS)))
    return State({name: tensors[name].float() for name in BUFFERS}, queue)


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
        router.router_replay.set_router_replay_action(ACTIONS[replay])
    if replay_target is not None:
        router.router_replay.set_target_indices(replay_target)
    moe_utils.MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(loss_scale, device=logits.device))
    mask = None if padding_mask is None else padding_mask.reshape(-1, batch_size)
    tracker = moe_utils.get_moe_layer_wise_logging_tracker()
    tracker.clear()
    with torch.compiler.set_stance("force_eager"):
        probs, routing_map = router.routing(logits.reshape(-1, batch_size, logits.shape[-1]), padding_mask=mask)
    coefficients = {"z_loss": config.z_loss_coeff, **config.balancing_coeffs}
    losses = {
        name: tracker[told]["values"][0] * coefficients[name] for name, told in TRACKED.items() if told in tracker
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
        _update_router_expert_bias([router], settings)
    reset_model_temporary_tensors(settings, [router])
    return _state(router, device)._replace(queue=state.queue)


@functools.lru_cache(maxsize=64)
def _settings(config: RouterConfig, replays: bool = False) -> TransformerConfig:
    """The package's configuration; several losses are lists."""
    read = {theirs: getattr(config, name) for name, theirs in NAMES.items()}
    read["moe_z_loss_coeff"] = config.z_loss_coeff or None
    losses = config.balancing_coeffs
    read["moe_router_load_balancing_type"] = "sinkhorn" if config.sinkhorn else list(losses) or "none"
    read["moe_aux_loss_coeff"] = list(losses.values()) or 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the package's defaults
        return TransformerConfig(
            **MODEL,
            **read,
            moe_enable_routing_replay=replays,
            perform_initialization=False,
            use_cpu_initialization=True,
        )


def _router(settings: TransformerConfig, device: torch.device, state: State | None = None) -> TopKRouter:
    """A router with the buffers of the state, kept out of the package's list of replay objects."""
    one_rank()
    with mock.patch.object(torch.cuda, "current_device", lambda: device):
        router = TopKRouter(settings, moe_utils.get_default_pg_collection())
    router.set_layer_number(1)
    if router.router_replay is not None:
        RouterReplay.global_router_replay_instances.remove(router.router_replay)
        router.router_replay.replay_backward_list = list(state.queue) if state else []
    for name, own in BUFFERS.items():
        if state and getattr(router, own) is not None:
            getattr(router, own).copy_(state.buffers[name])
    return router


def _state(router: TopKRouter, device: torch.device) -> State:
    """The state of a router."""
    zero = {name: torch.zeros(() if name == "global_steps" else router.num_experts, device=device) for name in BUFFERS}
    own = {name: getattr(router, buffer) for name, buffer in BUFFERS.items()}
    queue = router.router_replay.replay_backward_list if router.router_replay else ()
    return State({name: zero[name] if x is None else x for name, x in own.items()}, tuple(queue))


def _whole(x: Tensor) -> Tensor:
    """Counts as integers; values that are not whole stay as they are."""
    return x.long() if torch.equal(x, x.round()) else x
