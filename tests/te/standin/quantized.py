"""Transformer Engine's quantised tensors of rows, made by the reference, and their permutation."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

import moe_ref
from moe_ref.config import Recipe
from moe_ref.quantization.formats import E4M3, E5M2, E8M0, decode
from tests.te.standin.recipes import ours

MULTIPLE = {"block": 4, "mxfp8": 128}  # of tokens, where scales are stored with padding
FORMATS = {"e4m3": E4M3, "e5m2": E5M2}


@dataclass(frozen=True)
class QuantisedRows:
    """Codes, and scales as they are stored: of blocks transposed, padded to a multiple of 4."""

    scaling: str
    fp8_dtype: str
    dtype: torch.dtype
    _rowwise_data: Tensor
    _rowwise_scale_inv: Tensor

    def dequantize(self) -> Tensor:
        """The values, in the dtype that was quantised."""
        value = decode(self._rowwise_data, FORMATS[self.fp8_dtype])
        rows, columns = value.shape
        if self.scaling == "block":
            scale, block = self._rowwise_scale_inv.T, 128
        else:
            scale, block = decode(self._rowwise_scale_inv, E8M0), 32
        return (value * scale[:rows].repeat_interleave(block, 1)[:, :columns]).to(self.dtype)

    def moved(self, move: Callable[[Tensor], Tensor]) -> "QuantisedRows":
        """Codes and scales of rows in other places."""
        scale = self._rowwise_scale_inv
        if self.scaling == "block":
            return replace(self, _rowwise_data=move(self._rowwise_data), _rowwise_scale_inv=move(scale.T).T)
        return replace(self, _rowwise_data=move(self._rowwise_data), _rowwise_scale_inv=move(scale))

    def check(self, num_tokens: int) -> None:
        """The release's check of the scales' shape."""
        rows = self._rowwise_scale_inv.shape[self.scaling == "block"]
        if rows != num_tokens:
            raise ValueError(f"Scale and input shape mismatch: num_tokens ({num_tokens}) != {rows}")


class Quantisers:
    """The quantisers of one release, with the newest names of their options."""

    def get_fp8_te_dtype(self, fp8_recipe: Any, fprop_tensor: bool) -> str:
        """The format of a role."""
        return "e5m2" if ours(fp8_recipe).fp8_format == "hybrid" and not fprop_tensor else "e4m3"

    def Float8BlockQuantizer(
        self, fp8_dtype: str, amax_epsilon: float, force_pow_2_scales: bool, block_scaling_dim: int
    ) -> Callable[[Tensor], QuantisedRows]:
        """By blocks of a row."""
        if block_scaling_dim != 1:
            raise NotImplementedError(f"block_scaling_dim is {block_scaling_dim}; the stand-in has 1 alone")
        return _by_rows(fp8_dtype, "block", power_of_two_scales=force_pow_2_scales, amax_epsilon=amax_epsilon)

    def MXFP8Quantizer(self, fp8_dtype: str) -> Callable[[Tensor], QuantisedRows]:
        """By blocks of a row."""
        return _by_rows(fp8_dtype, "mxfp8")


def _by_rows(fp8_dtype: str, scaling: str, **options: Any) -> Callable[[Tensor], QuantisedRows]:
    recipe = Recipe(scaling, fp8_format="e4m3" if fp8_dtype == "e4m3" else "hybrid", **options)
    role = "input" if fp8_dtype == "e4m3" else "grad_output"

    def quantise(x: Tensor) -> QuantisedRows:
        quantized = moe_ref.quantize(x, recipe, role=role).quantized
        scales = pad(moe_ref.scales(quantized), (0, 0, 0, -len(x) % MULTIPLE[scaling]))
        stored = scales.T if scaling == "block" else scales
        return QuantisedRows(scaling, fp8_dtype, x.dtype, moe_ref.codes(quantized), stored)

    return quantise
