"""Defects that were reported of public quantisers, planted by their mechanism; see `planted`."""

from typing import Any

import torch
from torch import Tensor

from conformance.mutants.defect import Defect, Wrapper, with_values
from conformance.mutants.kinds.conditions import inside, only, replaced
from defects.quantization.combined import NAMES, QUANTIZE, RECIPES, another, changed
from defects.quantization.wrappers import Beside

LARGEST_HALF = 65504.0
TOP, LARGEST = 0x78, 0x7E  # codes of 256 and 448 in E4M3


# ---- parts of the reference


def _amax_in_bfloat16(block_amax: Wrapper, x: Tensor, block: Any) -> Tensor:
    amax: Tensor = block_amax(x, block)
    return amax.to(torch.bfloat16).to(amax.dtype)


def _half_multiplier(spread: Wrapper, scale: Tensor, block: Any, like: Tensor) -> Tensor:
    """Powers of two past float16's largest number become that."""
    out: Tensor = spread(scale.clamp(max=LARGEST_HALF), block, like)
    return out


def _least_after_rounding(scale_of: Wrapper, amax: Tensor, largest: float, **settings: Any) -> Tensor:
    epsilon = settings.get("epsilon", 0.0)
    if not epsilon or not settings.get("power_of_two"):
        out: Tensor = scale_of(amax, largest, **settings)
        return out
    bound = scale_of(torch.full_like(amax, epsilon), largest, **settings | {"epsilon": 0.0, "power_of_two": False})
    rounded = scale_of(amax, largest, **settings | {"epsilon": 0.0})
    return torch.where(amax < epsilon, bound, rounded)


def _of_rows_without_padding(swizzle: Wrapper, scale: Tensor, scheme: Any) -> Any:
    """A row's scales begin at row · columns, not at row · the columns of whole tiles."""
    if scheme.recipe.scaling not in ("mxfp8", "nvfp4") or scale.shape[1] % 4 == 0:
        return swizzle(scale, scheme)
    padded = torch.nn.functional.pad(scale, (0, -scale.shape[1] % 4))
    flat = torch.zeros_like(padded).flatten()
    flat[: scale.numel()] = scale.flatten()
    return swizzle(flat.view(padded.shape), scheme)


def _floor(encode: Wrapper, x: Tensor, format: Any, **settings: Any) -> Tensor:
    """The exponent of the amax, without what is behind it."""
    out: Tensor = encode(x, format, **settings)
    if format.max_code != 254 or x.dtype != torch.float32:
        return out
    return torch.where(torch.isfinite(x) & (x > 0), (x.view(torch.int32) >> 23).to(out.dtype), out)


def _columns_by_the_default() -> dict[str, Wrapper]:
    """The mode in which scales are rounded does not reach the columns' kernel."""

    def quantize(base: Wrapper, x: Tensor, recipe: Any, /, **settings: Any) -> Any:
        out = base(x, recipe, **settings)
        if recipe.scaling != "mxfp8" or not settings.get("columnwise"):
            return out
        with replaced(RECIPES, encode=_floor):
            other = base(x, recipe, **settings).quantized
        return out._replace(quantized=Beside(out.quantized, other))

    def read(base: Wrapper, quantized: Any, /, **how: Any) -> Any:
        if not isinstance(quantized, Beside):
            return base(quantized, **how)
        return base(quantized.known if how.get("columnwise") else quantized.quantized, **how)

    return {"quantize": quantize} | dict.fromkeys(NAMES, read)


# ---- conditions


def _float32_mxfp8(x: Tensor, recipe: Any, **settings: Any) -> bool:
    return recipe.scaling == "mxfp8" and x.dtype == torch.float32


def _half_mxfp8(x: Tensor, recipe: Any, **settings: Any) -> bool:
    return recipe.scaling == "mxfp8" and x.dtype == torch.float16


def _least_and_power_of_two(x: Tensor, recipe: Any, **settings: Any) -> bool:
    return bool(recipe.amax_epsilon) and bool(recipe.power_of_two_scales)


def _powers_of_two(x: Tensor, recipe: Any, **settings: Any) -> bool:
    return bool(recipe.power_of_two_scales)


