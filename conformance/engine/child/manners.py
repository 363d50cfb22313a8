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


# by name: how a call is made
MANNERS: dict[str, Callable[[Callable[[], Outputs]], Outputs]] = {
    "": lambda call: call(),
    "thread": _in_another_thread,
    "inference": _in_inference_mode,
    "accumulated": lambda call: call(),  # gradients of views, added to a `.grad`: see `Runner`
    "twice": lambda call: call(),  # second derivatives only: see `Runner`
    "overwritten": lambda call: call(),  # the results, before the backward: see `overwritten`
    # manners whose forward runs in a context of its own: see `around_forward`
    "autocast": lambda call: call(),
    "no_grad": lambda call: call(),  # and no backward: see `Runner`
}


def around_forward(manner: str, problem: Problem, device: str) -> AbstractContextManager[Any]:
    """The context in which the forward is called, and the backward is not."""
    if manner == "no_grad":
        return torch.no_grad()
    return torch.autocast(device, dtype=autocast_dtype(problem)) if manner == "autocast" else nullcontext()


def overwritten(outputs: Outputs, gradients: Callable[[], Outputs]) -> Outputs:
    """The results and the gradients, where the results with a graph were overwritten by NaN before
    the backward pass.
    """
    numbers = {name: x for name, x in outputs.items() if isinstance(x, Tensor) and x.requires_grad}
    copies = {name: x.detach().clone() for name, x in numbers.items()}
    for x in numbers.values():
        x.detach().fill_(torch.nan)  # a change in place, which autograd counts
    return outputs | copies | gradients()


def with_graph(outputs: Outputs) -> str:
    """The first output that has a graph; empty: none."""
    return next((name for name, x in outputs.items() if isinstance(x, Tensor) and x.grad_fn is not None), "")
