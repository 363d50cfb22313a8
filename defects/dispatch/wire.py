"""Defects of dispatchers that send codes and scales, planted in a working implementation.

The returned rows are opaque. As in `planted_quantization`, the defect's data accompany the rows,
and the defect shows in the scales read from the rows.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from conformance.mutants.defect import Defect, Wrapper
from defects.quantization.wrappers import Beside
from moe_ref.config import Recipe
from moe_ref.dispatch.low_latency import SMALLEST_AMAX
from moe_ref.quantization.formats import E4M3
from moe_ref.quantization.recipes import nearest32, over, scale_from_amax

NAN = 0xFF  # of E8M0
TILE = 8  # rows that share a scale by mistake
INVITED = "a mistake that dispatchers invite"


class Known(NamedTuple):
    """Data of rows sent as codes."""

    recipe: Recipe
    tokens_per_expert: Tensor


def _read(change: Callable[[Tensor, Known], Tensor]) -> dict[str, Wrapper]:
    """Wrappers that apply change(scale, known) to each expert's scales."""

    def dispatch(base: Wrapper, *tensors: Tensor, **settings: Any) -> Any:
        out = base(*tensors, **settings)
        recipe = settings.get("recipe")
        return out if recipe is None else out._replace(rows=Beside(out.rows, Known(recipe, out.tokens_per_expert)))

    def read(base: Wrapper, quantized: Any, /, **how: Any) -> Any:
        return base(quantized.quantized if isinstance(quantized, Beside) else quantized, **how)

    def scales(base: Wrapper, quantized: Any, /, **how: Any) -> Any:
        if not isinstance(quantized, Beside):
            return base(quantized, **how)
        by_expert = base(quantized.quantized, **how).split(quantized.known.tokens_per_expert.tolist())
        return torch.cat([change(scale, quantized.known) for scale in by_expert])

    return {"hybridep_dispatch": dispatch, "scales": scales, "codes": read, "dequantize": read}


def _of_another_row(scale: Tensor, known: Known) -> Tensor:
    return scale.roll(1, 0)


def _none_for_zeros(scale: Tensor, known: Known) -> Tensor:
    amax = scale.new_zeros(())
    multiplier = scale_from_amax(
        amax, E4M3.max, epsilon=known.recipe.amax_epsilon or 0.0, power_of_two=bool(known.recipe.power_of_two_scales)
    )
    return torch.where(scale == over(1.0, multiplier), 0.0, scale)


def _by_tiles(scale: Tensor, known: Known) -> Tensor:
    """One scale per tile of an expert's rows: that of the largest magnitude."""
    return (
        torch.cat([own.amax(0, keepdim=True).expand_as(own) for own in scale.split(TILE)]) if scale.numel() else scale
    )


def _one_for_the_least(dispatch: Wrapper, *tensors: Tensor, **settings: Any) -> Any:
    """The scale of a block whose amax is the least one."""
    out = dispatch(*tensors, **settings)
    if out.scales is None or settings.get("round_scale"):
        return out
    least = torch.full((), SMALLEST_AMAX, device=out.scales.device) * nearest32(1 / E4M3.max)
    return out._replace(scales=torch.where(out.scales == least, 1.0, out.scales))


def _words_as_numbers(dispatch: Wrapper, *tensors: Tensor, **settings: Any) -> Any:
    """Packed codes of four bytes pass through a float unit."""
    out = dispatch(*tensors, **settings)
    packed = out.scales is not None and out.scales.dtype == torch.int32
    return out._replace(scales=out.scales.float().to(torch.int32)) if packed else out


def _bytes_of_whole_words(dispatch: Wrapper, *tensors: Tensor, **settings: Any) -> Any:
    """Scales of one byte are copied in words of four; what is left of a row is not."""
    out = dispatch(*tensors, **settings)
    if out.scales is None or out.scales.dtype != torch.uint8:
        return out
    read = torch.arange(out.scales.shape[1], device=out.scales.device) < out.scales.shape[1] // 4 * 4
    return out._replace(scales=torch.where(read, out.scales, 0))


def _code_of_nan_is_the_largest(dispatch: Wrapper, *tensors: Tensor, **settings: Any) -> Any:
    out = dispatch(*tensors, **settings)
    if out.scales is None or out.scales.dtype != torch.float8_e8m0fnu:
        return out
    return out._replace(scales=out.scales.view(torch.uint8).clamp(max=NAN - 1).view(torch.float8_e8m0fnu))


DEFECTS: tuple[Defect, ...] = (
    Defect("W01", "scales in the order of another row", INVITED, _read(_of_another_row)),
    Defect("W02", "padding has codes and no scale", INVITED, _read(_none_for_zeros)),
    Defect("W03", "quantised where rows have arrived, several at once", INVITED, _read(_by_tiles)),
    Defect("W04", "a block of zeros has the scale 1", INVITED, {"deepep_low_latency_dispatch": _one_for_the_least}),
    Defect("W05", "packed codes of scales travel as numbers", INVITED, {"deepep_dispatch": _words_as_numbers}),
    Defect("W06", "scales of one byte travel in whole words", INVITED, {"deepep_dispatch": _bytes_of_whole_words}),
    Defect("W07", "a scale that is NaN becomes the largest", INVITED, {"deepep_dispatch": _code_of_nan_is_the_largest}),
)
