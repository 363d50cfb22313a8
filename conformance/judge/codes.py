"""Level 1: a quantised code is right if it is the nearest to the value that was divided by the scale, or the other one of a tie that
rounding before the quantiser could not tell from where it stood.

v = x / scale in float64, c its nearest code. Another code is right only if it is c's neighbour, and v within w·|v| of the midpoint of
the two: a quantiser that multiplies with a rounded reciprocal has v up to w = 4·2⁻²³ off, one that divides has w = 2⁻²⁴, and with
a scale that is a power of two w = 0 and nothing is forgiven. Of the values inside the window no more than half, up to the 99.99 %
quantile of the binomial distribution, may have been decided the other way: v lies on either side of the midpoint alike, and an error
can carry it across from one side only. (Equal values are decided alike and count once.) With every in-window value as a trial of its
own measured frequency the rule would hold of anything.
"""

from dataclasses import dataclass

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
    """Codes of a format with a sign and a magnitude: `value` holds the nearest ones, one an element.

    Every code counts: a NaN, a saturated value or the sign of a zero has one right code.
    """

    scaled: Tensor | None = None  # float64, v above; None: exact
    table: Tensor | None = None  # float64, what each code means, by code; as `code_values` makes it
    window: float = 0.0  # w above

    def __post_init__(self) -> None:
        """A copy with fewer rows of `value` keeps as many of the others."""
        if self.scaled is not None and len(self.scaled) > len(self.value):
            object.__setattr__(self, "scaled", self.scaled[: len(self.value)])

    def explain(self, observed: Tensor, wrong: np.ndarray, index: tuple[int, ...]) -> str:
        """The first wrong code with the value that it stands for, and how many are wrong."""
        if self.table is None or self.scaled is None:
            return super().explain(observed, wrong, index)
        got, right = (int(_integers(x)[index]) for x in (observed, self.value))
        means = f"{got:#x} ({self.table[got]:.6g}); the nearest to {float(self.scaled[index]):.9g} is {right:#x} ({self.table[right]:.6g})"
        if miscoded(self, observed, flips=False) is None:
            return f"{list(index)} is {means}: {int(wrong.sum())} values near a midpoint are decided the other way, more than rounding explains"
        return f"{list(index)} is {means} ({int(wrong.sum())} of {wrong.size} wrong)"


def code_values(dtype: torch.dtype) -> Tensor:
    """What each of the 256 codes of an 8-bit float format means."""
    return torch.arange(256, dtype=torch.uint8).view(dtype).double()


def _integers(codes: Tensor) -> np.ndarray:
    return bits(codes).astype(np.int64)


def miscoded(expected: Codes, observed: Tensor, flips: bool = True) -> np.ndarray | None:
    """True where a code is wrong, or None.

    Args:
        flips: whether to count those that are right only because of the window; if there are too many, all of those are wrong.
    """
    right, got = _integers(expected.value), _integers(observed)
    other = right != got
    if not other.any():
        return None
    if expected.scaled is None or expected.table is None or expected.window == 0:
        return other
    table, v = expected.table.numpy(), expected.scaled.numpy()
    first, second = table[right], table[got]
    with np.errstate(invalid="ignore"):  # NaN and infinity are near no midpoint
        forgiven = (
            other & (np.abs(right - got) == 1) & (np.abs(v - (first + second) / 2) <= expected.window * np.abs(v))
        )
    wrong = other & ~forgiven
    if wrong.any():
        return wrong
    if not flips:
        return None
    near = len(np.unique(v[_within_window(expected, right, v, table)]))
    decided_otherwise = len(np.unique(v[forgiven]))
    return forgiven if decided_otherwise > binomial_quantile(near, 0.5, FLIP_QUANTILE) else None


def _within_window(expected: Codes, right: np.ndarray, v: np.ndarray, table: np.ndarray) -> np.ndarray:
    """The values that are near enough to a midpoint for another code to be right."""
    near = np.zeros(v.shape, dtype=bool)
    for step in (-1, 1):
        neighbour = table[np.clip(right + step, 0, len(table) - 1)]
        with np.errstate(invalid="ignore"):
            near |= np.abs(v - (table[right] + neighbour) / 2) <= expected.window * np.abs(v)
    return near
