"""Defects of activations that only some calls show; see `planted`."""

from typing import Any

import torch
from torch import Tensor

from conformance.mutants.defect import Defect, Wrapper, with_values
from conformance.mutants.kinds.conditions import given, only
from conformance.mutants.kinds.gradients import with_gradients_of

SEVERAL = "a mistake that one option alone does not show"


def _interleaved_half(h: Tensor, **settings: Any) -> bool:
    return h.dtype == torch.float16 and settings.get("interleave") is not None and settings.get("clamp") is not None


def _clamped_as_halves(glu: Wrapper, right: Tensor, h: Tensor, **settings: Any) -> Tensor:
    """The first half is clamped as gates are, whatever is interleaved."""
    c, half = settings["clamp"], h.shape[1] // 2
    bounded = torch.cat([h[:, :half].clamp(max=c), h[:, half:].clamp(-c, c)], 1)
    return glu(bounded, **settings | {"clamp": None})


def _stored_after_the_clamp(glu: Wrapper, right: Tensor, h: Tensor, **settings: Any) -> Tensor:
    """The codes are of the clamped input: what was past the bound has a gradient."""
    c, half = settings["clamp"], h.shape[1] // 2
    size = settings.get("interleave") or max(half, 1)
    gate = (torch.arange(h.shape[1], device=h.device) // size % 2 == 0)[None]
    inside_bounds = torch.where(gate, h.clamp(max=c), h.clamp(-c, c)).detach()
    other = glu(with_values(h, lambda _: inside_bounds), **settings)
    return with_gradients_of(right, other) if right.requires_grad else right


_PLANTED: tuple[tuple[str, str, str, dict[str, Wrapper]], ...] = (
    (
        "AE113",
        "interleaved float16 is clamped as halves",
        SEVERAL,
        {"glu": only(_interleaved_half, _clamped_as_halves)},
    ),
    (
        "AE115",
        "the codes kept are of the clamped input",
        SEVERAL,
        {"glu": only(given("fp8_input_store", "clamp"), _stored_after_the_clamp)},
    ),
)
DEFECTS = tuple(Defect(*planted) for planted in _PLANTED)
