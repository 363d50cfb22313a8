"""Products and their expectations, for the tests of ratios."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor

from conformance.judge import Bounded, RowWise
from conformance.judge.bound import sum_bound
from conformance.judge.ratios import row_wise
from tests.judge.tolerance_experiment import contraction

ROWS, TERMS, COLUMNS = 128, 256, 64


def operands(
    seed: int, rows: int = ROWS, terms: int = TERMS, columns: int = COLUMNS, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor]:
    source = np.random.default_rng(seed)
    a, b = source.standard_normal((rows, terms)), source.standard_normal((columns, terms)) / terms**0.5
    return torch.from_numpy(a).to(dtype), torch.from_numpy(b).to(dtype)


def expected_of(a: Tensor, b: Tensor, loosened: float = 1.0, **settings) -> RowWise | Bounded:
    """A product with a bound as loose as after several roundings, so that only the ratios judge."""
    value, magnitude = a.double() @ b.double().T, a.double().abs() @ b.double().abs().T
    exact = sum_bound(value, magnitude, a.shape[1], a.dtype, torch.float32)
    bounded = dataclasses.replace(exact, bound=loosened * exact.bound)
    return row_wise(bounded, product(a, b), magnitude, a.shape[1], **settings)


def product(a: Tensor, b: Tensor, order: str = "one product") -> Tensor:
    return contraction(a.float(), b.float(), order).to(a.dtype)


@pytest.fixture
def expected() -> RowWise:
    return expected_of(*operands(0), loosened=100)
