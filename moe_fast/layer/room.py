"""The rule that runs a step a second time if some rank had too little room for its rows."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

X = TypeVar("X")


def in_room(run: Callable[[bool], X], dropped: Callable[[X], Tensor], group: Any, device: torch.device) -> X:
    """run(True), which has a budget of rows; and run(False), which has none, if any rank has
    dropped rows.

    All ranks call it together and decide alike. Before the second run torch's generators of the CPU
    and of the device are set back, so that it draws the same numbers. The host waits once.

    Args:
        group: None: this process alone.
        dropped: of the first result, [] bool or integer: whether this rank has dropped rows.
    """
    random_states = torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    result = run(True)
    overflow = dropped(result).to(torch.int32)
    if group is not None:
        dist.all_reduce(overflow, op=dist.ReduceOp.MAX, group=group)
    if not bool(overflow):
        return result
    torch.set_rng_state(random_states[0])
    if random_states[1] is not None:
        torch.cuda.set_rng_state(random_states[1], device)
    return run(False)
