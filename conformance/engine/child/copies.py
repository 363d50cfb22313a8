"""Copies inputs to the device, either in time or late.

The host does not wait for a small copy: a GPU that many processes share lets them run in turns, and
with fifteen processes one wait takes 2 ms.
"""

import torch
from torch import Tensor

from conformance.core.contract import Problem
from conformance.private_parts import available

PINNED_BYTES = 2**20  # larger tensors are not pinned: torch keeps pinned memory for the next copy


def copied(x: Tensor, device: str) -> Tensor:
    """A copy of a tensor of the host on the device, in memory of its own."""
    if device == "cuda" and 0 < x.nbytes <= PINNED_BYTES:
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device, copy=True)


def delay(placed: dict[str, Tensor]) -> None:
    """Overwrite the inputs by garbage at once, and by their values after a pause on the stream."""
    sources = {name: x.detach().clone() for name, x in placed.items()}
    for x in placed.values():
        x.detach().zero_()
    if sleep := available("torch.cuda._sleep"):
        sleep(2_000_000)  # about a millisecond
    for name, x in placed.items():
        x.detach().copy_(sources[name])


def overwrite(placed: dict[str, Tensor], problem: Problem) -> None:
    """Overwrite these tensors by the values of another call of equal shapes."""
    with torch.no_grad():
        for name, x in problem.masters.items():
            placed[name].copy_(x)
