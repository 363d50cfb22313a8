"""Codes of intervals: encoding is monotonic, so a code is right if it lies between the codes of
both ends.

Sign-magnitude codes are ordered by value, -0 before 0. An unknown value allows every code, NaN
included. If both ends have the same code, only this code is right.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from conformance.judge.exact import Exact

NAN_PLACE, NO_PLACE = 1000, 9000  # of every NaN; of invalid codes
LEAST_PLACE, MOST_PLACE = -2000, 2000
SLACK = 1 + 2.0**-50  # of half a width, which float64 rounds


@dataclass(frozen=True)
class Interval:
    """Numbers between `low` and `high`; NaN where `nan`, any where `unknown`. Width 0: exact."""

    low: Tensor
    high: Tensor
    nan: Tensor  # bool
    unknown: Tensor  # bool

    @classmethod
    def exact(cls, x: Tensor) -> "Interval":
        return cls(x, x, x.isnan(), torch.zeros_like(x, dtype=torch.bool))

    @classmethod
    def around(cls, x: Tensor, error: Tensor) -> "Interval":
        """x ± error; unknown where the error is infinite."""
        return cls(x - error, x + error, x.isnan(), error.isinf())

    @property
    def is_exact(self) -> bool:
        return bool(((self.low == self.high) | self.nan).all()) and not bool(self.unknown.any())

    @cached_property
    def center(self) -> Tensor:
        """float64: the middle; 0 where unknown."""
        middle = torch.where(self.low == self.high, self.low, (self.low.double() + self.high.double()) / 2)
        return torch.where(self.nan, torch.nan, torch.where(self.margin.isinf(), 0.0, middle))

    @cached_property
    def margin(self) -> Tensor:
        """float64: half of the width; infinity where unknown."""
        half = (self.high.double() - self.low.double()) / 2 * SLACK
        half = torch.where(self.low == self.high, 0.0, torch.where(half.isnan(), torch.inf, half))
        return torch.where(self.nan, 0.0, torch.where(self.unknown, torch.inf, half))

    def each(self, change: Callable[[Tensor], Tensor]) -> "Interval":
        """The interval with all tensors indexed, reshaped or permuted by `change`."""
        return Interval(*(change(x) for x in (self.low, self.high, self.nan, self.unknown)))

    def mapped(self, low: Callable[[Tensor], Tensor], high: Callable[[Tensor], Tensor] | None = None) -> "Interval":
        """The image under a monotonic function, or under a lower and an upper bound of it."""
        return Interval(low(self.low), (high or low)(self.high), self.nan, self.unknown)

    def either_zero(self) -> "Interval":
        """The interval with zeros of either sign."""
        return self.mapped(lambda low: torch.where(low == 0, -0.0, low), lambda high: torch.where(high == 0, 0.0, high))

    def or_else(self, alternative: "Interval", where: Tensor) -> "Interval":
        """The hull of both intervals where `where`."""
        low = torch.where(where, torch.minimum(self.low, alternative.low), self.low)
        return Interval(
            low, torch.where(where, torch.maximum(self.high, alternative.high), self.high), self.nan, self.unknown
        )

    def magnitudes(self) -> tuple[Tensor, Tensor]:
        """The bounds of |x| for a maximum that ignores NaN."""
        least = torch.where(self.nan, 0.0, torch.maximum(self.low, -self.high).clamp(min=0))
        most = torch.where(self.nan, 0.0, torch.maximum(self.low.abs(), self.high.abs()))
        return torch.where(self.unknown, 0.0, least), torch.where(self.unknown, torch.inf, most)


@dataclass(frozen=True)
class Ranged(Exact):
    """Codes with a range of right places each; `value` holds right codes."""

    least: Tensor | None = None  # int64, the first right place
    most: Tensor | None = None  # int64, the last right place
    places: Tensor | None = None  # int64 [256], the place of each code, from `code_places`

    check: ClassVar[str] = "code"
    by_row: ClassVar[tuple[str, ...]] = ("value", "least", "most")

    @classmethod
    def between(cls, codes: Interval, meanings: Tensor, sign_bit: int) -> "Ranged":
        """uint8 codes between both ends; any code where unknown."""
        places = code_places(meanings, sign_bit)
        least = torch.where(codes.unknown, LEAST_PLACE, places[codes.low.long()])
        most = torch.where(codes.unknown, MOST_PLACE, places[codes.high.long()])
        return cls(codes.low, "integers", least=least, most=most, places=places)

    def wrong(self, observed: Tensor) -> np.ndarray | None:
        assert self.least is not None and self.most is not None
        position = self._positions(observed)
        mismatches = ((position < self.least) | (position > self.most)).numpy()
        return mismatches if mismatches.any() else None

    def moved(self, corrupt: Tensor) -> bool:
        """Whether some code moved further than the width of its range."""
        assert self.least is not None and self.most is not None
        return bool(((self._positions(corrupt) - self._positions(self.value)).abs() > self.most - self.least).any())

    def _positions(self, codes: Tensor) -> Tensor:
        """The places of codes; NO_PLACE for integers that are no bytes."""
        assert self.places is not None
        code_numbers = codes.to(torch.int64)
        return torch.where((code_numbers >= 0) & (code_numbers < 256), self.places[code_numbers & 0xFF], NO_PLACE)

    def explain(self, observed: Tensor, mismatches: np.ndarray, index: tuple[int, ...]) -> str:
        """The first wrong code with the right ones, and the number of wrong codes."""
        assert self.least is not None and self.most is not None and self.places is not None
        least, most, got = int(self.least[index]), int(self.most[index]), int(observed[index])
        allowed_codes = [code for code in range(256) if least <= int(self.places[code]) <= most]
        text = " or ".join(f"{code:#x}" for code in allowed_codes[:2]) + (
            " or others" if len(allowed_codes) > 2 else ""
        )
        count = f"({int(mismatches.sum())} of {mismatches.size} wrong)"
        return f"{list(index)} is {got:#x}; what its value may be has {text} {count}"


def code_places(meanings: Tensor, sign_bit: int) -> Tensor:
    """The place of each of 256 codes.

    Args:
        meanings: float64 [codes], the values by code.
        sign_bit: the code of -0; 0 for a format without a sign.
    """
    code = torch.arange(256)
    negative = (code & sign_bit) > 0
    position = torch.where(negative, -(code & ~sign_bit) - 1, code)
    position = torch.where(torch.cat([meanings, meanings.new_zeros(256 - len(meanings))]).isnan(), NAN_PLACE, position)
    return torch.where(code < len(meanings), position, NO_PLACE)
