"""Every loss of precision in the reference goes through this file."""

import torch
from torch import Tensor


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums of `dtype` values are taken in: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def round_to(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x rounded to `dtype`, to nearest, ties to even; x itself if it has that dtype. From float64
    to 16 bits by float32, as torch does.
    """
    return x.to(dtype)


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, summed in the accumulator's dtype and rounded once to the factors'. `torch.autocast`
    around the call would round float32 factors.
    """
    accumulator = accumulator_dtype(a.dtype)
    with torch.autocast(a.device.type, enabled=False):
        return round_to(round_to(a, accumulator) @ round_to(b, accumulator), a.dtype)
