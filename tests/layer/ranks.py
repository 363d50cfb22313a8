"""Calls a function on several ranks, which are processes joined by gloo."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from conformance.engine.child import server


def on_ranks(ranks: int, function: Callable[..., Any], folder: Path, *arguments: Any) -> list[Any]:
    """function(group, rank, *arguments) of each rank."""
    with server.start().Pool(ranks) as pool:
        calls = [(rank, ranks, str(folder / "store"), function, arguments) for rank in range(ranks)]
        return pool.starmap_async(_call, calls, chunksize=1).get(timeout=3000)


def _call(rank: int, ranks: int, store: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    try:
        return function(dist.group.WORLD, rank, *arguments)
    finally:
        dist.destroy_process_group()
