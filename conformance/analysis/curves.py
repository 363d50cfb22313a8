"""Running error analysis of activations: f and f' of `moe_ref.experts.activations`, with error
bounds.

σ and tanh are computed from an exponential. Where they cancel, their error is a few roundings of 1;
where 1 absorbs the exponential, they are exactly 1. Without the second fact the bound of f', which
multiplies 1 - σ or 1 - tanh² by large numbers, would be vacuous.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from conformance.analysis.running import DIVISION, TRANSCENDENTAL, Running
from conformance.judge.bound import ROUNDOFF

LOST = 8.0  # any formula absorbs terms below e⁻⁸ of half an ulp of 1
BESIDE_ONE = 8.0  # in u: 2σ(2x) - 1 with the two constants above, and published polynomials of erf
TANH = 2.0  # in u: two ulp of a number below 1, as CUDA's tanhf
QUICK_GELU, GELU_CUBIC = 1.702, 0.044715  # Hendrycks and Gimpel 2016, arXiv 1606.08415


class Curve(NamedTuple):
    """A scalar function and its derivative."""

    value: Callable[[Running], Running]
    slope: Callable[[Running], Running]


def _room(dtype: torch.dtype) -> float:
    """The smallest x from which 1 + exp(-x) is exactly 1 in this dtype."""
    return LOST - math.log(ROUNDOFF[dtype])


def _off(x: Running) -> Tensor:
    """The error of an exponential whose argument x · log₂e is rounded before the exponential is
    taken.
    """
    return torch.where(x.value.isfinite(), x.error + 2 * ROUNDOFF[x.dtype] * x.value.abs(), 0.0)


def sigmoid(x: Running) -> Running:
    """1 / (1 + exp(-x)), 0 where exp(-x) overflows; or ½ + ½ tanh(x/2), 0 where the tanh is -1.

    A tanh is off by TANH roundings of 1, half of which remain where the ½ cancel; the sum rounds
    once more. Where 1 absorbs exp(x), the tanh is -1, and the whole value is lost.
    """
    value, off, unit = x.value.sigmoid(), _off(x), ROUNDOFF[x.dtype]
    inherited = torch.maximum((x.value + off).sigmoid() - value, value - (x.value - off).sigmoid())
    by_exp = unit * value * (TRANSCENDENTAL * (1 - value) + 1 + DIVISION) + torch.finfo(x.dtype).tiny
    by_tanh = torch.where(x.value + off < -_room(x.dtype), value, unit * (TANH / 2 + value))
    rounding = torch.maximum(by_exp, by_tanh)
    saturated = x.value - off > _room(x.dtype)
    error = torch.where(saturated, _distance_to_one(value, (off - x.value).exp(), x.dtype), inherited + rounding)
    return Running(value, torch.where(x.value.isfinite(), error, 0.0), x.dtype)


def tanh(x: Running) -> Running:
    """tanh(x) by an exponential, or better."""
    least, value = x.value.abs() - _off(x), x.value.tanh()
    distance_to_one = torch.where(
        2 * least > _room(x.dtype), _distance_to_one(value, 2 * (-2 * least).exp(), x.dtype), torch.inf
    )
    return _beside_one(x, value, (x.value + _off(x)).tanh(), (x.value - _off(x)).tanh(), distance_to_one)


def erf(x: Running) -> Running:
    """erf(x) by a polynomial with an error of BESIDE_ONE roundings of 1, or better."""
    least, value = (x.value.abs() - _off(x)).clamp(min=0), x.value.erf()
    distance_to_one = torch.where(
        least.square() > _room(x.dtype), _distance_to_one(value, torch.special.erfc(least), x.dtype), torch.inf
    )
    return _beside_one(x, value, (x.value + _off(x)).erf(), (x.value - _off(x)).erf(), distance_to_one)


def _distance_to_one(value: Tensor, float64_distance: Tensor, dtype: torch.dtype) -> Tensor:
    """1 - |value| of a saturated curve: in float64, or `float64_distance` where this underflows."""
    return torch.maximum(1 - value.abs(), float64_distance) + torch.finfo(dtype).tiny


def _beside_one(x: Running, value: Tensor, high: Tensor, low: Tensor, distance_to_one: Tensor) -> Running:
    """x → value with an error of BESIDE_ONE roundings of 1, at most `distance_to_one`."""
    error = torch.minimum(torch.maximum(high - value, value - low) + BESIDE_ONE * ROUNDOFF[x.dtype], distance_to_one)
    return Running(value, torch.where(x.value.isfinite(), error, 0.0), x.dtype)


def in_any_order(*terms: Running) -> Running:
    """The sum of the terms, with the error of adding them in any order: each partial sum is
    rounded.
    """
    shape = torch.broadcast_shapes(*(x.value.shape for x in terms))
    expanded = [Running(x.value.expand(shape), x.error.expand(shape), terms[-1].dtype) for x in terms]
    total = Running.joined(expanded, stack=True).sum(0)
    return Running(total.value[0], total.error[0], total.dtype)


def relu(x: Running) -> Running:
    """max(x, 0)."""
    return Running(x.value.clamp(min=0), torch.where(x.value + x.error > 0, x.error, 0.0), x.dtype)


def sigmoid_gated(alpha: float) -> Curve:
    """x σ(αx), and σ + αx σ(1 - σ)"""

    def slope(x: Running) -> Running:
        s = sigmoid(x * alpha)
        return s + x * s * (s.constant(1.0) - s) * alpha

    return Curve(lambda x: x * sigmoid(x * alpha), slope)


def _normal(x: Running) -> Running:
    """(1 + erf(x/√2)) / 2"""
    return (erf(x * math.sqrt(0.5)) + 1.0) * 0.5


def _normal_slope(x: Running) -> Running:
    """½ + erf(x/√2) / 2 + x exp(-x²/2) / √(2π), added in any order.

    oneDNN, and so torch on a CPU, adds the last term to the first ½: the roundings are of ½, also
    where ½ and erf/2 cancel.
    """
    bell = x * (x * x * -0.5).exp() * (1 / math.sqrt(2 * math.pi))
    return in_any_order(bell.constant(0.5), erf(x * math.sqrt(0.5)) * 0.5, bell)


def _bend(x: Running) -> Running:
    return tanh((x + x * x * x * GELU_CUBIC) * math.sqrt(2 / math.pi))


def _bend_slope(x: Running) -> Running:
    t = _bend(x)
    room = (t.constant(1.0) - t) * (t + 1.0)
    return (t + 1.0) * 0.5 + x * room * (x * x * (3 * GELU_CUBIC) + 1.0) * (0.5 * math.sqrt(2 / math.pi))


def _halved_last(x: Running, product: Running) -> Running:
    """x (1 + erf) / 2 in any order, as torch's own gelu: where the product overflows, anything."""
    beyond = 2 * x.value > torch.finfo(x.dtype).max
    return Running(product.value, torch.where(beyond, torch.inf, product.error), product.dtype)


