"""How far a sum over rows of many ranks may be from the truth: two levels of addition, with a rounding between.

Where a dispatcher declares its tree, an honest implementation may add in any order inside a level,
and may round less often:

    part[p]  = round(Σ rows of the part p)     error ≤ γ_n(u_first)·Σ|row| + u_between·(…)
    y[g]     = round(Σ parts of the token g)   error ≤ Σ errors of parts + γ_m(u_second)·(Σ|part| + …) + u_out·(…)

where γ_n(u) = (1 + u)ⁿ - 1 and u of a dtype is half the distance from 1 to its next number.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from conformance.families.dispatch.cases import DispatchCase, is_exact
from conformance.judge.bound import HALF_SUBNORMAL, ROUNDOFF, Bounded


@dataclass(frozen=True)
class Tree:
    """The dtypes that the two levels add in, and the dtype that parts are rounded to between them."""

    first: torch.dtype
    between: torch.dtype
    second: torch.dtype

    def rounded_first(self) -> "Tree":
        """Where what is added was computed in the accumulator's dtype, and rounded to it."""
        return Tree(self.first, self.second, self.second)


def flat(accumulator: torch.dtype) -> Tree:
    """One level: every row is a part of its own, and is not rounded again."""
    return Tree(accumulator, torch.float64, accumulator)


def tree_bound(
    case: DispatchCase, rows_RH: Tensor, part_R: Tensor, token_P: Tensor, tokens: int, dtype: torch.dtype, tree: Tree
) -> Bounded:
    """The bound of y[g], the sum over the parts p of g, of the rows of p.

    Args:
        rows_RH: float64 [R,…], what is added.
        part_R: the part of each row.
        token_P: the token of each part.
        tokens: how many there are.
        dtype: of the output.
    """
    parts = len(token_P)
    part, size = (_added(x, part_R, parts) for x in (rows_RH, rows_RH.abs()))
    most = _most(part_R, parts)
    gamma = _gamma(most, tree.first) if most > 1 else 0.0
    error = (
        gamma * size + ROUNDOFF[tree.between] * (part.abs() + gamma * size) + HALF_SUBNORMAL[tree.between] * (size > 0)
    )
    value, magnitude, total, brought = (_added(x, token_P, tokens) for x in (part, size, part.abs() + error, error))
    several = _most(token_P, tokens)
    narrowed = ROUNDOFF[tree.second] > ROUNDOFF[tree.between]  # then even a part that is alone is rounded
    brought = brought + (_gamma(several, tree.second) * total if several > 1 or narrowed else 0.0)
    bound = brought + ROUNDOFF[dtype] * (value.abs() + brought) + HALF_SUBNORMAL[dtype]
    narrow = max((x for x in (tree.first, tree.between, tree.second, dtype)), key=ROUNDOFF.__getitem__)
    exact = (magnitude == 0) | is_exact(case, narrow, magnitude)
    return Bounded(value, torch.where(exact, 0.0, bound), dtype, tree.second)


def _gamma(terms: int, dtype: torch.dtype) -> float:
    return math.expm1(terms * math.log1p(ROUNDOFF[dtype]))


def _added(x: Tensor, into: Tensor, count: int) -> Tensor:
    return x.new_zeros((count, *x.shape[1:])).index_add(0, into, x)


def _most(into: Tensor, count: int) -> int:
    return int(torch.bincount(into, minlength=max(count, 1)).max())
