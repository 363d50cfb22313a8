"""Defects of activations, products and MLPs that kernels of other libraries have had, or could
have; see `planted`.
"""

from typing import Any

import torch
from torch import Tensor

from conformance.mutants.defect import Change, Defect, Wrapper, with_values
from conformance.mutants.kinds.gradients import read_as_contiguous, with_gradient
from moe_ref.quantization.formats import E4M3, decode, encode

BACK = "a mistake that a backward of one's own invites"
PADDED = "a mistake that rows past the last expert invite"
EMPTY = "a mistake that empty experts invite"
LAYOUT = "a mistake that contiguous tensors do not show"
ROUNDED = "a mistake that a narrower unit invites"
BLOCK, COLUMNS, HUGE = 128, 512, 1e10


# ---- activations


def _probs_of_the_first_columns(glu: Wrapper, h: Tensor, /, **settings: Any) -> Any:
    """The gradient of probs is the sum of one program, and later columns have another."""
    out, probs = glu(h, **settings), settings.get("probs")
    if probs is None or out.shape[1] <= COLUMNS:
        return out
    value = glu(h.detach().double(), **settings | {"probs": None}).detach()
    seen: dict[str, Tensor] = {}

    def noted(g: Tensor) -> Tensor:
        seen["out"] = g
        return g

    back: Change = lambda g: (seen["out"].double() * value)[:, :COLUMNS].sum(1).to(g.dtype)  # noqa: E731
    return with_gradient(glu(h, **settings | {"probs": with_gradient(probs, back)}), noted)


def _a_row_of_zeros_is_skipped(activation: Wrapper, h: Tensor, /, **settings: Any) -> Any:
    """Rows of zeros are taken for padding: their h has no gradient."""
    padding = (h.detach() == 0).all(1, keepdim=True)
    return activation(with_gradient(h, lambda g: torch.where(padding, 0, g)), **settings)


def _probs_of_rounded_values(activation: Wrapper, h: Tensor, /, **settings: Any) -> Any:
    """The gradient of probs is taken of the values as stored in h's dtype."""
    out, probs = activation(h, **settings), settings.get("probs")
    if probs is None or settings.get("round_before_probs"):
        return out
    value = activation(h.detach(), **settings | {"probs": None})
    seen: dict[str, Tensor] = {}

    def noted(g: Tensor) -> Tensor:
        seen["out"] = g
        return g

    back: Change = lambda g: (seen["out"].double() * value.double()).sum(1).to(g.dtype)  # noqa: E731
    return with_gradient(activation(h, **settings | {"probs": with_gradient(probs, back)}), noted)


def _probs_twice_in_the_backward(activation: Wrapper, h: Tensor, /, **settings: Any) -> Any:
    out, probs = activation(h, **settings), settings.get("probs")
    if probs is None or not h.requires_grad:
        return out
    factor = probs.detach().double()[:, None]
    return activation(with_gradient(h, lambda g: (g.double() * factor).to(g.dtype)), **settings)


def _halves_of_odd_widths(glu: Wrapper, h: Tensor, /, **settings: Any) -> Any:
    """Of an odd number of columns the gate's last one is taken for a value's, and the reverse."""
    out, half = glu(h, **settings), h.shape[1] // 2
    if half % 2 == 0 or half < 2 or settings.get("interleave"):
        return out
    order = torch.arange(2 * half, device=h.device)
    order[half - 1], order[half] = half, half - 1
    return glu(h[:, order], **settings)


def _half_precision_gate(activation: Wrapper, h: Tensor, /, **settings: Any) -> Any:
    """float16 alone is computed in float16: σ is rounded before it multiplies."""
    out = activation(h, **settings)
    if h.dtype != torch.float16 or settings.get("kind") != "silu" or settings.get("probs") is not None:
        return out
    x = h.detach()
    return with_values(out, lambda _: (x.float() * torch.sigmoid(x.float()).half().float()).half())


