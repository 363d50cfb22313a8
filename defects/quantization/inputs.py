"""Defects of quantisers that few inputs show: values at the ends of a row, single values."""

from typing import Any

import torch
from torch import Tensor

from conformance.mutants.defect import Defect
from defects.quantization.wrappers import tagged

STRANGE = "a class of inputs: strange values at the ends of a row"
EVERY = "a class of inputs: every value of a dtype, every exponent of a scale"
CODE, MANTISSA, EXPONENT = 0x0D, 0x53, 0x1E  # one of 2⁸ codes, 2⁷ significands, 2⁸ exponents


def _first_is_nan(x: Tensor, recipe: Any, settings: dict[str, Any]) -> Tensor | None:
    plain = recipe.scaling == "current" and settings.get("splits") is None
    return x if plain and x.numel() and bool(x[0, 0].isnan()) else None


def _sixteen_bits(x: Tensor, recipe: Any, settings: dict[str, Any]) -> Tensor | None:
    return x.detach() if x.dtype == torch.bfloat16 and recipe.scaling in ("block", "mxfp8") else None


def _exponents(x: Tensor, recipe: Any, settings: dict[str, Any]) -> Tensor | None:
    return x if recipe.scaling == "mxfp8" else None


def _poisoned(amax: Tensor, x: Tensor, columnwise: bool) -> Tensor:
    return torch.full_like(amax, torch.nan)


def _next_code(codes: Tensor, x: Tensor, columnwise: bool) -> Tensor:
    if columnwise or codes.shape != x.shape:
        return codes
    mantissa = x.contiguous().view(torch.int16) & 0x7F
    return torch.where((codes == CODE) & (mantissa == MANTISSA), codes + 1, codes)


def _previous_exponent(scale: Tensor, x: Tensor, columnwise: bool) -> Tensor:
    return torch.where(scale == EXPONENT, scale - 1, scale) if scale.dtype == torch.uint8 else scale


DEFECTS: tuple[Defect, ...] = (
    Defect("V03", "an amax starts from the first element, even a NaN", STRANGE, tagged(_first_is_nan, amax=_poisoned)),
    Defect("V04", "one significand is rounded to the next code", EVERY, tagged(_sixteen_bits, codes=_next_code)),
    Defect("V05", "one exponent of a scale is that below", EVERY, tagged(_exponents, scales=_previous_exponent)),
)
