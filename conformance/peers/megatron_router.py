"""The installed megatron-core's router, unfused, offered by `conformance.peers.megatron`.

Only names, orders and result shapes are translated, with these workarounds for calls:

    gate                without Transformer Engine te_general_gemm is undefined and gating raises a
                        NameError; None, as in the package's extension module: its torch branch
    topk_indices        the indices are those that a RouterReplay records: there is one from 0.16 on
    drop_tokens         the package has a capacity factor instead of a capacity; probs are 0 for
                        experts that are not chosen, as its routing returns them
    update_expert_bias  the package sums counts over its process groups: of this process alone
"""

import atexit
import functools
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, distributed

from conformance.peers.megatron_features import UTILS, has, offered
from moe_ref.config import AuxScores, Routed, TopK

BIASED = has(f"{UTILS}router_gating_linear", "bias")

if not hasattr(moe_utils, "te_general_gemm"):
    moe_utils.te_general_gemm = None

ROUTER_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}  # else: the input's

ROUTING = {  # the package checks logits.dim() == 2 and the score function only
    "accumulator": "storage",
    "unchecked": ("topk", "num_groups", "group_topk", "scaling_factor", "expert_bias", "precomputed_indices"),
}
DECLARED: dict[str, dict[str, Any]] = {
    "gate": {"unchecked": ("x", "weight", "router_dtype")},
    "jitter": {"unchecked": ("eps",)},
    "topk_indices": ROUTING,
    "topk_routing": ROUTING,
    "sinkhorn_routing": {"accumulator": "storage", "unchecked": ("topk",)},
    "drop_tokens": {"unchecked": ("capacity", "routing_map")},
    "aux_loss_scores": {"unchecked": ("topk", "padding_mask")},
    "load_balancing_loss": {
        "accumulator": "storage",
        "unchecked": ("tokens_per_expert", "total_num_tokens", "num_experts", "coeff"),
    },
    "z_loss": {"accumulator": "storage", "unchecked": ("logits", "coeff", "padding_mask")},
    "attach_loss": {"unchecked": ("scale",)},
    "update_expert_bias": {"unchecked": ("expert_bias", "tokens_per_expert", "update_rate")},
}


def supports(function: str, **arguments: Any) -> str | None:
    """A score function that the package refuses: up to 0.16 it has softmax and sigmoid; and float64
    where the package has float32 inside: plans, the scale of losses, biases."""
    narrow = function in ("sinkhorn_routing", "attach_loss", "update_expert_bias")
    if narrow and any(isinstance(x, Tensor) and x.dtype == torch.float64 for x in arguments.values()):
        return "float64 is float32 inside"
    return refused(arguments.get("score_function", "softmax"))


@functools.cache
def refused(score_function: str) -> str | None:
    """The package's answer to a score function, asked with one number."""
    try:
        moe_utils.topk_routing_with_score_function(torch.zeros(1, 1), 1, score_function=score_function)
    except ValueError as error:
        return str(error)
    return None


def declares(function: str) -> dict[str, Any]:
    """Scores of bf16 logits are stored and summed in bf16; few arguments are checked."""
    return DECLARED[function]


@offered
def gate(x: Tensor, weight: Tensor, *, bias: Tensor | None = None, router_dtype: str | None = None) -> Tensor:
    """moe_utils.router_gating_linear with a torch dtype; TopKRouter.gating needs a GPU."""
    biased = {"bias": bias} if BIASED else {}
    dtype = ROUTER_DTYPES.get(router_dtype or "", x.dtype)
    return moe_utils.router_gating_linear(inp=x, weight=weight, router_dtype=dtype, **biased)


@offered
def jitter(x: Tensor, *, eps: float) -> Tensor:
    """TopKRouter.apply_input_jitter of a router that has jittered nothing yet."""
    router = SimpleNamespace(config=SimpleNamespace(moe_input_jitter_eps=eps), input_jitter=None)
    return TopKRouter.apply_input_jitter(router, x)


@offered
def topk_indices(
    logits: Tensor, *, topk: int, pre_softmax: bool = False, precomputed_indices: Tensor | None = None, **settings: Any
) -> TopK:
    """moe_utils.topk_routing_with_score_function; its RouterReplay records the indices."""
    replay = _replay(precomputed_indices)
    probs, _ = moe_utils.topk_routing_with_score_function(
        logits, topk, use_pre_softmax=pre_softmax, router_replay=replay, **settings
    )
    indices = replay.get_recorded_indices() if precomputed_indices is None else precomputed_indices
    return TopK(probs.gather(1, indices), indices)


