"""Checkpoints in a second formulation: entry by entry, and value by value."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from moe_ref.config.experts import GATED
from moe_ref.config.parameters import MemberShard, Shard, Upcycled

State = Mapping[str, Any]


def members_of(parameter: Any, num_experts: int) -> list[Any]:
    """The members of a parameter: the entries of a list, or every L-th part of a tensor's rows."""
    if not isinstance(parameter, Tensor):
        return list(parameter)
    members = parameter.unflatten(0, (num_experts, len(parameter) // num_experts))
    return [member[0] if len(parameter) == num_experts else member for member in members]


def relaid(state: State, key: str, num_experts: int, packed: bool) -> dict[str, Any]:
    """The state with one parameter packed or unpacked, if only the other form is complete."""
    keys_of_experts = {f"{key}{e}": e for e in range(num_experts)}
    there = [name for name in keys_of_experts if name in state]
    if packed and key not in state and len(there) == num_experts:
        shape = state[there[0]].shape
        packed_parameter = torch.cat([state[name].reshape(1, *shape) for name in keys_of_experts])
        return {name: x for name, x in state.items() if name not in keys_of_experts} | {key: packed_parameter}
    if not packed and key in state and not there:
        members = members_of(state[key], num_experts)
        unrelated = {name: x for name, x in state.items() if name != key}
        return unrelated | {name: members[e] for name, e in keys_of_experts.items()}
    return dict(state)


def normalize_parameters(
    state: State, *, num_experts: int, packed: bool, prefix: str = "", bias: bool = False
) -> dict[str, Any]:
    """The weight, and the bias if there is one."""
    relaid_state = relaid(state, prefix + "weight", num_experts, packed)
    return relaid(relaid_state, prefix + "bias", num_experts, packed) if bias else relaid_state


def normalize_master_parameters(state: State, *, name: str, num_experts: int, packed: bool) -> dict[str, Any]:
    """Keys are matched with a pattern: a prefix before the name, and a number after it."""
    pattern = re.compile(rf"((?:.*\.)?){re.escape(name)}(0|[1-9][0-9]*)?")
    matches = [match for key in state if (match := pattern.fullmatch(key))]
    packed_matches = [match for match in matches if match[2] is None]
    expert_matches = [match for match in matches if match[2] is not None and int(match[2]) < num_experts]
    if packed:
        one_prefix = len({match[1] for match in expert_matches}) == 1 and len(expert_matches) == num_experts
        if one_prefix and not packed_matches:
            return relaid(state, expert_matches[0][1] + name, num_experts, True)
    elif len(packed_matches) == 1 and not expert_matches:
        return relaid(state, packed_matches[0][0], num_experts, False)
    return dict(state)


def convert_experts(state: State, *, num_experts: int, layout: str, prefix: str = "") -> dict[str, Any]:
    """Each key with its linear layer, its name and its expert, written in the other way."""
    parameter = r"(linear_fc[12])\.(weight|bias)"
    converted: dict[str, Any] = dict(state)
    if layout == "sequential":
        for key in [key for key in state if re.fullmatch(re.escape(prefix) + parameter, key)]:
            converted = relaid(converted, key, num_experts, False)
        pattern, spelled = rf"{parameter}([0-9]+)", "local_experts.{2}.{0}.{1}"
    else:
        pattern, spelled = rf"local_experts\.([0-9]+)\.{parameter}", "{1}.{2}{0}"
    out = {}
    for key, x in converted.items():
        match = re.fullmatch(re.escape(prefix) + pattern, key)
        out[prefix + spelled.format(*match.groups()) if match else key] = x
    return out


def shard_parameters(
    parameters: State, *, num_experts: int, rank: int, ranks: int, tensor_rank: int = 0, tensor_ranks: int = 1,
    gated: bool = False, singleton: bool = False, prefix: str = "",
) -> list[Shard]:  # fmt: skip
    """Each half of each expert's part, with the position of its first row or column in the
    whole.
    """
    local, shards = num_experts // ranks, []
    for name in ("linear_fc1.weight", "linear_fc1.bias", "linear_fc2.weight", "linear_fc2.bias"):
        relaid_state = relaid(parameters, name, local, False)
        for e in [e for e in range(local) if f"{name}{e}" in relaid_state]:
            x, axis = relaid_state[f"{name}{e}"], {"linear_fc1": 0, "linear_fc2": 1}[name[:10]]
            cut, halves = name != "linear_fc2.bias", 2 if gated and name[:10] == "linear_fc1" else 1
            axis = axis if cut else 0
            size = x.shape[axis] // halves
            for half, piece in enumerate(x.split(size, axis) if size else [x] * halves):
                shape, offset = list(x.shape), [0] * x.dim()
                if cut:
                    shape[axis], offset[axis] = x.shape[axis] * tensor_ranks, (half * tensor_ranks + tensor_rank) * size
                number = rank * local + e
                key = f"{prefix}{number}.{name}" if singleton else prefix + name
                if not singleton:
                    piece, shape, offset = piece.reshape(1, *piece.shape), [num_experts, *shape], [number, *offset]
                shards.append(Shard(key, piece, tuple(shape), tuple(offset), cut or tensor_rank == 0))
    return shards


def expand_shard(
    members: Sequence[Tensor] | Tensor, shard: Tensor | None, *, offset: int | None = None
) -> list[MemberShard]:
    """The elements of each member that the shard has, counted one by one."""
    if isinstance(members, Tensor):
        return [MemberShard(members, shard, offset)]
    owner = [(i, position) for i, member in enumerate(members) for position in range(member.numel())]
    first = offset or 0
    owned_elements = owner[first : first + (0 if shard is None else len(shard))]
    entries = []
    for i, member in enumerate(members):
        here = [n for n, (owned, _) in enumerate(owned_elements) if owned == i]
        if shard is None or not here:
            entries.append(MemberShard(member, None, None))
        else:
            entries.append(MemberShard(member, shard[here[0] : here[-1] + 1], owned_elements[here[0]][1]))
    return entries


COLUMNS = {"scale_fwd": 3, "amax_history_fwd": 3, "scale_bwd": 2, "amax_history_bwd": 2}


def keys_of(prefix: str, num_experts: int) -> list[str]:
    return [prefix + "_extra_state" + (str(e) if e else "") for e in range(num_experts)]


def split_extra_state(state: State, *, num_experts: int, prefix: str = "") -> dict[str, Any]:
    """Expert e has each L-th column, from e on."""
    first, *other_keys = keys_of(prefix, num_experts)
    packed_state, out = state.get(first), dict(state)
    if not isinstance(packed_state, Mapping) or "scale_fwd" not in packed_state:
        return out
    if any(key in state for key in other_keys):
        return out
    for e, key in enumerate([first, *other_keys]):
        out[key] = {name: x[..., e::num_experts] if name in COLUMNS else x for name, x in packed_state.items()}
        out[key]["extra_fp8_variables"] = dict(packed_state.get("extra_fp8_variables", {}), num_gemms=1)
    return out


def merge_extra_state(state: State, *, num_experts: int, prefix: str = "") -> dict[str, Any]:
    """Column c of expert e is column c·L + e."""
    keys = keys_of(prefix, num_experts)
    expert_states = [state.get(key) for key in keys]
    if not all(isinstance(expert_state, Mapping) and "scale_fwd" in expert_state for expert_state in expert_states):
        return dict(state)
    first: Any = expert_states[0]
    merged = dict(first)
    for name, count in COLUMNS.items():
        columns_of_experts: Any = [expert_state[name] for expert_state in expert_states if expert_state is not None]
        order = [(c, e) for c in range(count) for e in range(num_experts)]
        merged[name] = torch.cat([columns_of_experts[e][..., c : c + 1] for c, e in order], -1)
    merged["extra_fp8_variables"] = dict(first.get("extra_fp8_variables", {}), num_gemms=num_experts)
    return {name: x for name, x in state.items() if name not in keys} | {keys[0]: merged}


def upcycle(
    router_weight: Tensor, fc1_weight: Tensor, fc2_weight: Tensor, *, topk: int, granularity: int = 1,
    kind: str = "swiglu", pre_softmax: bool = False, fc1_bias: Tensor | None = None, fc2_bias: Tensor | None = None,
) -> Upcycled:  # fmt: skip
    """Slices by axes: [half, slice, row of the slice], each repeated once per copy."""
    experts, halves = len(router_weight), 2 if kind in GATED else 1
    copies = experts // granularity
    alpha = copies * granularity**2 / topk if pre_softmax else granularity
    scale = alpha ** (1 / 3 if kind in GATED or kind == "squared_relu" else 1 / 2)

    def rows(x: Tensor) -> Tensor:
        sliced = x.unflatten(0, (halves, granularity, len(x) // halves // granularity)).transpose(0, 1).flatten(1, 2)
        return torch.cat([sliced] * copies) * scale

    columns = fc2_weight.unflatten(1, (granularity, fc2_weight.shape[1] // granularity)).movedim(1, 0)
    return Upcycled(
        router_weight[:copies].repeat_interleave(granularity, 0),
        rows(fc1_weight),
        torch.cat([columns] * copies) * scale,
        None if fc1_bias is None else rows(fc1_bias),
        None if fc2_bias is None else fc2_bias[None].repeat(experts, 1),
    )
