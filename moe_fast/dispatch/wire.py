"""Rows that travel as codes and scales of 1×128 blocks."""

import torch
from torch import Tensor

from moe_fast.dispatch.exchange import as_bytes, from_bytes
from moe_fast.launch.tuning import ceil_div
from moe_fast.quantization.quantize import quantize
from moe_fast.quantization.quantized import Form, Quantized, scale_limits
from moe_ref.config import FP8_BLOCK, Recipe

FORMAT = "e4m3"  # the format of inputs; gradients may have another one


def rule_of(recipe: Recipe | None, tokens: Tensor) -> tuple[tuple[int, int], dict[str, bool]]:
    """(limits of the scales, settings) for the kernels that encode."""
    if recipe is None:
        return (0, 0), {"POWER_OF_TWO": False}
    return scale_limits(recipe, tokens.dtype), {"POWER_OF_TWO": bool(recipe.power_of_two_scales)}


def packed(tokens_TH: Tensor, recipe: Recipe) -> tuple[Tensor, Tensor]:
    """([T, bytes of each token's scales and codes], the scale of zeros as integers).

    A scale is sent as the bits in which it differs from the scale of zeros: a row of zero bytes, as
    in padding, then has the codes and scales of a row of zeros.
    """
    form = _quantized(tokens_TH, recipe)
    of_zeros = _quantized(tokens_TH.new_zeros((1, 1)), recipe).scale.view(torch.int32)
    return torch.cat([as_bytes(form.scale.view(torch.int32) ^ of_zeros), form.codes_MN], 1), of_zeros


def unpacked(record_PB: Tensor, of_zeros: Tensor, hidden: int) -> Form:
    """The codes and scales of those bytes, in the layout of `quantize`."""
    blocks = ceil_div(hidden, FP8_BLOCK)
    scales, codes = record_PB.split([blocks * of_zeros.element_size(), hidden], 1)
    differing_PB = from_bytes(scales, of_zeros.expand(1, blocks))
    return form_of(codes.contiguous(), (differing_PB ^ of_zeros).view(torch.float32).T.contiguous().T)


def form_of(codes_PH: Tensor, scale_PB: Tensor) -> Form:
    """A form without an amax, because the amax does not travel."""
    return Form(codes_PH, scale_PB, scale_PB.new_empty(0), (1, FP8_BLOCK))


def rows_of(form: Form, recipe: Recipe, dtype: torch.dtype, tokens_per_expert: Tensor, source: Tensor) -> Quantized:
    """Arrived rows as `quantize` would return them; `source` is their node in the graph."""
    return Quantized(recipe, FORMAT, dtype, tokens_per_expert, source if source.requires_grad else None, form, None)


def _quantized(x: Tensor, recipe: Recipe) -> Form:
    form: Form = quantize(x.detach(), recipe).quantized.form(False)
    return form
