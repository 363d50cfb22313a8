"""Products of factors, expert by expert, and what is right of one: a bound, and for large ones the ratios to the reference's error."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

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
    """Σ_k left_ik right_jk with what it is judged by."""

    value: Tensor  # float64
    magnitude: Tensor  # Σ|terms|, as large as the accumulator takes them
    free: Tensor  # where an infinity went in, and no NaN: split products of it are NaN as well
    margin: Tensor  # how far other numbers of the factors' intervals would take it
    terms: int

    @classmethod
    def of(cls, left_IK: Tensor | Running | Factor, right_JK: Tensor | Running | Factor) -> "Product":
        (left, *left_sizes), (right, *right_sizes) = _operand(left_IK), _operand(right_JK)
        spoilt = left.isnan().any(1)[:, None] | right.isnan().any(1)[None]
        free = (left.isinf().any(1)[:, None] | right.isinf().any(1)[None]) & ~spoilt
        value = torch.where(left.isfinite(), left, 0.0) @ torch.where(right.isfinite(), right, 0.0).T
        value = torch.where(spoilt, torch.nan, value)
        (left_size, left_margin), (right_size, right_margin) = left_sizes, right_sizes
        magnitude, margin = left_size @ right_size.T, torch.zeros_like(value)
        if left_margin.any() or right_margin.any():
            farthest = (left_size + left_margin) @ (right_size + right_margin).T
            open_ = (left_margin > 0).any(1)[:, None] | (right_margin > 0).any(1)[None]
            margin = torch.where(open_, farthest - magnitude, 0.0)
        return cls(value, magnitude, free, margin, left.shape[1])

    @classmethod
    def joined(cls, products: list["Product"], stack: bool = False) -> "Product":
        join = torch.stack if stack else torch.cat
        fields = {name: join([getattr(p, name) for p in products]) for name in TENSORS}
        return cls(**fields, terms=max(p.terms for p in products))

    def with_tail(self, rows: int) -> "Product":
        """Zeros below, to so many rows."""
        more = rows - len(self.value)
        fields = {name: getattr(self, name) for name in TENSORS}
        longer: dict[str, Any] = {name: torch.cat([x, x.new_zeros((more, *x.shape[1:]))]) for name, x in fields.items()}
        return replace(self, **longer)

    def running(self, terms: int, dtype: torch.dtype, accumulator: Accumulator, roundings: int = 0) -> Running:
        """As a result that later stages go on with."""
        unit = accumulator.worst(terms) + roundings * ROUNDOFF[torch.float32]
        error = torch.where(self.margin.isfinite(), self.margin + unit * (self.magnitude + self.margin), torch.inf)
        return Running(self.value, error.nan_to_num(torch.inf, torch.inf), dtype)

    def bounded(self, terms: int, dtype: torch.dtype, accumulator: Accumulator, roundings: int = 0) -> Bounded:
        """The bound of so many terms, and of roundings of scales."""
        bounded = contraction_bound(self.value, self.magnitude, terms, dtype, accumulator)
        bound = bounded.bound * (
            2 if accumulator.unit == ROUNDOFF[torch.float64] else 1
        )  # the oracle's roundings are of the same size
        bound = bound + (self.margin + roundings * ROUNDOFF[torch.float32] * self.magnitude) * (1 + ROUNDOFF[dtype])
        bound = torch.where(self.free | (self.value.abs() + bound > torch.finfo(dtype).max), torch.inf, bound)
        return Bounded(
            torch.where(self.free, 0.0, self.value),
            torch.where(self.value.isnan(), 0.0, bound),
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
    """By ratios too, where the output is large enough for them to say something; an expert's rows share a bias."""
    if bounded.value.numel() < LEAST_ELEMENTS:
        return bounded
    shape = bounded.value.shape[:-1]
    groups = experts_of_rows(counts, shape[0]) if len(shape) == 1 else torch.arange(shape[0])[:, None].expand(shape)
    same = torch.where(
        product.margin > 0, torch.nan, reference()
    )  # rows in which a code may be another are no reference
    return row_wise(
        bounded,
        same,
        product.magnitude,
        max(terms, 1) + precision.roundings,
        accumulator=precision.accumulator,
        groups=groups,
    )


def _operand(x: Tensor | Running | Factor) -> tuple[Tensor, Tensor, Tensor]:
    """Values, the magnitudes that an accumulator takes them for (0 for NaN and infinities), and how far they may be off."""
    if isinstance(x, Factor):
        value, margin, aligned = x.values.center, x.values.margin, x.aligned
    else:
        value, margin = (x.value, x.error) if isinstance(x, Running) else (x.double(), torch.zeros_like(x.double()))
        aligned = None
    clean = torch.where(value.isfinite(), value, 0.0)
    return value, clean.abs() if aligned is None else torch.where(clean == 0, 0.0, aligned), margin


def expert_slices(counts: Tensor) -> list[slice]:
    """Where each expert's rows stand."""
    ends = counts.cumsum(0).tolist()
    return [slice(end - count, end) for end, count in zip(ends, counts.tolist(), strict=True)]


def experts_of_rows(counts: Tensor, rows: int) -> Tensor:
    """[P] the expert of each row; behind the last segment, one more than the last."""
    sizes = [*counts.tolist(), rows - int(counts.sum())]
    return torch.from_numpy(np.repeat(np.arange(len(sizes)), sizes))
