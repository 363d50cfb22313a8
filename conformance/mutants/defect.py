"""The record of a planted defect."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Wrapper = Callable[..., Any]
Change = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Defect:
    """One defect: its description, its origin, and the functions it is planted in."""

    name: str
    title: str
    origin: str
    wrappers: dict[str, Wrapper]  # by function: wrapper(base function, *args, **settings)


class _Changed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Change) -> Tensor:
        return change(x.clone())

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g, None


def with_values(x: Tensor, change: Change) -> Tensor:
    """change(x), with the gradient of x: a defect of the forward alone."""
    changed: Tensor = _Changed.apply(x, change)  # type: ignore[no-untyped-call]
    return changed
