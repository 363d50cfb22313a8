"""What is right of a quantised form whose noise the implementation draws itself: codes that are any of two, each as often as it should be.

The rows are the same few again and again, and quantised several times, so each element has as many repeats as there are copies of it in all
calls. amax, scales, and the values that the codes stand for are what they are elsewhere.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from conformance.analysis.quantizer import RightForm, _meanings
from conformance.judge import Exact, Outputs
from conformance.judge.draws import Drawn
from conformance.judge.statistics import ALPHA, Stochastic


@dataclass(frozen=True)
class RandomForm(RightForm):
    """The form of one of several calls."""

    rows: int  # that are repeated
    others: tuple[str, ...]  # the codes of the other calls: the names of the outputs

    checks: ClassVar[int] = 8  # two calls in each direction of two cases

    def _codes(self, outputs: Outputs) -> Exact:
        scaled = self._whole(
            [
                own.double() * self._multiplier(group, own)
                for own, group in zip(self._sources(), self.returned(outputs), strict=True)
            ]
        )
        rounding = self._rounding(scaled[: self.rows].abs().flatten())
        codes, format = self._right("codes"), self.form.scheme.format
        others = tuple(
            x for name in self.others if isinstance(x := outputs.get(name), Tensor) and x.shape == codes.shape
        )
        return Drawn(
            codes, "integers", rounding=rounding, table=_meanings(format), sign_bit=format.sign_bit, others=others
        )

    def _rounding(self, magnitude_N: Tensor) -> Stochastic:
        """Between which two codes each magnitude lies."""
        format = self.form.scheme.format
        grid = _meanings(format)[: format.max_code + 1]
        value = magnitude_N.clamp(max=format.max)
        place = torch.searchsorted(grid, value, right=True) - 1
        return Stochastic(
            value, grid[place], grid[(place + (grid[place] < value)).clamp(max=format.max_code)], ALPHA, self.checks
        )
