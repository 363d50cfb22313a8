"""glu and activation: the function between an expert's two linear layers, with the routing
probability.

Mirrors megatron.core.fusions (`fused_bias_swiglu`, `fused_bias_geglu`,
`fused_weighted_squared_relu`), the unfused activations of megatron.core.transformer.mlp, and
`ScaledSwiGLU`, `ScaledClampedQGeGLU`, `ScaledSReLU` of transformer_engine.pytorch.ops. Differs:
docs/differences.md#experts.

Each function has gradients derived by hand; autograd uses those. Both directions widen their
inputs, compute in float32 (float64 if an input is), and round each result once.
"""

from collections.abc import Callable
from functools import partial
from math import pi, sqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_ref.config import (
    GATED,
    ActivationGradients,
    check_activation,
    check_cotangent,
    check_glu,
    check_input_store,
    check_kind,
)
from moe_ref.quantization.formats import E4M3, decode, encode
from moe_ref.rounding import accumulator_dtype, round_to

QUICK_GELU = 1.702  # σ(1.702 u) approximates the normal distribution function: Hendrycks and Gimpel, arXiv 1606.08415
GELU_CUBIC = 0.044715  # the same paper, for the tanh form
TANH_SATURATED = 30.0  # past it the tanh form has slope 0 or 1 to the last bit of float64, while u² could overflow


class Curve(NamedTuple):
    """A function of one number, and its derivative; both finite for every finite number, unless f
    itself overflows.
    """

    value: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]


def sigmoid_gated(alpha: float) -> Curve:
    """f(u) = u σ(αu);   f'(u) = σ + α u σ (1 - σ)"""

    def slope(u: Tensor) -> Tensor:
        s = torch.sigmoid(alpha * u)
        return s + alpha * (u * s * (1 - s))  # in this order α never meets a large u that 1 - σ = 0 would have removed

    return Curve(lambda u: u * torch.sigmoid(alpha * u), slope)


def _gelu(u: Tensor) -> Tensor:
    return 0.5 * u * (1 + torch.erf(u / sqrt(2)))


def _gelu_slope(u: Tensor) -> Tensor:
    return 0.5 * (1 + torch.erf(u / sqrt(2))) + u * torch.exp(-u * u / 2) / sqrt(2 * pi)


def _bend(u: Tensor) -> Tensor:
    """tanh(√(2/π) (u + 0.044715 u³)). Megatron writes 0.79788456 for √(2/π)."""
    return torch.tanh(sqrt(2 / pi) * (u + GELU_CUBIC * u**3))


def _gelu_tanh(u: Tensor) -> Tensor:
    return 0.5 * u * (1 + _bend(u))


def _gelu_tanh_slope(u: Tensor) -> Tensor:
    near, bend = u.clamp(-TANH_SATURATED, TANH_SATURATED), _bend(u)
    return 0.5 * (1 + bend) + 0.5 * near * (1 - bend**2) * sqrt(2 / pi) * (1 + 3 * GELU_CUBIC * near**2)


CURVES = {
    "silu": sigmoid_gated(1.0),
    "gelu": Curve(_gelu, _gelu_slope),
    "gelu_tanh": Curve(_gelu_tanh, _gelu_tanh_slope),
    "quick_gelu": sigmoid_gated(QUICK_GELU),
    "relu": Curve(torch.relu, lambda h: (h > 0).to(h.dtype)),
    "squared_relu": Curve(lambda h: torch.relu(h) ** 2, lambda h: 2 * torch.relu(h)),
}
GATE_OF = {"swiglu": "silu", "geglu": "gelu_tanh", "geglu_erf": "gelu", "quick_geglu": "quick_gelu", "reglu": "relu"}


