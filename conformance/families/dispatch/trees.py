"""Error bound of a sum over rows of many ranks: two levels of addition, a rounding between.

A declared tree fixes the levels; the order within a level is free, and so are fewer roundings:

    part[p]  = round(Σ rows of part p)     error ≤ γ_n(u_first)·Σ|row| + u_between·(…)
    y[g]     = round(Σ parts of token g)   error ≤ Σ part errors + γ_m(u_second)·(Σ|part| + …)
                                                   + u_out·(…)

where γ_n(u) = (1 + u)ⁿ - 1 and u of a dtype is half the distance from 1 to its next number. A part
of one row, if its dtype holds it, is that row without an error.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from conformance.families.dispatch.cases import DispatchCase, is_exact
from conformance.judge.bound import HALF_SUBNORMAL, ROUNDOFF, Bounded


@dataclass(frozen=True)
class Tree:
    """Accumulation dtypes of the two levels, and the dtype of the parts between them."""

    first: torch.dtype
    between: torch.dtype
    second: torch.dtype

    def rounded_first(self) -> "Tree":
        """The tree of terms already rounded to the accumulator's dtype."""
        return Tree(self.first, self.second, self.second)


def flat(accumulator: torch.dtype) -> Tree:
    """One level: every row is a part, without a second rounding."""
    return Tree(accumulator, torch.float64, accumulator)


def tree_bound(
    case: DispatchCase, rows_RH: Tensor, part_R: Tensor, token_P: Tensor, tokens: int, dtype: torch.dtype, tree: Tree
) -> Bounded:
    """Bound of y[g] = Σ over parts p of g, Σ over rows of p.

    Args:
        rows_RH: float64 [R,…], the terms.
        part_R: the part of each row.
        token_P: the token of each part.
        tokens: number of tokens.
        dtype: the output's.
    """
    num_parts = len(token_P)
    sum_of_part, size = (_index_sums(x, part_R, num_parts) for x in (rows_RH, rows_RH.abs()))
    most = _most_terms(part_R, num_parts)
    gamma = _gamma(most, tree.first) if most > 1 else 0.0
    error = (
        gamma * size
        + ROUNDOFF[tree.between] * (sum_of_part.abs() + gamma * size)
        + HALF_SUBNORMAL[tree.between] * (size > 0)
    )
    error = torch.where(_unrounded(sum_of_part, part_R, tree.between), 0.0, error)
    value, magnitude, total, brought = (
        _index_sums(x, token_P, tokens) for x in (sum_of_part, size, sum_of_part.abs() + error, error)
    )
    several = _most_terms(token_P, tokens)
    narrowed = ROUNDOFF[tree.second] > ROUNDOFF[tree.between]  # single parts round too
    brought = brought + (_gamma(several, tree.second) * total if several > 1 or narrowed else 0.0)
    if narrowed:  # a part may be subnormal there; sums of such numbers are exact
        brought = brought + several * HALF_SUBNORMAL[tree.second]
    bound = brought + ROUNDOFF[dtype] * (value.abs() + brought) + HALF_SUBNORMAL[dtype]
    narrow = max((x for x in (tree.first, tree.between, tree.second, dtype)), key=ROUNDOFF.__getitem__)
    exact = (magnitude == 0) | is_exact(case, narrow, magnitude)
    return Bounded(value, torch.where(exact, 0.0, bound), dtype, tree.second)


def _unrounded(sum_of_part: Tensor, part_R: Tensor, between: torch.dtype) -> Tensor:
    """Where a part is one row, and a number of the dtype between the levels."""
    single_row = torch.bincount(part_R, minlength=len(sum_of_part)) == 1
    return single_row.reshape(-1, *(1,) * (sum_of_part.dim() - 1)) & (sum_of_part.to(between).double() == sum_of_part)


def _gamma(terms: int, dtype: torch.dtype) -> float:
    reference_roundings = terms if dtype == torch.float64 else 0  # roundings of the reference's sum
    return math.expm1((terms + reference_roundings) * math.log1p(ROUNDOFF[dtype]))


def _index_sums(x: Tensor, into: Tensor, count: int) -> Tensor:
    return x.new_zeros((count, *x.shape[1:])).index_add(0, into, x)


def _most_terms(into: Tensor, count: int) -> int:
    return int(torch.bincount(into, minlength=max(count, 1)).max())
