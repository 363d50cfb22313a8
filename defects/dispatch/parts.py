"""Parts of planted defects: what all ranks hold, the plan of a call, rows in another order."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_ref.dispatch.indices import flatten_experts
from moe_ref.dispatch.plan import Layout, RoutePlan, plan_of_maps


def everybodys(x: Tensor, group: Any) -> list[Tensor]:
    """x of each rank in the group, on the CPU."""
    every: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, x.detach().cpu().contiguous(), group=group)
    return every


def plan_of_call(routing_map: Tensor, settings: dict[str, Any]) -> RoutePlan:
    """The row of every copy on all ranks."""
    group, shards = settings["group"], settings.get("expert_tensor_parallel", 1)
    maps = everybodys(routing_map, group)
    flat = [flatten_experts(own, expert_parallel=len(maps) // shards, expert_tensor_parallel=shards) for own in maps]
    sources = tuple(rank for tp in range(shards) for rank in range(tp, len(maps), shards))
    return plan_of_maps(
        flat, Layout(sources, settings.get("capacity"), settings.get("align"), num_rows=settings.get("num_rows"))
    )


def taken(out: Any, index: Tensor) -> Any:
    """The result with rows and probs permuted."""
    rows = out.rows.view(torch.uint8)[index].view(out.rows.dtype) if out.rows.element_size() == 1 else out.rows[index]
    return out._replace(rows=rows, probs=None if out.probs is None else out.probs[index])