@offered
def topk_routing(
    logits: Tensor, *, topk: int, pre_softmax: bool = False, precomputed_indices: Tensor | None = None, **settings: Any
) -> Routed:
    """moe_utils.topk_routing_with_score_function; precomputed indices: a RouterReplay's target."""
    if precomputed_indices is not None:
        settings["router_replay"] = _replay(precomputed_indices)
    return Routed(*moe_utils.topk_routing_with_score_function(logits, topk, use_pre_softmax=pre_softmax, **settings))


@offered
def sinkhorn_routing(logits: Tensor, *, topk: int, training: bool = True) -> Routed:
    """TopKRouter.sinkhorn_load_balancing."""
    router = SimpleNamespace(topk=topk, training=training, config=SimpleNamespace(moe_aux_loss_coeff=0))
    return Routed(*TopKRouter.sinkhorn_load_balancing(router, logits))


@offered
def drop_tokens(
    probs: Tensor, routing_map: Tensor, *, capacity: int, drop_policy: str = "probs", pad_to_capacity: bool = False
) -> Routed:
    """moe_utils.apply_router_token_dropping; its factor gives `capacity` - ½, rounded up."""
    factor = (capacity - 0.5) * routing_map.shape[1] / max(len(routing_map), 1)
    of_chosen = torch.where(routing_map != 0, probs, 0)
    drop_settings: dict[str, Any] = {"drop_policy": drop_policy, "pad_to_capacity": pad_to_capacity}
    return Routed(*moe_utils.apply_router_token_dropping(of_chosen, routing_map, 1, factor, **drop_settings))


@offered
def aux_loss_scores(
    logits: Tensor, *, topk: int, score_function: str = "softmax", padding_mask: Tensor | None = None
) -> AuxScores:
    """moe_utils.compute_routing_scores_for_aux_loss, which returns the map first."""
    masked = {} if padding_mask is None else {"padding_mask": padding_mask}
    routing_map, scores = moe_utils.compute_routing_scores_for_aux_loss(logits, topk, score_function, **masked)
    return AuxScores(scores, routing_map)


@offered
def load_balancing_loss(
    scores: Tensor,
    tokens_per_expert: Tensor,
    *,
    total_num_tokens: int | Tensor,
    topk: int,
    num_experts: int,
    coeff: float,
) -> Tensor:
    """moe_utils.switch_load_balancing_loss_func."""
    return moe_utils.switch_load_balancing_loss_func(
        scores, tokens_per_expert, total_num_tokens, topk, num_experts, coeff
    )


@offered
def z_loss(logits: Tensor, *, coeff: float, padding_mask: Tensor | None = None) -> Tensor:
    """moe_utils.z_loss_func."""
    return moe_utils.z_loss_func(logits, coeff, **({} if padding_mask is None else {"padding_mask": padding_mask}))


@offered
def attach_loss(x: Tensor, loss: Tensor, *, scale: float = 1.0) -> Tensor:
    """moe_utils.MoEAuxLossAutoScaler, whose scale is one for the process, read in the backward."""
    moe_utils.MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(scale, device=loss.device))
    return moe_utils.MoEAuxLossAutoScaler.apply(x, loss)


@offered
def update_expert_bias(expert_bias: Tensor, tokens_per_expert: Tensor, *, update_rate: float) -> Tensor:
    """moe_utils.get_updated_expert_bias, which takes the counts first."""
    one_rank()
    return moe_utils.get_updated_expert_bias(tokens_per_expert, expert_bias, update_rate)


def _replay(target: Tensor | None) -> Any:
    """A RouterReplay that records, or replays `target`; the package's list of them is restored."""
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    replay = RouterReplay()
    RouterReplay.global_router_replay_instances.remove(replay)
    replay.set_router_replay_action(RouterReplayAction.RECORD if target is None else RouterReplayAction.REPLAY_FORWARD)
    if target is not None:
        replay.set_target_indices(target)
    return replay


@functools.cache
def one_rank() -> None:
    """The package's process groups, unless they exist: this process alone, gloo, until exit."""
    if not distributed.is_initialized():
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
        atexit.register(distributed.destroy_process_group)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
