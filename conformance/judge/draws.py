"""Level 4 for codes: repeated rows, and further calls, are draws of one stochastic rounding, which
`statistics` judges. No two calls may use the same random numbers.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from conformance.judge.exact import Exact
from conformance.judge.statistics import LEAST_REPEATS, Stochastic, improbable


@dataclass(frozen=True)
class Drawn(Exact):
    """Sign-magnitude codes, each a neighbour of the rounded value."""

    rounding: Stochastic | None = None  # of the magnitudes in the repeated rows
    table: Tensor | None = None  # float64 [256], values by code
    sign_bit: int = 0
    others: tuple[Tensor, ...] = ()  # codes of other calls

    check: ClassVar[str] = "random"

    def wrong(self, observed: Tensor) -> np.ndarray | None:
        """Where a code is no neighbour; everywhere if the draws are improbable."""
        mismatches = self._no_neighbour(observed)
        if not mismatches.any() and self._odds(observed) is not None:
            mismatches = np.ones_like(mismatches)
        return mismatches if mismatches.any() else None

    def explain(self, observed: Tensor, mismatches: np.ndarray, index: tuple[int, ...]) -> str:
        """The first code that is no neighbour, or the improbable statistic."""
        assert self.rounding is not None and self.table is not None
        if not self._no_neighbour(observed).any():
            return self._odds(observed) or ""
        n = int(np.ravel_multi_index(index, mismatches.shape)) % len(self.rounding.value_N)
        got, low, high = int(observed[index]), float(self.rounding.low_N[n]), float(self.rounding.high_N[n])
        means = f"{float(self.table[got]):.6g}" if 0 <= got < len(self.table) else "nothing"
        sign = "-" if int(self.value[index]) & self.sign_bit else ""
        count = f"{int(mismatches.sum())} of {mismatches.size} wrong"
        return f"{list(index)} is {got:#x} ({means}); its neighbours are {sign}{low:.6g} and {sign}{high:.6g} ({count})"

    def _no_neighbour(self, observed: Tensor) -> np.ndarray:
        assert self.rounding is not None
        codes, magnitude = observed.long(), self._magnitudes(observed)
        repeated = len(codes.flatten()) // max(len(self.rounding.value_N), 1)
        low, high = (x.repeat(repeated).reshape(codes.shape) for x in (self.rounding.low_N, self.rounding.high_N))
        signed = (codes & self.sign_bit) == (self.value.long() & self.sign_bit)
        mismatches: np.ndarray = (~((magnitude == low) | (magnitude == high)) | ~signed).numpy()
        return mismatches

    def _odds(self, observed: Tensor) -> str | None:
        """The improbable statistic of all calls' draws; None if there is none, or too few draws."""
        assert self.rounding is not None
        random = (self.rounding.p_N > 0) & (self.rounding.p_N < 1)
        calls = [observed, *(codes[: len(observed)] for codes in self.others)]
        if bool(random.any()) and any(torch.equal(calls[0], codes) for codes in calls[1:]):
            return "the same random numbers as in another call"
        if not len(random):
            return None
        draws_RN = torch.cat([self._magnitudes(codes).reshape(-1, len(self.rounding.value_N)) for codes in calls])
        return improbable(self.rounding, draws_RN) if len(draws_RN) >= LEAST_REPEATS else None

    def _magnitudes(self, codes: Tensor) -> Tensor:
        """The codes' absolute values; NaN for an invalid code."""
        assert self.table is not None
        code_numbers = codes.long()
        is_code = (code_numbers >= 0) & (code_numbers < len(self.table))
        return torch.where(is_code, self.table[code_numbers.clamp(0, len(self.table) - 1)].abs(), torch.nan)
