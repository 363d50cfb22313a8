"""MXFP8 of torchao: `to_mx` and `to_dtype` of torchao.prototype.mx_formats, scales rounded up.

    moe-conformance run --impl conformance.peers.torchao_mx

By rows alone; `amax` is the adapter's own, because `to_mx` returns none.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_dtype, to_mx

from moe_ref.config import Quantization, Recipe, check_quantize, check_splits

BLOCK = 32


class Rows(NamedTuple):
    """Codes, scales and amax of all groups."""

    codes: Tensor
    scales: Tensor
    amax: Tensor
    dtype: torch.dtype
    num_rows: int


def supports(function: str, **arguments: Any) -> str | None:
    """Rows of bfloat16 and float32, without square blocks."""
    if function != "quantize":
        return None
    recipe, dtype = arguments["recipe"], arguments["x"].dtype
    if isinstance(recipe, Recipe) and (recipe.scaling != "mxfp8" or recipe.two_dimensional_weights):
        return f"quantize under {recipe.scaling}" + (" in squares" if recipe.scaling == "mxfp8" else "")
    return None if dtype in (torch.bfloat16, torch.float32) else f"quantize of {dtype}"


def declares(function: str) -> dict[str, Any]:
    """The codes have no gradient."""
    return {"differentiable": False} if function == "quantize" else {}


def quantize(x: Tensor, recipe: Recipe, *, role: str = "input", splits: Tensor | None = None) -> Quantization:
    """`moe_ref.quantize` by rows."""
    check_quantize(x, recipe, role, splits, True, False, None, None)
    sizes = [len(x)] if splits is None else splits.tolist()
    check_splits(sizes, len(x), recipe)
    own = x.detach()[: sum(sizes)].contiguous()
    hybrid = recipe.fp8_format == "hybrid" and role == "grad_output"
    scale, data = to_mx(own, torch.float8_e5m2 if hybrid else torch.float8_e4m3fn, BLOCK, ScaleCalculationMode.RCEIL)
    blocks = own.float().unflatten(1, (-1, BLOCK)).abs()
    amax = torch.where(blocks.isnan(), 0, blocks).amax(2)
    return Quantization(Rows(data, scale.view(torch.uint8).view(amax.shape), amax, x.dtype, len(x)), None)


def codes(quantized: Rows) -> Tensor:
    """`moe_ref.codes`."""
    return _extended(quantized.codes.view(torch.uint8), quantized)


def scales(quantized: Rows) -> Tensor:
    """`moe_ref.scales`."""
    return quantized.scales


def amax(quantized: Rows) -> Tensor:
    """`moe_ref.amax`."""
    return quantized.amax


def dequantize(quantized: Rows) -> Tensor:
    """`moe_ref.dequantize`."""
    scale = quantized.scales.view(torch.float8_e8m0fnu)
    return _extended(to_dtype(quantized.codes, scale, quantized.codes.dtype, BLOCK, quantized.dtype), quantized)


def _extended(x: Tensor, quantized: Rows) -> Tensor:
    return torch.cat([x, x.new_zeros(quantized.num_rows - len(x), x.shape[1])])
