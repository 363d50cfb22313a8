"""Defects of float16: a stage, or a part of a sum, past the largest number becomes that number."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from conformance.mutants.defect import Change, Defect, Wrapper, with_values
from conformance.mutants.kinds.gradients import with_gradient, with_gradients_of
from moe_ref.experts.activations import chosen_activation
from moe_ref.experts.linear import grouped_linear

RANGE = "a mistake that a saturating conversion invites"
MLP = ("grouped_mlp", "sequential_mlp")
SHAPES = ("kind", "offset", "clamp", "alpha", "interleave", "round_before_probs", "fp8_input_store")
OTHERS = ("recipe", "align", "recompute", "probs_on_input", "fc2_bias", "gate_weight", "state", "noise", "wgrads")
MOST = torch.finfo(torch.float16).max


def _saturated(x: Tensor) -> Tensor:
    return x.clamp(-MOST, MOST)


def _forward(x: Tensor) -> Tensor:
    return with_values(x, _saturated)


def _backward(x: Tensor) -> Tensor:
    return with_gradient(x, _saturated)


def _kept(x: Tensor) -> Tensor:
    return x


def _staged(of_h: Change = _kept, of_a: Change = _kept) -> Wrapper:
    """Both products with of_h(h) and of_a(act(h)) between them; for float16 and few options."""

    def mlp(base: Wrapper, rows: Tensor, counts: Tensor, fc1: Tensor, fc2: Tensor, /, **settings: Any) -> Any:
        out = base(rows, counts, fc1, fc2, **settings)
        plain = not any(settings.get(name) for name in OTHERS if not isinstance(settings.get(name), Tensor))
        given = any(isinstance(settings.get(name), Tensor) for name in OTHERS)
        if rows.dtype != torch.float16 or not plain or given or int(counts.sum()) < len(rows):
            return out
        act = chosen_activation(**{"kind": "swiglu"} | {name: settings[name] for name in SHAPES if name in settings})
        h = of_h(grouped_linear(rows, fc1, counts, bias=settings.get("fc1_bias")))
        return grouped_linear(of_a(act(h, probs=settings.get("probs"))), fc2, counts)

    return mlp


def _shared(of_h: Change = _kept, of_a: Change = _kept) -> Wrapper:
    staged = _staged(of_h, of_a)

    def shared(base: Wrapper, x: Tensor, fc1: Tensor, fc2: Tensor, /, **settings: Any) -> Any:
        def one(rows: Tensor, counts: Tensor, first: Tensor, second: Tensor, **options: Any) -> Any:
            return base(rows, first[0], second[0], **options)

        return staged(one, x, torch.tensor([len(x)]), fc1[None], fc2[None], **settings)

    return shared


def _halves_saturate(linear: Wrapper, rows: Tensor, weight: Tensor, *rest: Tensor, **settings: Any) -> Any:
    """Sums over two halves of the columns are stored in float16, saturated, and added."""
    out, half = linear(rows, weight, *rest, **settings), rows.shape[-1] // 2
    if rows.dtype != torch.float16 or settings.get("recipe") is not None or settings.get("bias") is not None:
        return out
    wide = [x.detach().float() for x in (rows, weight)]
    first, second = (linear(wide[0][..., part], wide[1][..., part], *rest) for part in (slice(half), slice(half, None)))
    exact = first + second
    lost = (first.abs() > MOST) | (second.abs() > MOST)
    value = torch.where(lost & exact.isfinite(), (_saturated(first) + _saturated(second)).half(), out.detach())
    return with_gradients_of(value, out) if out.requires_grad else value


def _parts_of_rows_saturate(wgrad: Wrapper, d_out: Tensor, rows: Tensor, counts: Tensor, /, **settings: Any) -> Any:
    """The same of two halves of each expert's rows."""
    out = wgrad(d_out, rows, counts, **settings)
    if rows.dtype != torch.float16 or settings.get("recipe") is not None or "accumulate_into" in settings:
        return out
    place = torch.cat([torch.arange(count) < count // 2 for count in counts.tolist()] or [torch.zeros(0).bool()])
    place = torch.cat([place, torch.zeros(len(rows) - len(place)).bool()])[:, None]
    wide = rows.float()
    parts = [wgrad(d_out.float(), torch.where(own, wide, 0), counts) for own in (place, ~place)]
    lost, exact = (parts[0].abs() > MOST) | (parts[1].abs() > MOST), parts[0] + parts[1]
    return torch.where(lost & exact.isfinite(), (_saturated(parts[0]) + _saturated(parts[1])).half(), out)


def _everywhere(of_h: Change = _kept, of_a: Change = _kept) -> dict[str, Callable[..., Any]]:
    return dict.fromkeys(MLP, _staged(of_h, of_a)) | {"shared_experts": _shared(of_h, of_a)}


DEFECTS: tuple[Defect, ...] = (
    Defect("AD79", "a hidden value past the largest becomes that", RANGE, _everywhere(of_h=_forward)),
    Defect("AD80", "an activation past the largest becomes that", RANGE, _everywhere(of_a=_forward)),
    Defect("AD81", "a hidden gradient past the largest becomes that", RANGE, _everywhere(of_h=_backward)),
    Defect("AD82", "an activation's gradient past the largest becomes that", RANGE, _everywhere(of_a=_backward)),
    Defect(
        "AD83",
        "sums of two halves saturate",
        RANGE,
        dict.fromkeys(("grouped_linear", "latent_projection"), _halves_saturate),
    ),
    Defect("AD84", "sums of two halves of the rows saturate", RANGE, {"grouped_wgrad": _parts_of_rows_saturate}),
)
