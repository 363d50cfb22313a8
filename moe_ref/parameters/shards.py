"""Shards: of the experts' parameters in a checkpoint, and of an optimizer's masters."""

from collections.abc import Sequence

from torch import Tensor

from moe_ref.config.parameters import (
    TENSOR_AXIS,
    MemberShard,
    Shard,
    State,
    check_expand_shard,
    check_halves,
    check_shard_parameters,
)
from moe_ref.parameters.names import unpack


def shard_parameters(
    parameters: State, *, num_experts: int, rank: int, ranks: int, tensor_rank: int = 0, tensor_ranks: int = 1,
    gated: bool = False, singleton: bool = False, prefix: str = "",
) -> list[Shard]:  # fmt: skip
    """A rank's parameters as parts of those in the checkpoint, which are the same for any ranks.

        linear_fc1.weight [E,M·V,N]    expert rank·L + e, rows of tensor rank v
        linear_fc2.weight [E,N,M·V]    columns of tensor rank v
        linear_fc1.bias [E,M·V]        linear_fc2.bias [E,N], which each tensor rank has whole

    With two halves, tensor rank v has rows v·M/2 … of the first and of the second half: two shards.

    Args:
        parameters: by name, packed or indexed; a name may be absent.
        num_experts: E, of all ranks; each has L = E/W.
        rank, ranks: w and W, of expert parallelism.
        tensor_rank, tensor_ranks: v and V, of the experts' tensor parallelism.
        gated: whether linear_fc1 has two halves.
        singleton: keys prefix + expert.name without an axis of experts.

    Raises:
        ValueError: an unknown parameter; ranks out of range, or that do not divide E; a half row.

    Source: `TEGroupedMLP.sharded_state_dict`, `SequentialMLP.sharded_state_dict`.
    """
    check_shard_parameters(parameters, num_experts, rank, ranks, tensor_rank, tensor_ranks)
    local, shards = num_experts // ranks, []
    for name, axis in TENSOR_AXIS.items():
        by_expert = unpack(dict(parameters), name, local)
        for e in (e for e in range(local) if f"{name}{e}" in by_expert):
            expert, values = rank * local + e, by_expert[f"{name}{e}"]
            key = f"{prefix}{expert}.{name}" if singleton else f"{prefix}{name}"
            halves = 2 if gated and name.startswith("linear_fc1") else 1
            writes = axis is not None or tensor_rank == 0
            for piece, shape, offset in _parts(name, values, axis, halves, tensor_rank, tensor_ranks):
                if singleton:
                    shards.append(Shard(key, piece, shape, offset, writes))
                else:
                    shards.append(Shard(key, piece[None], (num_experts, *shape), (expert, *offset), writes))
    return shards


def _parts(
    name: str, values: Tensor, axis: int | None, halves: int, tensor_rank: int, tensor_ranks: int
) -> list[tuple[Tensor, tuple[int, ...], tuple[int, ...]]]:
    """(values, whole shape, offset) of each half of one expert's parameter."""
    shape, start = list(values.shape), [0] * values.dim()
    if axis is None:
        return [(values, tuple(shape), tuple(start))]
    if halves == 2:
        check_halves(name, values)
    length = shape[axis] // halves
    shape[axis] *= tensor_ranks
    pieces = []
    for half in range(halves):
        start[axis] = (half * tensor_ranks + tensor_rank) * length
        pieces.append((values.narrow(axis, half * length, length), tuple(shape), tuple(start)))
    return pieces


def expand_shard(
    members: Sequence[Tensor] | Tensor, shard: Tensor | None, *, offset: int | None = None
) -> list[MemberShard]:
    """A rank's shard of a grouped master, as one entry per member: what is to be quantised into it.

        the shard is elements o … o+n-1 of the concatenated members; those of member i, which begins
        at b, are max(o, b) … min(o+n, b+numel) - 1, and start at max(o, b) - b

    All ranks have the same entries in the same order, empty ones included: quantisation reduces
    over ranks, member by member.

    Args:
        members: of a quantised grouped parameter, any shapes; or one parameter, whose entry is the
            arguments as they are.
        shard: [n], or None: the rank has no part.
        offset: o; None is 0.

    Raises:
        ValueError: a shard that is not flat, or beyond the members.

    Source: `_expand_quantized_param_shard_for_cast`. Differs: there what is beyond the members is
    left out.
    """
    if isinstance(members, Tensor):
        return [MemberShard(members, shard, offset)]
    check_expand_shard(members, shard, offset)
    first = offset or 0
    last = first if shard is None else first + len(shard)
    entries, begin = [], 0
    for member in members:
        low, high = max(first, begin), min(last, begin + member.numel())
        if shard is None or low >= high:
            entries.append(MemberShard(member, None, None))
        else:
            entries.append(MemberShard(member, shard[low - first : high - first], low - begin))
        begin += member.numel()
    return entries
