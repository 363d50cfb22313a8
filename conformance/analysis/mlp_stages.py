"""An expert MLP in running numbers: each stage's error and its propagation, forward and backward.

    x' = p·x or x     h = x'W1ᵀ + b1    a = act(h)·p    y = aW2ᵀ    out = y + p·b2
    d_a = d_out W2    d_h = act'(h)(d_a·p)    d_x' = d_h W1
    dW1 = Σ d_hᵀx'    dW2 = Σ d_outᵀa    db1 = Σ d_h    db2 = Σ p·d_out
    dp = Σ d_a·act(h) + Σ d_out·b2, or Σ d_x'·x

x', h, a, y, out, d_a, d_h, d_x' and d_rows are rounded to the rows' dtype; a stage in a wider dtype
is nearer to the exact result, so it is right as well. A recipe quantises all GEMM operands: see
`mlp_layers`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from conformance.analysis.curves import CURVES, gate_of, interleave_halves, split
from conformance.analysis.input_store import kept_in_e4m3
from conformance.analysis.mlp_layers import LowLayer
from conformance.analysis.products import Product, expert_slices, experts_of_rows
from conformance.analysis.running import Running, contracted
from conformance.judge import Bounded
from conformance.judge.bound import Accumulator, accumulating
from moe_ref.config import PLAIN

Contraction = tuple[Running, Product]


@dataclass(frozen=True)
class Activated:
    """act(h), and its vjp."""

    value: Running
    vjp: Callable[[Running], Running]


def activated(h: Running, settings: Mapping[str, Any]) -> Activated:
    """The activation of inexact values."""
    kind = settings.get("kind", "swiglu")
    if kind in PLAIN:
        return Activated(CURVES[kind].value(h), lambda g: g * CURVES[kind].slope(h))
    gate, clamp = gate_of(settings), settings.get("clamp")
    (u, v), (off_u, off_v) = split(h.value, settings), split(h.error, settings)
    free_u, free_v = Running(u, off_u, h.dtype), Running(v, off_v, h.dtype)
    bound = torch.inf if clamp is None else clamp
    inner_u, inner_v = clamped(free_u, -torch.inf, bound), clamped(free_v, -bound, bound)
    shifted = inner_v + settings["offset"] if settings.get("offset") else inner_v

    def vjp(g: Running) -> Running:
        du = clamp_vjp(g * gate.slope(inner_u) * shifted, free_u, -torch.inf, bound)
        dv = clamp_vjp(g * gate.value(inner_u), free_v, -bound, bound)
        return Running(
            interleave_halves(du.value, dv.value, settings), interleave_halves(du.error, dv.error, settings), g.dtype
        )

    return Activated(gate.value(inner_u) * shifted, vjp)


def activated_as_kept(h: Running, settings: Mapping[str, Any]) -> Activated:
    """`activated`, for an h that is stored as E4M3 codes.

    The result is unknown where a gate or its value may overflow.
    """
    stored_h = kept_in_e4m3(h)
    act = activated(stored_h, settings)
    beyond = torch.logical_or(*split(stored_h.error.isinf(), settings))
    lost = interleave_halves(beyond, beyond, settings)

    def vjp(g: Running) -> Running:
        d_h = act.vjp(g)
        return replace(d_h, error=torch.where(lost, torch.inf, d_h.error))

    return Activated(act.value, vjp)


def clamped(x: Running, least: float, most: float) -> Running:
    """min(max(x, least), most); x's error is clamped as well."""
    beyond_limits = (x.value - x.error >= most) | (x.value + x.error <= least)
    return Running(x.value.clamp(least, most), torch.where(beyond_limits, 0.0, x.error), x.dtype)


def clamp_vjp(g: Running, x: Running, least: float, most: float) -> Running:
    """The gradient of `clamped`: g where x lies within the bounds, else 0; either one where the
    interval of x contains a bound.
    """
    within_limits = (x.value >= least) & (x.value <= most)
    open_ = ((x.value - most).abs() <= x.error) | ((x.value - least).abs() <= x.error)
    either = open_ & (x.error > 0)
    return Running(
        torch.where(within_limits, g.value, 0.0),
        torch.where(either, g.value.abs() + g.error, torch.where(within_limits, g.error, 0.0)),
        g.dtype,
    )


