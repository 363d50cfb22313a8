"""Defects of activations that only some calls show; see `planted`."""

from typing import Any

import torch
from torch import Tensor

from conformance.mutants.defect import Defect, Wrapper, with_values
from conformance.mutants.kinds.conditions import given, only
from conformance.mutants.kinds.gradients import rounded_to, with_gradient, with_gradients_of

SEVERAL = "a mistake that one option alone does not show"
VALUES = "a mistake that one class of values shows"
SIZES = "a mistake that one size shows"
BACK = "a mistake that one gradient shows"
BOTH = ("glu", "activation")


def _interleaved_half(h: Tensor, **settings: Any) -> bool:
    return h.dtype == torch.float16 and settings.get("interleave") is not None and settings.get("clamp") is not None


def _clamped_as_halves(glu: Wrapper, right: Tensor, h: Tensor, **settings: Any) -> Tensor:
    """The first half is clamped as gates are, whatever is interleaved."""
    c, half = settings["clamp"], h.shape[1] // 2
    bounded = torch.cat([h[:, :half].clamp(max=c), h[:, half:].clamp(-c, c)], 1)
    return glu(bounded, **settings | {"clamp": None})


def _offset_without_prob(glu: Wrapper, right: Tensor, h: Tensor, **settings: Any) -> Tensor:
    plain = settings | {"offset": 0.0}
    shift = glu(h, **settings | {"probs": None}) - glu(h, **plain | {"probs": None})
    return (glu(h, **plain) + shift).to(h.dtype)


def _offset_and_clamp(h: Tensor, **settings: Any) -> bool:
    return bool(settings.get("offset")) and settings.get("clamp") is not None and settings.get("probs") is not None


def _stored_after_the_clamp(glu: Wrapper, right: Tensor, h: Tensor, **settings: Any) -> Tensor:
    """The codes are of the clamped input: what was past the bound has a gradient."""
    c, half = settings["clamp"], h.shape[1] // 2
    size = settings.get("interleave") or max(half, 1)
    gate = (torch.arange(h.shape[1], device=h.device) // size % 2 == 0)[None]
    inside_bounds = torch.where(gate, h.clamp(max=c), h.clamp(-c, c)).detach()
    other = glu(with_values(h, lambda _: inside_bounds), **settings)
    return with_gradients_of(right, other) if right.requires_grad else right


def _infinite_prob_of_zero(act: Wrapper, right: Tensor, h: Tensor, **settings: Any) -> Tensor:
    """0 · ∞ is 0."""
    zero = act(h.detach(), **settings | {"probs": None}) == 0
    lost = zero & settings["probs"].detach().isinf()[:, None]
    return torch.where(lost, torch.zeros_like(right), right)


def _wide_probs(h: Tensor, **settings: Any) -> bool:
    probs = settings.get("probs")
    return isinstance(probs, Tensor) and probs.dtype == torch.float64 and h.dtype != torch.float64


def _probs_through_float32(act: Wrapper, right: Tensor, h: Tensor, **settings: Any) -> Tensor:
    return act(h, **settings | {"probs": with_gradient(settings["probs"], rounded_to(torch.float32))})


def _rounds_forward_alone(act: Wrapper, right: Tensor, h: Tensor, **settings: Any) -> Tensor:
    """The probs' gradient is of the value before it was rounded."""
    probs = settings["probs"]
    exact = act(h, **settings | {"round_before_probs": False})
    of_h = act(h, **settings | {"probs": probs.detach()})
    return (
        with_gradients_of(right, of_h, act(h.detach(), **settings | {"round_before_probs": False}))
        if (right.requires_grad and exact.requires_grad)
        else right
    )


def _odd_rows(h: Tensor, **settings: Any) -> bool:
    return len(h) % 64 == 1 and len(h) > 1


def _last_row_has_the_prob_before(act: Wrapper, right: Tensor, h: Tensor, **settings: Any) -> Tensor:
    probs = settings.get("probs")
    if probs is None:
        return right
    moved = torch.cat([probs[:-1], probs[-2:-1]])
    return act(h, **settings | {"probs": with_values(probs, lambda _: moved.detach())})


_PLANTED: tuple[tuple[str, str, str, dict[str, Wrapper]], ...] = (
    (
        "AE113",
        "interleaved float16 is clamped as halves",
        SEVERAL,
        {"glu": only(_interleaved_half, _clamped_as_halves)},
    ),
    (
        "AE114",
        "with a clamp the offset is not weighted",
        SEVERAL,
        {"glu": only(_offset_and_clamp, _offset_without_prob)},
    ),
    (
        "AE115",
        "the codes kept are of the clamped input",
        SEVERAL,
        {"glu": only(given("fp8_input_store", "clamp"), _stored_after_the_clamp)},
    ),
    ("AE116", "0 · ∞ is 0", VALUES, dict.fromkeys(BOTH, only(given("probs"), _infinite_prob_of_zero))),
    (
        "AE117",
        "float64 probs have a float32 gradient",
        SEVERAL,
        dict.fromkeys(BOTH, only(_wide_probs, _probs_through_float32)),
    ),
    (
        "AE118",
        "the gradient of probs is of a value not rounded",
        BACK,
        dict.fromkeys(BOTH, only(given("round_before_probs", "probs"), _rounds_forward_alone)),
    ),
    (
        "AE119",
        "the one row past a tile has another prob",
        SIZES,
        dict.fromkeys(BOTH, only(_odd_rows, _last_row_has_the_prob_before)),
    ),
)
DEFECTS = tuple(Defect(*planted) for planted in _PLANTED)