def _positive(x: Running) -> Running:
    """1 for x > 0, else 0; either where the interval of x contains 0."""
    either = (x.value.abs() <= x.error) & (x.error > 0)
    return Running((x.value > 0).double(), either.double(), x.dtype)


CURVES = {
    "silu": sigmoid_gated(1.0),
    "gelu": Curve(lambda x: _halved_last(x, x * _normal(x)), _normal_slope),
    "gelu_tanh": Curve(lambda x: _halved_last(x, x * ((_bend(x) + 1.0) * 0.5)), _bend_slope),
    "quick_gelu": sigmoid_gated(QUICK_GELU),
    "relu": Curve(relu, _positive),
    "squared_relu": Curve(lambda x: relu(x) * relu(x), lambda x: relu(x) * 2.0),
}
GATES = {
    "swiglu": CURVES["silu"],
    "geglu": CURVES["gelu_tanh"],
    "geglu_erf": CURVES["gelu"],
    "quick_geglu": CURVES["quick_gelu"],
    "reglu": CURVES["relu"],
}


def gate_of(settings: Mapping[str, Any]) -> Curve:
    """f."""
    alpha = settings.get("alpha")
    return GATES[settings.get("kind", "swiglu")] if alpha is None else sigmoid_gated(alpha)


def split(h: Tensor, settings: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """u and v, column by column."""
    width = h.shape[1] // 2
    size = settings.get("interleave") or max(width, 1)
    gates = torch.tensor([j // size * 2 * size + j % size for j in range(width)], dtype=torch.int64)
    return h[:, gates], h[:, gates + size]


def interleave_halves(u: Tensor, v: Tensor, settings: Mapping[str, Any]) -> Tensor:
    """The h whose `split` are u and v."""
    numbers = torch.arange(2 * u.shape[1])[None]
    places = torch.cat(split(numbers, settings), 1)[0]
    return torch.cat([u, v], 1)[:, places.argsort()]


def halves(h: Tensor, settings: Mapping[str, Any], dtype: torch.dtype) -> tuple[Running, Running]:
    """u and v within their bounds, which are rounded as the kernel computes, not as h is stored."""
    u, v = (Running.of(x, dtype) for x in split(h, settings))
    clamp = settings.get("clamp")
    return (u, v) if clamp is None else (_clamped(u, -math.inf, clamp), _clamped(v, -clamp, clamp))


def _clamped(x: Running, low: float, high: float) -> Running:
    off = x.constant(high).error
    within_limits = (x.value >= low) & (x.value <= high) | x.value.isnan()
    return Running(x.value.clamp(low, high), torch.where(within_limits, x.error, off), x.dtype)


def shifted(v: Running, settings: Mapping[str, Any]) -> Running:
    """v + offset."""
    return v + settings["offset"] if settings.get("offset") else v
