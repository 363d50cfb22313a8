"""Values that quantisers are compared on: first the special ones, then drawn ones."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def generator(seed: int) -> torch.Generator:
    """A generator of its own."""
    return torch.Generator().manual_seed(seed)


def blocks(count: int, size: int, dtype: torch.dtype, largest: float, *, special: bool = True) -> Tensor:
    """[count + special, size]: a block a row.

    Drawn rows are normal, times a power of two from the dtype's whole range. Special ones: zeros,
    an infinity, a NaN, NaN alone, -0, the largest and the smallest number, and a block whose
    largest value is `largest` times a power of two, or next to it.
    """
    info = torch.finfo(dtype)
    low, high = (-120, 120) if dtype != torch.float16 else (-14, 12)
    exponent = torch.randint(low, high, (count, 1), generator=generator(1))
    drawn = torch.randn(count, size, generator=generator(2)) * torch.exp2(exponent.float())
    rows = [drawn.clamp(-info.max, info.max).to(dtype)]
    if special:
        rows.insert(0, torch.stack([*_special(size, dtype, largest)]))
    return torch.cat(rows)


def _special(size: int, dtype: torch.dtype, largest: float) -> Iterator[Tensor]:
    info = torch.finfo(dtype)
    ramp = torch.linspace(-1, 1, size).to(dtype)
    yield torch.zeros(size, dtype=dtype)
    yield -torch.zeros(size, dtype=dtype)
    for value in (math.inf, -math.inf, math.nan, info.max, info.tiny, info.smallest_normal * info.eps):
        for base_row in (torch.zeros(size, dtype=dtype), ramp):
            row = base_row.clone()
            row[size // 2] = value
            yield row
    yield torch.full((size,), math.nan, dtype=dtype)
    for power in (-8, -1, 0, 3):
        exact = torch.tensor(largest * 2.0**power, dtype=dtype)
        for near in (torch.nextafter(exact, exact * 0), exact, torch.nextafter(exact, exact * 2)):
            row = ramp * exact / 2
            row[0] = near
            yield row
