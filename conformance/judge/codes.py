"""Level 1: a quantised code is right if it is nearest to value / scale, or the other neighbour of a
midpoint within the quantiser's roundings.

v = x / scale in float64, c its nearest code. Another code is right only if it is adjacent to c and
v lies within w·|v| of their midpoint: w = 4·2⁻²³ for multiplication by a rounded reciprocal, 2⁻²⁴
for division, 0 for scales that are powers of two. Of the distinct values in this window, at most
half, up to the 99.99 % quantile of the binomial distribution, may have the other code: v is equally
likely on either side of the midpoint, and an error moves it across from one side only.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from conformance.judge.exact import Exact, bits
from conformance.judge.statistics import binomial_quantile

# w above: one rounding; 1/scale and a product, each up to 1 ulp more than correctly rounded
DIVISION, RECIPROCAL = 2.0**-24, 4 * 2.0**-23
FLIP_QUANTILE = 0.9999


@dataclass(frozen=True)
class Codes(Exact):
    """Sign-magnitude codes; `value` holds the nearest code of each element.

    NaN, a saturated value and a signed zero have one right code each.
    """

    scaled: Tensor | None = None  # float64, v above; None: exact
    table: Tensor | None = None  # float64 [256], values by code, from `code_values`
    window: float = 0.0  # w above

    check: ClassVar[str] = "code"
    by_row: ClassVar[tuple[str, ...]] = ("value", "scaled")

    def wrong(self, observed: Tensor) -> np.ndarray | None:
        mismatches, forgiven = self._compared(observed)
        if mismatches.any():
            return mismatches
        return forgiven if self._too_many(forgiven) else None

    def explain(self, observed: Tensor, mismatches: np.ndarray, index: tuple[int, ...]) -> str:
        """The first wrong code with its value, and the number of wrong codes."""
        if self.table is None or self.scaled is None:
            return super().explain(observed, mismatches, index)
        got, expected_code = (int(_integers(x)[index]) for x in (observed, self.value))
        value, count = float(self.scaled[index]), int(mismatches.sum())
        nearest = f"{expected_code:#x} ({self.table[expected_code]:.6g})"
        means = f"{got:#x} ({self.table[got]:.6g}); the nearest to {value:.9g} is {nearest}"
        if not self._compared(observed)[0].any():
            excess = f"{count} values near a midpoint are decided the other way, more than rounding explains"
            return f"{list(index)} is {means}: {excess}"
        return f"{list(index)} is {means} ({count} of {mismatches.size} wrong)"

    def _compared(self, observed: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Masks of wrong codes, and of codes that are not nearest but within the window."""
        expected, got = _integers(self.value), _integers(observed)
        differs = expected != got
        if not differs.any() or self.scaled is None or self.table is None or self.window == 0:
            return differs, np.zeros_like(differs)
        table, v = self.table.numpy(), self.scaled.numpy()
        forgiven = differs & (np.abs(expected - got) == 1) & self._near_midpoint(table[expected], table[got], v)
        return differs & ~forgiven, forgiven

    def _near_midpoint(self, first: np.ndarray, second: np.ndarray, v: np.ndarray) -> np.ndarray:
        with np.errstate(invalid="ignore"):  # NaN and infinity are near no midpoint
            near: np.ndarray = np.abs(v - (first + second) / 2) <= self.window * np.abs(v)
        return near

    def _too_many(self, forgiven: np.ndarray) -> bool:
        """Whether more values have the other code than rounding explains."""
        if not forgiven.any():
            return False
        assert self.table is not None and self.scaled is not None
        expected, table, v = _integers(self.value), self.table.numpy(), self.scaled.numpy()
        neighbours = (table[np.clip(expected + step, 0, len(table) - 1)] for step in (-1, 1))
        near = np.logical_or(*(self._near_midpoint(table[expected], neighbour, v) for neighbour in neighbours))
        return len(np.unique(v[forgiven])) > binomial_quantile(len(np.unique(v[near])), 0.5, FLIP_QUANTILE)


def code_values(dtype: torch.dtype) -> Tensor:
    """The values of the 256 codes of an 8-bit float format."""
    return torch.arange(256, dtype=torch.uint8).view(dtype).double()


def _integers(codes: Tensor) -> np.ndarray:
    return bits(codes).astype(np.int64)
