"""Defects of quantisers that kernels of other libraries have had, or could have; see `planted`."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import moe_ref
from conformance.mutants.defect import Defect, Wrapper
from defects.quantization.wrappers import MX_BLOCK, Beside, tagged
from moe_ref.quantization.recipes import FLOAT32_MAX, scheme

OPTION = "a mistake that recipes invite"
SCALE = "a mistake that a scale and its reciprocal invite"
RANGE = "a mistake that numbers near the end of a format invite"
TWICE = "a mistake that codes made of codes invite"
NAN_CODE, INFINITY, LARGEST5, SIGN = 255, 0x7C, 57344.0, 0x80  # of E8M0; of E5M2
TILE = 512  # scales: 128 rows of 4 blocks


def _ignoring(option: str, value: Any) -> Wrapper:
    """The option has another value, where the recipe has it."""

    def quantize(base: Wrapper, x: Tensor, recipe: Any, /, **settings: Any) -> Any:
        out = base(x, recipe, **settings)
        other = replace(recipe, **{option: value}) if getattr(recipe, option) is not None else recipe
        return out if other == recipe else base(x, other, **settings)

    return quantize


def _blocks_with_nan(x: Tensor, recipe: Any, settings: dict[str, Any]) -> Tensor | None:
    square = recipe.two_dimensional_weights and settings.get("role") == "weight"
    if recipe.scaling != "mxfp8" or square or not x.numel():
        return None
    rows = len(x) if settings.get("splits") is None else int(settings["splits"].sum())
    return x.detach()[:rows].isnan().reshape(rows, -1, MX_BLOCK).any(2)


def _scale_is_nan(scale: Tensor, lost: Tensor, columnwise: bool) -> Tensor:
    return scale if columnwise or scale.shape != lost.shape else torch.where(lost, NAN_CODE, scale)


def _groups(x: Tensor, settings: dict[str, Any]) -> list[Tensor]:
    splits = settings.get("splits")
    return [x.detach()] if splits is None else list(x.detach()[: int(splits.sum())].split(splits.tolist()))


def _divided(x: Tensor, recipe: Any, settings: dict[str, Any]) -> Tensor | None:
    """[G] amax / FMAX; None for other recipes."""
    if recipe.scaling != "current" or recipe.power_of_two_scales or recipe.amax_epsilon:
        return None
    sizes = [own.float().nan_to_num(0.0, torch.inf, -torch.inf).abs().flatten() for own in _groups(x, settings)]
    amax = torch.stack([own.max() if len(own) else own.new_zeros(()) for own in sizes])
    most = torch.full_like(amax, scheme(recipe, settings.get("role", "input")).format.max)
    return torch.where((amax > 0) & amax.isfinite(), amax / most, torch.nan)


def _in_place_of_the_reciprocal(scale: Tensor, divided: Tensor, columnwise: bool) -> Tensor:
    return torch.where(divided.isnan(), scale, divided)


def _empty_groups(x: Tensor, recipe: Any, settings: dict[str, Any]) -> Tensor | None:
    splits = settings.get("splits")
    return None if splits is None or recipe.scaling != "current" else splits == 0


def _scale_of_nothing(scale: Tensor, empty: Tensor, columnwise: bool) -> Tensor:
    return torch.where(empty.to(scale.device), torch.inf, scale)


def _columnwise_of_rowwise() -> dict[str, Wrapper]:
    """The columnwise form is made of the values of the rowwise codes."""

    def quantize(base: Wrapper, x: Tensor, recipe: Any, /, **settings: Any) -> Any:
        out = base(x, recipe, **settings)
        both = settings.get("columnwise") and settings.get("rowwise", True)
        if not both or recipe.scaling not in ("block", "mxfp8"):
            return out
        forward = {name: x for name, x in settings.items() if name in ("role", "splits")}
        values = moe_ref.dequantize(moe_ref.quantize(x.detach(), recipe, **forward).quantized)
        return out._replace(quantized=Beside(out.quantized, base(values, recipe, **settings).quantized))

    def read(base: Wrapper, quantized: Any, /, *, columnwise: bool = False, **options: Any) -> Any:
        if isinstance(quantized, Beside):
            quantized = quantized.known if columnwise else quantized.quantized
        return base(quantized, columnwise=columnwise, **options) if columnwise else base(quantized, **options)

    return {"quantize": quantize} | dict.fromkeys(("amax", "scales", "codes", "dequantize"), read)


def _of_float32(x: Tensor, recipe: Any, settings: dict[str, Any]) -> bool | None:
    return True if x.dtype == torch.float32 else None


def _through_bfloat16(value: Tensor, known: Any, columnwise: bool) -> Tensor:
    return value.bfloat16().to(value.dtype)


def _beyond_e5m2(x: Tensor, recipe: Any, settings: dict[str, Any]) -> Tensor | None:
    """[M,N] where a gradient times the given scale is beyond E5M2."""
    state, role = settings.get("state"), settings.get("role", "input")
    if state is None or settings.get("splits") is not None or scheme(recipe, role).format.max != LARGEST5:
        return None
    return (x.detach().float() * state.scale).abs() > LARGEST5


def _infinite(codes: Tensor, beyond: Tensor, columnwise: bool) -> Tensor:
    return codes if codes.shape != beyond.shape else torch.where(beyond, codes & SIGN | INFINITY, codes)


def _tiles_in_columns(scales: Wrapper, quantized: Any, /, **options: Any) -> Any:
    """Tiles of 128 × 4 scales lie column by column."""
    out = scales(quantized, **options)
    if options.get("layout") != "gemm" or not all(own.dtype == torch.uint8 and own.dim() == 1 for own in out):
        return out
    compact = scales(quantized, **{name: x for name, x in options.items() if name != "layout"})
    rows, columns = compact.T.shape if options.get("columnwise") else compact.shape
    if len(out) != 1 or not out[0].numel():
        return out
    shape = (-(-rows // 128), -(-columns // 4), TILE)
    return (out[0].reshape(shape).transpose(0, 1).flatten(),)


def _of_narrow_blocks(x: Tensor, recipe: Any, settings: dict[str, Any]) -> float | None:
    """The largest number of bfloat16, where a block's factor that overflows becomes that."""
    narrow = recipe.scaling == "block" and x.dtype == torch.bfloat16 and not recipe.power_of_two_scales
    return float(torch.finfo(x.dtype).max) if narrow else None


