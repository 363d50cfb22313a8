"""Codes of values that are known to lie between two numbers: encoding is monotonic, so a code is right if it lies between the codes of
both.

Codes of a format with a sign and a magnitude are put in the order of what they mean, -0 before 0; where nothing is known of a value,
every code is right, and a NaN's among them. Between two numbers that have the same code there is one right code: nothing is forgiven for
being near.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from conformance.judge.exact import Exact

NAN_PLACE, NO_PLACE = 1000, 9000  # of all NaN; of what is no code
LEAST_PLACE, MOST_PLACE = -2000, 2000


@dataclass(frozen=True)
class Ranged(Exact):
    """Codes that lie within a range each: `value` holds some that do."""

    least: Tensor | None = None  # int64, the first place that is right
    most: Tensor | None = None  # and the last
    places: Tensor | None = None  # int64 [256], the place of each code; as `code_places` makes it

    check: ClassVar[str] = "code"
    by_row: ClassVar[tuple[str, ...]] = ("value", "least", "most")

    def wrong(self, observed: Tensor) -> np.ndarray | None:
        assert self.least is not None and self.most is not None
        place = self._place(observed)
        wrong = ((place < self.least) | (place > self.most)).numpy()
        return wrong if wrong.any() else None

    def moved(self, corrupt: Tensor) -> bool:
        """Whether some code was moved further than its range is wide."""
        assert self.least is not None and self.most is not None
        return bool(((self._place(corrupt) - self._place(self.value)).abs() > self.most - self.least).any())

    def _place(self, codes: Tensor) -> Tensor:
        """Where codes stand; what is no byte stands nowhere."""
        assert self.places is not None
        whole = codes.to(torch.int64)
        return torch.where((whole >= 0) & (whole < 256), self.places[whole & 0xFF], NO_PLACE)

    def explain(self, observed: Tensor, wrong: np.ndarray, index: tuple[int, ...]) -> str:
        """The first wrong code with those that would be right, and how many are wrong."""
        assert self.least is not None and self.most is not None and self.places is not None
        least, most, got = int(self.least[index]), int(self.most[index]), int(observed[index])
        right = [code for code in range(256) if least <= int(self.places[code]) <= most]
        text = " or ".join(f"{code:#x}" for code in right[:2]) + (" or others" if len(right) > 2 else "")
        return f"{list(index)} is {got:#x}; what its value may be has {text} ({int(wrong.sum())} of {wrong.size} wrong)"


def code_places(meanings: Tensor, sign_bit: int) -> Tensor:
    """The place of each of 256 codes.

    Args:
        meanings: float64 [codes], what each code of the format means.
        sign_bit: the code of -0; 0 for a format without a sign.
    """
    code = torch.arange(256)
    negative = (code & sign_bit) > 0
    place = torch.where(negative, -(code & ~sign_bit) - 1, code)
    place = torch.where(torch.cat([meanings, meanings.new_zeros(256 - len(meanings))]).isnan(), NAN_PLACE, place)
    return torch.where(code < len(meanings), place, NO_PLACE)
