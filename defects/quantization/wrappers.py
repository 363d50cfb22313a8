"""Planted defects of quantisers, all real but one (B) that recipes invite; see `planted`.

A quantised tensor is opaque. A defect in its readers (`amax`, `scales`, …) wraps it: `quantize`
returns the base's result with the defect's data, and the readers unpack both.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from conformance.mutants.defect import Defect, Wrapper

MX_BLOCK, E4M3_MAX = 32, 448.0  # OCP Microscaling Formats 1.0
MANTISSA, ALL_BUT_SIGN = 23, 0x7FFFFFFF  # of float32


class Beside(NamedTuple):
    """The base's quantised tensor and the defect's data."""

    quantized: Any
    known: Any


def tagged(data_of: Callable[..., Any], **readers: Callable[[Tensor, Any, bool], Tensor]) -> dict[str, Wrapper]:
    """A defect's wrappers: `quantize` keeps data_of(x, recipe, settings); readers use it."""

    def quantize(base: Wrapper, x: Tensor, recipe: Any, /, **settings: Any) -> Any:
        out = base(x, recipe, **settings)
        return out._replace(quantized=Beside(out.quantized, data_of(x, recipe, settings)))

    def reading(change: Callable[[Tensor, Any, bool], Tensor] | None) -> Wrapper:
        def read(base: Wrapper, tagged: Any, /, *, columnwise: bool = False, **options: Any) -> Any:
            if not isinstance(tagged, Beside):  # another function's result
                return base(tagged, columnwise=columnwise, **options)
            out = base(tagged.quantized, **options, **({"columnwise": True} if columnwise else {}))
            unchanged = change is None or tagged.known is None or not isinstance(out, Tensor)
            return out if unchanged else change(out, tagged.known, columnwise)  # type: ignore[misc]

        return read

    return {"quantize": quantize} | {
        name: reading(readers.get(name)) for name in ("amax", "scales", "codes", "dequantize")
    }


# ---- the exponent of a scale


