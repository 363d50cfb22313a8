"""Defects of dispatchers in the process group, in a handle that several calls take, and in how work
is shared out.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from conformance.mutants.defect import Defect, Wrapper, with_values
from conformance.mutants.kinds.gradients import rounded_to
from conformance.mutants.kinds.layouts import MANY, numbered_in_bytes

SHARDS = "a mistake that sharded experts invite"
PROGRAMS = "a mistake that numbers of blocks invite"
DOUBLES = "a class of dtypes: rows of float64"
SIZED = "a mistake in a result that is seldom read"
GROUPS = "a mistake that a program with one group does not show"


def _default_group(collective: Wrapper, *inputs: Any, group: Any, **settings: Any) -> Any:
    return collective(*inputs, group=dist.group.WORLD, **settings)


def _shard_by_shard(flatten_experts: Wrapper, x: Tensor, **settings: Any) -> Any:
    """Expert by expert, in place of rank by rank."""
    right = flatten_experts(x, **settings)
    groups, shards = settings["expert_parallel"], settings["expert_tensor_parallel"]
    return right.unflatten(1, (groups, shards, -1)).transpose(2, 3).flatten(1)


def _gradient_of_one_shard(flatten_experts: Wrapper, x: Tensor, **settings: Any) -> Any:
    groups, shards = settings["expert_parallel"], settings["expert_tensor_parallel"]
    parts = flatten_experts(x, **settings).unflatten(1, (groups, shards, -1))
    return torch.cat([parts[:, :, :1], parts[:, :, 1:].detach()], 2).flatten(1)


def _whole_blocks(rows: Any, num_blocks: int | None) -> Any:
    """Blocks have as many rows each; the rest, where they do not divide the rows, is left out."""
    if num_blocks is None or not isinstance(rows, Tensor) or rows.element_size() == 1:
        return rows
    inside = torch.arange(len(rows), device=rows.device) < len(rows) // num_blocks * num_blocks
    return torch.where(inside[:, None], rows, 0)


def _not_copied(dispatch: Wrapper, *arguments: Any, num_blocks: int | None = None, **settings: Any) -> Any:
    out = dispatch(*arguments, **settings)
    return out._replace(rows=_whole_blocks(out.rows, num_blocks))


def _not_added(combine: Wrapper, rows: Tensor, *rest: Any, num_blocks: int | None = None, **settings: Any) -> Any:
    return combine(_whole_blocks(rows, num_blocks), *rest, **settings)


def _numbered(move: Wrapper, rows: Tensor, *rest: Any, **settings: Any) -> Any:
    """Tokens of a dispatch, or rows of a combine, have numbers of 8 bits."""
    return move(numbered_in_bytes(rows) if rows.dim() == 2 and len(rows) > 256 else rows, *rest, **settings)


def _added_in_float32(combine: Wrapper, rows: Tensor, *rest: Any, **settings: Any) -> Any:
    """The sums of float64 rows are in float32."""
    out = combine(rows, *rest, **settings)
    if rows.dtype != torch.float64:
        return out
    narrow = rounded_to(torch.float32)
    return with_values(out, narrow) if isinstance(out, Tensor) else out._replace(tokens=with_values(out.tokens, narrow))


def _counts_of_another(dispatch: Wrapper, *arguments: Any, **settings: Any) -> Any:
    out = dispatch(*arguments, **settings)
    if out.tokens_per_expert is not None:
        return out
    experts = settings["num_experts"] // dist.get_world_size(settings["group"])
    return out._replace(tokens_per_expert=torch.full((experts,), len(out.rows)))


ADDED = {
    "M31": "allgather_combine",
    "M32": "alltoall_combine",
    "M33": "deepep_combine",
    "M34": "hybridep_combine",
    "M35": "deepep_low_latency_combine",
}
NUMBERED = {
    "M24": "allgather_dispatch",
    "M25": "alltoall_dispatch",
    "M26": "deepep_dispatch",
    "M27": "hybridep_dispatch",
    "M28": "deepep_low_latency_dispatch",
    "M29": "deepep_combine",
    "M30": "alltoall_combine",
}
DEFECTS: tuple[Defect, ...] = (
    *(
        Defect(name, f"{function} numbers a rank's rows in 8 bits", MANY, {function: _numbered})
        for name, function in NUMBERED.items()
    ),
    *(
        Defect(name, f"{function} adds float64 rows in float32", DOUBLES, {function: _added_in_float32})
        for name, function in ADDED.items()
    ),
    Defect(
        "M36", "with a size given, the counts of another call are there", SIZED, {"deepep_dispatch": _counts_of_another}
    ),
    Defect("C33", "the last block's rows are not copied", PROGRAMS, {"hybridep_dispatch": _not_copied}),
    Defect("C34", "the last block's rows are not added", PROGRAMS, {"hybridep_combine": _not_added}),
    Defect("C31", "the shards of an expert are neighbours", SHARDS, {"flatten_experts": _shard_by_shard}),
    Defect("C32", "one shard has the expert's gradient", SHARDS, {"flatten_experts": _gradient_of_one_shard}),
    Defect("C24", "collectives over the default group", GROUPS, {"alltoall_dispatch": _default_group}),
    Defect("C25", "collectives over the default group", GROUPS, {"deepep_combine": _default_group}),
)
