"""Defects of quantisers: options ignored, blocks at an edge, the state; see `planted`."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from conformance.mutants.defect import Defect, Wrapper
from conformance.mutants.kinds.gradients import with_gradient
from defects.quantization.wrappers import PRODUCTS, blocks_along_rows, products, tagged
from moe_ref.config.quantization import BLOCK

OPTION = "a mistake that recipes invite"
EDGE = "a mistake that blocks at an edge invite"
EXPONENT = "a mistake that scales without a mantissa invite"
STATE = "a mistake that an amax history invites"
ONE = 127  # the code of E8M0 for 1
MINUS_ZERO, LARGEST = 0x80, 0x7E  # of E4M3


def _otherwise(recipe: Any, **options: Any) -> Any:
    """The recipe with other options, as far as it has them."""
    return replace(recipe, **{name: x for name, x in options.items() if getattr(recipe, name) is not None})


def _ignoring(**options: Any) -> Wrapper:
    def quantize(base: Wrapper, x: Tensor, recipe: Any, /, **settings: Any) -> Any:
        out = base(x, recipe, **settings)
        other = _otherwise(recipe, **options)
        return out if other == recipe else base(x, other, **settings)

    return quantize


def _products_ignoring(*functions: str, **options: Any) -> dict[str, Wrapper]:
    return products(lambda settings: settings | {"recipe": _otherwise(settings["recipe"], **options)}, functions)


def _one_noise(quantize: Wrapper, x: Tensor, recipe: Any, /, **settings: Any) -> Any:
    out, noise = quantize(x, recipe, **settings), settings.get("noise")
    return out if noise is None else quantize(x, recipe, **settings | {"noise": noise[:1].expand_as(noise)})


# ---- codes and scales


def _itself(x: Tensor, recipe: Any, settings: dict[str, Any]) -> Tensor | None:
    return None if recipe.scaling == "nvfp4" else x.detach()


def _no_sign_of_zero(codes: Tensor, x: Tensor, columnwise: bool) -> Tensor:
    return torch.where(codes == MINUS_ZERO, 0, codes)


def _nan_saturates(codes: Tensor, x: Tensor, columnwise: bool) -> Tensor:
    return codes if codes.shape != x.shape else torch.where(x.isnan() & (codes & 0x7F == 0x7F), LARGEST, codes)


def _up_from_a_power(scale: Tensor, exact: Tensor, columnwise: bool) -> Tensor:
    if columnwise or scale.shape != exact.shape:
        return scale
    power = (exact.frexp().mantissa == 0.5) & (exact > 2.0**-126)
    return torch.where(power, scale + 1, scale)


def _down(scale: Tensor, exact: Tensor, columnwise: bool) -> Tensor:
    if columnwise or scale.shape != exact.shape:
        return scale
    between = (exact.frexp().mantissa != 0.5) & (exact > 2.0**-126) & exact.isfinite()
    return torch.where(between, scale - 1, scale)


def _one_for_zeros(scale: Tensor, exact: Tensor, columnwise: bool) -> Tensor:
    return scale if columnwise or scale.shape != exact.shape else torch.where(exact == 0, ONE, scale)


def _has_a_tail(x: Tensor, recipe: Any, settings: dict[str, Any]) -> Tensor | None:
    block = BLOCK["block"]
    return x.detach() if recipe.scaling == "block" and x.shape[1] > block and x.shape[1] % block else None


def _scale_of_the_block_before(scale: Tensor, x: Tensor, columnwise: bool) -> Tensor:
    if columnwise or scale.dim() != 2 or scale.shape[1] < 2:
        return scale
    return torch.cat([scale[:, :-1], scale[:, -2:-1]], 1)


def _tail_rows(x: Tensor, recipe: Any, settings: dict[str, Any]) -> Tensor | None:
    splits = settings.get("splits")
    if splits is None or recipe.scaling not in ("current", "delayed") or not len(splits):
        return None
    tail = x.detach()[int(splits.sum()) :]
    return tail.float().nan_to_num(0.0).abs().amax() if tail.numel() else None


def _largest_with_the_tail(amax: Tensor, tail: Tensor, columnwise: bool) -> Tensor:
    return torch.cat([amax[:-1], torch.maximum(amax[-1:], tail.to(amax.dtype))])


def _as_it_is(quantize: Wrapper, *inputs: Any, **settings: Any) -> Any:
    return quantize(*inputs, **settings)


def _gradient_past_the_groups(quantize: Wrapper, x: Tensor, recipe: Any, /, **settings: Any) -> Any:
    out, splits = quantize(x, recipe, **settings), settings.get("splits")
    if splits is None or not x.requires_grad:
        return out
    behind = (torch.arange(len(x), device=x.device) >= splits.sum())[:, None]
    return quantize(with_gradient(x, lambda g: torch.where(behind, 1.0, g)), recipe, **settings)


# ---- the state


def _last_call_of_a_step(quantize: Wrapper, x: Tensor, recipe: Any, /, **settings: Any) -> Any:
    """Several calls in one step: the last one's amax, not the largest."""
    out, state = quantize(x, recipe, **settings), settings.get("state")
    if state is None:
        return out
    history = state.amax_history.clone()
    history[:, 0] = 0
    return quantize(x, recipe, **settings | {"state": state._replace(amax_history=history)})


