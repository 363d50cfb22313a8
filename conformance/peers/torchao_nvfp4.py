"""NVFP4 of torchao: `nvfp4_quantize` with a scale per tensor, and `NVFP4Tensor.dequantize`.

    moe-conformance run --impl conformance.peers.torchao_nvfp4

By rows, without transform, squares and stochastic rounding; `amax` is the adapter's own. Each group
of rows is a tensor.
"""

import torch
from torch import Tensor
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, nvfp4_quantize, per_tensor_amax_to_scale

from conformance.peers.torchao_mx import Rows, amax, codes, declares, dequantize, extended, group_sizes, scales
from moe_ref.config import Quantization, Recipe

__all__ = ["amax", "codes", "declares", "dequantize", "quantize", "scales"]
BLOCK = 16
# variant 1 scales inputs by rows; its weights and gradients have one scale per tensor
scope = "scaling=nvfp4 and variant=1 and role in (weight, grad_output) and dtype in (float32, bfloat16)"


def quantize(x: Tensor, recipe: Recipe, *, role: str = "input", splits: Tensor | None = None) -> Quantization:
    """`moe_ref.quantize` by rows."""
    sizes = group_sizes(x, recipe, role, splits)
    groups = [_tensor(rows) for rows in x.detach()[: sum(sizes)].split(sizes)]
    packed = extended(torch.cat([tensor.qdata for tensor, _ in groups]), x)
    scale = torch.cat([tensor.scale.view(torch.uint8) for tensor, _ in groups])
    values = extended(torch.cat([tensor.dequantize() for tensor, _ in groups]), x)
    codes = torch.stack([packed & 15, packed >> 4], 2).flatten(1)
    return Quantization(Rows(codes, scale, torch.stack([amax for _, amax in groups]), values), None)


def _tensor(rows: Tensor) -> tuple[NVFP4Tensor, Tensor]:
    """The tensor of a group, and its amax; NaN is no number."""
    amax = rows.float().abs().nan_to_num(0, torch.inf).amax() if rows.numel() else torch.zeros(())
    tensor_scale = per_tensor_amax_to_scale(amax)
    scale, data = nvfp4_quantize(rows.contiguous(), BLOCK, tensor_scale)
    return NVFP4Tensor(data, scale.view(len(rows), -1), BLOCK, rows.dtype, tensor_scale), amax
