"""How near two computations of the same thing in one dtype must be, where only the order of their roundings differs."""

import torch
from torch import Tensor


def near(got: Tensor, right: Tensor) -> bool:
    """Within some dozen roundings of their dtype, beside the largest number of the same row; a NaN is near nothing."""
    assert (got.dtype, got.shape) == (right.dtype, right.shape)
    largest = right.abs().amax(-1, keepdim=True) if right.numel() else right
    return bool(((got - right).abs() <= 64 * torch.finfo(right.dtype).eps * largest).all())
