"""What needs nothing from other ranks runs beside what does: shared experts beside a dispatch, or beside all of dispatch, experts and combine."""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

X = TypeVar("X")
Y = TypeVar("Y")


def beside(local: Callable[[], X], exchange: Callable[[], Y], device: torch.device) -> tuple[X, Y]:
    """(local(), exchange()), at once where the device is a GPU: `local` on a stream of its own.

        y, rows = beside(partial(shared_experts, x, fc1, fc2), partial(hybridep_dispatch, x, routing_map, …), x.device)

    `local` is launched first, so that an exchange whose host waits for counts does not hold it up. What stands before on the current stream is
    done before either begins; what comes after waits for both. Autograd runs a backward on the stream of its forward, so that gradients run
    beside each other likewise. Both can be captured in one graph, if each can.

    Args:
        local: must not communicate: the ranks' launches on two streams have no common order.
        exchange: every rank's, in the same order.
        device: of their tensors.

    Source: the shared-expert overlap of Megatron's dispatchers, which cuts the experts into steps between the collectives instead.
    """
    if device.type != "cuda":
        return local(), exchange()
    here, other = torch.cuda.current_stream(device), _stream(device)
    other.wait_stream(here)
    with torch.cuda.stream(other):
        own = local()
    exchanged = exchange()
    here.wait_stream(other)
    for x in _tensors(own):
        x.record_stream(here)  # its memory is the other stream's
    return own, exchanged


@cache
def _stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)


def _tensors(result: Any) -> Iterator[Tensor]:
    """Those of a result, alone or in a tuple."""
    for x in result if isinstance(result, tuple) else (result,):
        if isinstance(x, Tensor):
            yield x
