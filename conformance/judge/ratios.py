"""Level 3: a contraction is right if no row's error much exceeds the recipe's rounding error.

The bound of level 2 holds for every order of summation, so it is 10 to 100 times wider than a
kernel's error on well-scaled data: a row in the wrong precision passes it. The errors are therefore
compared to those of ŷ_ref, the reference with the recipe's rounding points. With d = ŷ - y*, r_t =
‖d_t‖ / ‖y*_t‖, s_t the row's scale (the larger of its rms and the rms of a random walk of its
terms), u the output's roundoff and α the accumulator's typical error √n·u_acc:

    row       max_t r_t(ŷ) / max(r_t(ŷ_ref), u/2 + α + ε_t)                    one wrong row
    element   max_ti |d_ti| / max(s_t, |y*_ti|) over ŷ_ref's or u + 4α + ε_t   one wrong element
    rms       √mean_t r_t(ŷ)² / √(mean_t r_t(ŷ_ref)² + α² + ε_t²)              precision lost
    bias      |mean of d in ulps| per group, away from zero or upwards,        not round-to-nearest
              over its allowance

ε_t is the error that a row typically inherits from earlier stages, relative to ‖y*_t‖ (0 for one
contraction): a gate's error is in all elements of its row, so no number of them averages it out.

Each is at most its calibrated limit; a result better than ŷ_ref is right. The bound alone judges
outputs of fewer than 4096 elements, and rows that cancel, contain zeros, NaN or infinities, or lie
near underflow or overflow.
"""

import json
import math
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from conformance.judge.bound import FLOAT32, ROUNDOFF, Accumulator, Bounded
from conformance.judge.expectation import Resolved

CALIBRATION = Path(__file__).with_name("calibration.json")
# with fewer, honest reorderings exceeded the limits: 1.8 % of runs at 64 × 64, rows that cancel
LEAST_ELEMENTS = 4096
POOLED = 64  # elements: shorter rows are pooled, because a ratio's noise falls with their root
# of Σ|terms|/√n, the length of a random walk of n such steps (1.25 times for normal factors)
CANCELS = 0.5
PEAK = 4  # largest noise of many elements, relative to a row's
NORMAL = 8  # times the smallest normal number: subnormals in smaller rows have a roundoff above u
# of the bias, in ulps and in standard errors: 5 are exceeded by chance once in two million
SLACK, DEVIATIONS = 0.02, 5.0
BIAS_ROWS, BIAS_ELEMENTS = 16, 1024  # the mean of a smaller group is not tested


@dataclass(frozen=True)
class Limits:
    """The limit of each ratio."""

    row: float
    element: float
    rms: float
    bias: float


@cache
def calibrated() -> Limits:
    """The limits of `calibration.json`, which `benchmarks/calibrate.py` writes."""
    return Limits(**json.loads(CALIBRATION.read_text())["limits"])


@dataclass(frozen=True)
class Measure:
    """One ratio at its worst place."""

    rule: str
    ratio: float
    index: tuple[int, ...]  # of the output
    place: str


@dataclass(frozen=True)
class Errors:
    """A result's errors in the judged rows J, of M elements each."""

    row_J: Tensor  # r_t
    element_JM: Tensor  # |d| / max(s, |y*|)
    ulps_JM: Tensor  # d in ulps of max(s, |y*|): ulps of small elements alone are noise


