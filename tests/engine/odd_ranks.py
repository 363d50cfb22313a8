"""A `shift` whose rank 1 is odd, in the way that the number of rows chooses."""

import time
from typing import Any

import torch.distributed as dist
from torch import Tensor

from tests.engine.odd_implementations import CALLS, SLEEP, Mute, Unprintable
from tests.engine.world_fixtures import shift as right

TRANSPORTS = {
    "transport_raises": lambda: int("no number"),
    "transport_mute": lambda: (_ for _ in ()).throw(Mute()),
    "transport_list": lambda: ["mail"],
    "transport_unprintable": Unprintable,
    "transport_sleeps": lambda: time.sleep(SLEEP),
}
KINDS = [
    *("os_exit_3", "sys_exit", "keyboard_interrupt", "group_sigterm", "group_sigkill", "fork_outlives", "exec_true"),
    *("close_all", "garbage", "half_a_message", "stops", "starts_a_program", "gradients", "mute", "evasive"),
    *TRANSPORTS,
]
_kind = ""  # of the last call of this rank


def shift(x: Tensor, *, group: Any) -> Tensor:
    global _kind
    odd = len(x) > 1 and dist.get_rank(group) == 1
    _kind = KINDS[len(x) - 2] if odd else ""
    out = right(x, group=group)
    return CALLS[_kind](out) if _kind in CALLS else out


def transport(function: str, group: Any) -> Any:
    return TRANSPORTS[_kind]() if _kind in TRANSPORTS else ""
