"""Names of the experts' parameters in a state dict: renamings of keys, and views of one tensor."""

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


def indexed(key: str, num_experts: int) -> list[str]:
    return [f"{key}{e}" for e in range(num_experts)]


def members(key: str, packed: Any, num_experts: int) -> tuple[Tensor, ...]:
    """Views of a packed parameter [L,…] or [L·M,…], one per expert; or the members of a list."""
    check_whole(key, packed, num_experts)
    if not isinstance(packed, Tensor):
        return tuple(packed)
    rows = packed.shape[0] // num_experts
    return (packed if packed.shape[0] == num_experts else packed.unflatten(0, (num_experts, rows))).unbind()


def stored(state: dict[str, Any], key: str, num_experts: int, packed: bool) -> None:
    """Bring one parameter of `state` into the layout, if the state has it only in the other one."""
    names = indexed(key, num_experts)
    present = [name in state for name in names]
    if packed and key not in state and all(present):
        check_members(key, [state[name] for name in names])
        state[key] = torch.stack([state.pop(name) for name in names])
    elif not packed and key in state and not any(present):
        state |= zip(names, members(key, state.pop(key), num_experts), strict=True)


def normalize_parameters(
    state: State, *, num_experts: int, packed: bool, prefix: str = "", bias: bool = False
) -> dict[str, Any]:
    """One layer's state in the layout of the module that loads it; unpacked values are views."""
    check_num_experts(num_experts)
    normalized = dict(state)
    for name in NAMES[: 1 + bias]:
        stored(normalized, prefix + name, num_experts, packed)
    return normalized


def normalize_master_parameters(state: State, *, name: str, num_experts: int, packed: bool) -> dict[str, Any]:
    """`normalize_parameters` under the only prefix that has the parameter."""
    check_num_experts(num_experts)
    normalized = dict(state)
    suffixes = [name, *indexed(name, num_experts)]
    prefixes = [[key[: len(key) - len(suffix)] for key in state if matches(key, suffix)] for suffix in suffixes]
    packed_prefixes, member_prefixes = (
        prefixes[0],
        [prefix for prefixes_of_member in prefixes[1:] for prefix in prefixes_of_member],
    )
    is_unique = (
        not packed_prefixes and len(set(member_prefixes)) == 1
        if packed
        else not member_prefixes and len(packed_prefixes) == 1
    )
    if is_unique:  # keys of one prefix are distinct
        stored(normalized, (member_prefixes if packed else packed_prefixes)[0] + name, num_experts, packed)
    return normalized


def convert_experts(state: State, *, num_experts: int, layout: str, prefix: str = "") -> dict[str, Any]:
    """A rank's experts with the keys of the other implementation; nothing is copied."""
    check_num_experts(num_experts)
    check_layout_of_experts(layout)
    converted = dict(state)
    for linear, name in ((linear, name) for linear in LINEARS for name in NAMES):
        packed_name = f"{prefix}{linear}.{name}"
        modules = [f"{prefix}local_experts.{e}.{linear}.{name}" for e in range(num_experts)]
        keys = {"grouped": indexed(packed_name, num_experts), "sequential": modules}
        if layout == "sequential":
            stored(converted, packed_name, num_experts, packed=False)
        target = keys.pop(layout)
        (source,) = keys.values()
        if converted.keys() & set(source):
            check_conversion(converted, source, [*target, packed_name])
            converted |= {new: converted.pop(old) for old, new in zip(source, target, strict=True)}
    return converted
