"""Shards of parameters, masters and extra states, as views of the tensors that are passed in."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from moe_fast.parameters.names import members
from moe_ref.config.parameters import (
    COLUMNS,
    EXTRA_STATE,
    TENSOR_AXIS,
    MemberShard,
    Shard,
    State,
    check_expand_shard,
    check_extra_state,
    check_halves,
    check_num_experts,
    check_shard_parameters,
)


def shard_parameters(
    parameters: State, *, num_experts: int, rank: int, ranks: int, tensor_rank: int = 0, tensor_ranks: int = 1,
    gated: bool = False, singleton: bool = False, prefix: str = "",
) -> list[Shard]:  # fmt: skip
    """A rank's parameters as views, with their positions in the checkpoint."""
    check_shard_parameters(parameters, num_experts, rank, ranks, tensor_rank, tensor_ranks)
    local = num_experts // ranks
    shards = []
    for name, axis in TENSOR_AXIS.items():
        values_of_expert = {e: parameters[f"{name}{e}"] for e in range(local) if f"{name}{e}" in parameters}
        if not values_of_expert and name in parameters:
            values_of_expert = dict(enumerate(members(name, parameters[name], local)))
        halves = 1 + (gated and name.startswith("linear_fc1"))
        for e, values in values_of_expert.items():
            if halves == 2:
                check_halves(name, values)
            placed_views = _places(values, axis, halves, tensor_rank, tensor_ranks)
            for view, shape, offset in placed_views:
                expert, writes = rank * local + e, axis is not None or not tensor_rank
                if singleton:
                    shards.append(Shard(f"{prefix}{expert}.{name}", view, shape, offset, writes))
                    continue
                along = (num_experts, *shape), (expert, *offset)
                shards.append(Shard(prefix + name, view.unsqueeze(0), *along, writes))
    return shards


def _places(values: Tensor, axis: int | None, halves: int, rank: int, ranks: int) -> list[Any]:
    """(view, shape of the unsharded parameter, offset) of each half."""
    if axis is None:
        return [(values, tuple(values.shape), (0,) * values.dim())]
    full_shape = tuple(n * (ranks if d == axis else 1) for d, n in enumerate(values.shape))
    length = values.shape[axis] // halves
    views = values.unflatten(axis, (halves, length)).unbind(axis)
    starts = [(half * ranks + rank) * length for half in range(halves)]
    return [
        (view, full_shape, tuple(start if d == axis else 0 for d in range(values.dim())))
        for view, start in zip(views, starts, strict=True)
    ]


def expand_shard(
    members: Sequence[Tensor] | Tensor, shard: Tensor | None, *, offset: int | None = None
) -> list[MemberShard]:
    """A rank's shard of a grouped master as one view per member, the same number on all ranks."""
    if isinstance(members, Tensor):
        return [MemberShard(members, shard, offset)]
    check_expand_shard(members, shard, offset)
    length = 0 if shard is None else shard.shape[0]
    ends = accumulate((x.numel() for x in members), initial=-(offset or 0))
    entries = []
    for member, (begin, end) in zip(members, pairwise(ends), strict=True):  # counted from the shard's start
        low, high = sorted((0, begin, length))[1], sorted((0, end, length))[1]
        if shard is None or low == high:
            entries.append(MemberShard(member, None, None))
        else:
            entries.append(MemberShard(member, shard[low:high], low - begin))
    return entries


# ---- extra states


def _split(layer_state: State, num_experts: int) -> list[dict[str, Any]]:
    """Each expert's columns, as views of the state of all experts."""
    columns = {name: layer_state[name].unflatten(-1, (c, num_experts)).unbind(-1) for name, c in COLUMNS.items()}
    variables = {"extra_fp8_variables": {**layer_state.get("extra_fp8_variables", {}), "num_gemms": 1}}
    return [{**layer_state, **{name: x[e] for name, x in columns.items()}, **variables} for e in range(num_experts)]


def _states(state: State, prefix: str, num_experts: int) -> tuple[list[str], list[bool]]:
    """(the experts' keys, which of them have scales)."""
    check_num_experts(num_experts)
    keys = [prefix + EXTRA_STATE, *(f"{prefix}{EXTRA_STATE}{e}" for e in range(1, num_experts))]
    return keys, [hasattr(x := state.get(key, {}), "keys") and "scale_fwd" in x for key in keys]


def split_extra_state(state: State, *, num_experts: int, prefix: str = "") -> dict[str, Any]:
    """The layer's extra state as one state of views per expert."""
    keys, scaled = _states(state, prefix, num_experts)
    if not scaled[0] or state.keys() & set(keys[1:]):
        return dict(state)
    check_extra_state(keys[0], state[keys[0]], num_experts)
    return {**state, **dict(zip(keys, _split(state[keys[0]], num_experts), strict=True))}


def merge_extra_state(state: State, *, num_experts: int, prefix: str = "") -> dict[str, Any]:
    """The layer's extra state, made of the experts' by one copy per tensor."""
    keys, scaled = _states(state, prefix, num_experts)
    merged = dict(state)
    if all(scaled):
        expert_states = [merged.pop(key) for key in keys]
        for key, expert_state in zip(keys, expert_states, strict=True):
            check_extra_state(key, expert_state, 1)
        variables = {**expert_states[0].get("extra_fp8_variables", {}), "num_gemms": num_experts}
        tensors = {}
        for name in COLUMNS:
            tensors[name] = torch.cat([expert_state[name][..., None] for expert_state in expert_states], -1).flatten(-2)
        merged[keys[0]] = {**expert_states[0], **tensors, "extra_fp8_variables": variables}
    return merged