def _slope_of_huge_ones(function: Wrapper, h: Tensor, /, **settings: Any) -> Any:
    """A fourth power overflows in the slope, times 1 - tanh² = 0."""
    out, kind = function(h, **settings), settings.get("kind")
    if kind not in ("geglu", "gelu_tanh"):
        return out
    return function(with_gradient(h, lambda g: torch.where(h.abs() > HUGE, torch.nan, g)), **settings)


# ---- products


def _slices(counts: Tensor) -> list[slice]:
    ends = counts.cumsum(0).tolist()
    return [slice(end - count, end) for end, count in zip(ends, counts.tolist(), strict=True)]


def _plain(settings: dict[str, Any]) -> bool:
    return settings.get("recipe") is None


def _bias_past_the_last(linear: Wrapper, rows: Tensor, weight: Tensor, counts: Tensor, /, **settings: Any) -> Any:
    out, bias = linear(rows, weight, counts, **settings), settings.get("bias")
    if bias is None:
        return out
    tail = torch.arange(len(out), device=out.device)[:, None] >= counts.sum()
    return with_values(out, lambda y: torch.where(tail, bias.detach()[-1:].to(y.dtype), y))


def _bias_of_experts_with_rows(
    linear: Wrapper, rows: Tensor, weight: Tensor, counts: Tensor, /, **settings: Any
) -> Any:
    """The bias of the n-th expert that has rows is the n-th."""
    out, bias = linear(rows, weight, counts, **settings), settings.get("bias")
    if bias is None:
        return out
    number = ((counts > 0).cumsum(0) - 1).clamp(min=0)
    return linear(rows, weight, counts, **settings | {"bias": bias[number]})


def _rows_past_the_last_unmasked(
    wgrad: Wrapper, d_out: Tensor, rows: Tensor, counts: Tensor, /, **settings: Any
) -> Any:
    """One factor is masked: 0 · NaN of the other reaches the last expert's partial tile."""
    out = wgrad(d_out, rows, counts, **settings)
    tail = rows[int(counts.sum()) :]
    if len(tail) == 0 or not _plain(settings) or int(counts[-1]) % BLOCK == 0:
        return out
    spoilt = (0 * tail.double()).sum(0).to(out.dtype)
    return torch.cat([out[:-1], (out[-1] + spoilt)[None]])


def _weight_taken_for_contiguous(dgrad: Wrapper, d_out: Tensor, weight: Tensor, *rest: Tensor, **settings: Any) -> Any:
    out = dgrad(d_out, weight, *rest, **settings)
    return out if weight.is_contiguous() else dgrad(d_out, read_as_contiguous(weight), *rest, **settings)


def _added_in_float32(wgrad: Wrapper, d_out: Tensor, rows: Tensor, counts: Tensor, /, **settings: Any) -> Any:
    out, into = wgrad(d_out, rows, counts, **settings), settings.get("accumulate_into")
    if into is None or into.dtype != torch.float64 or d_out.dtype == torch.float64:
        return out
    narrow = wgrad(d_out, rows, counts, **settings | {"accumulate_into": into.float()}).double()
    return torch.where((counts == 0)[:, None, None], out, narrow)


def _last_block_by_the_scale_before(linear: Wrapper, rows: Tensor, *rest: Tensor, **settings: Any) -> Any:
    """The last, partial block of columns is quantised by the scale of the block before."""
    out, recipe = linear(rows, *rest, **settings), settings.get("recipe")
    tail = rows.shape[1] % BLOCK
    if recipe is None or recipe.scaling != "block" or rows.shape[1] < BLOCK or not tail:
        return out

    def change(x: Tensor) -> Tensor:
        before, last = x[:, -tail - BLOCK : -tail].float(), x[:, -tail:].float()
        scale = torch.exp2((448.0 / before.abs().amax(1, keepdim=True)).log2().floor())
        scale = torch.where(scale.isfinite(), scale, 1.0)
        return torch.cat([x[:, :-tail], (decode(encode(last * scale, E4M3), E4M3) / scale).to(x.dtype)], 1)

    return linear(with_values(rows, change), *rest, **settings)


