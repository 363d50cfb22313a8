"""What several test modules of this folder use: reference."""

import math
from bisect import bisect_left
from functools import cache
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from moe_ref import new_quantizer_state, quantize
from moe_ref.config import Recipe

STATELESS = [
    Recipe("current"),
    Recipe("block"),
    Recipe("mxfp8"),
    Recipe("nvfp4", hadamard=False, stochastic_rounding=False),
]


ALL = [*STATELESS, Recipe("delayed")]
by_scaling = {"ids": lambda recipe: recipe.scaling}
NAN, INF = math.nan, math.inf
f32 = np.float32
LARGEST = np.finfo(np.float32).max


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def quantized(x: Tensor, recipe: Recipe, **options):
    """The quantised tensor; a fresh state where one is needed."""
    splits = options.get("splits")
    options.setdefault("state", new_quantizer_state(recipe, num_groups=1 if splits is None else len(splits)))
    return quantize(x, recipe, **options)[0]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    """Bit by bit; a NaN equals a NaN."""
    return all(
        x.shape == y.shape and x.dtype == y.dtype and bool(((x == y) | (x.isnan() & y.isnan())).all())
        for x, y in zip(a, b, strict=True)
    )


def row(values: list[float], length: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """One row, zeros behind the values."""
    return torch.tensor([values + [0.0] * (length - len(values))], dtype=dtype)


# ---- golden cases, worked by hand


@cache
def table(name: str) -> tuple[list[float], list[float]]:
    """(values, midpoints) of the codes without a sign."""
    mantissa, bias, count = {"e4m3": (3, 7, 0x7F), "e5m2": (2, 15, 0x7C), "e2m1": (1, 1, 8)}[name]
    values = [
        (c % 2**mantissa + (2**mantissa if c >> mantissa else 0)) * 2.0 ** (max(c >> mantissa, 1) - bias - mantissa)
        for c in range(count)
    ]
    return values, [(a + b) / 2 for a, b in pairwise(values)]


def code_of(v: float, name: str) -> int:
    """Nearest, ties to even, saturated."""
    middles = table(name)[1]
    if math.isnan(v):
        return 7 if name == "e2m1" else 0x7F
    place = bisect_left(middles, abs(v))
    if place < len(middles) and middles[place] == abs(v) and place % 2 == 1:
        place += 1
    return place + (0 if math.copysign(1, v) > 0 else {"e2m1": 8}.get(name, 0x80))