Update = Callable[..., Any]


def _no_margin(update: Update, state: Any, recipe: Any, /, **settings: Any) -> Any:
    out = update(state, recipe, **settings)
    return out if recipe.margin is None else update(state, replace(recipe, margin=0), **settings)


def _largest_for_most_recent(update: Update, state: Any, recipe: Any, /, **settings: Any) -> Any:
    out = update(state, recipe, **settings)
    return out if recipe.scaling != "delayed" else update(state, replace(recipe, amax_compute_algo="max"), **settings)


def _scale_of_an_infinity(update: Update, state: Any, recipe: Any, /, **settings: Any) -> Any:
    out = update(state, recipe, **settings)
    infinite = state.amax_history.isinf().any(1)
    return out._replace(scale=torch.where(infinite, 0.0, out.scale))


def _oldest_is_kept(update: Update, state: Any, recipe: Any, /, **settings: Any) -> Any:
    """The history is not moved on: the newest takes the place of the one before."""
    out, history = update(state, recipe, **settings), state.amax_history
    if history.shape[1] < 3:
        return out
    moved = torch.cat([out.amax_history[:, :1], history[:, 1:-1], out.amax_history[:, -1:]], 1)
    return out._replace(amax_history=moved)


def _updated(update: Update) -> dict[str, Wrapper]:
    """An update of the state, which the cases of quantize call."""
    return {"quantize": _as_it_is, "update_scales": update}


DEFECTS: tuple[Defect, ...] = (
    Defect("Z01", "the least amax is ignored", OPTION, {"quantize": _ignoring(amax_epsilon=0.0)}),
    Defect("Z02", "scales are no powers of two", OPTION, {"quantize": _ignoring(power_of_two_scales=False)}),
    Defect("Z03", "gradients of a hybrid recipe are E4M3", OPTION, {"quantize": _ignoring(fp8_format="e4m3")}),
    Defect("Z04", "weights have blocks of one row", OPTION, {"quantize": _ignoring(two_dimensional_weights=False)}),
    Defect("Z05", "both directions round by one noise", OPTION, {"quantize": _one_noise}),
    Defect("Z06", "the sign of a zero is lost", EDGE, tagged(_itself, codes=_no_sign_of_zero)),
    Defect("Z07", "NaN becomes the largest number", EDGE, tagged(_itself, codes=_nan_saturates)),
    Defect("Z08", "an exact power of two is rounded up", EXPONENT, tagged(blocks_along_rows, scales=_up_from_a_power)),
    Defect("Z09", "an exponent is rounded down", EXPONENT, tagged(blocks_along_rows, scales=_down)),
    Defect("Z10", "the scale of a block of zeros is 1", EXPONENT, tagged(blocks_along_rows, scales=_one_for_zeros)),
    Defect(
        "Z11", "a partial block takes the scale before", EDGE, tagged(_has_a_tail, scales=_scale_of_the_block_before)
    ),
    Defect("Z12", "rows past the last group count in its amax", EDGE, tagged(_tail_rows, amax=_largest_with_the_tail)),
    Defect("Z14", "rows past the last group have a gradient", EDGE, {"quantize": _gradient_past_the_groups}),
    Defect("Z15", "the last amax of a step, not the largest", STATE, {"quantize": _last_call_of_a_step}),
    Defect("Z16", "the margin is ignored", STATE, _updated(_no_margin)),
    Defect("Z17", "the largest amax where the most recent is asked for", STATE, _updated(_largest_for_most_recent)),
    Defect("Z18", "an infinite amax makes the scale 0", STATE, _updated(_scale_of_an_infinity)),
    Defect("Z19", "a history forgets all but its ends", STATE, _updated(_oldest_is_kept)),
    Defect(
        "Z20",
        "gradients of a hybrid recipe are E4M3, in products",
        OPTION,
        _products_ignoring("grouped_dgrad", "grouped_wgrad", fp8_format="e4m3"),
    ),
    Defect(
        "Z21",
        "weights have blocks of one row, in products",
        OPTION,
        _products_ignoring("grouped_linear", "grouped_dgrad", two_dimensional_weights=False),
    ),
    Defect("Z22", "the least amax is ignored in products", OPTION, _products_ignoring(*PRODUCTS, amax_epsilon=0.0)),
    Defect(
        "Z23",
        "scales of products are no powers of two",
        OPTION,
        _products_ignoring(*PRODUCTS, power_of_two_scales=False),
    ),
)
