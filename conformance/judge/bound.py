"""Level 2: a sum is right if it lies within the worst case of its declared arithmetic.

    |y - y*| ≤ γ_n(u_acc) · Σ|terms| + u_out · (|y*| + γ_n Σ|terms|) + η_out,   γ_n(u) = (1 + u)ⁿ - 1

y* is the float64 result on the same stored inputs, n the roundings a term can meet on its way, u the unit roundoff of the
accumulator and of the output, η half the output's smallest subnormal. It holds for every order of summation, so no honest
kernel can leave it. (The usual n·u / (1 - n·u) is an upper estimate of γ_n that has no meaning from n·u = 1: 256 terms in bf16.)
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from conformance.judge.expectation import Resolved

ROUNDOFF = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
HALF_SUBNORMAL = {
    torch.float64: 2.0**-1075,
    torch.float32: 2.0**-150,
    torch.float16: 2.0**-25,
    torch.bfloat16: 2.0**-134,
}


@dataclass(frozen=True)
class Bounded(Resolved):
    """An output that is a sum: its float64 value, how far an honest result may be from it, and its dtype."""

    bound: Tensor  # float64, ≥ 0; 0 asks for the exact value, infinity for none
    dtype: torch.dtype
    accumulator: torch.dtype

    check: ClassVar[str] = "bound"
    by_row: ClassVar[tuple[str, ...]] = ("value", "bound")

    @property
    def honest(self) -> Tensor:
        return self.value.to(self.dtype)

    def dtype_error(self, observed: Tensor) -> str | None:
        return None if observed.dtype == self.dtype else f"has dtype {observed.dtype}; the reference's is {self.dtype}"

    def wrong(self, observed: Tensor) -> np.ndarray | None:
        """Where the distance exceeds the bound; NaN and infinities must be where the reference has them."""
        right, got, bound = self.value.numpy(), observed.detach().double().numpy(), self.bound.numpy()
        with np.errstate(invalid="ignore"):
            fine = (np.abs(got - right) <= bound) | (bound == np.inf)
        odd = ~np.isfinite(right)
        if odd.any():
            fine = np.where(odd, (right == got) | (np.isnan(right) & np.isnan(got)), fine)
        return None if fine.all() else ~fine

    def moved(self, corrupt: Tensor) -> bool:
        before, after = self.honest.double().numpy(), corrupt.double().numpy()
        with np.errstate(invalid="ignore"):  # `honest` is rounded, up to one bound away
            return bool((np.abs(after - before) > 4 * self.bound.numpy()).any())

    def explain(self, observed: Tensor, wrong: np.ndarray, index: tuple[int, ...]) -> str:
        """The worst element in units of its bound, and how many are wrong."""
        got, right = observed.detach().double().numpy(), self.value.numpy()
        where = f"{list(index)} is {got[index]:.9g}; the reference has {right[index]:.9g}"
        with np.errstate(all="ignore"):
            ratio = np.where(wrong, np.abs(got - right) / self.bound.numpy(), 0)
        finite = ratio[np.isfinite(ratio)].max(initial=0)
        rows = int(wrong.reshape(len(wrong), -1).any(1).sum()) if wrong.ndim else 1
        worst = (
            f"error {finite:.1f} × the bound of {self.accumulator} accumulation".replace("torch.", "")
            if finite
            else "where it must be exact"
        )
        return f"{where}: {worst}, {rows} of {len(wrong) if wrong.ndim else 1} rows"


def sum_bound(value: Tensor, magnitude: Tensor, terms: int, dtype: torch.dtype, accumulator: torch.dtype) -> Bounded:
    """The bound of a sum.

    Args:
        value: float64 result.
        magnitude: float64 Σ|terms|; where it is 0 the result must be exactly 0.
        terms: n above, the roundings a term can meet.
        dtype, accumulator: of the output and of the sum.
    """
    gamma = math.expm1(terms * math.log1p(ROUNDOFF[accumulator]))
    bound = gamma * magnitude + ROUNDOFF[dtype] * (value.abs() + gamma * magnitude)
    return Bounded(value, torch.where(magnitude > 0, bound + HALF_SUBNORMAL[dtype], 0.0), dtype, accumulator)
