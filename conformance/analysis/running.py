"""Running error analysis: float64 values, with bounds on the error of a lower precision.

Each operation adds its rounding r to the propagated errors of its operands (Wilkinson's running
bound). A formula in `Running` numbers thus extends the bound of `judge.bound` beyond one sum:
softmax, its gradient, a normalisation.

    x ± y    e = e_x + e_y + r                      exp    e = expm1(e_x)·v + r
    x · y    e = |x|e_y + |y|e_x + e_x e_y + r      √x     e = √(x+e_x) - √(x-e_x) + r
    x / y    e = (e_x + |v|e_y) / (|y| - e_y) + r   ln     e = e_x / (x - e_x) + r
    Σ        e = Σ e_i + γ_n Σ(|x_i| + e_i)         r = c·u·(|v| + e) + least

u is the unit roundoff; c is 1 for + - ·, and the error of fast hardware versions for the others;
`least` is the flush-to-zero limit. exp's argument is rounded once more, as in exp2(x·log2 e). A
result that is exactly zero by its operands stays zero.
"""

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Union

import numpy as np
import torch
from torch import Tensor

from conformance.judge.bound import FLOAT32, HALF_SUBNORMAL, ROUNDOFF, Accumulator, Bounded
from conformance.judge.ranges import Interval

# c above, in units of u: div.full and sqrt.approx have 2 ulp, ex2.approx and lg2.approx 2 to 4
DIVISION, ROOT, TRANSCENDENTAL = 2.5, 2.0, 6.0
Operand = Union["Running", float]


