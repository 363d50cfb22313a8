"""Level 2: a sum is right if it lies within the worst case of its declared arithmetic.

    |y - y*| ≤ γ_n(u_acc) Σ|terms| + u_out (|y*| + γ_n Σ|terms|) + η_out,   γ_n(u) = (1 + u)ⁿ - 1

y* is the float64 result on the same stored inputs, n the number of roundings per term, u the unit
roundoff of the accumulator and of the output, η half the output's smallest subnormal. The bound
holds for every order of summation, so no honest kernel exceeds it. (The usual n·u / (1 - n·u) is an
upper estimate of γ_n, undefined from n·u = 1 on: 256 terms in bf16.)
"""

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from conformance.judge.expectation import Resolved
from conformance.judge.factor import plain_factor

ROUNDOFF = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
HALF_SUBNORMAL = {
    torch.float64: 2.0**-1075,
    torch.float32: 2.0**-150,
    torch.float16: 2.0**-25,
    torch.bfloat16: 2.0**-134,
}


@dataclass(frozen=True)
class Bounded(Resolved):
    """An output that is a sum: float64 value, bound on an honest result's error, dtype."""

    bound: Tensor  # float64, ≥ 0; 0: exact; infinity: unchecked
    dtype: torch.dtype
    accumulator: torch.dtype
    # True where NaN and infinities are right too: a stage before may have overflowed; None: nowhere
    spoilt: Tensor | None = field(default=None, kw_only=True)

    check: ClassVar[str] = "bound"
    by_row: ClassVar[tuple[str, ...]] = ("value", "bound", "spoilt")

    @cached_property
    def honest(self) -> Tensor:
        return self.value.to(self.dtype)

    def dtype_error(self, observed: Tensor) -> str | None:
        return None if observed.dtype == self.dtype else f"has dtype {observed.dtype}; the reference's is {self.dtype}"

    def wrong(self, observed: Tensor) -> np.ndarray | None:
        """Where the error exceeds the bound, or NaN and infinities are not the reference's."""
        expected, got, bound = self.value.numpy(), observed.detach().double().numpy(), self.bound.numpy()
        with np.errstate(invalid="ignore"):
            fine = (np.abs(got - expected) <= bound) | (bound == np.inf)
        odd = ~np.isfinite(expected)
        if odd.any():
            fine = np.where(odd, (expected == got) | (np.isnan(expected) & np.isnan(got)), fine)
        if self.spoilt is not None:
            fine = fine | (self.spoilt.numpy() & ~np.isfinite(got))
        return None if fine.all() else ~fine

    def scores(self, observed: Tensor) -> dict[str, float]:
        """The largest error beyond the correctly rounded result's, over what the bound leaves.

        (|y - y*| - r) / (bound - r) with r = |round(y*) - y*|: 0 for a correctly rounded result.
        The error itself says little, because rounding alone nearly reaches the bound.
        """
        got, expected, bound = observed.detach().double().numpy(), self.value.numpy(), self.bound.numpy()
        with np.errstate(all="ignore"):
            rounding = np.abs(self.honest.double().numpy() - expected)
            share = (np.abs(got - expected) - rounding) / (bound - rounding)
        counts = np.isfinite(share) & (bound > rounding) & np.isfinite(bound)
        return {"error": float(share[counts].max(initial=0))}

    def taken(self, rows: Tensor) -> "Bounded":
        """The bound alone of some rows, which `rows` indexes."""
        spoilt = None if self.spoilt is None else self.spoilt[rows]
        return Bounded(self.value[rows], self.bound[rows], self.dtype, self.accumulator, spoilt=spoilt)

    def moved(self, corrupt: Tensor) -> bool:
        expected, corrupted = self.honest.double().numpy(), corrupt.double().numpy()
        with np.errstate(invalid="ignore"):  # `honest` is rounded, up to one bound away
            apart = np.abs(corrupted - expected) > 4 * self.bound.numpy()
        if self.spoilt is not None:
            apart &= ~(self.spoilt.numpy() & ~np.isfinite(corrupted))
        return bool(apart.any())

    def explain(self, observed: Tensor, mismatches: np.ndarray, index: tuple[int, ...]) -> str:
        """The worst element in units of its bound, and how many are wrong."""
        got, expected = observed.detach().double().numpy(), self.value.numpy()
        where = f"{list(index)} is {got[index]:.9g}; the reference has {expected[index]:.9g}"
        with np.errstate(all="ignore"):
            ratio = np.where(mismatches, np.abs(got - expected) / self.bound.numpy(), 0)
        finite = ratio[np.isfinite(ratio)].max(initial=0)
        rows = int(mismatches.reshape(len(mismatches), -1).any(1).sum()) if mismatches.ndim else 1
        worst = (
            f"error {finite:.1f} × the bound of {self.accumulator} accumulation".replace("torch.", "")
            if finite
            else "where it must be exact"
        )
        factor = plain_factor(expected, got, self.bound.numpy())
        factor_note = f"; all values are {factor} × the reference's" if factor else ""
        return f"{where}: {worst}, {rows} of {len(mismatches) if mismatches.ndim else 1} rows{factor_note}"


