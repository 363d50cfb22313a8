"""The extra state of a grouped layer in FP8: scales and amax histories of all experts' products."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from moe_ref.config.parameters import COLUMNS, EXTRA_STATE, State, check_extra_state, check_num_experts


def split_extra_state(state: State, *, num_experts: int, prefix: str = "") -> dict[str, Any]:
    """The layer's extra state as one per expert, under _extra_state, _extra_state1, …

        x‹e›[…, c] = x[…, c·L + e]          c: input, weight, output; output's and input's gradient

    Args:
        state: values by key. The extra state is a dict: scale_fwd [3L], amax_history_fwd [A,3L],
            scale_bwd [2L], amax_history_bwd [A,2L]; extra_fp8_variables, with num_gemms; others,
            which each expert gets. Without scale_fwd, and where it is split, it stays.
        num_experts: L, of this rank.
        prefix: of the layer's keys.

    Raises:
        ValueError: a tensor that has not its columns of L experts.

    Source: `TEGroupedLinear._split_extra_state`.
    """
    check_num_experts(num_experts)
    keys = extra_state_keys(prefix, num_experts)
    extra = state.get(keys[0], {})
    if not is_fp8(extra) or any(key in state for key in keys[1:]):
        return dict(state)
    check_extra_state(keys[0], extra, num_experts)
    states = {}
    for e, key in enumerate(keys):
        columns = {name: extra[name].unflatten(-1, (c, num_experts))[..., e] for name, c in COLUMNS.items()}
        states[key] = extra | columns | {"extra_fp8_variables": extra.get("extra_fp8_variables", {}) | {"num_gemms": 1}}
    return dict(state) | states


def merge_extra_state(state: State, *, num_experts: int, prefix: str = "") -> dict[str, Any]:
    """The inverse of `split_extra_state`; what only one expert can give is the first's.

    As it is: where an expert has no extra state, an empty one, or one without scale_fwd.

    Raises:
        ValueError: a tensor that has not one expert's columns, or another shape than the first's.

    Source: `TEGroupedLinear.merge_extra_states`.
    """
    check_num_experts(num_experts)
    keys = extra_state_keys(prefix, num_experts)
    expert_states = [state.get(key, {}) for key in keys]
    if not all(is_fp8(expert_state) for expert_state in expert_states):
        return dict(state)
    for key, expert_state in zip(keys, expert_states, strict=True):
        check_extra_state(key, expert_state, 1)
    first: dict[str, Any] = expert_states[0]
    merged = {name: _together([expert_state[name] for expert_state in expert_states]) for name in COLUMNS}
    variables = first.get("extra_fp8_variables", {}) | {"num_gemms": num_experts}
    unrelated = {name: x for name, x in state.items() if name not in keys}
    return unrelated | {keys[0]: first | merged | {"extra_fp8_variables": variables}}


def _together(expert_columns: list[Tensor]) -> Tensor:
    """[…,C] of each expert as […,C·L], column by column."""
    return torch.stack(expert_columns, dim=-1).flatten(-2)


def extra_state_keys(prefix: str, num_experts: int) -> list[str]:
    return [f"{prefix}{EXTRA_STATE}{e or ''}" for e in range(num_experts)]


def is_fp8(extra: Any) -> bool:
    return isinstance(extra, Mapping) and "scale_fwd" in extra
