"""The tolerance between two computations that differ in the order of their roundings only."""

import torch
from torch import Tensor


def near(got: Tensor, right: Tensor) -> bool:
    """Within 64 eps of the row's largest magnitude; NaN is never near."""
    assert (got.dtype, got.shape) == (right.dtype, right.shape)
    largest = right.abs().amax(-1, keepdim=True) if right.numel() else right
    return bool(((got - right).abs() <= 64 * torch.finfo(right.dtype).eps * largest).all())