def sum_bound(value: Tensor, magnitude: Tensor, terms: int, dtype: torch.dtype, accumulator: torch.dtype) -> Bounded:
    """The bound of a sum.

    Args:
        value: float64 result.
        magnitude: float64 Σ|terms|; where it is 0 the result must be exactly 0.
        terms: n above, the roundings per term.
        dtype, accumulator: of the output and of the sum.
    """
    reference_roundings = (
        terms if accumulator == torch.float64 else 0
    )  # roundings of `value`, which is a sum in float64
    gamma = math.expm1((terms + reference_roundings) * math.log1p(ROUNDOFF[accumulator]))
    bound = gamma * magnitude + ROUNDOFF[dtype] * (value.abs() + gamma * magnitude)
    return Bounded(value, torch.where(magnitude > 0, bound + HALF_SUBNORMAL[dtype], 0.0), dtype, accumulator)


# ---- contractions


@dataclass(frozen=True)
class Accumulator:
    """A contraction's declared accumulation.

    Adding a product rounds by at most `unit` times the largest magnitude so far. After `block`
    products (None: never) the partial sum is scaled and added to a float32 sum that starts at 0.
    """

    unit: float = ROUNDOFF[torch.float32]
    block: int | None = None
    # typical error in units: 1/√3 if uniform; 1 where n does not count every rounding
    spread: float = 1.0
    # error towards zero in units per product, where products are truncated before they are added
    drift: float = 0.0

    def worst(self, terms: int) -> float:
        """γ: the worst error of a sum of `terms` products, relative to Σ|terms|."""
        in_block, promoted = self._steps(terms)
        return math.expm1(in_block * math.log1p(self.unit) + promoted * math.log1p(ROUNDOFF[torch.float32]))

    def typical(self, terms: int) -> float:
        """α: √n·u·spread, the size of n independent errors relative to a sum without cancellation.

        A sequential float32 sum reaches a third of α. A matrix unit reaches α where one product
        outweighs the others, which are truncated at its last place. Errors of truncation have one
        sign, so they add up to n·u·drift.
        """
        in_block, promoted = self._steps(terms)
        return math.hypot(
            math.sqrt(in_block) * self.unit * self.spread,
            in_block * self.unit * self.drift,
            math.sqrt(promoted) * ROUNDOFF[torch.float32],
        )

    def _steps(self, terms: int) -> tuple[int, int]:
        """Products per block, and roundings of the sum of blocks (one addition, two scalings)."""
        in_block = min(terms, self.block or terms)
        return in_block, -(-terms // in_block) + 2 if self.block and terms else 0


FLOAT32 = Accumulator()
# float32 sums of products of 16 or 8 bits; positive products reach n·u/9 on Hopper
MATRIX_UNIT = Accumulator(drift=1 / 8)
# 14 bits, truncated; promoted every 128 products: DeepSeek-V3 report, 3.3.2
HOPPER_FP8 = Accumulator(unit=2.0**-13, block=128, spread=3**-0.5)


def accumulating(sums: torch.dtype, factors: torch.dtype) -> Accumulator:
    """The accumulator of products of two numbers of dtype `factors` that are added in `sums`."""
    on_matrix_unit = sums == torch.float32 and factors.itemsize <= 2
    return MATRIX_UNIT if on_matrix_unit else Accumulator(unit=ROUNDOFF[sums])


def contraction_bound(
    value: Tensor, magnitude: Tensor, terms: int, dtype: torch.dtype, accumulator: Accumulator = FLOAT32
) -> Bounded:
    """`sum_bound` for an `Accumulator` instead of a dtype.

    Args:
        value, magnitude: float64 result and Σ|terms|.
        terms: products per element.
    """
    brought = accumulator.worst(terms) * magnitude
    bound = brought + ROUNDOFF[dtype] * (value.abs() + brought) + HALF_SUBNORMAL[dtype]
    return Bounded(value, torch.where(magnitude > 0, bound, 0.0), dtype, torch.float32)
