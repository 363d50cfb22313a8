"""The running error bound where a result, or a part of a sum, may be past the largest number."""

import math

import pytest
import torch

from conformance.analysis.running import Running
from conformance.judge import judge


def test_what_may_overflow_has_no_bound():
    most = torch.finfo(torch.float32).max
    x = Running.of(torch.tensor([most, 1.0]), torch.float32) * 1.01
    assert x.error.isinf().tolist() == [True, False]
    assert judge("x", x.bounded(torch.float32), torch.tensor([torch.inf, 1.01])) is None
    assert judge("x", x.bounded(torch.float32), torch.tensor([torch.inf, 1.02])).index == (1,)


def test_what_surely_overflows_16_bits_is_an_infinity():
    bounded = (Running.of(torch.tensor([1e5, 65504.0, 65521.0]), torch.float32) * 1.0).bounded(torch.float16)
    honest = torch.tensor([torch.inf, 65504.0, torch.inf], dtype=torch.float16)
    assert judge("x", bounded, honest) is None and judge("x", bounded, honest.clamp(max=65504)).index == (0,)


def test_a_sum_whose_partial_sums_may_overflow_is_unspecified():
    large = torch.tensor([3e38, 3e38, -3e38])
    bound = Running.of(large, torch.float32).sum(0)
    assert float(bound.value) == pytest.approx(3e38) and bound.error.item() == math.inf
    assert math.isfinite(Running.of(large[1:], torch.float64).sum(0).error.item())


@pytest.mark.parametrize(("term", "most"), [(-3e38, math.inf), (-1.0, 0.0), (3e38, 0.0)])
def test_an_infinity_beside_terms_that_may_overflow_to_the_other_one_is_unspecified(term, most):
    total = Running.of(torch.tensor([torch.inf, term, term]), torch.float32).sum(0)
    assert total.error.item() == most
    assert total.value.item() == (0.0 if most else math.inf)
