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
# the variants without square blocks
scope = "scaling=mxfp8 and variant in (0, 1) and dtype in (float32, bfloat16)"


class Rows(NamedTuple):
    """The results for all rows."""

    codes: Tensor
    scales: Tensor
    amax: Tensor
    values: Tensor


def declares(function: str) -> dict[str, Any]:
    """The codes have no gradient."""
    return {"differentiable": False} if function == "quantize" else {}


def quantize(x: Tensor, recipe: Recipe, *, role: str = "input", splits: Tensor | None = None) -> Quantization:
    """`moe_ref.quantize` by rows."""
    num_rows = sum(group_sizes(x, recipe, role, splits))
    hybrid = recipe.fp8_format == "hybrid" and role == "grad_output"
    kind = torch.float8_e5m2 if hybrid else torch.float8_e4m3fn
    scale, data = to_mx(x.detach()[:num_rows].contiguous(), kind, BLOCK, ScaleCalculationMode.RCEIL)
    amax = x.detach()[:num_rows].float().unflatten(1, (-1, BLOCK)).abs().nan_to_num(0, torch.inf).amax(2)
    value = extended(to_dtype(data, scale, kind, BLOCK, x.dtype), x)
    return Quantization(Rows(extended(data.view(torch.uint8), x), scale.view(torch.uint8), amax, value), None)


def group_sizes(x: Tensor, recipe: Recipe, role: str, splits: Tensor | None) -> list[int]:
    """Rows of each group, of a legal call."""
    check_quantize(x, recipe, role, splits, True, False, None, None)
    sizes = [len(x)] if splits is None else splits.tolist()
    check_splits(sizes, len(x), recipe)
    return sizes


def extended(y: Tensor, x: Tensor) -> Tensor:
    """Zeros in the rows past the last group."""
    return torch.cat([y, y.new_zeros(len(x) - len(y), y.shape[1])])


def codes(quantized: Rows) -> Tensor:
    """`moe_ref.codes`."""
    return quantized.codes


def scales(quantized: Rows) -> Tensor:
    """`moe_ref.scales`."""
    return quantized.scales


def amax(quantized: Rows) -> Tensor:
    """`moe_ref.amax`."""
    return quantized.amax


def dequantize(quantized: Rows) -> Tensor:
    """`moe_ref.dequantize`."""
    return quantized.values