@dataclass(frozen=True)
class Call:
    """The inputs of one call: the finite rows inside segments."""

    rows_PH: Tensor | Running  # Running: with errors, its dtype the stored one; so are probs
    counts_L: Tensor
    fc1_weight: Tensor
    fc2_weight: Tensor
    probs: Tensor | Running | None
    fc1_bias: Tensor | None
    fc2_bias: Tensor | None
    settings: Mapping[str, Any]
    sums: torch.dtype  # of GEMM accumulators
    wide: torch.dtype  # of products with probs, and of activations that include them
    widest: torch.dtype  # of the addition of the second bias
    low: tuple[LowLayer, LowLayer] | None = None  # with a recipe: both layers
    marked: bool = False  # the error is infinite from where a stage may overflow in the rows' dtype

    @property
    def accumulator(self) -> Accumulator:
        return accumulating(self.sums, self.rows_PH.dtype if self.low is None else torch.float8_e4m3fn)

    def of_rows(self, x_L: Tensor) -> Tensor:
        """The entry of each row's expert."""
        return x_L[experts_of_rows(self.counts_L, len(self.rows_PH))]

    def kept(self, x: Running, dtype: torch.dtype) -> Running:
        """x rounded to the rows' dtype, as input of a stage computed in `dtype`."""
        x = replace(x.with_rounding(self.rows_PH.dtype), dtype=dtype)
        beyond = x.value.abs() + x.error > torch.finfo(self.rows_PH.dtype).max
        return replace(x, error=torch.where(beyond, torch.inf, x.error)) if self.marked else x

    def fprop(self, layer: int, x: Running) -> Contraction:
        """The GEMM of a layer, the first with its bias."""
        weight, bias = ((self.fc1_weight, self.fc1_bias), (self.fc2_weight, None))[layer]
        return self.by_expert(x, weight, bias) if self.low is None else self.low[layer].fprop(x, weight, bias)

    def dgrad(self, layer: int, g: Running) -> Contraction:
        """The gradient of a layer's rows."""
        weight = (self.fc1_weight, self.fc2_weight)[layer]
        return self.by_expert(g, weight.mT) if self.low is None else self.low[layer].dgrad(g, weight)

    def wgrad(self, layer: int, g: Running, x: Running) -> Contraction:
        """The gradient of a layer's weights."""
        return self.outer(g, x) if self.low is None else self.low[layer].wgrad(g, x)

    def by_expert(self, x: Running, weights: Tensor, bias_LM: Tensor | None = None) -> Contraction:
        """x W_eᵀ + b_e: the bias is one more column times 1, added first or last."""
        products = []
        for e, rows in enumerate(expert_slices(self.counts_L)):
            expert_rows, expert_weights = x[rows], Running.of(weights[e], self.sums)
            if bias_LM is not None:
                ones, bias = (
                    torch.ones(len(expert_rows.value), 1, dtype=torch.float64),
                    Running.of(bias_LM[e][:, None], self.sums),
                )
                expert_rows = Running(
                    torch.cat([expert_rows.value, ones], 1),
                    torch.cat([expert_rows.error, 0 * ones], 1),
                    expert_rows.dtype,
                )
                expert_weights = Running(
                    torch.cat([expert_weights.value, bias.value], 1),
                    torch.cat([expert_weights.error, bias.error], 1),
                    expert_weights.dtype,
                )
            products.append(Product.of(expert_rows, expert_weights))
        return self._contracted(products, x.dtype)

    def outer(self, left_rows: Running, right_rows: Running) -> Contraction:
        """Σ over each expert's rows of leftᵀ right."""
        products = [Product.of(left_rows[rows].mT, right_rows[rows].mT) for rows in expert_slices(self.counts_L)]
        return self._contracted(products, left_rows.dtype, stack=True)

    def _contracted(self, products: list[Product], dtype: torch.dtype, stack: bool = False) -> Contraction:
        contractions = [product.running(product.terms, dtype, self.accumulator) for product in products]
        return Running.joined(contractions, stack), Product.joined(products, stack)

    def summed(self, x: Running, weights: Running | None) -> Running:
        """Σ over each expert's rows of x, weighted, in the dtype of the second bias' sums."""
        accumulator = Accumulator(unit=torch.finfo(x.dtype).eps / 2)
        if weights is None:
            weights = Running(
                torch.ones(len(x.value), 1, dtype=torch.float64),
                torch.zeros(len(x.value), 1, dtype=torch.float64),
                x.dtype,
            )
        sums = [contracted(weights[rows].mT, x[rows].mT, accumulator) for rows in expert_slices(self.counts_L)]
        return Running.joined(sums)


