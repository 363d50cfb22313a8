"""The manners of making a call, by name."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from conformance.core.autocast import autocast_dtype
from conformance.core.contract import Problem

Outputs = dict[str, Any]


def _in_another_thread(call: Callable[[], Outputs]) -> Outputs:
    """Make the call in a thread that has made no call before, on the same stream."""
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    def made() -> Outputs:
        with torch.cuda.stream(stream):
            return call()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(made).result()


def _in_inference_mode(call: Callable[[], Outputs]) -> Outputs:
    with torch.inference_mode():
        return call()


def made(manner: str, call: Callable[[], Outputs]) -> Outputs:
    """The outputs of a call that is made in a manner.

    "": plainly · "thread", "inference": elsewhere · "accumulated": gradients of views, added to a
    `.grad` · "twice": second derivatives · "overwritten": see `overwritten` · "autocast",
    "no_grad": see `around_forward`
    """
    return {"thread": _in_another_thread, "inference": _in_inference_mode}.get(manner, lambda call: call())(call)


def around_forward(manner: str, problem: Problem, device: str) -> AbstractContextManager[Any]:
    """The context in which the forward is called, and the backward is not."""
    if manner == "no_grad":
        return torch.no_grad()
    return torch.autocast(device, dtype=autocast_dtype(problem)) if manner == "autocast" else nullcontext()


def overwritten(outputs: Outputs, gradients: Callable[[], Outputs]) -> Outputs:
    """The results and the gradients; NaN overwrites the results before the backward pass."""
    numbers = {name: x for name, x in outputs.items() if isinstance(x, Tensor) and x.requires_grad}
    copies = {name: x.detach().clone() for name, x in numbers.items()}
    for x in numbers.values():
        x.detach().fill_(torch.nan)  # a change in place, which autograd counts
    return outputs | copies | gradients()


def with_graph(outputs: Outputs) -> str:
    """The first output that has a graph; empty: none."""
    return next((name for name, x in outputs.items() if isinstance(x, Tensor) and x.grad_fn is not None), "")
