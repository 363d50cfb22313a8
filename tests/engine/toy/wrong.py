"""A defect that only shows with at least four rows and a bfloat16 input."""

import torch
from torch import Tensor

from tests.engine.toy.kernels import reverse as right


def reverse(x: Tensor, *, kept: int = 0) -> tuple[Tensor]:
    y = right(x, kept=kept)[0]
    return (y if x.dtype != torch.bfloat16 else torch.cat([y[:3], 2 * y[3:]]),)
