"""Local work at the same time as an exchange: shared experts during a dispatch, or during all of
dispatch, experts and combine.
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

X = TypeVar("X")
Y = TypeVar("Y")


def beside(local: Callable[[], X], exchange: Callable[[], Y], device: torch.device) -> tuple[X, Y]:
    """(local(), exchange()), at once where the device is a GPU: `local` on a stream of its own.

        dispatch = partial(hybridep_dispatch, x, routing_map, …)
        y, rows = beside(partial(shared_experts, x, fc1, fc2), dispatch, x.device)

    `local` is launched first, so that a host that waits for counts does not delay it, and must not
    communicate: the ranks' launches on two streams have no common order. Later work waits for both.
    Autograd runs a backward on the stream of its forward, so that gradients overlap too. One graph
    can capture both, if it can capture each.
    """
    if device.type != "cuda":
        return local(), exchange()
    here, other = torch.cuda.current_stream(device), _stream(device)
    other.wait_stream(here)
    with torch.cuda.stream(other):
        result = local()
    exchanged = exchange()
    here.wait_stream(other)
    for x in _tensors(result):
        x.record_stream(here)  # its memory is the other stream's
    return result, exchanged


@cache
def _stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)


def _tensors(result: Any) -> Iterator[Tensor]:
    """The tensors of a result, alone or in a tuple."""
    for x in result if isinstance(result, tuple) else (result,):
        if isinstance(x, Tensor):
            yield x
