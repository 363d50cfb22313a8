"""Honest experts in plain torch that differ in everything the contract leaves open.

Autograd    torch's activations and autograd; one float32 matmul per GEMM
BaseTwo     σ = 1 / (1 + exp2(-x log₂e)), tanh = 2σ(2x) - 1, polynomial erf, closed-form gradients;
            sums over K in two halves
Wide        float64, rounded once
Backwards   swish = x / (1 + exp(-x)), tanh = 1 - 2 / (1 + exp(2x)), probs multiplied first;
            sums over K sequential, from the end
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from moe_ref import config

LOG2E = math.log2(math.e)


def sigmoid_base_two(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp2(-x * LOG2E))


def tanh_by_sigmoid(x: Tensor) -> Tensor:
    return 2 * sigmoid_base_two(2 * x) - 1


def tanh_backwards(x: Tensor) -> Tensor:
    return 1 - 2 / (1 + torch.exp(2 * x))


def erf_by_polynomial(x: Tensor) -> Tensor:
    """Abramowitz and Stegun 7.1.26, error at most 1.5e-7; float64: torch.erf."""
    if x.dtype == torch.float64:
        return torch.erf(x)
    t = 1 / (1 + 0.3275911 * x.abs())
    series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    return x.sign() * (1 - series * torch.exp(-x * x))


def in_one(x: Tensor, y: Tensor) -> Tensor:
    return x @ y


def in_halves(x: Tensor, y: Tensor) -> Tensor:
    middle = x.shape[-1] // 2
    return x[..., middle:] @ y[middle:] + x[..., :middle] @ y[:middle]


def one_by_one(x: Tensor, y: Tensor) -> Tensor:
    total = x.new_zeros((*x.shape[:-1], y.shape[-1]))
    for k in reversed(range(x.shape[-1])):
        total = total + x[..., k, None] * y[k]
    return total


@dataclass(frozen=True)
class How:
    """The options of a variant."""

    dtype: torch.dtype = torch.float32
    sigmoid: Callable[[Tensor], Tensor] = torch.sigmoid
    gated: Callable[[Tensor, Tensor], Tensor] | None = None  # x σ(αx) from x and αx
    tanh: Callable[[Tensor], Tensor] = torch.tanh
    erf: Callable[[Tensor], Tensor] = torch.erf
    closed: bool = False  # closed-form gradients
    probs_first: bool = False
    product: Callable[[Tensor, Tensor], Tensor] = in_one

    def wide(self, x: Tensor, *operands: Tensor | None) -> Tensor:
        doubles = any(y is not None and y.dtype == torch.float64 for y in (x, *operands))
        return x.to(torch.float64 if doubles else self.dtype)

    def swish(self, x: Tensor, alpha: float) -> Tensor:
        return self.gated(x, alpha * x) if self.gated else x * self.sigmoid(alpha * x)

    def bend(self, x: Tensor) -> Tensor:
        return self.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * (x * x * x)))

    def curve(self, x: Tensor, kind: str, alpha: float | None) -> Tensor:
        if kind in ("swiglu", "silu", "quick_geglu", "quick_gelu"):
            return self.swish(x, alpha or (1.702 if "quick" in kind else 1.0))
        if kind in ("geglu", "gelu_tanh"):
            return 0.5 * x * (1 + self.bend(x))
        if kind in ("geglu_erf", "gelu"):
            return 0.5 * x * (1 + self.erf(x * math.sqrt(0.5)))
        return torch.relu(x) if kind != "squared_relu" else torch.relu(x) * torch.relu(x)

    def slope(self, x: Tensor, kind: str, alpha: float | None) -> Tensor:
        if kind in ("swiglu", "silu", "quick_geglu", "quick_gelu"):
            alpha = alpha or (1.702 if "quick" in kind else 1.0)
            s = self.sigmoid(alpha * x)
            return s * (1 + alpha * x * (1 - s))
        if kind in ("geglu", "gelu_tanh"):
            t = self.bend(x)
            return 0.5 * ((1 + t) + x * (1 - t * t) * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x * x))
        if kind in ("geglu_erf", "gelu"):
            return 0.5 * (1 + self.erf(x * math.sqrt(0.5))) + x * torch.exp2(-0.5 * LOG2E * x * x) / math.sqrt(
                2 * math.pi
            )
        return (x > 0).to(x.dtype) * (2 * x if kind == "squared_relu" else 1)


class Curved(torch.autograd.Function):
    """f(x) with a closed-form gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: str, alpha: float | None, variant: How) -> Tensor:
        ctx.save_for_backward(x)
        ctx.settings = kind, alpha, variant
        return variant.curve(x, kind, alpha)

    @staticmethod
    def backward(ctx: Any, g: Tensor):
        kind, alpha, variant = ctx.settings
        return g * variant.slope(ctx.saved_tensors[0], kind, alpha), None, None, None


class Rounded(torch.autograd.Function):
    """x rounded to a dtype; the cotangent is rounded too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = dtype
        return x.to(dtype).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor):
        return g.to(ctx.dtype).to(g.dtype), None


class KeptInE4m3(torch.autograd.Function):
    """x through E4M3, NaN on overflow; the gradient is straight through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.where(x.abs() > 464, torch.nan, x.to(torch.float8_e4m3fn).to(x.dtype))

    @staticmethod
    def backward(ctx: Any, g: Tensor):
        return g


class Shown(torch.autograd.Function):
    """Returns `shown`; the gradient goes to x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shown: Tensor) -> Tensor:
        return shown.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor):
        return g, None


class Multiplied(torch.autograd.Function):
    """x y; both gradients by the same product function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, product: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(x, y)
        ctx.product = product
        return product(x, y)

    @staticmethod
    def backward(ctx: Any, g: Tensor):
        x, y = ctx.saved_tensors
        return ctx.product(g, y.T), ctx.product(x.T, g), None


