"""Defects of activations: clamps, options that one direction forgets, gradients; see `planted`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from conformance.mutants.defect import Defect, Wrapper, with_values
from conformance.mutants.kinds.gradients import rounded_to, with_gradient, with_gradients_of

CLAMPED = "a mistake that clamps and offsets invite"
BACK = "a mistake that a backward of one's own invites"
RANGE = "a mistake that values of moderate size do not show"
OVERFLOWS = 88.8  # exp of more is infinite in float32
WIDEST = 16  # columns of an interleaved block


def _gates(h: Tensor, settings: dict[str, Any]) -> Tensor:
    """[1,2F] True in the columns of the gate."""
    size = settings.get("interleave") or max(h.shape[1] // 2, 1)
    return (torch.arange(h.shape[1], device=h.device) // size % 2 == 0)[None]


def _gate_clamped_below(glu: Wrapper, h: Tensor, /, **settings: Any) -> Any:
    out, clamp = glu(h, **settings), settings.get("clamp")
    return out if clamp is None else glu(torch.where(_gates(h, settings) & (h < -clamp), -clamp, h), **settings)


def _nothing_at_the_bound(glu: Wrapper, h: Tensor, /, **settings: Any) -> Any:
    clamp = settings.get("clamp")
    if clamp is None:
        return glu(h, **settings)
    at = torch.where(_gates(h, settings), h == clamp, h.abs() == clamp)
    return glu(with_gradient(h, lambda g: torch.where(at, 0.0, g)), **settings)


def _gradient_past_the_clamp(glu: Wrapper, h: Tensor, /, **settings: Any) -> Any:
    out, clamp = glu(h, **settings), settings.get("clamp")
    if clamp is None:
        return out
    inside = torch.where(_gates(h, settings), h.clamp(max=clamp), h.clamp(-clamp, clamp)).detach()
    return glu(with_values(h, lambda _: inside), **settings)


def _offset_before_the_clamp(glu: Wrapper, h: Tensor, /, **settings: Any) -> Any:
    out, clamp, offset = glu(h, **settings), settings.get("clamp"), settings.get("offset", 0.0)
    if clamp is None or not offset:
        return out
    value = (h + offset).clamp(-clamp, clamp) - offset
    return glu(torch.where(_gates(h, settings), h, value), **settings)


def _back_without(*names: str) -> Wrapper:
    """Some options do not reach the backward."""

    def wrapper(act: Wrapper, h: Tensor, /, **settings: Any) -> Any:
        out = act(h, **settings)
        rest = {name: x for name, x in settings.items() if name not in names}
        return with_gradients_of(out, act(h, **rest)) if out.requires_grad and len(rest) < len(settings) else out

    return wrapper


def _other_curve(kind: str, other: str) -> Wrapper:
    def wrapper(act: Wrapper, h: Tensor, /, **settings: Any) -> Any:
        return act(h, **settings | ({"kind": other} if settings.get("kind") == kind else {}))

    return wrapper


def _probs_without_the_offset(glu: Wrapper, h: Tensor, /, **settings: Any) -> Any:
    out, probs = glu(h, **settings), settings.get("probs")
    if probs is None or not out.requires_grad or not settings.get("offset"):
        return out
    of_h = glu(h, **settings | {"probs": probs.detach()})
    return with_gradients_of(out, of_h, glu(h.detach(), **settings | {"offset": 0.0}))


def _with_probs(change: Callable[[Tensor, Tensor], Tensor]) -> Wrapper:
    """The activation with change(probs, h)."""

    def wrapper(act: Wrapper, h: Tensor, /, **settings: Any) -> Any:
        out, probs = act(h, **settings), settings.get("probs")
        return out if probs is None else act(h, **settings | {"probs": change(probs, h)})

    return wrapper


def _only_with_h(probs: Tensor, h: Tensor) -> Tensor:
    return probs if h.requires_grad else with_gradient(probs, torch.zeros_like)


def _gradient_in_the_dtype_of_h(probs: Tensor, h: Tensor) -> Tensor:
    return with_gradient(probs, rounded_to(h.dtype))


def _in_the_dtype_of_h(probs: Tensor, h: Tensor) -> Tensor:
    return with_values(probs, rounded_to(h.dtype))


def _row_of_prob_zero(act: Wrapper, h: Tensor, /, **settings: Any) -> Any:
    """A row of prob 0 is not computed: a NaN in it is hidden."""
    out, probs = act(h, **settings), settings.get("probs")
    return out if probs is None else torch.where((probs == 0)[:, None], 0.0, out)


def _slope_overflows(act: Wrapper, h: Tensor, /, **settings: Any) -> Any:
    """e / (1 + e)² with e = exp(-h), which is ∞ / ∞."""
    out = act(h, **settings)
    if settings.get("kind", "swiglu" if "interleave" in settings else "") not in ("swiglu", "silu"):
        return out
    gates = _gates(h, settings) if out.shape != h.shape else torch.ones_like(h[:1], dtype=torch.bool)
    far = gates & (h.detach().float() < -OVERFLOWS)
    return act(with_gradient(h, lambda g: torch.where(far, torch.nan, g)), **settings)


def _slope_one_at_zero(act: Wrapper, h: Tensor, /, **settings: Any) -> Any:
    out = act(h, **settings)
    if settings.get("kind") not in ("relu", "reglu") or not out.requires_grad:
        return out
    return with_gradients_of(
        out, act(with_values(h, lambda x: torch.where(x == 0, torch.finfo(x.dtype).tiny, x)), **settings)
    )


def _narrow_blocks(glu: Wrapper, h: Tensor, /, **settings: Any) -> Any:
    out, size = glu(h, **settings), settings.get("interleave") or 0
    narrow = size > WIDEST and (h.shape[1] // 2) % WIDEST == 0
    return glu(h, **settings | {"interleave": WIDEST}) if narrow else out


def _both(wrapper: Wrapper) -> dict[str, Wrapper]:
    return {"activation": wrapper, "glu": wrapper}


DEFECTS: tuple[Defect, ...] = (
    Defect("Y01", "the gate is clamped from below, too", CLAMPED, {"glu": _gate_clamped_below}),
    Defect("Y02", "a value at the bound itself has no gradient", CLAMPED, {"glu": _nothing_at_the_bound}),
    Defect("Y03", "clamped values keep their gradient", CLAMPED, {"glu": _gradient_past_the_clamp}),
    Defect("Y04", "the offset is added before the clamp", CLAMPED, {"glu": _offset_before_the_clamp}),
    Defect("Y05", "alpha does not reach the backward", BACK, {"glu": _back_without("alpha")}),
    Defect("Y06", "the offset does not reach the backward", BACK, {"glu": _back_without("offset")}),
    Defect("Y07", "the backward does not round before the probs", BACK, _both(_back_without("round_before_probs"))),
    Defect("Y08", "the backward does not read the stored codes", BACK, {"glu": _back_without("fp8_input_store")}),
    Defect("Y09", "gelu by erf where tanh is asked for", RANGE, {"glu": _other_curve("geglu", "geglu_erf")}),
    Defect("Y10", "gelu by tanh where erf is asked for", RANGE, {"activation": _other_curve("gelu", "gelu_tanh")}),
    Defect("Y11", "the gradient of probs forgets the offset", BACK, {"glu": _probs_without_the_offset}),
    Defect("Y12", "probs have a gradient only if h has one", BACK, _both(_with_probs(_only_with_h))),
    Defect(
        "Y13", "the gradient of probs is rounded to h's dtype", BACK, _both(_with_probs(_gradient_in_the_dtype_of_h))
    ),
    Defect("Y14", "probs are rounded to h's dtype", RANGE, _both(_with_probs(_in_the_dtype_of_h))),
    Defect("Y16", "a row of prob 0 hides its NaN", RANGE, _both(_row_of_prob_zero)),
    Defect("Y17", "the slope of silu far below 0 is NaN", RANGE, _both(_slope_overflows)),
    Defect("Y18", "the slope of relu at 0 is 1", BACK, _both(_slope_one_at_zero)),
    Defect("Y19", "interleaved blocks of more than 16 columns are cut", CLAMPED, {"glu": _narrow_blocks}),
)