def _e4m3(x: Tensor, recipe: Any, **settings: Any) -> bool:
    gradients = settings.get("role") == "grad_output"
    return recipe.scaling != "nvfp4" and not (gradients and recipe.fp8_format == "hybrid")


def _transformed(x: Tensor, recipe: Any, **settings: Any) -> bool:
    return bool(recipe.hadamard) and bool(settings.get("columnwise")) and settings.get("role") != "weight"


def _noisy(x: Tensor, recipe: Any, **settings: Any) -> bool:
    stochastic = bool(recipe.stochastic_rounding) and settings.get("role") == "grad_output"
    return stochastic and settings.get("noise") is not None


def _after_an_empty_group(quantize: Wrapper, x: Tensor, recipe: Any, /, **settings: Any) -> Any:
    """A group behind an empty one has the descriptor of the group before both."""
    right, splits = quantize(x, recipe, **settings), settings.get("splits")
    if splits is None or recipe.scaling != "mxfp8":
        return right
    source, start = torch.arange(len(x), device=x.device), 0
    last, empty = (0, 0), False
    for count in splits.tolist():
        if count and empty and last[1]:
            source[start : start + count] = last[0] + torch.arange(count, device=x.device) % last[1]
        last, empty = ((start, count), False) if count else (last, True)
        start += count
    return quantize(with_values(x, lambda own: own[source]), recipe, **settings)


# ---- results


def _top_binade_saturates(out: Tensor, x: Tensor, recipe: Any, settings: Any, how: Any) -> Tensor:
    bits = out.view(torch.uint8)
    largest = (bits & 0x80) | LARGEST
    top = ((bits & 0x7F) >= TOP) & ((bits & 0x7F) < 0x7F)
    return torch.where(top, largest, bits).view(out.dtype)


def _no_codes(out: Tensor, x: Tensor, recipe: Any, settings: Any, how: Any) -> Tensor:
    return torch.zeros_like(out.view(torch.uint8)).view(out.dtype)


def _amax_of_rows(out: Tensor, x: Tensor, recipe: Any, settings: Any, how: Any) -> Tensor:
    """The largest value is taken before the transform."""
    if not how.get("columnwise") or settings.get("splits") is not None or not x.numel():
        return out
    return torch.full_like(out, float(x.detach().float().nan_to_num(0.0).abs().max()))


_PLANTED: tuple[tuple[str, str, str, dict[str, Wrapper]], ...] = (
    (
        "RB59",
        "an amax of float32 passes through bfloat16",
        "torchao #4725",
        {"quantize": only(_float32_mxfp8, inside(RECIPES, block_amax=_amax_in_bfloat16))},
    ),
    (
        "RB60",
        "a multiplier is at most float16's largest number",
        "SGLang #33533",
        {"quantize": only(_half_mxfp8, inside(RECIPES, spread=_half_multiplier))},
    ),
    (
        "RB61",
        "the least amax is no power of two",
        "vLLM #58032",
        {"quantize": only(_least_and_power_of_two, inside(RECIPES, scale_from_amax=_least_after_rounding))},
    ),
    (
        "RB62",
        "scales are rounded after the codes are made",
        "transformers #47030",
        another(_powers_of_two, readers=("codes",), power_of_two_scales=False),
    ),
    ("RB63", "256 and more become 448", "tilelang-metax #140 (review)", changed("codes", _top_binade_saturates, _e4m3)),
    (
        "RB64",
        "a group behind an empty one has the rows before",
        "TransformerEngine #2782",
        {"quantize": _after_an_empty_group},
    ),
    (
        "RB65",
        "rows of scales are not padded before they are tiled",
        "MSLK #339",
        {
            "scales": only(
                lambda q, **how: how.get("layout") == "gemm", inside(QUANTIZE, _for_gemm=_of_rows_without_padding)
            )
        },
    ),
    (
        "RB66",
        "the columns' amax is taken before the transform",
        "TransformerEngine #2695, a race",
        changed("amax", _amax_of_rows, _transformed),
    ),
    ("RB67", "with noise all codes are 0", "TransformerEngine #3281", changed("codes", _no_codes, _noisy)),
    ("RB68", "exponents of columns are rounded down", "torchao #3686", _columns_by_the_default()),
)
DEFECTS = tuple(Defect(*planted) for planted in _PLANTED)