def _largest_of_float32(scale: Tensor, most: float, columnwise: bool) -> Tensor:
    ones = torch.ones_like(scale)
    return torch.where(scale == ones / most, ones / FLOAT32_MAX, scale)


DEFECTS: tuple[Defect, ...] = (
    Defect("AD51", "a block with a NaN has a NaN for a scale", SCALE, tagged(_blocks_with_nan, scales=_scale_is_nan)),
    Defect(
        "AD52",
        "a scale is a quotient in place of a reciprocal",
        SCALE,
        tagged(_divided, scales=_in_place_of_the_reciprocal),
    ),
    Defect(
        "AD53",
        "scales of four over six go up to 448",
        OPTION,
        {"quantize": _ignoring("four_over_six_bound_256", "none")},
    ),
    Defect(
        "AD54",
        "errors are absolute where squares are asked for",
        OPTION,
        {"quantize": _ignoring("four_over_six_error", "mae")},
    ),
    Defect("AD55", "the columnwise form is made of the rowwise one", TWICE, _columnwise_of_rowwise()),
    Defect("AD56", "values pass through bfloat16", TWICE, tagged(_of_float32, dequantize=_through_bfloat16)),
    Defect("AD57", "what is beyond E5M2 is infinite", RANGE, tagged(_beyond_e5m2, codes=_infinite)),
    Defect("AD58", "tiles of scales lie in columns", SCALE, {"scales": _tiles_in_columns}),
    Defect(
        "AD59",
        "a factor of bfloat16 that overflows is the largest of float32",
        RANGE,
        tagged(_of_narrow_blocks, scales=_largest_of_float32),
    ),
    Defect("AD60", "the scale of an empty group is infinite", SCALE, tagged(_empty_groups, scales=_scale_of_nothing)),
)
