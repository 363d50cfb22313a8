"""Level 1: a quantised code is right if it is nearest to the value divided by the scale, or next to
a midpoint closer than the quantiser's own roundings.

v = x / scale in float64, c its nearest code. Another code is right only if it is c's neighbour, and
v within w·|v| of the midpoint of the two: a quantiser that multiplies with a rounded reciprocal has
v up to w = 4·2⁻²³ off, one that divides has w = 2⁻²⁴, and with a scale that is a power of two w = 0
and nothing is forgiven. Of the values inside the window no more than half, up to the 99.99 %
quantile of the binomial distribution, may have been decided the other way: v lies on either side of
the midpoint alike, and an error can carry it across from one side only. (Equal values are decided
alike and count once.) With every in-window value as a trial of its own measured frequency the rule
would hold of anything.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from conformance.judge.exact import Exact, bits
from conformance.judge.statistics import binomial_quantile

DIVISION, RECIPROCAL = (
    2.0**-24,
    4 * 2.0**-23,
)  # w above: one rounding; 1/scale, a product, and either approximated by 1 ulp
FLIP_QUANTILE = 0.9999


@dataclass(frozen=True)
class Codes(Exact):
    """Codes of a format with a sign and a magnitude: `value` holds the nearest of each element.

    Every code counts: a NaN, a saturated value or the sign of a zero has one right code.
    """

    scaled: Tensor | None = None  # float64, v above; None: exact
    table: Tensor | None = None  # float64, what each code means, by code; as `code_values` makes it
    window: float = 0.0  # w above

    check: ClassVar[str] = "code"
    by_row: ClassVar[tuple[str, ...]] = ("value", "scaled")

    def wrong(self, observed: Tensor) -> np.ndarray | None:
        wrong, forgiven = self._compared(observed)
        if wrong.any():
            return wrong
        return forgiven if self._too_many(forgiven) else None

    def explain(self, observed: Tensor, wrong: np.ndarray, index: tuple[int, ...]) -> str:
        """The first wrong code with the value that it stands for, and how many are wrong."""
        if self.table is None or self.scaled is None:
            return super().explain(observed, wrong, index)
        got, right = (int(_integers(x)[index]) for x in (observed, self.value))
        value, count = float(self.scaled[index]), int(wrong.sum())
        means = f"{got:#x} ({self.table[got]:.6g}); the nearest to {value:.9g} is {right:#x} ({self.table[right]:.6g})"
        if not self._compared(observed)[0].any():
            others = f"{count} values near a midpoint are decided the other way, more than rounding explains"
            return f"{list(index)} is {means}: {others}"
        return f"{list(index)} is {means} ({count} of {wrong.size} wrong)"

    def _compared(self, observed: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Where a code is wrong, and where it is not the nearest but right by the window."""
        right, got = _integers(self.value), _integers(observed)
        other = right != got
        if not other.any() or self.scaled is None or self.table is None or self.window == 0:
            return other, np.zeros_like(other)
        table, v = self.table.numpy(), self.scaled.numpy()
        forgiven = other & (np.abs(right - got) == 1) & self._near_midpoint(table[right], table[got], v)
        return other & ~forgiven, forgiven

    def _near_midpoint(self, first: np.ndarray, second: np.ndarray, v: np.ndarray) -> np.ndarray:
        with np.errstate(invalid="ignore"):  # NaN and infinity are near no midpoint
            near: np.ndarray = np.abs(v - (first + second) / 2) <= self.window * np.abs(v)
        return near

    def _too_many(self, forgiven: np.ndarray) -> bool:
        """Whether rounding explains fewer of the values decided the other way."""
        if not forgiven.any():
            return False
        assert self.table is not None and self.scaled is not None
        right, table, v = _integers(self.value), self.table.numpy(), self.scaled.numpy()
        neighbours = (table[np.clip(right + step, 0, len(table) - 1)] for step in (-1, 1))
        near = np.logical_or(*(self._near_midpoint(table[right], neighbour, v) for neighbour in neighbours))
        return len(np.unique(v[forgiven])) > binomial_quantile(len(np.unique(v[near])), 0.5, FLIP_QUANTILE)


def code_values(dtype: torch.dtype) -> Tensor:
    """What each of the 256 codes of an 8-bit float format means."""
    return torch.arange(256, dtype=torch.uint8).view(dtype).double()


def _integers(codes: Tensor) -> np.ndarray:
    return bits(codes).astype(np.int64)
