"""Level 4 for codes: those of rows that repeat are draws of one rounding at random, which `statistics` judges; so are those of the other
calls, which must not be the same over again.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from conformance.judge.exact import Exact
from conformance.judge.statistics import LEAST_REPEATS, Stochastic, improbable


@dataclass(frozen=True)
class Drawn(Exact):
    """Codes of a format with a sign and a magnitude, each one of the neighbours of what was rounded: `value` holds some that are right."""

    rounding: Stochastic | None = None  # of the magnitudes in the rows that repeat
    table: Tensor | None = None  # float64, what each of 256 codes means
    sign_bit: int = 0
    others: tuple[Tensor, ...] = ()  # codes of other calls

    def explain(self, observed: Tensor, wrong: np.ndarray, index: tuple[int, ...]) -> str:
        """The first code that is no neighbour, or what is improbable about all of them."""
        assert self.rounding is not None and self.table is not None
        if not _no_neighbour(self, observed).any():
            return _odds(self, observed) or ""
        n = int(np.ravel_multi_index(index, wrong.shape)) % len(self.rounding.value_N)
        got, low, high = int(observed[index]), float(self.rounding.low_N[n]), float(self.rounding.high_N[n])
        means = f"{float(self.table[got]):.6g}" if 0 <= got < len(self.table) else "nothing"
        sign = "-" if int(self.value[index]) & self.sign_bit else ""
        count = f"{int(wrong.sum())} of {wrong.size} wrong"
        return f"{list(index)} is {got:#x} ({means}); between {sign}{low:.6g} and {sign}{high:.6g} there is nothing else ({count})"


def undrawn(expected: Drawn, observed: Tensor) -> np.ndarray | None:
    """True where a code is no neighbour; everywhere if all together are improbable; or None."""
    wrong = _no_neighbour(expected, observed)
    if not wrong.any() and _odds(expected, observed) is not None:
        wrong = np.ones_like(wrong)
    return wrong if wrong.any() else None


def _no_neighbour(expected: Drawn, observed: Tensor) -> np.ndarray:
    assert expected.rounding is not None
    codes, magnitude = observed.long(), _magnitudes(expected, observed)
    repeated = len(codes.flatten()) // max(len(expected.rounding.value_N), 1)
    low, high = (x.repeat(repeated).reshape(codes.shape) for x in (expected.rounding.low_N, expected.rounding.high_N))
    signed = (codes & expected.sign_bit) == (expected.value.long() & expected.sign_bit)
    wrong: np.ndarray = (~((magnitude == low) | (magnitude == high)) | ~signed).numpy()
    return wrong


def _odds(expected: Drawn, observed: Tensor) -> str | None:
    """What is improbable about the draws of all calls, or None; of fewer than can be judged, nothing is."""
    assert expected.rounding is not None
    random = (expected.rounding.p_N > 0) & (expected.rounding.p_N < 1)
    calls = [observed, *(other[: len(observed)] for other in expected.others)]
    if bool(random.any()) and any(torch.equal(calls[0], other) for other in calls[1:]):
        return "the same random numbers as in another call"
    draws_RN = torch.cat([_magnitudes(expected, codes).reshape(-1, len(expected.rounding.value_N)) for codes in calls])
    return improbable(expected.rounding, draws_RN) if len(draws_RN) >= LEAST_REPEATS else None


def _magnitudes(expected: Drawn, codes: Tensor) -> Tensor:
    """What codes mean, without a sign; NaN where there is no such code."""
    assert expected.table is not None
    whole = codes.long()
    known = (whole >= 0) & (whole < len(expected.table))
    return torch.where(known, expected.table[whole.clamp(0, len(expected.table) - 1)].abs(), torch.nan)
