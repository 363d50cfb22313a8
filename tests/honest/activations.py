"""Honest activations as libraries ship them: torch's own functions, and formulas around a tanh.

Eager       F.silu, F.gelu, F.relu and their autograd, in float32; on a CPU oneDNN adds the three
            terms of gelu's slope in another order
TanhHalf    σ(x) = ½ + ½ tanh(x/2) (CUTLASS); closed-form slopes
TermByTerm  slopes as sums of all their terms, the largest first; cotangents multiplied in first
Doubles     torch's own functions in float64
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.honest.experts import How, make

CUBIC, BEND = 0.044715, math.sqrt(2 / math.pi)


def sigmoid_by_tanh(x: Tensor) -> Tensor:
    return 0.5 * torch.tanh(0.5 * x) + 0.5


@dataclass(frozen=True)
class Shipped(How):
    """torch's own function of every kind."""

    def curve(self, x: Tensor, kind: str, alpha: float | None) -> Tensor:
        if kind in ("swiglu", "silu", "quick_geglu", "quick_gelu"):
            alpha = alpha or (1.702 if "quick" in kind else 1.0)
            return F.silu(x) if alpha == 1.0 else x * torch.sigmoid(alpha * x)
        if kind in ("geglu", "gelu_tanh"):
            return F.gelu(x, approximate="tanh")
        if kind in ("geglu_erf", "gelu"):
            return F.gelu(x)
        return F.relu(x) if kind != "squared_relu" else F.relu(x).square()


@dataclass(frozen=True)
class Summed(How):
    """Closed-form slopes, every product written out and added, the constants first."""

    def slope(self, x: Tensor, kind: str, alpha: float | None) -> Tensor:
        if kind in ("swiglu", "silu", "quick_geglu", "quick_gelu"):
            alpha = alpha or (1.702 if "quick" in kind else 1.0)
            s = self.sigmoid(alpha * x)
            return (1 + alpha * x * (1 - s)) * s
        if kind in ("geglu", "gelu_tanh"):
            t, inner = self.bend(x), BEND * (1 + 3 * CUBIC * (x * x))
            far = t.abs() == 1  # there t's slope is 0, while x² may overflow
            return 0.5 + 0.5 * torch.where(far, 0, x * (1 - t * t) * inner) + 0.5 * t
        if kind in ("geglu_erf", "gelu"):
            bell = x * torch.exp(-0.5 * (x * x)) / math.sqrt(2 * math.pi)
            return 0.5 + bell + 0.5 * self.erf(x * math.sqrt(0.5))
        return super().slope(x, kind, alpha)


Eager = make(Shipped())
TanhHalf = make(How(sigmoid=sigmoid_by_tanh, closed=True))
TermByTerm = make(Summed(closed=True))
Doubles = make(Shipped(dtype=torch.float64))
