"""Grouped GEMMs: their bounds, and ratios to the reference's error."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from conformance.analysis.factors import Factor, ProductPrecision
from conformance.analysis.running import Running
from conformance.judge import Bounded, Expectation
from conformance.judge.bound import ROUNDOFF, Accumulator, contraction_bound
from conformance.judge.ratios import LEAST_ELEMENTS, row_wise

TENSORS = ("value", "magnitude", "free", "margin")


@dataclass(frozen=True)
class Product:
    """Σ_k left_ik right_jk with the magnitudes for its bound."""

    value: Tensor  # float64
    magnitude: Tensor  # Σ|terms|, as aligned by the accumulator
    free: Tensor  # where an infinity is an operand, and no NaN: a split GEMM may give NaN as well
    margin: Tensor  # error from the factors' intervals
    terms: int

    @classmethod
    def of(cls, left_IK: Tensor | Running | Factor, right_JK: Tensor | Running | Factor) -> "Product":
        left_factor, right_factor = _operand(left_IK), _operand(right_JK)
        value, magnitude = left_factor.clean @ right_factor.clean.T, left_factor.size @ right_factor.size.T
        unspecified, margin = torch.zeros_like(value, dtype=torch.bool), torch.zeros_like(value)
        if not (left_factor.finite and right_factor.finite):
            spoilt = left_factor.value.isnan().any(1)[:, None] | right_factor.value.isnan().any(1)[None]
            unspecified = (
                left_factor.value.isinf().any(1)[:, None] | right_factor.value.isinf().any(1)[None]
            ) & ~spoilt
            value = torch.where(spoilt, torch.nan, value)
        if not (left_factor.exact and right_factor.exact):
            farthest = (left_factor.size + left_factor.margin) @ (right_factor.size + right_factor.margin).T
            open_ = (left_factor.margin > 0).any(1)[:, None] | (right_factor.margin > 0).any(1)[None]
            margin = torch.where(open_, farthest - magnitude, 0.0)
        return cls(value, magnitude, unspecified, margin, left_factor.value.shape[1])

    @classmethod
    def joined(cls, products: list["Product"], stack: bool = False) -> "Product":
        join = torch.stack if stack else torch.cat
        fields = {name: join([getattr(p, name) for p in products]) for name in TENSORS}
        return cls(**fields, terms=max(p.terms for p in products))

    def with_tail(self, rows: int) -> "Product":
        """The product padded with zeros to `rows` rows."""
        extra_rows = rows - len(self.value)
        fields = {name: getattr(self, name) for name in TENSORS}
        longer: dict[str, Any] = {
            name: torch.cat([x, x.new_zeros((extra_rows, *x.shape[1:]))]) for name, x in fields.items()
        }
        return replace(self, **longer)

    def running(self, terms: int, dtype: torch.dtype, accumulator: Accumulator, roundings: int = 0) -> Running:
        """The result with its error, as input of later stages."""
        unit = accumulator.worst(terms) + roundings * ROUNDOFF[torch.float32]
        error = torch.where(self.margin.isfinite(), self.margin + unit * (self.magnitude + self.margin), torch.inf)
        return Running(self.value, error.nan_to_num(torch.inf, torch.inf), dtype)

    def bounded(self, terms: int, dtype: torch.dtype, accumulator: Accumulator, roundings: int = 0) -> Bounded:
        """The bound for `terms` terms and `roundings` roundings of scales.

        What surely overflows is an infinity; of sums in 16 bits, whose parts may overflow with
        either sign, it is unchecked.
        """
        bounded = contraction_bound(self.value, self.magnitude, terms, dtype, accumulator)
        bound = bounded.bound * (
            2 if accumulator.unit == ROUNDOFF[torch.float64] else 1
        )  # the oracle's roundings are of the same size
        bound = bound + (self.margin + roundings * ROUNDOFF[torch.float32] * self.magnitude) * (1 + ROUNDOFF[dtype])
        largest = torch.finfo(dtype).max
        surely = self.value.isfinite() & (self.value.abs() - bound > largest * (1 + ROUNDOFF[dtype]))
        surely &= ~self.free & (accumulator.unit <= ROUNDOFF[torch.float32])
        bound = torch.where(self.free | (self.value.abs() + bound > largest), torch.inf, bound)
        value = torch.where(surely, self.value.sign() * torch.inf, self.value)
        return Bounded(
            torch.where(self.free, 0.0, value),
            torch.where(self.value.isnan() | surely, 0.0, bound),
            dtype,
            bounded.accumulator,
        )


def compared(
    bounded: Bounded,
    reference: Callable[[], Tensor],
    product: Product,
    terms: int,
    precision: ProductPrecision,
    counts: Tensor,
) -> Expectation:
    """The bound, with ratios if the output is large enough; an expert's rows share a bias."""
    if bounded.value.numel() < LEAST_ELEMENTS:
        return bounded
    shape = bounded.value.shape[:-1]
    groups = experts_of_rows(counts, shape[0]) if len(shape) == 1 else torch.arange(shape[0])[:, None].expand(shape)
    # rows in which a code may differ are no reference
    same = torch.where(product.margin > 0, torch.nan, reference())
    return row_wise(
        bounded,
        same,
        product.magnitude,
        max(terms, 1) + precision.roundings,
        accumulator=precision.accumulator,
        groups=groups,
    )


class _Operand(NamedTuple):
    """A factor, with what its products need several times."""

    value: Tensor
    clean: Tensor  # 0 where the value is not finite
    size: Tensor  # magnitudes for an accumulator's alignment; 0 in the same places
    margin: Tensor
    finite: bool  # all values
    exact: bool  # no margin


def _operand(x: Tensor | Running | Factor) -> _Operand:
    if isinstance(x, Factor):
        value, margin, aligned = x.values.center, x.values.margin, x.aligned
    else:
        value, margin = (x.value, x.error) if isinstance(x, Running) else (x.double(), torch.zeros(()))
        aligned = None
    finite = value.isfinite()
    clean = torch.where(finite, value, 0.0)
    size = clean.abs() if aligned is None else torch.where(clean == 0, 0.0, aligned)
    margin = margin.expand(value.shape)
    return _Operand(value, clean, size, margin, bool(finite.all()), not margin.any())


def expert_slices(counts: Tensor) -> list[slice]:
    """The slice of rows of each expert."""
    ends = counts.cumsum(0).tolist()
    return [slice(end - count, end) for end, count in zip(ends, counts.tolist(), strict=True)]


def experts_of_rows(counts: Tensor, rows: int) -> Tensor:
    """[P] the expert of each row; past the last segment, the number of experts."""
    sizes = [*counts.tolist(), rows - int(counts.sum())]
    return torch.from_numpy(np.repeat(np.arange(len(sizes)), sizes))
