"""Defects of quantisers that only some calls show; see `planted`."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from conformance.mutants.defect import Defect, Wrapper
from conformance.mutants.kinds.conditions import always, in_place, inside, only
from conformance.mutants.kinds.gradients import read_as_contiguous
from defects.quantization.wrappers import Beside

SEVERAL = "a mistake that one option alone does not show"
READERS = "a mistake in a result that is seldom read"
VALUES = "a mistake that one class of values shows"
OWNER = "a mistake about whose memory it is"
RECIPES, QUANTIZE = "moe_ref.quantization.recipes", "moe_ref.quantization.quantize"
NAMES = ("amax", "scales", "codes", "dequantize")


def another(
    where: Callable[..., bool], columnwise: bool | None = None, readers: tuple[str, ...] = NAMES, **change: Any
) -> dict[str, Wrapper]:
    """Readers of a direction, or of both, read what quantize makes of other arguments."""

    def quantize(base: Wrapper, x: Tensor, recipe: Any, /, **settings: Any) -> Any:
        out = base(x, recipe, **settings)
        if not where(x, recipe, **settings):
            return out
        options = {name: value for name, value in change.items() if name in vars(recipe) if hasattr(recipe, name)}
        rest = {name: value for name, value in change.items() if name not in options and name != "x"}
        made = change["x"](x) if "x" in change else x
        other = base(made, replace(recipe, **options) if options else recipe, **settings | rest).quantized
        return out._replace(quantized=Beside(out.quantized, other))

    def reading(name: str) -> Wrapper:
        def read(base: Wrapper, quantized: Any, /, **how: Any) -> Any:
            if not isinstance(quantized, Beside):
                return base(quantized, **how)
            here = columnwise is None or bool(how.get("columnwise")) == columnwise
            return base(quantized.known if here and name in readers else quantized.quantized, **how)

        return read

    return {"quantize": quantize} | {name: reading(name) for name in NAMES}


def changed(name: str, change: Callable[..., Any], where: Callable[..., bool] = always) -> dict[str, Wrapper]:
    """A reader with change(result, x, recipe, settings, how), where where(x, recipe, …)."""

    def quantize(base: Wrapper, x: Tensor, recipe: Any, /, **settings: Any) -> Any:
        out = base(x, recipe, **settings)
        return (
            out._replace(quantized=Beside(out.quantized, (x, recipe, settings)))
            if where(x, recipe, **settings)
            else out
        )

    def reading(reader: str) -> Wrapper:
        def read(base: Wrapper, quantized: Any, /, **how: Any) -> Any:
            if not isinstance(quantized, Beside):
                return base(quantized, **how)
            out = base(quantized.quantized, **how)
            return change(out, *quantized.known, how) if reader == name else out

        return read

    return {"quantize": quantize} | {reader: reading(reader) for reader in NAMES}


def _rows_of_groups(x: Tensor, settings: dict[str, Any]) -> int:
    return len(x) if settings.get("splits") is None else int(settings["splits"].sum())


# ---- conditions


def _row_scaled(x: Tensor, recipe: Any, **settings: Any) -> bool:
    return bool(recipe.row_scaled_activation) and settings.get("role", "input") == "input"


def _row_scaled_columns(x: Tensor, recipe: Any, **settings: Any) -> bool:
    return _row_scaled(x, recipe, **settings) and bool(settings.get("columnwise"))


def _square_mxfp8(x: Tensor, recipe: Any, **settings: Any) -> bool:
    square = recipe.scaling == "mxfp8" and recipe.two_dimensional_weights and settings.get("role") == "weight"
    return bool(square) and bool(settings.get("columnwise"))


def _narrow_block(x: Tensor, recipe: Any, **settings: Any) -> bool:
    return recipe.scaling == "block" and x.dtype in (torch.float16, torch.bfloat16)


def _strided_columnwise(x: Tensor, recipe: Any, **settings: Any) -> bool:
    return bool(settings.get("columnwise")) and not x.is_contiguous() and x.numel() > 0


def _half(x: Tensor, recipe: Any, **settings: Any) -> bool:
    return x.dtype == torch.float16


def _several_groups(x: Tensor, recipe: Any, **settings: Any) -> bool:
    return settings.get("splits") is not None and len(settings["splits"]) > 1


def _float32_square_block(x: Tensor, recipe: Any, **settings: Any) -> bool:
    return recipe.scaling == "block" and bool(recipe.amax_epsilon) and settings.get("role") == "weight"


def _both_forms_of_noise(x: Tensor, recipe: Any, **settings: Any) -> bool:
    return settings.get("noise") is not None


# ---- parts of the reference


def _four_if_equal(right: Wrapper, x32: Tensor, block: Tensor, amax: Tensor, encoding: Tensor, scheme: Any) -> Any:
    from moe_ref.quantization import recipes as r

    base = r.over(block, torch.full_like(block, 6.0)) * encoding
    scales = (r.encode(base, r.E4M3), r.encode(base * 1.5, r.E4M3))
    codes = [r._two_level_codes(x32, scale, encoding) for scale in scales]
    six, four = (r._errors(x32, c, s, amax, scheme) for c, s in zip(codes, scales, strict=True))
    pick = four <= six
    wide = r.spread(pick, (1, 16), x32)
    return r.Scaled(torch.where(wide, codes[1], codes[0]), torch.where(pick, scales[1], scales[0]), amax)


def _errors_by_448(right: Wrapper, x32: Tensor, codes: Tensor, scale: Tensor, amax: Tensor, scheme: Any) -> Any:
    return right(x32, codes, scale, amax, replace(scheme, scale_max=448.0))


def _errors_before_the_amax(
    right: Wrapper, x32: Tensor, codes: Tensor, scale: Tensor, amax: Tensor, scheme: Any
) -> Any:
    """The squares of the last element of a block are left out."""
    lost = torch.arange(x32.shape[1]) % 16 == 15
    return right(torch.where(lost, 0, x32), torch.where(lost, 0, codes).to(codes.dtype), scale, amax, scheme)


def _up_where_the_noise_is_equal(right: Wrapper, x: Tensor, format: Any, *, noise: Tensor | None = None) -> Tensor:
    if noise is not None:
        noise = torch.nextafter(noise.double(), torch.full_like(noise, -1.0, dtype=torch.float64))
    return right(x, format, noise=noise)


def _transform_of_the_first_group() -> Any:
    def wrong(function: Wrapper, right: Any, *inputs: Any, **settings: Any) -> Any:
        calls: list[int] = []

        def hadamard(transform: Wrapper, x: Tensor) -> Tensor:
            calls.append(1)
            return transform(x) if len(calls) == 1 else x

        return inside(QUANTIZE, hadamard=hadamard)(function, right, *inputs, **settings)

    return wrong


def _transform_in_bfloat16(right: Wrapper, x: Tensor) -> Tensor:
    """Sums of the halves of a block are rounded."""
    blocks = x.float().unflatten(1, (-1, 16))
    low = torch.cat([blocks[..., :8], torch.zeros_like(blocks[..., 8:])], 2).flatten(1)
    high = torch.cat([torch.zeros_like(blocks[..., :8]), blocks[..., 8:]], 2).flatten(1)
    return (right(low.to(x.dtype)).float() + right(high.to(x.dtype)).float()).to(x.dtype)


def _tiles_column_by_column(scale: Tensor, scheme: Any) -> Tensor:
    more = (0, -scale.shape[1] % 4, 0, -scale.shape[0] % 128)
    tiles = torch.nn.functional.pad(scale, more)
    rows, columns = tiles.shape
    return tiles.reshape(rows // 128, 4, 32, columns // 4, 4).permute(3, 0, 2, 1, 4).flatten()


def _swizzle(right: Wrapper, scale: Tensor, scheme: Any) -> Tensor:
    return (
        _tiles_column_by_column(scale, scheme) if scheme.recipe.scaling in ("mxfp8", "nvfp4") else right(scale, scheme)
    )


# ---- results that are seldom read


def _amax_with_the_least(out: Tensor, x: Tensor, recipe: Any, settings: dict[str, Any], how: dict[str, Any]) -> Tensor:
    return out.clamp(min=recipe.amax_epsilon) if recipe.amax_epsilon else out


def _minus_zeros_past_the_groups(
    out: Tensor, x: Tensor, recipe: Any, settings: dict[str, Any], how: dict[str, Any]
) -> Tensor:
    beyond = torch.arange(len(out))[:, None] >= _rows_of_groups(x, settings)
    return torch.where(beyond, 0x80, out)


def _largest_of_half(out: Tensor, x: Tensor, recipe: Any, settings: dict[str, Any], how: dict[str, Any]) -> Tensor:
    return torch.where(out.isinf(), out.sign() * 65504.0, out)


def _nan_past_the_middle(out: Tensor, x: Tensor, recipe: Any, settings: dict[str, Any], how: dict[str, Any]) -> Tensor:
    """What would round past 448 with a scale of earlier steps is NaN."""
    rows = _rows_of_groups(x, settings)
    state, sizes = settings["state"], settings.get("splits")
    each = state.scale if sizes is None else state.scale.repeat_interleave(sizes.long())
    y = x.detach()[:rows].float() * (each if sizes is None else each[:, None])
    past = torch.cat([y.abs() > 464, torch.zeros_like(x[rows:], dtype=torch.bool)])
    hybrid = recipe.fp8_format == "hybrid" and settings.get("role") == "grad_output"
    return out if hybrid else torch.where(past, 0x7F, out)


def _delayed(x: Tensor, recipe: Any, **settings: Any) -> bool:
    return recipe.scaling == "delayed"


# ---- the state


def _no_amax_without_rows(quantize: Wrapper, right: Any, x: Tensor, recipe: Any, **settings: Any) -> Any:
    return right._replace(state=settings["state"])


def _columns_alone(x: Tensor, recipe: Any, **settings: Any) -> bool:
    return recipe.scaling == "delayed" and settings.get("rowwise") is False


def _replaces_the_running_amax(quantize: Wrapper, right: Any, x: Tensor, recipe: Any, **settings: Any) -> Any:
    history = settings["state"].amax_history
    fresh = settings["state"]._replace(amax_history=torch.cat([torch.zeros_like(history[:, :1]), history[:, 1:]], 1))
    return right._replace(state=quantize(x, recipe, **settings | {"state": fresh}).state)


def _nan_to_zero_in_place(x: Tensor, recipe: Any, **settings: Any) -> None:
    if not x.requires_grad:
        x.nan_to_num_(0.0)


def _own_amax_for_the_most_recent(update: Wrapper, state: Any, recipe: Any, **settings: Any) -> Any:
    out = update(state, recipe, **settings)
    local = recipe.amax_compute_algo == "most_recent"
    return out._replace(scale=update(state, recipe, **settings | {"reduced_amax": None}).scale) if local else out


def _no_margin_for_gradients(update: Wrapper, state: Any, recipe: Any, **settings: Any) -> Any:
    out = update(state, recipe, **settings)
    alone = settings.get("role") == "grad_output" and recipe.margin
    return update(state, replace(recipe, margin=0), **settings) if alone else out


def _zero_of_all_ranks(update: Wrapper, state: Any, recipe: Any, **settings: Any) -> Any:
    """A reduced amax of 0 is taken: nothing moves, even if this rank has seen values."""
    out, reduced = update(state, recipe, **settings), settings.get("reduced_amax")
    if reduced is None:
        return out
    nothing = reduced == 0
    return out._replace(
        scale=torch.where(nothing, state.scale, out.scale),
        amax_history=torch.where(nothing[:, None], state.amax_history, out.amax_history),
    )


def _old_infinity_passed_over(update: Wrapper, state: Any, recipe: Any, **settings: Any) -> Any:
    out = update(state, recipe, **settings)
    older = state.amax_history[:, 1:]
    finite = torch.cat([state.amax_history[:, :1], torch.where(older.isinf(), 0, older)], 1)
    return out._replace(scale=update(state._replace(amax_history=finite), recipe, **settings).scale)


def _one_recipe(scaling: str, **options: Any) -> Callable[..., bool]:
    def where(x: Tensor, recipe: Any, **settings: Any) -> bool:
        return recipe.scaling == scaling and all(getattr(recipe, name) == value for name, value in options.items())

    return where


def _four_over_six(x: Tensor, recipe: Any, **settings: Any) -> bool:
    return (recipe.four_over_six or "none") != "none"


def _by_squares(x: Tensor, recipe: Any, **settings: Any) -> bool:
    return _four_over_six(x, recipe) and recipe.four_over_six_error == "mse"


def _flushed(x: Tensor) -> Tensor:
    return torch.where(x.abs() < torch.finfo(torch.float16).tiny, torch.zeros_like(x), x)


def _current_powers(x: Tensor, recipe: Any, **settings: Any) -> bool:
    return recipe.scaling == "current" and bool(recipe.power_of_two_scales) and bool(recipe.amax_epsilon)


def _scales_by_address() -> Wrapper:
    """The codes of a weight are kept by its address and shape: a step in place goes unseen."""
    kept: dict[Any, Any] = {}

    def planted(quantize: Wrapper, x: Tensor, recipe: Any, /, **settings: Any) -> Any:
        out = quantize(x, recipe, **settings)
        if settings.get("role") != "weight" or settings.get("state") is not None:
            return out
        key = (
            x.data_ptr(),
            tuple(x.shape),
            tuple(x.stride()),
            x.dtype,
            recipe,
            tuple(sorted(map(str, settings.items()))),
        )
        return kept.setdefault(key, out)

    return planted


_SWIZZLE = {"scales": only(lambda q, **how: how.get("layout") == "gemm", inside(QUANTIZE, _for_gemm=_swizzle))}
_PLANTED: tuple[tuple[str, str, str, dict[str, Wrapper]], ...] = (
    (
        "AE058",
        "columns of a row-scaled tensor have one amax",
        SEVERAL,
        another(_row_scaled_columns, True, row_scaled_activation=False),
    ),
    (
        "AE059",
        "row scaling reaches only the first 64 columns' amax",
        SEVERAL,
        another(_row_scaled, False, x=lambda x: torch.where(torch.arange(x.shape[1]) < 64, x, x.clamp(-1, 1))),
    ),
    (
        "AE060",
        "columns of square MXFP8 weights have blocks of a row",
        SEVERAL,
        another(_square_mxfp8, True, two_dimensional_weights=False),
    ),
    (
        "AE061",
        "a scale of 16-bit values may be more than their largest",
        SEVERAL,
        another(_narrow_block, None, ("scales", "codes"), x=lambda x: x.float()),
    ),
    (
        "AE062",
        "the columnwise form reads x as contiguous",
        SEVERAL,
        another(_strided_columnwise, True, x=read_as_contiguous),
    ),
    ("AE063", "float16 subnormals are flushed", VALUES, another(_half, None, ("codes", "scales", "amax"), x=_flushed)),
    (
        "AE064",
        "4 is taken where both errors are equal",
        VALUES,
        {"quantize": only(_four_over_six, inside(RECIPES, _better_of_two=_four_if_equal))},
    ),
    (
        "AE065",
        "errors of a bound of 256 are taken with 448",
        SEVERAL,
        {"quantize": only(_four_over_six, inside(RECIPES, _errors=_errors_by_448))},
    ),
    (
        "AE066",
        "errors lack the last element of a block",
        SEVERAL,
        {"quantize": only(_by_squares, inside(RECIPES, _errors=_errors_before_the_amax))},
    ),
    (
        "AE067",
        "a noise equal to the rest rounds up",
        VALUES,
        {"quantize": only(_both_forms_of_noise, inside(RECIPES, encode=_up_where_the_noise_is_equal))},
    ),
    (
        "AE068",
        "groups after the first are not transformed",
        SEVERAL,
        {"quantize": only(_several_groups, _transform_of_the_first_group())},
    ),
    (
        "AE069",
        "halves of a transform are rounded",
        SEVERAL,
        {"quantize": only(_one_recipe("nvfp4", hadamard=True), inside(QUANTIZE, hadamard=_transform_in_bfloat16))},
    ),
    ("AE070", "tiles of scales are in the order of columns", READERS, _SWIZZLE),
    ("AE071", "an amax is at least the least one", READERS, changed("amax", _amax_with_the_least)),
    ("AE072", "rows past the groups are -0", READERS, changed("codes", _minus_zeros_past_the_groups)),
    ("AE073", "values past float16 are its largest", VALUES, changed("dequantize", _largest_of_half, _half)),
    ("AE074", "a stale scale makes NaN", VALUES, changed("codes", _nan_past_the_middle, _delayed)),
    ("AE075", "columns alone measure no amax", SEVERAL, {"quantize": only(_columns_alone, _no_amax_without_rows)}),
    (
        "AE076",
        "a second tensor of a step replaces the amax",
        SEVERAL,
        {"quantize": only(_delayed, _replaces_the_running_amax)},
    ),
    ("AE077", "NaN of the caller's tensor becomes 0", OWNER, {"quantize": in_place(_nan_to_zero_in_place)}),
    ("AE078", "the most recent amax is this rank's", SEVERAL, {"update_scales": _own_amax_for_the_most_recent}),
    ("AE079", "gradients have no margin", SEVERAL, {"update_scales": _no_margin_for_gradients}),
    ("AE080", "a reduced amax of 0 stops the step", VALUES, {"update_scales": _zero_of_all_ranks}),
    ("AE081", "an old infinity is passed over", VALUES, {"update_scales": _old_infinity_passed_over}),
    (
        "AE082",
        "a least amax and powers of two exclude each other",
        SEVERAL,
        another(_current_powers, None, ("codes", "scales"), amax_epsilon=0.0),
    ),
    (
        "AE083",
        "square blocks have no least amax",
        SEVERAL,
        another(_float32_square_block, None, ("codes", "scales"), amax_epsilon=0.0),
    ),
    ("AE084", "codes of a weight are kept by its address", OWNER, {"quantize": _scales_by_address()}),
)
DEFECTS = tuple(Defect(*planted) for planted in _PLANTED)
