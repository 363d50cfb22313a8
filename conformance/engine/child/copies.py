"""Copies inputs to the device, in time or late. The host does not wait for a small one.

A GPU that many processes share gives each a turn of its own: with fifteen, one wait takes 2 ms.
"""

import torch
from torch import Tensor

from conformance.core.contract import Problem
from conformance.private_parts import available

PINNED_BYTES = 2**20  # more is not pinned: torch keeps pinned memory for the next copy


def copied(x: Tensor, device: str) -> Tensor:
    """A copy of a tensor of the host on the device, in memory of its own."""
    if device == "cuda" and 0 < x.nbytes <= PINNED_BYTES:
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device, copy=True)


def delay(placed: dict[str, Tensor]) -> None:
    """Overwrite the inputs by garbage now, and by their values after a pause on the stream."""
    sources = {name: x.detach().clone() for name, x in placed.items()}
    for x in placed.values():
        x.detach().zero_()
    if sleep := available("torch.cuda._sleep"):
        sleep(2_000_000)  # about a millisecond
    for name, x in placed.items():
        x.detach().copy_(sources[name])


def overwrite(placed: dict[str, Tensor], problem: Problem) -> None:
    """The values of another call, of equal shapes, in these very tensors."""
    with torch.no_grad():
        for name, x in problem.masters.items():
            placed[name].copy_(x)
