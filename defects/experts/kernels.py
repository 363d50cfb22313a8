"""Defects of activations, products and MLPs that kernels of other libraries have had, or could
have; see `planted`.
"""

from typing import Any

import torch
from torch import Tensor

from conformance.mutants.defect import Defect, Wrapper, with_values
from conformance.mutants.kinds.gradients import with_gradient
from moe_ref.quantization.formats import E4M3, decode, encode

BACK = "a mistake that a backward of one's own invites"
PADDED = "a mistake that rows past the last expert invite"
ROUNDED = "a mistake that a narrower unit invites"
BLOCK, COLUMNS, HUGE = 128, 512, 1e10


# ---- activations


def _a_row_of_zeros_is_skipped(activation: Wrapper, h: Tensor, /, **settings: Any) -> Any:
    """Rows of zeros are taken for padding: their h has no gradient."""
    padding = (h.detach() == 0).all(1, keepdim=True)
    return activation(with_gradient(h, lambda g: torch.where(padding, 0, g)), **settings)


def _half_precision_gate(activation: Wrapper, h: Tensor, /, **settings: Any) -> Any:
    """float16 alone is computed in float16: σ is rounded before it multiplies."""
    out = activation(h, **settings)
    if h.dtype != torch.float16 or settings.get("kind") != "silu" or settings.get("probs") is not None:
        return out
    x = h.detach()
    return with_values(out, lambda _: (x.float() * torch.sigmoid(x.float()).half().float()).half())


# ---- products


def _slices(counts: Tensor) -> list[slice]:
    ends = counts.cumsum(0).tolist()
    return [slice(end - count, end) for end, count in zip(ends, counts.tolist(), strict=True)]


def _plain(settings: dict[str, Any]) -> bool:
    return settings.get("recipe") is None


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
    Defect("AD37", "a row of zeros has no gradient", PADDED, {"activation": _a_row_of_zeros_is_skipped}),
    Defect("AD41", "a gate of float16 is rounded", ROUNDED, {"activation": _half_precision_gate}),
    Defect("AD45", "one factor is masked past the last row", PADDED, {"grouped_wgrad": _rows_past_the_last_unmasked}),
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