class _WithGradients(torch.autograd.Function):
    """forward(h, probs), whose gradients are backward(d_out, h, probs); h may be saved as E4M3
    codes.
    """

    @staticmethod
    def forward(
        ctx: Any,
        forward: Callable[..., Tensor],
        backward: Callable[..., ActivationGradients],
        h: Tensor,
        probs: Tensor | None,
        fp8_input_store: bool = False,
    ) -> Tensor:
        store = encode(round_to(h, torch.float32), E4M3) if fp8_input_store else h  # float64 by float32, as torch casts
        ctx.save_for_backward(store, probs)
        ctx.backward_of, ctx.dtype = backward, h.dtype
        return forward(h, probs)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor):
        store, probs = ctx.saved_tensors
        h = store if store.dtype == ctx.dtype else decode(store, E4M3, dtype=ctx.dtype)
        return None, None, *ctx.backward_of(d_out, h, probs), None


def glu(
    h_PF2: Tensor,
    *, probs: Tensor | None = None, kind: str = "swiglu", offset: float = 0.0,
    clamp: float | None = None, alpha: float | None = None, interleave: int | None = None,
    round_before_probs: bool = False, fp8_input_store: bool = False,
) -> Tensor:  # fmt: skip
    """A gated activation, times the row's probability.

        out = f(u) · (v + offset) · p,     u, v = the halves of h, the gate u first

        swiglu       f(u) = u σ(αu), α = 1          geglu_erf   f(u) = u (1 + erf(u/√2)) / 2
        quick_geglu  f(u) = u σ(αu), α = 1.702      reglu       f(u) = max(u, 0)
        geglu        f(u) = u (1 + tanh(√(2/π) (u + 0.044715 u³))) / 2
        with clamp c:  u ← min(u, c),  v ← min(max(v, -c), c)

    With `interleave` s the columns alternate: u_0 … u_{s-1}, v_0 … v_{s-1}, u_s …; out is the same.
    A gate of -∞ makes NaN, in reglu 0 · v; one of +∞ in geglu_erf ∞ or NaN, by the formula of erf.
    A prob of 0 hides no NaN; rows do not depend on each other.

    Args:
        h_PF2: [P,2F] bfloat16, float16, float32 or float64.
        probs: [P] floating point, or None for 1.
        alpha: of swiglu or quick_geglu; None for the kind's own.
        interleave: a divisor of F, or None for halves.
        fp8_input_store: `glu_backward` gets ĥ = decode(encode(h)), E4M3 without a scale. If |h| >
            464, d_h at that column and d_probs of that row are unspecified. With swiglu only.

    Rounding: float32 (float64 if h or probs are), once to h's dtype; `round_before_probs` also
    rounds before the product with p, and in the backward. Gradients: `glu_backward`.

    Raises:
        ValueError: see `moe_ref.config`: check_glu, check_input_store.
    """
    check_glu(h_PF2, probs, kind, offset, clamp, alpha, interleave)
    check_input_store(fp8_input_store, kind)

    def forward(h_PF2: Tensor, probs: Tensor | None) -> Tensor:
        u_PF, v_PF = _clamp(*_halves(_widened(h_PF2, probs), interleave), clamp)
        act_PF = _gate(kind, alpha).value(u_PF) * (v_PF + offset)
        return _times_probs(act_PF, probs, h_PF2.dtype, round_before_probs)

    def backward(d_out_PF: Tensor, h_PF2: Tensor, probs: Tensor | None) -> ActivationGradients:
        return glu_backward(
            d_out_PF,
            h_PF2,
            probs=probs,
            kind=kind,
            offset=offset,
            clamp=clamp,
            alpha=alpha,
            interleave=interleave,
            round_before_probs=round_before_probs,
        )

    return _WithGradients.apply(forward, backward, h_PF2, probs, fp8_input_store)


