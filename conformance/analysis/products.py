"""Products of factors, expert by expert, and what is right of one: a bound, and for large ones the ratios to the reference's error."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from conformance.analysis.factors import Factor, ProductPrecision
from conformance.judge import Bounded, Expectation
from conformance.judge.bound import ROUNDOFF, Accumulator, contraction_bound
from conformance.judge.ranges import Interval
from conformance.judge.ratios import LEAST_ELEMENTS, row_wise


@dataclass(frozen=True)
class Product:
    """Σ_k left_ik right_jk with what it is judged by."""

    value: Tensor  # float64
    magnitude: Tensor  # Σ|terms|, as large as the accumulator takes them
    free: Tensor  # where an infinity went in, and no NaN: split products of it are NaN as well
    margin: Tensor  # how far other codes of the factors would take it

    @classmethod
    def of(cls, left_IK: Tensor, right_JK: Tensor) -> "Product":
        return cls.of_factors(*(Factor(Interval.exact(x.double())) for x in (left_IK, right_JK)))

    @classmethod
    def of_factors(cls, left_IK: Factor, right_JK: Factor) -> "Product":
        left, right = left_IK.values.center, right_JK.values.center
        clean_left, clean_right = (torch.where(x.isfinite(), x, 0.0) for x in (left, right))
        spoilt = left.isnan().any(1)[:, None] | right.isnan().any(1)[None]
        infinite = left.isinf().any(1)[:, None] | right.isinf().any(1)[None]
        value = torch.where(spoilt, torch.nan, clean_left @ clean_right.T)
        sizes = [
            clean.abs() if x.aligned is None else torch.where(clean == 0, 0.0, x.aligned)
            for x, clean in ((left_IK, clean_left), (right_JK, clean_right))
        ]
        magnitude = sizes[0] @ sizes[1].T
        margins = [x.values.margin for x in (left_IK, right_JK)]
        if not any(margin.any() for margin in margins):
            return cls(value, magnitude, infinite & ~spoilt, torch.zeros_like(value))
        farthest = (sizes[0] + margins[0]) @ (sizes[1] + margins[1]).T
        open_ = (margins[0] > 0).any(1)[:, None] | (margins[1] > 0).any(1)[None]
        return cls(value, magnitude, infinite & ~spoilt, torch.where(open_, farthest - magnitude, 0.0))

    @classmethod
    def joined(cls, products: list["Product"], stack: bool = False) -> "Product":
        join = torch.stack if stack else torch.cat
        return cls(*(join([getattr(p, name) for p in products]) for name in ("value", "magnitude", "free", "margin")))

    def with_tail(self, rows: int) -> "Product":
        """Zeros below, to so many rows."""
        more = rows - len(self.value)
        return Product(
            *(
                torch.cat([x, x.new_zeros((more, *x.shape[1:]))])
                for x in (self.value, self.magnitude, self.free, self.margin)
            )
        )

    def bounded(self, terms: int, dtype: torch.dtype, accumulator: Accumulator, roundings: int = 0) -> Bounded:
        """The bound of so many terms, and of roundings of scales."""
        bounded = contraction_bound(self.value, self.magnitude, terms, dtype, accumulator)
        own = bounded.bound * (
            2 if accumulator.unit == ROUNDOFF[torch.float64] else 1
        )  # the oracle's roundings are of the same size
        own = own + (self.margin + roundings * ROUNDOFF[torch.float32] * self.magnitude) * (1 + ROUNDOFF[dtype])
        bound = torch.where(self.free | (self.value.abs() + own > torch.finfo(dtype).max), torch.inf, own)
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
    how: ProductPrecision,
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
        bounded, same, product.magnitude, max(terms, 1) + how.roundings, accumulator=how.accumulator, groups=groups
    )


def own_rows(counts: Tensor) -> list[slice]:
    """Where each expert's rows stand."""
    ends = counts.cumsum(0).tolist()
    return [slice(end - count, end) for end, count in zip(ends, counts.tolist(), strict=True)]


def experts_of_rows(counts: Tensor, rows: int) -> Tensor:
    """[P] the expert of each row; behind the last segment, one more than the last."""
    sizes = [*counts.tolist(), rows - int(counts.sum())]
    return torch.from_numpy(np.repeat(np.arange(len(sizes)), sizes))