def blocks_along_rows(x: Tensor, recipe: Any, settings: dict[str, Any]) -> Tensor | None:
    """[M,N/32] MXFP8 block scales before rounding to a power of two; None without 1 × 32 blocks."""
    square = recipe.two_dimensional_weights and settings.get("role") == "weight"
    if recipe.scaling != "mxfp8" or square or not x.numel():
        return None
    rows = len(x) if settings.get("splits") is None else int(settings["splits"].sum())
    magnitude = x.detach().float()[:rows].nan_to_num(0, torch.inf, -torch.inf).abs()
    return magnitude.reshape(rows, x.shape[1] // MX_BLOCK, MX_BLOCK).amax(2) / E4M3_MAX


def _leaking(scale: Tensor, exact: Tensor, columnwise: bool) -> Tensor:
    """Four exponents packed per word: each mantissa's top bits leak into the previous byte."""
    if columnwise or scale.shape != exact.shape:
        return scale
    mantissa = (exact.view(torch.int32) & ALL_BUT_SIGN) >> (MANTISSA - 8) & 0xFF
    next_mantissa = torch.cat([mantissa[:, 1:], torch.zeros_like(mantissa[:, :1])], 1)
    last_of_four = torch.arange(scale.shape[1], device=scale.device) % 4 == 3
    return torch.where(last_of_four, scale, scale | next_mantissa.to(torch.uint8))


def _extreme_blocks(x: Tensor, recipe: Any, settings: dict[str, Any]) -> Tensor | None:
    """[M,N] True in blocks whose exponent is the format's smallest or largest."""
    exact = blocks_along_rows(x, recipe, settings)
    if exact is None:
        return None
    extreme = (exact <= 2.0**-127) | exact.isinf()
    return extreme.repeat_interleave(MX_BLOCK, 1)


def _signs_only(codes: Tensor, lost: Tensor, columnwise: bool) -> Tensor:
    """Zeros lost blocks: x times 1 for 2^127, or 0 for 2^-127, leaves only signs."""
    if columnwise:
        return codes
    kept = torch.cat([~lost, lost.new_ones(len(codes) - len(lost), codes.shape[1])])
    return torch.where(kept, codes, codes & 0x80)


# ---- recipes, groups and state

_first_recipes: dict[tuple[str, str], Any] = {}


def _first_recipe_for_ever(quantize: Wrapper, x: Tensor, recipe: Any, /, **settings: Any) -> Any:
    scaling = getattr(recipe, "scaling", "delayed")
    if scaling in ("delayed", "nvfp4"):  # state and noise belong to the new recipe
        return quantize(x, recipe, **settings)
    return quantize(x, _first_recipes.setdefault((scaling, settings.get("role", "input")), recipe), **settings)


def _one_history_for_all(quantize: Wrapper, x: Tensor, recipe: Any, /, **settings: Any) -> Any:
    out = quantize(x, recipe, **settings)
    if out.state is None:
        return out
    history = out.state.amax_history
    shared = torch.cat([history[:, :1].amax(0, keepdim=True).expand(len(history), 1), history[:, 1:]], 1)
    return out._replace(state=out.state._replace(amax_history=shared))


def _legal(splits: Tensor, x: Tensor) -> bool:
    """Whether the splits are legal: the base refuses other calls."""
    integers = splits.dim() == 1 and len(splits) > 0 and not splits.is_floating_point()
    return integers and bool((splits >= 0).all()) and int(splits.sum()) <= len(x)


def _mean_groups(quantize: Wrapper, x: Tensor, recipe: Any, /, **settings: Any) -> Any:
    splits = settings.get("splits")
    if (
        not isinstance(splits, Tensor)
        or getattr(recipe, "scaling", "mxfp8") in ("mxfp8", "nvfp4")
        or not _legal(splits, x)
    ):
        return quantize(x, recipe, **settings)
    total = int(splits.sum())
    ends = torch.tensor([(g + 1) * total // len(splits) for g in range(len(splits))], device=splits.device)
    return quantize(x, recipe, **settings | {"splits": ends.diff(prepend=ends.new_zeros(1)).to(splits.dtype)})


def _of_groups(x: Tensor, recipe: Any, settings: dict[str, Any]) -> Tensor | None:
    """x with zeros past the last group; None without groups."""
    splits = settings.get("splits")
    return (
        None if splits is None else torch.where(torch.arange(len(x), device=x.device)[:, None] < splits.sum(), x, 0.0)
    )


def _unquantized(value: Tensor, x: Tensor, columnwise: bool) -> Tensor:
    return x.to(value.dtype)


# ---- products of quantised factors

PRODUCTS, LAYERS = (
    ("grouped_linear", "grouped_dgrad", "grouped_wgrad"),
    ("grouped_mlp", "sequential_mlp", "shared_experts"),
)
EVERY_PRODUCT = (*PRODUCTS, *LAYERS, "latent_projection")
INVITED = "a mistake that recipes invite"
_first_of_products: dict[str, Any] = {}


def products(
    change: Callable[[dict[str, Any]], dict[str, Any]], functions: tuple[str, ...] = PRODUCTS
) -> dict[str, Wrapper]:
    """Wrappers that change the settings of calls with a recipe."""

    def product(base: Wrapper, *tensors: Tensor, **settings: Any) -> Any:
        return base(*tensors, **change(settings) if getattr(settings.get("recipe"), "scaling", None) else settings)

    return dict.fromkeys(functions, product)


def _first_recipe_of_products(settings: dict[str, Any]) -> dict[str, Any]:
    scaling = settings["recipe"].scaling
    return (
        settings
        if scaling in ("delayed", "nvfp4")
        else settings | {"recipe": _first_of_products.setdefault(scaling, settings["recipe"])}
    )


def _high_precision(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in settings.items() if name not in ("recipe", "state", "noise")}


def _override_forgotten(settings: dict[str, Any]) -> dict[str, Any]:
    """Ignores the override; NVFP4 without transform and noise, which the call lacks."""
    recipe = settings["recipe"]
    if recipe.backward_override is None:
        return settings
    bare = {"hadamard": False, "stochastic_rounding": False} if recipe.scaling == "nvfp4" else {}
    return settings | {"recipe": replace(recipe, backward_override=None, **bare)}


def _one_scale_for_all(settings: dict[str, Any]) -> dict[str, Any]:
    state = settings.get("state")
    if state is None:
        return settings
    shared = [s._replace(scale=s.scale.amin().expand_as(s.scale).clone()) for s in state]
    return settings | {"state": state._replace(**dict(zip(state._fields, shared, strict=True)))}


DEFECTS: tuple[Defect, ...] = (
    Defect(
        "Q01",
        "the mantissa of a scale leaks into the next byte",
        "TransformerEngine #2589, 2.9 to 2.11",
        tagged(blocks_along_rows, scales=_leaking),
    ),
    Defect(
        "Q03",
        "the reciprocal of the extreme exponents is wrong",
        "TransformerEngine #2647, 2.6 to 2.12",
        tagged(_extreme_blocks, codes=_signs_only),
    ),
    Defect(
        "Q11",
        "the quantizer of the first recipe is kept",
        "TransformerEngine #1814, to 2.4",
        {"quantize": _first_recipe_for_ever},
    ),
    Defect(
        "Q13",
        "experts stay in high precision, silently",
        "torchtitan #3199",
        tagged(_of_groups, dequantize=_unquantized),
    ),
    Defect(
        "Q11g",
        "the quantizer of the first recipe is kept, in products",
        "TransformerEngine #1814, to 2.4",
        products(_first_recipe_of_products),
    ),
    Defect(
        "Q13g",
        "experts' products stay in high precision, silently",
        "torchtitan #3199",
        products(_high_precision),
    ),
    Defect(
        "Q13m",
        "experts' layers stay in high precision, silently",
        "torchtitan #3199",
        products(_high_precision, LAYERS),
    ),
    Defect(
        "Q13l", "so does a latent projection", "torchtitan #3199", products(_high_precision, ("latent_projection",))
    ),
    Defect(
        "Q15g",
        "the weights of a packed tensor share a scale, in products",
        "TransformerEngine #3225, 2.14 to 2.18",
        products(_one_scale_for_all),
    ),
    Defect(
        "B01",
        "the override reaches the recipe and not the products: gradients stay quantised",
        INVITED,
        products(_override_forgotten, EVERY_PRODUCT),
    ),
    Defect(
        "Q15",
        "the groups of a packed tensor share a quantizer",
        "TransformerEngine #3225, 2.14 to 2.18",
        {"quantize": _one_history_for_all},
    ),
    Defect(
        "G21q",
        "scales of ragged groups by the formula of equal ones",
        "TransformerEngine #3344, to 2.18",
        {"quantize": _mean_groups},
    ),
)
