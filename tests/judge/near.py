"""The tolerance between two computations that differ in the order of their roundings only."""

import torch
from torch import Tensor


def near(got: Tensor, expected: Tensor) -> bool:
    """Within 64 eps of the row's largest magnitude; NaN is never near."""
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    largest = expected.abs().amax(-1, keepdim=True) if expected.numel() else expected
    return bool(((got - expected).abs() <= 64 * torch.finfo(expected.dtype).eps * largest).all())