@dataclass(frozen=True)
class RowWise(Bounded):
    """A contraction: the bound, and four ratios to the error of the same-precision reference."""

    reference: Tensor  # in `dtype`: the reference with the recipe's rounding points
    magnitude: Tensor  # float64 Σ|terms|
    terms: int
    noise: float  # α above
    # integers, value's shape without its last dimension (1-D: its shape): rows that share a bias
    groups: Tensor | None = None
    inherited: Tensor | None = None  # float64, typical errors of earlier stages; None: none
    limits: Limits = field(default_factory=calibrated)

    check: ClassVar[str] = "ratio"
    by_row: ClassVar[tuple[str, ...]] = ("value", "bound", "reference", "magnitude", "groups", "inherited")

    @property
    def stages(self) -> tuple[Resolved, ...]:
        return self.bounded, self

    def wrong(self, observed: Tensor) -> np.ndarray | None:
        """True at the worst element of the ratio furthest beyond its limit."""
        worst = self.excess(observed)
        if worst is None:
            return None
        mismatches = np.zeros(tuple(self.value.shape), dtype=bool)
        mismatches[worst.index] = True
        return mismatches

    def scores(self, observed: Tensor) -> dict[str, float]:
        """Also the largest ratio's share of its limit."""
        ratio = max((self._share(measure) for measure in self.measures(observed)), default=0.0)
        return super().scores(observed) | {"ratio": ratio}

    def explain(self, observed: Tensor, mismatches: np.ndarray, index: tuple[int, ...]) -> str:
        worst = self.excess(observed)
        assert worst is not None
        limit = getattr(self.limits, worst.rule)
        return f"{worst.place} {self._share(worst):.3g} × what the recipe allows ({worst.ratio:.3g}, limit {limit:.3g})"

    @property
    def bounded(self) -> Bounded:
        """Level 2 alone."""
        return Bounded(self.value, self.bound, self.dtype, self.accumulator)

    @cached_property
    def judged(self) -> Tensor:
        """Indices of the rows judged by ratios, from the oracle alone."""
        expected, bound, reference, magnitude = (
            _rows(x).double() for x in (self.value, self.bound, self.reference, self.magnitude)
        )
        kind = torch.finfo(self.dtype)
        norm, walk = expected.norm(dim=1), magnitude.norm(dim=1) / math.sqrt(self.terms)
        ordinary = expected.isfinite().all(1) & bound.isfinite().all(1) & reference.isfinite().all(1)
        ordinary &= _rows(self.magnitude if self.inherited is None else self.inherited).isfinite().all(1)
        small = norm / math.sqrt(expected.shape[1]) < NORMAL * kind.tiny
        return (ordinary & (norm > 0) & (norm >= CANCELS * walk) & ~small).nonzero().flatten()

    @cached_property
    def applies(self) -> bool:
        """Whether enough elements remain for ratios."""
        return len(self.judged) * _rows(self.value).shape[1] >= LEAST_ELEMENTS

    def measures(self, observed: Tensor) -> list[Measure]:
        """The four ratios of a result within the bound."""
        if not self.applies:
            return []
        got, reference = self._errors(observed), self._reference_errors
        return [
            self._worst_row(got, reference),
            self._worst_element(got, reference),
            self._rms(got, reference),
            *self._bias(got, reference),
        ]

    def excess(self, observed: Tensor) -> Measure | None:
        """The ratio furthest beyond its limit, or None."""
        worst = max(self.measures(observed), key=self._share, default=None)
        return worst if worst and self._share(worst) > 1 else None

    def _share(self, measure: Measure) -> float:
        return measure.ratio / getattr(self.limits, measure.rule)

    @cached_property
    def _reference_errors(self) -> Errors:
        return self._errors(self.reference)

    def _errors(self, result: Tensor) -> Errors:
        expected, got, magnitude = (
            _rows(x.detach()).double()[self.judged] for x in (self.value, result, self.magnitude)
        )
        d, scale = got - expected, self._scale(expected, magnitude)
        return Errors(d.norm(dim=1) / expected.norm(dim=1), d.abs() / scale, d / self._ulp(scale))

    def _scale(self, expected: Tensor, magnitude: Tensor) -> Tensor:
        """max(s_t, |y*_ti|)."""
        walk_J1 = magnitude.norm(dim=1, keepdim=True) / math.sqrt(self.terms * expected.shape[1])
        return torch.maximum(expected.abs(), torch.maximum(walk_J1, expected.square().mean(1, keepdim=True).sqrt()))

    def _ulp(self, x: Tensor) -> Tensor:
        # frexp's fraction is from ½ to 1
        return torch.exp2(torch.frexp(x).exponent.double()) * ROUNDOFF[self.dtype]

    @cached_property
    def _ties(self) -> Tensor:
        """Whether y*_ti is a midpoint of two outputs, up to the accumulator's error."""
        expected, magnitude = (_rows(x).double()[self.judged] for x in (self.value, self.magnitude))
        steps, ulp = expected.abs() / self._ulp(expected), self._ulp(expected)
        return (steps % 1 - 0.5).abs() * ulp <= PEAK * self.noise * self._scale(expected, magnitude)

    @cached_property
    def _pools(self) -> Tensor:
        """The pool of each judged row; each has at least POOLED elements."""
        rows = -(-POOLED // _rows(self.value).shape[1])
        return (torch.arange(len(self.judged)) // rows).clamp(max=max(len(self.judged) // rows - 1, 0))

    def _pooled(self, row_J: Tensor) -> Tensor:
        """The rms of r_t per pool."""
        count = int(self._pools[-1]) + 1
        total = torch.zeros(count, dtype=torch.float64).index_add(0, self._pools, row_J.square())
        return (total / torch.bincount(self._pools)).sqrt()

    @cached_property
    def _inherited_J(self) -> Tensor:
        """ε_t."""
        expected = _rows(self.value).double()[self.judged]
        error = torch.zeros_like(expected) if self.inherited is None else _rows(self.inherited)[self.judged]
        return error.norm(dim=1) / expected.norm(dim=1)

    def _worst_row(self, got: Errors, reference: Errors) -> Measure:
        floor = self._pooled(ROUNDOFF[self.dtype] / 2 + self.noise + self._inherited_J)
        ratio = self._pooled(got.row_J) / torch.maximum(self._pooled(reference.row_J), floor)
        pool = int(ratio.argmax())
        members = (self._pools == pool).nonzero().flatten()
        row = int(members[got.row_J[members].argmax()])
        num_exceeding = int((ratio > self.limits.row).sum())
        location = (
            f"row {self._named(row)}" if len(members) == 1 else f"{len(members)} rows around row {self._named(row)}"
        )
        exceeding_note = (
            f"; {num_exceeding} of {len(ratio)} {'rows' if len(members) == 1 else 'groups of rows'}"
            if num_exceeding
            else ""
        )
        return Measure(
            "row",
            float(ratio[pool]),
            (*self._row_index(row), *self._column(got, row)),
            f"{location}{exceeding_note}: error",
        )

    def _worst_element(self, got: Errors, reference: Errors) -> Measure:
        floor_J = ROUNDOFF[self.dtype] + PEAK * self.noise + self._inherited_J
        ratio_JM = got.element_JM / floor_J.clamp(min=float(reference.element_JM.max()))[:, None]
        row, column = divmod(int(ratio_JM.argmax()), ratio_JM.shape[1])
        index = (*self._row_index(row), column)[: self.value.dim()]
        return Measure("element", float(ratio_JM[row, column]), index, f"element {list(index)}: error")

    def _rms(self, got: Errors, reference: Errors) -> Measure:
        worst = int(got.row_J.argmax())
        usual = reference.row_J.square() + self.noise**2 + self._inherited_J.square()
        ratio = float((got.row_J.square().mean() / usual.mean()).sqrt())
        return Measure(
            "rms",
            ratio,
            (*self._row_index(worst), *self._column(got, worst)),
            f"all {len(got.row_J)} rows together: error",
        )

    def _bias(self, got: Errors, reference: Errors) -> list[Measure]:
        """Per group, the mean error away from zero, and upwards, over its allowance.

        Allowance: slack + noise + standard errors + the reference's mean error. The noise α is at
        most α/u ulps, because an ulp is u to 2u of its number. At a tie the
        accumulator's last bit decides, for all elements of a regular input in the same way: ties
        count with the reference's error.
        """
        ulps_JM = torch.where(self._ties, reference.ulps_JM, got.ulps_JM)
        sign = _rows(self.value)[self.judged].sign()
        groups = (
            torch.zeros(len(self.judged), dtype=torch.int64)
            if self.groups is None
            else self.groups.flatten()[self.judged].long()
        )
        measures = []
        for group in groups.unique().tolist():
            members = (groups == group).nonzero().flatten()
            if len(members) < BIAS_ROWS or ulps_JM[members].numel() < BIAS_ELEMENTS:
                continue
            for direction, towards in (("away from zero", sign[members]), ("upwards", torch.ones(()))):
                mean, spread = _mean_and_error(ulps_JM[members] * towards)
                usual, _ = _mean_and_error(reference.ulps_JM[members] * towards)
                allowed = SLACK + DEVIATIONS * spread + abs(usual) + self.noise / ROUNDOFF[self.dtype]
                where = "" if self.groups is None else f"group {group}: "
                description = f"{where}a mean error of {mean:.3g} ulp {direction},"
                first = int(members[0])
                measures.append(
                    Measure(
                        "bias", abs(mean) / allowed, (*self._row_index(first), *self._column(got, first)), description
                    )
                )
        return [max(measures, key=lambda measure: measure.ratio)] if measures else []

    def _column(self, got: Errors, row: int) -> tuple[int, ...]:
        return (int(got.element_JM[row].argmax()),) if self.value.dim() > 1 else ()

    def _row_index(self, row: int) -> tuple[int, ...]:
        """The index of a judged row in the output."""
        shape = self.value.shape[:-1] if self.value.dim() > 1 else self.value.shape
        return tuple(int(i) for i in torch.unravel_index(self.judged[row], shape))

    def _named(self, row: int) -> str:
        indices = self._row_index(row)
        return str(indices[0]) if len(indices) == 1 else str(list(indices))


def row_wise(
    bounded: Bounded,
    reference: Tensor,
    magnitude: Tensor,
    terms: int,
    *,
    accumulator: Accumulator = FLOAT32,
    groups: Tensor | None = None,
    inherited: Tensor | None = None,
    limits: Limits | None = None,
) -> RowWise | Bounded:
    """A contraction's expectation: `bounded`, with ratios where they apply.

    Args:
        bounded: the oracle's value and its level-2 bound.
        reference: of the output's dtype, the same-precision reference's result.
        magnitude: float64 Σ|terms|.
        terms: products per element.
        accumulator: as declared; its typical error is allowed on top of the reference's.
        groups: rows that share a bias (the expert of each row); None: all.
        inherited: float64, the value's typical errors that earlier stages cause; None: none.
        limits: None: the calibrated limits.
    """
    if bounded.value.numel() < LEAST_ELEMENTS or reference.dtype != bounded.dtype:
        return bounded
    noise = accumulator.typical(terms)
    with_ratios = RowWise(
        bounded.value,
        bounded.bound,
        bounded.dtype,
        bounded.accumulator,
        reference.detach(),
        magnitude,
        terms,
        noise,
        groups,
        inherited,
        limits or calibrated(),
    )
    return with_ratios if with_ratios.applies else bounded


def _rows(x: Tensor) -> Tensor:
    """All dimensions but the last flattened; a vector becomes a column."""
    return x.reshape(-1, x.shape[-1]) if x.dim() > 1 else x.reshape(-1, 1)


def _mean_and_error(x_RM: Tensor) -> tuple[float, float]:
    """The mean and its standard error, over elements or rows: a row's errors may be correlated."""
    by_row = x_RM.mean(1)
    error = max(float(x_RM.std()) / math.sqrt(x_RM.numel()), float(by_row.std()) / math.sqrt(len(by_row)))
    return float(x_RM.mean()), error
