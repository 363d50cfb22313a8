"""The experts in a second formulation: products with a weight matrix per row, and activations by
their formulas, with autograd's gradients.
"""

from collections.abc import Callable
from functools import partial
from math import pi, sqrt
from typing import Any

import torch
from torch import Tensor

from evidence.formulations.quantization import Through, factor, nearest
from moe_ref.config import Recipe
from moe_ref.config.experts import GATED


def sigmoid(u: Tensor) -> Tensor:
    """exp(-ln(1 + exp(-u)))"""
    return (-torch.logaddexp(torch.zeros_like(u), -u)).exp()


CURVES: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": lambda u: u * sigmoid(u),
    "gelu": lambda u: u / 2 * (1 + torch.erf(u / sqrt(2))),
    "gelu_tanh": lambda u: u / 2 * (1 + torch.tanh(sqrt(2 / pi) * (u + 0.044715 * u * u * u))),
    "quick_gelu": lambda u: u * sigmoid(1.702 * u),
    "relu": lambda u: torch.where(u <= 0, 0.0, u),
    "squared_relu": lambda u: torch.where(u <= 0, 0.0, u * u),
}
GATES = {"swiglu": "silu", "geglu": "gelu_tanh", "geglu_erf": "gelu", "quick_geglu": "quick_gelu", "reglu": "relu"}


