"""The states of router and quantiser before the first step, saved and loaded; for all
implementations.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from moe_ref.config.quantization import QuantizerState, Recipe
from moe_ref.config.router import RouterConfig, RouterState, check_state_tensors
from moe_ref.config.rules import check_count


def new_state(config: RouterConfig, device: Any = None) -> RouterState:
    """The state before the first step: all zeros."""
    counts, total = (torch.zeros(config.num_experts, dtype=torch.int64, device=device) for _ in range(2))
    return RouterState(torch.zeros(config.num_experts, device=device), counts, total, counts.new_zeros(()), ())


def state_tensors(state: RouterState) -> dict[str, Tensor]:
    """The state as named tensors, to be saved."""
    named = state._asdict()
    queue = named.pop("replay_queue")
    return named | {f"replay_queue.{i}": indices for i, indices in enumerate(queue)}


def state_from(tensors: Mapping[str, Tensor]) -> RouterState:
    """The inverse of `state_tensors`. An expert_bias of another floating dtype, as a cast of all
    buffers leaves it, becomes float32: in bf16 its next steps would be lost.

    Raises:
        ValueError: a tensor is missing, or expert_bias is not floating point.
    """
    check_state_tensors(tensors)
    names = [name for name in RouterState._fields if name != "replay_queue"]
    queue = tuple(tensors[f"replay_queue.{i}"] for i in range(len(tensors) - len(names)))
    state = RouterState(**{name: tensors[name] for name in names}, replay_queue=queue)
    return state._replace(expert_bias=state.expert_bias.float())


def new_quantizer_state(
    recipe: Recipe, *, num_groups: int = 1, device: torch.device | str | None = None
) -> QuantizerState | None:
    """The state before the first step: no amax seen, scales of 1; None for a recipe without memory.

    Source: DelayedScalingRecipeState.
    """
    check_count("num_groups", num_groups)
    if recipe.scaling != "delayed":
        return None
    assert recipe.amax_history_len is not None
    return QuantizerState(
        torch.zeros(num_groups, recipe.amax_history_len, device=device), torch.ones(num_groups, device=device)
    )