@dataclass(frozen=True)
class Running:
    """A tensor of values with their error bounds."""

    value: Tensor  # float64
    error: Tensor  # float64, ≥ 0
    dtype: torch.dtype  # of the computation

    @classmethod
    def of(cls, x: Union[Tensor, "Running"], dtype: torch.dtype) -> "Running":
        """x as stored, errors included; rounded on input if wider than `dtype`."""
        if isinstance(x, Running):
            wider = ROUNDOFF[x.dtype] < ROUNDOFF[dtype]
            return replace(x.with_rounding(dtype) if wider else x, dtype=dtype)
        value = x.detach().double()
        wider = ROUNDOFF.get(x.dtype, 0.0) < ROUNDOFF[dtype] and x.is_floating_point()
        error = value.abs() * ROUNDOFF[dtype] if wider else torch.zeros_like(value)
        return cls(value, torch.where(value.isfinite(), error, 0.0), dtype)

    def __len__(self) -> int:
        return len(self.value)

    def __getitem__(self, index: Any) -> "Running":
        return Running(self.value[index], self.error[index], self.dtype)

    @property
    def mT(self) -> "Running":
        """Transposed."""
        return Running(self.value.mT, self.error.mT, self.dtype)

    @property
    def _arrays(self) -> tuple[np.ndarray, np.ndarray]:
        return self.value.numpy(), self.error.numpy()

    @classmethod
    def joined(cls, pieces: list["Running"], stack: bool = False) -> "Running":
        """The parts concatenated, or stacked."""
        join = torch.stack if stack else torch.cat
        return cls(join([x.value for x in pieces]), join([x.error for x in pieces]), pieces[0].dtype)

    def _rounded(self, result: Tensor, inherited: np.ndarray, c: float = 1.0) -> "Running":
        """The result with its rounding."""
        value = result.numpy()
        with np.errstate(all="ignore"):
            size, finite = np.abs(value), np.isfinite(value)
            magnitude = size + inherited
            error = inherited + (c * ROUNDOFF[self.dtype] * magnitude + torch.finfo(self.dtype).tiny)
            error = np.where(finite & (magnitude != 0), error, 0.0)  # 0 by its operands is exact
            error = np.where(finite & (size + error > torch.finfo(self.dtype).max), np.inf, error)
        return Running(result, torch.from_numpy(error), self.dtype)

    def constant(self, operand: Operand) -> "Running":
        """A constant, rounded as stored."""
        return operand if isinstance(operand, Running) else _constant(float(operand).hex(), self.dtype)

    def __add__(self, operand: Operand) -> "Running":
        y = self.constant(operand)
        return self._rounded(self.value + y.value, self.error.numpy() + y.error.numpy())

    def __sub__(self, operand: Operand) -> "Running":
        y = self.constant(operand)
        return self._rounded(self.value - y.value, self.error.numpy() + y.error.numpy())

    def __mul__(self, operand: Operand) -> "Running":
        b = self.constant(operand)
        (x, e), (y, f), product = self._arrays, b._arrays, self.value * b.value
        with np.errstate(all="ignore"):
            inherited = _times(np.abs(x), f) + _times(np.abs(y), e) + _times(e, f)
            underflow = (product.numpy() == 0) & (x != 0) & (y != 0)  # in float64: no exact zero
        return self._rounded(product, np.where(underflow, torch.finfo(self.dtype).tiny, inherited))

    def __truediv__(self, operand: Operand) -> "Running":
        b = self.constant(operand)
        (x, e), (y, f), quotient = self._arrays, b._arrays, self.value / b.value
        with np.errstate(all="ignore"):
            room, exact = np.abs(y) - f, (x == 0) & (e == 0)
            inherited = (e + _times(np.abs(quotient.numpy()), f)) / room
            inherited = np.where(room > 0, inherited, np.where(exact, 0.0, np.inf))
        return self._rounded(quotient, inherited, DIVISION)

    def exp(self) -> "Running":
        value = self.value.exp()
        argument = self.error + 2 * ROUNDOFF[self.dtype] * torch.where(self.value.isfinite(), self.value.abs(), 0.0)
        with np.errstate(all="ignore"):
            inherited = _times(value.numpy(), torch.expm1(argument).numpy())
        rounded = self._rounded(value, np.where(value.numpy() == 0, 0.0, inherited), TRANSCENDENTAL)
        underflow = (value == 0) & self.value.isfinite()  # in float64: only exp(-∞) is exactly zero
        return Running(value, torch.where(underflow, torch.finfo(self.dtype).tiny, rounded.error), self.dtype)

    def log1p(self) -> "Running":
        """ln(1 + x) for x ≥ 0, accurate for small x."""
        value = self.value.log1p()
        inherited = self.error / (1 + (self.value - self.error).clamp(min=0))
        return self._rounded(value, inherited.numpy(), TRANSCENDENTAL)

    def log(self) -> "Running":
        room = self.value - self.error
        inherited = torch.where(room > 0, self.error / room, torch.inf) + 2 * ROUNDOFF[self.dtype]
        return self._rounded(self.value.log(), inherited.numpy(), TRANSCENDENTAL)

    def sqrt(self) -> "Running":
        high, low = (self.value + self.error).sqrt(), (self.value - self.error).clamp(min=0).sqrt()
        value = self.value.sqrt()
        return self._rounded(value, torch.maximum(high - value, value - low).numpy(), ROOT)

    def sum(self, dim: int, terms: int | None = None) -> "Running":
        """The sum in any order; `terms`: the number of terms not exactly zero; None: all.

        The error is infinite where a partial sum may overflow. So it is of an infinite sum, if
        finite terms of the other sign may overflow: infinities of both signs give NaN.
        """
        gamma = math.expm1((terms or self.value.shape[dim]) * math.log1p(ROUNDOFF[self.dtype]))
        value = self.value.sum(dim, keepdim=True)
        magnitude = (self.value.abs() + self.error).sum(dim, keepdim=True)
        error = self.error.sum(dim, keepdim=True) + gamma * magnitude
        most = torch.finfo(self.dtype).max
        error = torch.where(magnitude > most, torch.inf, error)
        other_sign = self.value.isfinite() & ((self.value * value.sign() < 0) | (self.error > self.value.abs()))
        against = torch.where(other_sign, self.value.abs() + self.error, 0.0).sum(dim, keepdim=True)
        unknown = value.isinf() & (against > most)
        value = torch.where(unknown, 0.0, value)
        return Running(value, torch.where(value.isfinite(), error, 0.0), self.dtype)

    def masked(self, mask: Tensor) -> "Running":
        """Exactly zero where the mask is not set."""
        return Running(torch.where(mask, self.value, 0.0), torch.where(mask, self.error, 0.0), self.dtype)

    @property
    def beside_the_oracle(self) -> "Running":
        """With the oracle's own roundings, which in float64 are as large as the candidate's."""
        return replace(self, error=2 * self.error) if self.dtype == torch.float64 else self

    def before_final_rounding(self, dtype: torch.dtype) -> "Running":
        """The value before its final rounding to `dtype`, which may flush it to zero.

        float32 may be flushed everywhere, float16 nowhere. Oracle roundings of the same size are
        included.
        """
        least = torch.finfo(dtype).tiny if dtype != torch.float16 else 0.0
        error = self.beside_the_oracle.error + least
        error = torch.where((self.value == 0) & (self.error == 0), 0.0, error)
        return Running(self.value, torch.where(self.value.isfinite(), error, 0.0), self.dtype)

    def with_rounding(self, dtype: torch.dtype) -> "Running":
        """The value rounded to `dtype` between two stages."""
        error = self.error + ROUNDOFF[dtype] * (self.value.abs() + self.error) + HALF_SUBNORMAL[dtype]
        exact_zero = (self.value == 0) & (self.error == 0)
        return Running(self.value, torch.where(exact_zero, 0.0, error), self.dtype)

    def rounded_to(self, dtype: torch.dtype) -> "Running":
        """The nearest number of `dtype`; exact if all within the error round to it, unflushed."""
        value, (low, high) = self.value.to(dtype).double(), self.ends(dtype)
        tiny = torch.finfo(dtype).tiny if dtype != torch.float16 else 0.0
        flushed = torch.where((value != 0) & (value.abs() <= tiny), tiny, torch.zeros_like(value))
        error = torch.maximum(high - value, value - low) + flushed
        return Running(value, torch.where(value.isfinite(), error, 0.0), self.dtype)

    def interval(self, dtype: torch.dtype, unspecified: Tensor) -> Interval:
        """The possible results in `dtype`, rounded once or through float32."""
        last = self.before_final_rounding(dtype)
        unknown = unspecified | (last.error == torch.inf)
        return Interval(*last.ends(dtype), last.value.isnan() & ~unknown, unknown).either_zero()

    def ends(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The bounds of the rounded value.

        torch rounds float64 to 16 bits through float32; compiled kernels round once.
        """
        twice = self.dtype == torch.float64 and ROUNDOFF[dtype] > ROUNDOFF[torch.float32]
        second_rounding = 2 * ROUNDOFF[torch.float32] * torch.where(self.value.isfinite(), self.value.abs(), 0.0)
        error = self.error + second_rounding if twice else self.error
        return (self.value - error).to(dtype).double(), (self.value + error).to(dtype).double()

    def bounded(self, dtype: torch.dtype, value: Tensor | None = None, unspecified: Tensor | None = None) -> Bounded:
        """The bound of the result rounded to `dtype`; an infinity where it surely overflows.

        Args:
            value: the oracle's float64 value by another formula; None: this value.
            unspecified: where every result is right.
        """
        expected = self.value if value is None else value.double()
        unit = ROUNDOFF[dtype]
        some = ((expected != 0) | (self.error != 0)).double()
        bound = self.error + unit * (expected.abs() + self.error) + HALF_SUBNORMAL[dtype] * some
        largest = torch.finfo(dtype).max
        surely = expected.abs() - self.error > largest * (1 + unit)
        bound = torch.where(expected.abs() + bound > largest, torch.inf, bound)  # it may overflow
        expected = torch.where(surely, expected.sign() * torch.inf, expected)
        if unspecified is not None:
            expected, bound = torch.where(unspecified, 0.0, expected), torch.where(unspecified, torch.inf, bound)
        return Bounded(expected, torch.where(expected.isfinite(), bound, 0.0), dtype, self.dtype)


@cache
def _constant(digits: str, dtype: torch.dtype) -> Running:
    """A number by its digits, which tell -0 from 0, as the numbers do not."""
    value = torch.full((), float.fromhex(digits), dtype=torch.float64)
    return Running(value, (value - value.to(dtype).double()).abs(), dtype)


def contracted(left_MK: Running, right_NK: Running, accumulator: Accumulator = FLOAT32) -> Running:
    """left_MK · right_NKᵀ: the operands' errors, and the roundings of the sum."""
    magnitude = (left_MK.value.abs() + left_MK.error) @ (right_NK.value.abs() + right_NK.error).mT
    inherited = magnitude - left_MK.value.abs() @ right_NK.value.abs().mT
    error = inherited.clamp(min=0) + accumulator.worst(left_MK.value.shape[-1]) * magnitude
    return Running(left_MK.value @ right_NK.value.mT, error, left_MK.dtype)


def _times(x: np.ndarray, error: np.ndarray) -> np.ndarray:
    """x · error: 0 for an exact operand even at infinity; infinite for an overflow even times 0."""
    return np.where(error == 0, 0.0, np.where(error == np.inf, np.inf, x * error))