@dataclass(frozen=True)
class Forward:
    """The result, and the stages that the backward reads."""

    call: Call
    x: Running  # input of fc1
    first: Product  # of fc1
    act: Activated  # of h as kept
    a: Running
    y: Product
    out: Running
    p: Running | None  # of the activation
    p_bias: Running | None  # of the second bias


def forward(call: Call) -> Forward:
    """The stages up to the output."""
    on_input, rounds_before_probs = (
        bool(call.settings.get("probs_on_input")),
        bool(call.settings.get("round_before_probs")),
    )
    x = Running.of(call.rows_PH, call.sums)
    p = p_bias = None
    if call.probs is not None and on_input:
        x = call.kept(replace(x, dtype=call.wide) * Running.of(call.probs[:, None], call.wide), call.sums)
    elif call.probs is not None:
        p, p_bias = (Running.of(call.probs[:, None], dtype) for dtype in (call.wide, call.widest))
    computed = call.sums if p is None else call.wide  # without probs their dtype is irrelevant
    h, first = call.fprop(0, x)
    h = call.kept(h, computed)
    act = activated(h, call.settings)
    saved_activation = activated_as_kept(h, call.settings) if call.settings.get("fp8_input_store") else act
    if rounds_before_probs and p is not None:
        act, saved_activation = (replace(x, value=call.kept(x.value, computed)) for x in (act, saved_activation))
    a = call.kept(act.value if p is None else act.value * p, call.sums)
    out, y = call.fprop(1, a)
    if call.fc2_bias is not None:
        bias = Running.of(call.of_rows(call.fc2_bias), call.widest)
        out = call.kept(out, call.widest) + (bias if p_bias is None else bias * p_bias)
    return Forward(call, x, first, saved_activation, a, y, out, p, p_bias)


@dataclass(frozen=True)
class Backward:
    """The gradients. Weight gradients, which a recipe may refuse, are computed lazily."""

    rows: Running
    row_product: Product | None  # None: h may be kept as codes other than the reference's
    d_a: Product  # fc2's dgrad
    fc1_weight: Callable[[], Contraction]
    fc2_weight: Callable[[], Contraction]
    fc1_bias: Running
    fc2_bias: Running
    probs: Running | None
    d_y: Running  # the cotangents of both products
    d_h: Running


def backward(stages: Forward, g: Running) -> Backward:
    """The backward stages from a cotangent of the output."""
    call, p = stages.call, stages.p
    g = replace(g, dtype=call.sums)
    d_a, d_a_product = call.dgrad(1, g)
    d_a = call.kept(d_a, stages.act.value.dtype)
    d_act = d_a if p is None else d_a * p
    if call.settings.get("round_before_probs") and p is not None:
        d_act = call.kept(d_act, d_a.dtype)
    d_h = call.kept(stages.act.vjp(d_act), call.sums)
    d_rows, row_product = call.dgrad(0, d_h)
    d_probs = None
    if p is not None:
        d_probs = (d_a * stages.act.value).sum(1)
        if call.fc2_bias is not None:
            d_bias_probs = (replace(g, dtype=call.widest) * Running.of(call.of_rows(call.fc2_bias), call.widest)).sum(1)
            assert call.probs is not None
            stored = call.probs.dtype  # two uses of the probs: each part may be a gradient of its own
            d_bias_probs = replace(d_bias_probs.with_rounding(stored), dtype=d_probs.dtype)
            d_probs = d_probs.with_rounding(stored) + d_bias_probs
    elif call.probs is not None:
        d_x = call.kept(d_rows, call.wide)
        d_rows = d_x * Running.of(call.probs[:, None], call.wide)
        d_probs = (d_x * Running.of(call.rows_PH, call.wide)).sum(1)
    return Backward(
        d_rows,
        None if call.settings.get("fp8_input_store") else row_product,
        d_a_product,
        partial(call.wgrad, 0, d_h, stages.x),
        partial(call.wgrad, 1, g, stages.a),
        call.summed(d_h, None),
        call.summed(replace(g, dtype=call.widest), stages.p_bias),
        d_probs,
        g,
        d_h,
    )


def final_bound(x: Running, dtype: torch.dtype, unspecified: Tensor) -> Bounded:
    """The bound of x after its final rounding to `dtype`."""
    return x.before_final_rounding(dtype).bounded(dtype, None, unspecified.expand(x.value.shape))
