"""Values of rows that travel as codes, and of scales that travel with rows."""

import numpy as np
import torch
from torch import Tensor

from conformance.core.tensors import hashed

E4M3_MAX = 448.0  # OCP OFP8 1.0
SCALE_DTYPES = ("int32", "uint8", "float8_e8m0fnu")  # scales that travel: packed codes, and codes
CODES = (0, 1, 127, 254, 255)  # codes of E8M0: the smallest, the next, 1, the largest, NaN


def at_edges_of_scales(x: Tensor) -> Tensor:
    """Rows in turn: of zeros; of an amax below DeepEP's least; with an amax of 448 · 2ⁿ, whose
    scale has no mantissa; as they are, in float16 up to half its largest number.
    """
    kind = torch.arange(len(x))[:, None] % 4
    full = torch.cat([x[:, :1], E4M3_MAX * 2.0 ** (kind % 3), x[:, 2:]], 1).to(x.dtype)
    scaled = x * 2.0**14 if x.dtype == torch.float16 else x
    return torch.where(kind == 0, 0, torch.where(kind == 1, x * 2.0**-20, torch.where(kind == 2, full, scaled)))


def at_reciprocals(x: Tensor) -> Tensor:
    """Rows in turn, of an amax a: 448 / a overflows; it is 2¹²⁸, one past the largest number; it is
    2¹²⁷, whose reciprocal is subnormal; a is so large that eight copies add up; as they are.
    """
    kind = torch.arange(len(x))[:, None] % 5
    small = x.double() * 2.0**-130
    amax = torch.tensor([0.0, E4M3_MAX * 2.0**-128, E4M3_MAX * 2.0**-127], dtype=torch.float64)[kind.clamp(max=2)]
    led = torch.where(torch.arange(x.shape[1])[None] == 1, amax, small)
    large = torch.where(kind == 3, x.double() * 2.0**123, x.double())
    return torch.where(kind == 0, small, torch.where(kind < 3, led, large)).to(x.dtype)


def packed_codes(seed: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Random codes of E8M0, one in each byte.

    They must arrive bit by bit, because DeepEP packs four of them into 32 bits.
    """
    count = int(np.prod(shape)) * dtype.itemsize
    codes = np.array(CODES, dtype=np.uint8)[hashed(seed, "packed codes", count) % len(CODES)]
    packed = torch.empty(int(np.prod(shape)), dtype=dtype)
    packed.view(torch.uint8).copy_(torch.from_numpy(codes))
    return packed.reshape(shape)


def with_special(probs: Tensor, seed: int) -> Tensor:
    """The probabilities, of which a quarter are NaN, infinite or negative."""
    noise = torch.from_numpy(hashed(seed, "special probs", probs.numel()) % 16.0).long().reshape(probs.shape)
    strange = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.5], dtype=probs.dtype)
    return torch.where(noise < len(strange), strange[noise.clamp(max=len(strange) - 1)], probs)