def _accumulated_in(variant: How, accumulator: str, x: Tensor) -> torch.dtype:
    return torch.float64 if accumulator == "float64" or x.dtype == torch.float64 else variant.dtype


def _segments(counts: Tensor, rows: int) -> list[slice]:
    config.check_count_values(counts.tolist(), rows)
    ends = counts.cumsum(0).tolist()
    return [slice(end - count, end) for end, count in zip(ends, counts.tolist(), strict=True)]


def _curve(variant: How, x: Tensor, kind: str, alpha: float | None = None) -> Tensor:
    return Curved.apply(x, kind, alpha, variant) if variant.closed else variant.curve(x, kind, alpha)


def glu(
    variant: How, h, *, probs=None, kind="swiglu", offset=0.0, clamp=None, alpha=None, interleave=None,
    round_before_probs=False, fp8_input_store=False,
):  # fmt: skip
    config.check_glu(h, probs, kind, offset, clamp, alpha, interleave)
    config.check_input_store(fp8_input_store, kind)
    settings = {
        "probs": probs,
        "kind": kind,
        "offset": offset,
        "clamp": clamp,
        "alpha": alpha,
        "interleave": interleave,
    }
    out = gated(variant, h, **settings, rounded=round_before_probs)
    if not fp8_input_store:
        return out
    return Shown.apply(gated(variant, KeptInE4m3.apply(h), **settings, rounded=round_before_probs), out)


def gated(variant: How, h, *, probs, kind, offset, clamp, alpha, interleave, rounded):
    h_wide, half = variant.wide(h, probs), h.shape[1] // 2
    u, v = (
        h_wide.unflatten(1, (half // interleave, 2, interleave)).transpose(1, 2).flatten(2).unbind(1)
        if interleave and half
        else h_wide.chunk(2, 1)
    )
    if clamp is not None:
        u, v = u.clamp(max=clamp), v.clamp(-clamp, clamp)
    return _weighted(variant, _curve(variant, u, kind, alpha), v + offset if offset else v, probs, h.dtype, rounded)


def activation(variant: How, h, *, probs=None, kind="squared_relu", round_before_probs=False):
    config.check_activation(h, probs, kind)
    return _weighted(variant, _curve(variant, variant.wide(h, probs), kind), None, probs, h.dtype, round_before_probs)


def grouped_linear(variant: How, rows, weight, tokens_per_expert, *, bias=None, accumulator="float32"):
    config.check_grouped_linear(rows, weight, tokens_per_expert, bias)
    config.check_precision(None, None, None, accumulator)
    dtype = _accumulated_in(variant, accumulator, rows)
    out = rows.new_zeros((len(rows), weight.shape[1]), dtype=dtype)
    for e, segment in enumerate(_segments(tokens_per_expert, len(rows))):
        product = Multiplied.apply(rows[segment].to(dtype), weight[e].to(dtype).T, variant.product)
        out = out.index_copy(
            0, torch.arange(segment.start, segment.stop), product if bias is None else product + bias[e].to(dtype)
        )
    return out.to(rows.dtype)


def grouped_dgrad(variant: How, d_out, weight, tokens_per_expert, *, accumulator="float32"):
    config.check_grouped_dgrad(d_out, weight, tokens_per_expert)
    config.check_precision(None, None, None, accumulator)
    dtype = _accumulated_in(variant, accumulator, d_out)
    out = d_out.new_zeros((len(d_out), weight.shape[2]))
    for e, segment in enumerate(_segments(tokens_per_expert, len(d_out))):
        out[segment] = variant.product(d_out[segment].to(dtype), weight[e].to(dtype)).to(d_out.dtype)
    return out


def grouped_wgrad(variant: How, d_out, rows, tokens_per_expert, *, accumulate_into=None, accumulator="float32"):
    config.check_grouped_wgrad(d_out, rows, tokens_per_expert, accumulate_into)
    config.check_precision(None, None, None, accumulator)
    dtype = _accumulated_in(variant, accumulator, rows)
    gradients = [
        variant.product(d_out[segment].to(dtype).T, rows[segment].to(dtype))
        for segment in _segments(tokens_per_expert, len(rows))
    ]
    total = torch.stack(gradients)
    return total.to(rows.dtype) if accumulate_into is None else (total + accumulate_into).to(accumulate_into.dtype)


def make(variant: How) -> SimpleNamespace:
    """The namespace of a variant."""
    functions = (glu, activation, grouped_linear, grouped_dgrad, grouped_wgrad)
    return SimpleNamespace(**{function.__name__: MethodType(function, variant) for function in functions})


def _weighted(
    variant: How, f: Tensor, v: Tensor | None, probs: Tensor | None, dtype: torch.dtype, rounded: bool
) -> Tensor:
    """f · v · p, rounded to dtype."""
    if probs is None:
        return (f if v is None else f * v).to(dtype)
    p = probs.to(f.dtype)[:, None]
    if rounded:
        return (Rounded.apply(f if v is None else f * v, dtype) * p).to(dtype)
    if variant.probs_first and v is not None:
        return (f * (v * p)).to(dtype)
    return ((f if v is None else f * v) * p).to(dtype)


BASE_TWO = {"sigmoid": sigmoid_base_two, "tanh": tanh_by_sigmoid, "erf": erf_by_polynomial}
BACKWARDS = {"gated": lambda x, y: x / (1 + torch.exp(-y)), "tanh": tanh_backwards, "probs_first": True}
Autograd = make(How())
BaseTwo = make(How(**BASE_TWO, closed=True, product=in_halves))
Wide = make(How(dtype=torch.float64))
Backwards = make(How(**BACKWARDS, closed=True, product=one_by_one))
