"""The router's memory: made, saved, loaded, and updated at the end of a global batch.

Mirrors the buffers of `TopKRouter`, and `finalize_model_grads` of megatron.core.distributed.
Differs: docs/differences.md#router.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from moe_ref.config import RouterConfig, RouterRanks, RouterState, check_state_tensors
from moe_ref.router.balancing import update_expert_bias


def new_state(config: RouterConfig, device: Any = None) -> RouterState:
    """The state before the first step: all zeros."""
    counts = torch.zeros(config.num_experts, dtype=torch.int64, device=device)
    return RouterState(torch.zeros(config.num_experts, device=device), counts, counts, counts.new_zeros(()), ())


def state_tensors(state: RouterState) -> dict[str, Tensor]:
    """The state as named tensors, to be saved."""
    named = state._asdict()
    queue = named.pop("replay_queue")
    return named | {f"replay_queue.{i}": indices for i, indices in enumerate(queue)}


def state_from(tensors: Mapping[str, Tensor]) -> RouterState:
    """The inverse of `state_tensors`.

    Raises:
        ValueError: a tensor is missing, or expert_bias is not float32: a cast of all buffers to
            bf16 loses its steps.
    """
    check_state_tensors(tensors)
    names = [name for name in RouterState._fields if name != "replay_queue"]
    queue = tuple(tensors[f"replay_queue.{i}"] for i in range(len(tensors) - len(names)))
    return RouterState(**{name: tensors[name] for name in names}, replay_queue=queue)


def finish_batch(
    state: RouterState, config: RouterConfig, *, frozen: bool = False, ranks: RouterRanks | None = None
) -> RouterState:
    """End a global batch, when the gradients are final.

    The expert bias takes a step by the counts of all tp_dp_cp ranks (`update_expert_bias`), unless
    it is frozen. All counters become zero.
    """
    ranks = ranks or RouterRanks()
    if config.expert_bias and not frozen:
        counts = ranks.tp_dp_cp.sum(state.tokens_per_expert)
        bias = update_expert_bias(state.expert_bias, counts, update_rate=config.bias_update_rate)
        state = state._replace(expert_bias=bias)
    zero = torch.zeros_like(state.tokens_per_expert)
    steps = torch.zeros_like(state.global_steps)
    return state._replace(tokens_per_expert=zero, global_tokens_per_expert=zero, global_steps=steps)