def columns(width: int, interleave: int | None) -> tuple[list[int], list[int]]:
    """The columns of h with the gate and with the value of each feature."""
    size = interleave or max(width, 1)
    gates = [2 * size * (j // size) + j % size for j in range(width)]
    return gates, [column + size for column in gates]


def glu(
    h_PF2: Tensor, *, probs: Tensor | None = None, kind: str = "swiglu", offset: float = 0.0,
    clamp: float | None = None, alpha: float | None = None, interleave: int | None = None,
    round_before_probs: bool = False, fp8_input_store: bool = False,
) -> Tensor:  # fmt: skip
    """f(u) · (v + offset) · p, column by column."""

    def of(h: Tensor) -> Tensor:
        gates, values = columns(h.shape[1] // 2, interleave)
        u, v = h[:, gates], h[:, values]
        if clamp is not None:
            u = torch.where(u > clamp, clamp, u)
            v = torch.where(v.abs() > clamp, clamp * v.detach().sign(), v)
        act = (u * sigmoid(alpha * u) if alpha is not None else CURVES[GATES[kind]](u)) * (v + offset)
        return act if probs is None else act * probs[:, None]

    return stored(of, h_PF2) if fp8_input_store else of(h_PF2)


def stored(of: Callable[[Tensor], Tensor], h: Tensor) -> Tensor:
    """of(h), whose gradient is taken at the E4M3 values of h."""
    stored_output = of(Through.apply(h, nearest(h.detach(), "e4m3")))
    return Through.apply(stored_output, of(h).detach())


def activation(
    h_PF: Tensor, *, probs: Tensor | None = None, kind: str = "squared_relu", round_before_probs: bool = False
) -> Tensor:
    """f(h) · p"""
    act = CURVES[kind](h_PF)
    return act if probs is None else torch.einsum("pf,p->pf", act, probs)


# ---- products


def experts_of(tokens_per_expert_L: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """The expert of each row [P], and whether it has one. Rows past the last segment have none."""
    counts = tokens_per_expert_L.tolist()
    expert = [e for e, count in enumerate(counts) for _ in range(count)]
    num_tail = num_rows - len(expert)
    has_expert = torch.arange(num_rows) < len(expert)
    return torch.tensor(expert + [len(counts) - 1] * num_tail, dtype=torch.int64), has_expert


def read(x_PN: Tensor, has_expert: Tensor) -> Tensor:
    """x with zeros past the last segment."""
    return torch.where(has_expert[:, None], x_PN, 0.0)


class _LowPrecision(torch.autograd.Function):
    """A product of quantised factors, whose gradients are the products below."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, counts: Tensor, precision: Any) -> Tensor:
        ctx.save_for_backward(rows, weight, counts)
        ctx.how = precision
        x, w = factor(rows, counts, "input", "fprop", **precision), factor(weight, None, "weight", "fprop", **precision)
        return _product(x, w, counts, bias)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Any, ...]:
        rows, weight, counts = ctx.saved_tensors
        d_rows = grouped_dgrad(d_out, weight, counts, **ctx.how)
        d_weight = grouped_wgrad(d_out, rows, counts, **ctx.how) if ctx.needs_input_grad[1] else None
        d_bias = None
        if ctx.needs_input_grad[2]:
            d_bias = torch.stack([d_rows.sum(0) for d_rows in d_out[: counts.sum()].split(counts.tolist())])
        return d_rows, d_weight, d_bias, None, None


def _product(x: Tensor, weight: Tensor, counts: Tensor, bias: Tensor | None) -> Tensor:
    expert, has_expert = experts_of(counts, len(x))
    out = torch.einsum("pmn,pn->pm", weight[expert], read(x, has_expert))
    return read(out if bias is None else out + bias[expert], has_expert)


def grouped_linear(
    rows_PN: Tensor, weight_LMN: Tensor, tokens_per_expert_L: Tensor, *, bias: Tensor | None = None,
    recipe: Recipe | None = None, state: Any = None, noise: Tensor | None = None, accumulator: str = "float32",
) -> Tensor:  # fmt: skip
    """out[p, m] = Σ_n W[e(p), m, n] x[p, n] + b[e(p), m], of all rows at once."""
    if recipe is None:
        return _product(rows_PN, weight_LMN, tokens_per_expert_L, bias)
    precision = {"recipe": recipe, "state": state, "noise": noise}
    return _LowPrecision.apply(rows_PN, weight_LMN, bias, tokens_per_expert_L, precision)


def grouped_dgrad(
    d_out_PM: Tensor, weight_LMN: Tensor, tokens_per_expert_L: Tensor, *, recipe: Recipe | None = None,
    state: Any = None, noise: Tensor | None = None, accumulator: str = "float32",
) -> Tensor:  # fmt: skip
    """dx[p, n] = Σ_m W[e(p), m, n] d[p, m]"""
    precision = {"recipe": recipe, "state": state, "noise": noise}
    d_out = factor(d_out_PM, tokens_per_expert_L, "grad_output", "dgrad", **precision)
    weight = factor(weight_LMN, None, "weight", "dgrad", **precision)
    expert, has_expert = experts_of(tokens_per_expert_L, len(d_out))
    return read(torch.einsum("pmn,pm->pn", weight[expert], read(d_out, has_expert)), has_expert)


def grouped_wgrad(
    d_out_PM: Tensor, rows_PN: Tensor, tokens_per_expert_L: Tensor, *, accumulate_into: Tensor | None = None,
    recipe: Recipe | None = None, state: Any = None, noise: Tensor | None = None, accumulator: str = "float32",
) -> Tensor:  # fmt: skip
    """dW[l] = Σ_p d[p] ⊗ x[p], the rows of others taken as zeros; added to what is there."""
    precision = {"recipe": recipe, "state": state, "noise": noise}
    d_out = factor(d_out_PM, tokens_per_expert_L, "grad_output", "wgrad", **precision)
    rows = factor(rows_PN, tokens_per_expert_L, "input", "wgrad", **precision)
    expert, has_expert = experts_of(tokens_per_expert_L, len(rows))
    masks = [has_expert & (expert == e) for e in range(len(tokens_per_expert_L))]
    product = torch.stack([torch.einsum("pm,pn->mn", read(d_out, mask), read(rows, mask)) for mask in masks])
    return product if accumulate_into is None else accumulate_into + product


def linear(x_TN: Tensor, weight_MN: Tensor, *, bias: Tensor | None = None, **precision: Any) -> Tensor:
    """All rows times one weight."""
    if precision.get("recipe") is None:
        out = torch.einsum("tn,mn->tm", x_TN, weight_MN)
        return out if bias is None else out + bias
    num_rows = torch.tensor([len(x_TN)])
    return grouped_linear(x_TN, weight_MN[None], num_rows, bias=None if bias is None else bias[None], **precision)


latent_projection = linear


# ---- layers of two products


def acts(kind: str, **settings: Any) -> Callable[..., Tensor]:
    """`glu` or `activation` of that kind."""
    if kind in GATED:
        return partial(glu, kind=kind, **settings)
    return partial(activation, kind=kind)


def precisions(recipe: Recipe | None, state: Any, noise: Any) -> list[dict[str, Any]]:
    """Recipe, state and noise of both products."""
    pairs = zip(state or (None, None), noise or (None, None), strict=True)
    return [{"recipe": recipe, "state": layer_state, "noise": drawn} for layer_state, drawn in pairs]


def grouped_mlp(
    rows_PH: Tensor, tokens_per_expert_L: Tensor, fc1_weight: Tensor, fc2_weight: Tensor, *,
    probs: Tensor | None = None, fc1_bias: Tensor | None = None, fc2_bias: Tensor | None = None,
    kind: str = "swiglu", probs_on_input: bool = False, align: int | None = None, recompute: Any = None,
    recipe: Recipe | None = None, state: Any = None, noise: Any = None, round_before_probs: bool = False,
    **shape: Any,
) -> Tensor:  # fmt: skip
    """Every row by its expert's weights, in a buffer with the padding that `align` adds."""
    counts = tokens_per_expert_L.tolist()
    lengths = [-(-count // (align or 1)) * (align or 1) for count in counts]
    source: list[int] = []  # of each row of the padded buffer; -1: zeros
    for e, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        begin = sum(counts[:e])
        source += [*range(begin, begin + count), *[-1] * (length - count)]
    real = torch.tensor([i >= 0 for i in source], dtype=torch.bool)
    at, padded = torch.tensor(source, dtype=torch.int64).clamp(min=0), torch.tensor(lengths)
    x = torch.where(real[:, None], rows_PH[at] if len(source) else rows_PH[:0], 0.0)
    p = None if probs is None else torch.where(real, probs[at] if len(source) else probs[:0], 0.0)
    if probs_on_input and p is not None:
        x, p = x * p[:, None], None
    noise = None if noise is None else [x if x is None else x[:, : len(source)] for x in noise]
    fc1, fc2 = precisions(recipe, state, noise)
    h = grouped_linear(x, fc1_weight, padded, bias=fc1_bias, **fc1)
    y = grouped_linear(acts(kind, **shape)(h, probs=p), fc2_weight, padded, **fc2)
    if fc2_bias is not None:
        bias = fc2_bias[experts_of(padded, len(source))[0]]
        y = y + (bias if p is None else bias * p[:, None])
    tail = rows_PH.new_zeros(len(rows_PH) - sum(counts), y.shape[1])
    return torch.cat([y[real], tail])


def sequential_mlp(
    rows_PH: Tensor, tokens_per_expert_L: Tensor, fc1_weight: Tensor, fc2_weight: Tensor, **settings: Any
) -> Tensor:
    """Row by row, each as a batch of one. With a recipe, which covers all rows, `grouped_mlp`."""
    if settings.get("recipe") is not None:
        return grouped_mlp(rows_PH, tokens_per_expert_L, fc1_weight, fc2_weight, **settings)
    probs, bias1, bias2 = (settings.pop(name, None) for name in ("probs", "fc1_bias", "fc2_bias"))
    on_input, kind = settings.pop("probs_on_input", False), settings.pop("kind", "swiglu")
    act = acts(kind, **{name: x for name, x in settings.items() if name not in ("align", "recompute", "recipe")})
    out = [torch.zeros_like(row) for row in rows_PH]
    first_row = 0
    for e, count in enumerate(tokens_per_expert_L.tolist()):
        for i in range(first_row, first_row + count):
            p = rows_PH.new_ones(1) if probs is None else probs[i : i + 1]
            h = fc1_weight[e] @ (rows_PH[i] * p if on_input else rows_PH[i])
            h = h if bias1 is None else h + bias1[e]
            output_probs = torch.ones_like(p) if on_input else p
            y = fc2_weight[e] @ act(h[None], probs=output_probs)[0]
            out[i] = y if bias2 is None else y + output_probs * bias2[e]
        first_row += count
    return torch.stack(out) if out else rows_PH


def shared_experts(
    x_TH: Tensor, fc1_weight: Tensor, fc2_weight: Tensor, *, gate_weight: Tensor | None = None, kind: str = "swiglu",
    recompute: bool = False, recipe: Recipe | None = None, state: Any = None, noise: Any = None, **shape: Any,
) -> Tensor:  # fmt: skip
    """Two products, and a gate per token."""
    fc1, fc2 = precisions(recipe, state, noise)
    y = linear(acts(kind, **shape)(linear(x_TH, fc1_weight, **fc1)), fc2_weight, **fc2)
    return y if gate_weight is None else y * sigmoid((x_TH * gate_weight).sum(1, keepdim=True))
