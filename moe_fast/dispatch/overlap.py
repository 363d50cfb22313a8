"""Local work at the same time as an exchange: shared experts during a dispatch, or during all of
dispatch, experts and combine.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from moe_fast.launch.autograd import once_differentiable
from moe_fast.launch.operators import has_memory

X = TypeVar("X")
Y = TypeVar("Y")


def beside(local: Callable[[], X], exchange: Callable[[], Y], device: torch.device) -> tuple[X, Y]:
    """(local(), exchange()). On a GPU both run at once, `local` on a separate stream.

        dispatch = partial(hybridep_dispatch, x, routing_map, …)
        y, rows = beside(partial(shared_experts, x, fc1, fc2), dispatch, x.device)

    `local` is launched first, so that a host that waits for counts does not delay it. It must not
    communicate, because launches on two streams have no common order on the ranks. Later work waits
    for both. Autograd runs a backward on the stream of its forward, so that the gradients overlap
    too. One CUDA graph can capture both, if it can capture each.
    """
    result = launched_beside(local, device)
    exchanged = exchange()
    wait_for(_tensors(result), device)
    return result, exchanged


def in_backward(rows: Tensor, local: Callable[[], Any]) -> Tensor:
    """The rows unchanged. When their gradient is computed, the backward launches `local` on the
    stream of `beside`, and goes on with the operation that made the rows, for example an exchange.

        rows = in_backward(dispatched.rows, weight_gradients)       # beside the dispatch's backward
        …
        wait_for(gradients, device)                                 # before anything reads them

    `local` must not communicate, and what it reads must live until something has waited for it.
    """
    return _InBackward.apply(rows, local)


class _InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, local: Callable[[], Any]) -> Tensor:
        ctx.local = local
        return rows.view_as(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_rows: Tensor) -> tuple[Tensor, None]:
        launched_beside(ctx.local, d_rows.device)
        return d_rows, None


def launched_beside(local: Callable[[], X], device: torch.device) -> X:
    """local(), after all work that was launched before it; on a GPU on a separate stream, of which
    a graph of torch.compile has none.
    """
    if not _has_streams(device):
        return local()
    stream = side_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        return local()


def wait_for(results: Iterable[Tensor], device: torch.device) -> None:
    """Make later work on the current stream wait for everything that `launched_beside` has
    launched, and keep the results alive for it.
    """
    if _has_streams(device):
        here = torch.cuda.current_stream(device)
        here.wait_stream(side_stream(device))
        for x in results:
            x.record_stream(here)  # its memory is the other stream's


def _has_streams(device: torch.device) -> bool:
    return device.type == "cuda" and has_memory()


@cache
def side_stream(device: torch.device) -> Any:
    """The stream on which a GPU runs `launched_beside`."""
    return torch.cuda.Stream(device)


def _tensors(result: Any) -> Iterator[Tensor]:
    """The tensors of a result, alone or in a tuple."""
    for x in result if isinstance(result, tuple) else (result,):
        if isinstance(x, Tensor):
            yield x
