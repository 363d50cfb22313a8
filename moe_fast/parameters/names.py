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


def members(key: str, whole: Any, num_experts: int) -> tuple[Tensor, ...]:
    """Views of a packed parameter [L,…] or [L·M,…], or its list of members."""
    check_whole(key, whole, num_experts)
    if not isinstance(whole, Tensor):
        return tuple(whole)
    rows = whole.shape[0] // num_experts
    return (whole if whole.shape[0] == num_experts else whole.unflatten(0, (num_experts, rows))).unbind()


def stored(state: dict[str, Any], key: str, num_experts: int, packed: bool) -> None:
    """Bring one parameter of `state` into the layout, where the state has it in the other alone."""
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
    found = dict(state)
    for name in NAMES[: 1 + bias]:
        stored(found, prefix + name, num_experts, packed)
    return found


def normalize_master_parameters(state: State, *, name: str, num_experts: int, packed: bool) -> dict[str, Any]:
    """`normalize_parameters` under the one prefix that has the parameter."""
    check_num_experts(num_experts)
    found = dict(state)
    suffixes = [name, *indexed(name, num_experts)]
    prefixes = [[key[: len(key) - len(suffix)] for key in state if matches(key, suffix)] for suffix in suffixes]
    whole, parts = prefixes[0], [prefix for own in prefixes[1:] for prefix in own]
    known = not whole and len(set(parts)) == 1 if packed else not parts and len(whole) == 1
    if known:  # keys of one prefix are distinct
        stored(found, (parts if packed else whole)[0] + name, num_experts, packed)
    return found


def convert_experts(state: State, *, num_experts: int, layout: str, prefix: str = "") -> dict[str, Any]:
    """A rank's experts with the keys of the other implementation; nothing is copied."""
    check_num_experts(num_experts)
    check_layout_of_experts(layout)
    found = dict(state)
    for linear, name in ((linear, name) for linear in LINEARS for name in NAMES):
        whole = f"{prefix}{linear}.{name}"
        modules = [f"{prefix}local_experts.{e}.{linear}.{name}" for e in range(num_experts)]
        keys = {"grouped": indexed(whole, num_experts), "sequential": modules}
        if layout == "sequential":
            stored(found, whole, num_experts, packed=False)
        target = keys.pop(layout)
        (source,) = keys.values()
        if found.keys() & set(source):
            check_conversion(found, source, [*target, whole])
            found |= {new: found.pop(old) for old, new in zip(source, target, strict=True)}
    return found
