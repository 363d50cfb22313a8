"""A value that underflows is not taken for an exact zero."""

import torch

from conformance.analysis.running import Running


def test_a_product_that_underflows_in_float64_is_not_exactly_zero():
    least = Running.of(torch.tensor([5e-324, 0.0], dtype=torch.float64), torch.float64)
    product = least * 0.3
    assert product.value.tolist() == [0.0, 0.0]
    assert product.error[0] >= 5e-324
    assert product.error[1] == 0.0
