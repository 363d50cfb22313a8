"""The toy family's implementation."""

import torch
from torch import Tensor


def reverse(x: Tensor, *, kept: int = 0) -> tuple[Tensor]:
    """The rows of x [R,C] in reverse order, after the first `kept` rows.

    Raises:
        ValueError: kept < 0.
    """
    if kept < 0:
        raise ValueError(f"kept is {kept}")
    return (torch.cat([x[:kept], x[kept:].flip(0)]),)
