"""Zeros: one of a value that underflows is not exact, and a constant one keeps its sign."""

import torch

from conformance.analysis.running import Running


def test_a_product_that_underflows_in_float64_is_not_exactly_zero():
    least = Running.of(torch.tensor([5e-324, 0.0], dtype=torch.float64), torch.float64)
    product = least * 0.3
    assert product.value.tolist() == [0.0, 0.0]
    assert product.error[0] >= 5e-324
    assert product.error[1] == 0.0


def test_a_constant_keeps_the_sign_of_its_zero():
    x = Running.of(torch.ones(1), torch.float32)
    signs = [bool(torch.signbit((x * zero).value)) for zero in (0.0, -0.0, 0.0)]
    assert signs == [False, True, False]
