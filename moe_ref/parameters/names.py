"""Names of the experts' parameters in a state dict.

    packed      weight                     [L,M,N]       all experts of a rank
    indexed     weight0, weight1, …        [M,N] each
    sequential  local_experts.0.…weight …  [M,N] each    a module per expert

No function changes its argument; tensors of the result may be views of it.
"""

from typing import Any

import torch
from torch import Tensor

from moe_ref.config.parameters import (
    LINEARS,
    NAMES,
    State,
    check_conversion,
    check_layout_of_experts,
    check_members,
    check_num_experts,
    check_whole,
    matches,
)


def normalize_parameters(
    state: State, *, num_experts: int, packed: bool, prefix: str = "", bias: bool = False
) -> dict[str, Any]:
    """The state of one grouped linear layer in the layout of the module that loads it.

        packed module     all of weight0 … and no weight    →  weight = stack(weight0, …)
        indexed module    weight and none of weight0 …      →  weight0, … = members(weight)
        otherwise         as it is

    Args:
        state: values by key; a packed one is [L,M,N], [L·M,N], or the list of a quantised
            parameter's L members.
        num_experts: L, of this rank.
        prefix: of the layer's keys; all others stay.
        bias: whether the layer has biases, [L,M] or [M] each; else their keys stay as well.

    Raises:
        ValueError: a packed value that L experts cannot share; indexed values of several shapes.

    Source: `_normalize_grouped_parameter_keys`, `_split_grouped_checkpoint_tensor`.
    """
    check_num_experts(num_experts)
    normalized = dict(state)
    for name in NAMES if bias else NAMES[:1]:
        normalized = (pack if packed else unpack)(normalized, f"{prefix}{name}", num_experts)
    return normalized


def pack(state: dict[str, Any], key: str, num_experts: int) -> dict[str, Any]:
    """key0 … become key, unless it is there or one of them is not."""
    expert_keys = [f"{key}{e}" for e in range(num_experts)]
    if key in state or any(expert_key not in state for expert_key in expert_keys):
        return state
    check_members(key, [state[expert_key] for expert_key in expert_keys])
    unrelated = {name: x for name, x in state.items() if name not in expert_keys}
    return unrelated | {key: torch.stack([state[expert_key] for expert_key in expert_keys])}


def unpack(state: dict[str, Any], key: str, num_experts: int) -> dict[str, Any]:
    """key becomes key0 …, unless it is not there or one of them is."""
    expert_keys = [f"{key}{e}" for e in range(num_experts)]
    if key not in state or any(expert_key in state for expert_key in expert_keys):
        return state
    unrelated = {name: x for name, x in state.items() if name != key}
    return unrelated | dict(zip(expert_keys, members(key, state[key], num_experts), strict=True))


def members(key: str, packed: Any, num_experts: int) -> list[Tensor]:
    """Each expert's part of a packed value.

    A value [L,…] has one entry per expert, even if it is [L·1,N], the flat form of L rows: then a
    member is [N] and not [1,N].
    """
    check_whole(key, packed, num_experts)
    if not isinstance(packed, Tensor):
        return list(packed)
    rows = packed.shape[0] // num_experts
    if packed.shape[0] == num_experts:
        return [packed[e] for e in range(num_experts)]
    return [packed[e * rows : (e + 1) * rows] for e in range(num_experts)]


def normalize_master_parameters(state: State, *, name: str, num_experts: int, packed: bool) -> dict[str, Any]:
    """`normalize_parameters` for an optimizer's masters, whose keys have prefixes it need not know.

    A key matches the parameter's name if it is the name, or ends in it after a dot.

        packed     name0 … match one key each, of one prefix, and name none  →  prefix + name
        indexed    name matches one key, and name0 … none                    →  prefix + name0 …
        otherwise  as it is: several keys match, and any choice could be wrong

    Args:
        state: masters by key.
        name: of the parameter, such as linear_fc1.weight.
        num_experts: L.

    Raises:
        ValueError: as `normalize_parameters`.

    Source: `_normalize_state_dict_for_grouped_params`. Differs: there a name needs no dot before
    it, and an indexed name with two keys counts as one with none: both layouts may be left.
    """
    check_num_experts(num_experts)
    packed_keys = [key for key in state if matches(key, name)]
    indexed_keys = [[key for key in state if matches(key, f"{name}{e}")] for e in range(num_experts)]
    if packed:
        prefixes = {key.removesuffix(f"{name}{e}") for e, keys in enumerate(indexed_keys) for key in keys}
        if packed_keys or len(prefixes) != 1 or any(len(keys) != 1 for keys in indexed_keys):
            return dict(state)
        return pack(dict(state), f"{prefixes.pop()}{name}", num_experts)
    if len(packed_keys) != 1 or any(indexed_keys):
        return dict(state)
    return unpack(dict(state), packed_keys[0], num_experts)


def convert_experts(state: State, *, num_experts: int, layout: str, prefix: str = "") -> dict[str, Any]:
    """The state of a rank's experts with the keys of the other implementation.

        sequential    prefix + local_experts.e.linear_fc1.weight
        grouped       prefix + linear_fc1.weight‹e›                   also for linear_fc2 and bias

    Args:
        state: values by key; grouped ones may be packed. Other keys stay.
        num_experts: L, of the rank.
        layout: of the result.

    Raises:
        ValueError: a parameter that some experts have and others do not, or that has both names.

    Source: checkpoints of SequentialMLP and TEGroupedMLP.
    """
    check_num_experts(num_experts)
    check_layout_of_experts(layout)
    converted = dict(state)
    for linear in LINEARS:
        for name in NAMES:
            grouped = [f"{prefix}{linear}.{name}{e}" for e in range(num_experts)]
            sequential = [f"{prefix}local_experts.{e}.{linear}.{name}" for e in range(num_experts)]
            if layout == "sequential":
                converted = unpack(converted, f"{prefix}{linear}.{name}", num_experts)
            source, target = (grouped, sequential) if layout == "sequential" else (sequential, grouped)
            if any(key in converted for key in source):
                check_conversion(converted, source, [*target, f"{prefix}{linear}.{name}"])
                for old, new in zip(source, target, strict=True):
                    converted[new] = converted.pop(old)
    return converted