def glu_backward(
    d_out_PF: Tensor, h_PF2: Tensor,
    *, probs: Tensor | None = None, kind: str = "swiglu", offset: float = 0.0,
    clamp: float | None = None, alpha: float | None = None, interleave: int | None = None,
    round_before_probs: bool = False,
) -> ActivationGradients:  # fmt: skip
    """The gradients of `glu`.

        g  = d_out · p,   with u and v after the clamp, and the bounds themselves passing:
        du = g · f'(u) · (v + offset)   where u ≤ c, else 0       f'(u) = σ + αu σ(1 - σ), σ = σ(αu)
        dv = g · f(u)                   where |v| ≤ c, else 0
        dp = Σ_F d_out · f(u) · (v + offset)

    d_h has the layout of h; it is unspecified in a row with a NaN or an infinity. The relu of reglu
    has slope 0 at 0.

    Rounding: float32 throughout (float64 if h or probs are); d_h is rounded once, to h's dtype, and
    d_probs once, to the probs' dtype. With `round_before_probs`, g is also rounded to the dtype of
    h, and f(u) · (v + offset) in dp.

    Raises:
        ValueError: see `moe_ref.config`: check_glu, check_cotangent.
    """
    check_glu(h_PF2, probs, kind, offset, clamp, alpha, interleave)
    check_cotangent(d_out_PF, h_PF2.shape[0], h_PF2.shape[1] // 2, h_PF2)
    gate = _gate(kind, alpha)
    free_u_PF, free_v_PF = _halves(_widened(h_PF2, probs), interleave)
    u_PF, v_PF = _clamp(free_u_PF, free_v_PF, clamp)
    f_PF, shifted_PF = gate.value(u_PF), v_PF + offset
    g_PF, d_probs = _times_probs_vjp(d_out_PF, f_PF * shifted_PF, probs, round_before_probs)
    du_PF, dv_PF = g_PF * gate.slope(u_PF) * shifted_PF, g_PF * f_PF
    if clamp is not None:
        du_PF = torch.where(free_u_PF <= clamp, du_PF, 0)
        dv_PF = torch.where(free_v_PF.abs() <= clamp, dv_PF, 0)
    return ActivationGradients(round_to(_interleave_halves(du_PF, dv_PF, interleave), h_PF2.dtype), d_probs)


def activation(
    h_PF: Tensor, *, probs: Tensor | None = None, kind: str = "squared_relu", round_before_probs: bool = False
) -> Tensor:
    """An activation without a gate, times the row's probability.

        out = f(h) · p

        silu        h σ(h)                      gelu          h (1 + erf(h/√2)) / 2
        quick_gelu  h σ(1.702 h)           gelu_tanh     h (1 + tanh(√(2/π) (h + 0.044715 h³))) / 2
        relu        max(h, 0)                   squared_relu  max(h, 0)²

    Args:
        h_PF: bfloat16, float16, float32 or float64.
        probs: [P] floating point, or None for 1.
        round_before_probs: as in `glu`.

    Returns:
        [P,F] in the dtype of h.

    Rounding, and what a NaN or an infinity does: as in `glu`. Gradients: `activation_backward`.

    Raises:
        ValueError: see `moe_ref.config.check_activation`.

    Source: weighted_squared_relu_impl, MLP.forward; TE ScaledSReLU.
    """
    check_activation(h_PF, probs, kind)

    def forward(h_PF: Tensor, probs: Tensor | None) -> Tensor:
        return _times_probs(CURVES[kind].value(_widened(h_PF, probs)), probs, h_PF.dtype, round_before_probs)

    def backward(d_out_PF: Tensor, h_PF: Tensor, probs: Tensor | None) -> ActivationGradients:
        return activation_backward(d_out_PF, h_PF, probs=probs, kind=kind, round_before_probs=round_before_probs)

    return _WithGradients.apply(forward, backward, h_PF, probs)


def activation_backward(
    d_out_PF: Tensor,
    h_PF: Tensor,
    *,
    probs: Tensor | None = None,
    kind: str = "squared_relu",
    round_before_probs: bool = False,
) -> ActivationGradients:
    """The gradients of `activation`.

        d_h = d_out · p · f'(h),     dp = Σ_F d_out · f(h);     relu has slope 0 at 0

    Rounding: as in `glu_backward`.

    Raises:
        ValueError: see `moe_ref.config`: check_activation, check_cotangent.
    """
    check_activation(h_PF, probs, kind)
    check_cotangent(d_out_PF, h_PF.shape[0], h_PF.shape[1], h_PF)
    x_PF = _widened(h_PF, probs)
    g_PF, d_probs = _times_probs_vjp(d_out_PF, CURVES[kind].value(x_PF), probs, round_before_probs)
    return ActivationGradients(round_to(g_PF * CURVES[kind].slope(x_PF), h_PF.dtype), d_probs)


def chosen_activation(
    kind: str,
    *, offset: float = 0.0, clamp: float | None = None, alpha: float | None = None,
    interleave: int | None = None, round_before_probs: bool = False, fp8_input_store: bool = False,
) -> Callable[..., Tensor]:  # fmt: skip
    """`glu` or `activation`, whichever has that kind, as a function of h and probs.

    Raises:
        ValueError: see `moe_ref.config`: check_kind, check_input_store.
    """
    check_kind(kind, offset, clamp, alpha, interleave)
    check_input_store(fp8_input_store, kind)
    if kind in GATED:
        shape: dict[str, Any] = {"offset": offset, "clamp": clamp, "alpha": alpha, "interleave": interleave}
        return partial(glu, kind=kind, **shape, round_before_probs=round_before_probs, fp8_input_store=fp8_input_store)
    return partial(activation, kind=kind, round_before_probs=round_before_probs)


def _gate(kind: str, alpha: float | None) -> Curve:
    return CURVES[GATE_OF[kind]] if alpha is None else sigmoid_gated(alpha)


def _clamp(u_PF: Tensor, v_PF: Tensor, clamp: float | None) -> tuple[Tensor, Tensor]:
    """The gate bounded from above, the value from both sides."""
    return (u_PF, v_PF) if clamp is None else (u_PF.clamp(max=clamp), v_PF.clamp(-clamp, clamp))


def _widened(h: Tensor, probs: Tensor | None) -> Tensor:
    """h in the dtype that everything is computed in."""
    return h.to(accumulator_dtype(h.dtype if probs is None else torch.promote_types(h.dtype, probs.dtype)))


def _halves(h_PF2: Tensor, interleave: int | None) -> tuple[Tensor, Tensor]:
    """The gates and the values of h, each [P,F]."""
    rows, width = h_PF2.shape
    size = interleave or max(width // 2, 1)
    blocks = h_PF2.reshape(rows, width // 2 // size, 2, size)
    return blocks[:, :, 0].reshape(rows, width // 2), blocks[:, :, 1].reshape(rows, width // 2)


def _interleave_halves(u_PF: Tensor, v_PF: Tensor, interleave: int | None) -> Tensor:
    """The [P,2F] whose `_halves` are u and v."""
    rows, width = u_PF.shape
    size = interleave or max(width, 1)
    blocks = (rows, width // size, size)
    return torch.stack([u_PF.reshape(blocks), v_PF.reshape(blocks)], dim=2).reshape(rows, 2 * width)


def _times_probs(act_PF: Tensor, probs: Tensor | None, dtype: torch.dtype, round_before_probs: bool) -> Tensor:
    """act · p, rounded to `dtype`."""
    if probs is None:
        return round_to(act_PF, dtype)
    if round_before_probs:
        act_PF = round_to(act_PF, dtype).to(act_PF.dtype)
    return round_to(act_PF * probs.to(act_PF.dtype)[:, None], dtype)


def _times_probs_vjp(
    d_out_PF: Tensor, act_PF: Tensor, probs: Tensor | None, round_before_probs: bool
) -> tuple[Tensor, Tensor | None]:
    """The gradient of act, not rounded, and the gradient of the probs."""
    wide_PF = d_out_PF.to(act_PF.dtype)
    if probs is None:
        return wide_PF, None
    g_PF = wide_PF * probs.to(act_PF.dtype)[:, None]
    if round_before_probs:
        act_PF, g_PF = (
            round_to(act_PF, d_out_PF.dtype).to(act_PF.dtype),
            round_to(g_PF, d_out_PF.dtype).to(act_PF.dtype),
        )
    return g_PF, round_to((wide_PF * act_PF).sum(1), probs.dtype)