# ---- layers

MLP = ("grouped_mlp", "sequential_mlp")


def _no_probs_in_the_bias(mlp: Wrapper, rows: Tensor, counts: Tensor, *weights: Tensor, **settings: Any) -> Any:
    """The gradient of probs lacks the part of the second bias."""
    out, probs, bias = mlp(rows, counts, *weights, **settings), settings.get("probs"), settings.get("fc2_bias")
    if probs is None or bias is None or settings.get("probs_on_input") or not probs.requires_grad:
        return out
    seen: dict[str, Tensor] = {}

    def noted(g: Tensor) -> Tensor:
        seen["out"] = g
        return g

    def back(g: Tensor) -> Tensor:
        part = torch.zeros_like(g, dtype=torch.float64)
        for expert, own in enumerate(_slices(counts)):
            part[own] = seen["out"][own].double() @ bias.detach()[expert].double()
        return (g.double() - part).to(g.dtype)

    return with_gradient(mlp(rows, counts, *weights, **settings | {"probs": with_gradient(probs, back)}), noted)


def _recomputed_probs_are_constant(mlp: Wrapper, *tensors: Tensor, **settings: Any) -> Any:
    out, probs = mlp(*tensors, **settings), settings.get("probs")
    if probs is None or settings.get("recompute") != "moe_act":
        return out
    return mlp(*tensors, **settings | {"probs": with_gradient(probs, torch.zeros_like)})


DEFECTS: tuple[Defect, ...] = (
    Defect("AD36", "the gradient of probs has the first 512 columns", BACK, {"glu": _probs_of_the_first_columns}),
    Defect("AD37", "a row of zeros has no gradient", PADDED, {"activation": _a_row_of_zeros_is_skipped}),
    Defect(
        "AD38",
        "the gradient of probs is taken of rounded values",
        BACK,
        dict.fromkeys(("glu", "activation"), _probs_of_rounded_values),
    ),
    Defect(
        "AD39",
        "the gradient of h has the probs twice",
        BACK,
        dict.fromkeys(("glu", "activation"), _probs_twice_in_the_backward),
    ),
    Defect("AD40", "halves of an odd width share a column", LAYOUT, {"glu": _halves_of_odd_widths}),
    Defect("AD41", "a gate of float16 is rounded", ROUNDED, {"activation": _half_precision_gate}),
    Defect(
        "AD42",
        "the slope at a huge number is NaN",
        BACK,
        dict.fromkeys(("glu", "activation"), _slope_of_huge_ones),
    ),
    Defect("AD43", "rows past the last expert have its bias", PADDED, {"grouped_linear": _bias_past_the_last}),
    Defect("AD44", "empty experts shift the biases", EMPTY, {"grouped_linear": _bias_of_experts_with_rows}),
    Defect("AD45", "one factor is masked past the last row", PADDED, {"grouped_wgrad": _rows_past_the_last_unmasked}),
    Defect("AD46", "a weight is taken for contiguous", LAYOUT, {"grouped_dgrad": _weight_taken_for_contiguous}),
    Defect("AD47", "a float64 gradient is added to in float32", ROUNDED, {"grouped_wgrad": _added_in_float32}),
    Defect(
        "AD48",
        "the last block has the scale of the block before",
        "a mistake that partial blocks invite",
        {"grouped_linear": _last_block_by_the_scale_before},
    ),
    Defect(
        "AD49",
        "the gradient of probs lacks the second bias",
        BACK,
        dict.fromkeys(MLP, _no_probs_in_the_bias),
    ),
    Defect(
        "AD50",
        "probs that are used again have no gradient",
        BACK,
        dict.fromkeys(MLP, _recomputed_probs_are_constant),
    ),
)
