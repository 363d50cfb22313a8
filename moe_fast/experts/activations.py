"""glu, activation and their gradients, fused: one launch each, which reads everything once."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_fast.experts import _activations as kernels
from moe_fast.launch import tuning
from moe_fast.launch.arithmetic import accumulator, number_bits
from moe_fast.launch.autograd import once_differentiable
from moe_fast.launch.backend import casts_in_hardware, check_device, present, strided, strided_or_empty
from moe_fast.launch.operators import as_operators, has_memory, launch, operator, traceable
from moe_fast.launch.tuning import ceil_div
from moe_ref.config import ActivationGradients, check_activation, check_cotangent, check_glu, check_input_store, require

PROBS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # dtypes of probs
QUICK_GELU = 1.702  # Hendrycks and Gimpel 2016, arXiv 1606.08415
CURVES = {  # kind → the kernels' name of f, and its α
    "swiglu": ("sigmoid", 1.0),
    "quick_geglu": ("sigmoid", QUICK_GELU),
    "geglu": ("tanh", 1.0),
    "geglu_erf": ("erf", 1.0),
    "reglu": ("relu", 1.0),
    "silu": ("sigmoid", 1.0),
    "quick_gelu": ("sigmoid", QUICK_GELU),
    "gelu_tanh": ("tanh", 1.0),
    "gelu": ("erf", 1.0),
    "relu": ("relu", 1.0),
    "squared_relu": ("squared_relu", 1.0),
}


@dataclass(frozen=True)
class Settings:
    """The settings of an activation, as the kernels take them. If alpha is None, α is the default
    of the kind.
    """

    kind: str
    gated: bool
    round_first: bool
    offset: float = 0.0
    clamp: float | None = None
    alpha: float | None = None
    interleave: int | None = None

    def width(self, h: Tensor) -> int:
        """How many columns the result has."""
        return h.shape[1] // 2 if self.gated else h.shape[1]

    def between(self, h: Tensor) -> int:
        """The distance in h from a gate to its value, in columns."""
        return (self.interleave or max(self.width(h), 1)) if self.gated else 0

    def layout(self, h: Tensor) -> str:
        """The kernels' name for the positions of gates and values in h."""
        if not self.gated:
            return "single"
        between = self.between(h)
        if between == 1:
            return "pairs"  # also a gate and its only value
        return "halves" if between == self.width(h) else "blocks"

    @property
    def effective_alpha(self) -> float:
        """α, or the default of the kind."""
        return CURVES[self.kind][1] if self.alpha is None else self.alpha

    def numbers(self) -> tuple[int, int, int]:
        """offset, clamp and α."""
        return number_bits(self.offset), number_bits(self.clamp or 0.0), number_bits(self.effective_alpha)


@traceable
def glu(
    h_PF2: Tensor,
    *, probs: Tensor | None = None, kind: str = "swiglu", offset: float = 0.0,
    clamp: float | None = None, alpha: float | None = None, interleave: int | None = None,
    round_before_probs: bool = False, fp8_input_store: bool = False,
) -> Tensor:  # fmt: skip
    """A gated activation, times the row's probability: one launch.

    Saved for the backward are the probs and h, with `fp8_input_store` as E4M3 codes that the same
    launch writes.

    Raises:
        ValueError: also for probs of other dtypes than `PROBS`.
    """
    check_glu(h_PF2, probs, kind, offset, clamp, alpha, interleave)
    check_input_store(fp8_input_store, kind)
    check_fused(h_PF2, probs)
    settings = Settings(kind, True, round_before_probs, offset, clamp, alpha, interleave)
    return activated(h_PF2, settings, probs=probs, fp8_input_store=fp8_input_store)


@traceable
def glu_backward(
    d_out_PF: Tensor, h_PF2: Tensor,
    *, probs: Tensor | None = None, kind: str = "swiglu", offset: float = 0.0,
    clamp: float | None = None, alpha: float | None = None, interleave: int | None = None,
    round_before_probs: bool = False,
) -> ActivationGradients:  # fmt: skip
    """The gradients of `glu`: one launch. The order of d_probs' sum depends on the width and the
    block sizes only.

    Raises:
        ValueError: also for probs of other dtypes than `PROBS`.
    """
    check_glu(h_PF2, probs, kind, offset, clamp, alpha, interleave)
    settings = Settings(kind, True, round_before_probs, offset, clamp, alpha, interleave)
    return _checked_backward(d_out_PF, h_PF2, probs, settings)


@traceable
def activation(
    h_PF: Tensor,
    *,
    probs: Tensor | None = None,
    kind: str = "squared_relu",
    round_before_probs: bool = False,
) -> Tensor:
    """An activation without a gate, times the row's probability: one launch.

    Raises:
        ValueError: also for probs of other dtypes than `PROBS`.
    """
    check_activation(h_PF, probs, kind)
    check_fused(h_PF, probs)
    return activated(h_PF, Settings(kind, False, round_before_probs), probs=probs)


@traceable
def activation_backward(
    d_out_PF: Tensor,
    h_PF: Tensor,
    *,
    probs: Tensor | None = None,
    kind: str = "squared_relu",
    round_before_probs: bool = False,
) -> ActivationGradients:
    """The gradients of `activation`: one launch.

    Raises:
        ValueError: also for probs of other dtypes than `PROBS`.
    """
    check_activation(h_PF, probs, kind)
    return _checked_backward(d_out_PF, h_PF, probs, Settings(kind, False, round_before_probs))


def activated(
    h: Tensor,
    settings: Settings,
    *, probs: Tensor | None = None, fp8_input_store: bool = False, totals: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`glu` or `activation`, without checks. If `totals` of a plan are given, rows past the
    experts' are not written, and neither is their d_h.
    """
    return _Activation.apply(h, probs, settings, fp8_input_store, totals, True)


def unwritten(h: Tensor, settings: Settings, *, probs: Tensor | None, totals: Tensor | None) -> Tensor:
    """A tensor of the shape of `activated` as its node in autograd's graph. Its values are never
    read.
    """
    return _Activation.apply(h, probs, settings, False, totals, False)


def check_fused(h: Tensor, probs: Tensor | None) -> None:
    """Raise `ValueError` for tensors that the kernels cannot read."""
    check_device("h", h)
    check_probs(probs)


def check_probs(probs: Tensor | None) -> None:
    """Raise `ValueError` for probs that no kernel multiplies by."""
    if probs is not None:
        require(probs.dtype in PROBS, "probs", f"of dtype {probs.dtype}", f"one of {PROBS}")


@as_operators
class _Activation(torch.autograd.Function):
    """`glu` or `activation`. Gradients that are not needed are not written."""

    @staticmethod
    def forward(
        ctx: Any, h: Tensor, probs: Tensor | None, settings: Settings, fp8_input_store: bool, totals: Tensor | None,
        written: bool,
    ) -> Tensor:  # fmt: skip
        ctx.settings = settings
        codes = (
            torch.empty(h.shape, dtype=torch.uint8, device=h.device)
            if fp8_input_store and any(ctx.needs_input_grad)
            else None
        )  # activation_kernel writes all of it
        ctx.save_for_backward(h if codes is None else codes, probs, totals)
        if not written:
            return h.new_empty(()).expand(h.shape[0], settings.width(h))  # it takes no memory
        return _forward(h, probs, settings, codes, totals)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        h, probs, totals = ctx.saved_tensors
        wants_h, wants_probs, *_ = ctx.needs_input_grad
        return *backward_of(d_out, h, probs, ctx.settings, wants_h, wants_probs, totals), *(None,) * 4


def _checked_backward(d_out: Tensor, h: Tensor, probs: Tensor | None, settings: Settings) -> ActivationGradients:
    check_cotangent(d_out, h.shape[0], settings.width(h), h)
    check_fused(h, probs)
    d_h, d_probs = backward_of(d_out, h, probs, settings, True, True)
    assert d_h is not None
    return ActivationGradients(d_h, d_probs)


def _forward(
    h: Tensor, probs: Tensor | None, settings: Settings, codes: Tensor | None, totals: Tensor | None
) -> Tensor:
    """f(u) · (v + offset) · p; also fills `codes` with the codes of h, if it is not None."""
    num_rows, width = h.shape[0], settings.width(h)
    constants = constants_of(h, h, probs, settings, tuning.for_device(h.device).activation)
    out = torch.empty((num_rows, width), dtype=h.dtype, device=h.device)  # activation_kernel writes all of it
    column_programs = ceil_div(width, constants["BLOCK_F"])
    programs = ceil_div(num_rows, constants["BLOCK_P"]) * column_programs
    launch(kernels.activation_kernel, (programs,), h)(
        *strided(h),
        *strided_or_empty(probs, 1),
        out,
        codes,
        totals,  # the forward is slower with an empty tensor, which it waits for
        num_rows,
        width,
        settings.between(h),
        column_programs,
        *settings.numbers(),
        HARDWARE=casts_in_hardware(h.device),
        **constants,
    )
    return out


@operator
def backward_of(
    d_out: Tensor, h: Tensor, probs: Tensor | None, settings: Settings, needs_h: bool, needs_probs: bool,
    totals: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """(d_h, d_probs), each None unless needed. h is in d_out's dtype, or E4M3 codes; if d_probs is
    needed, one program computes whole rows.
    """
    num_rows, width = h.shape[0], settings.width(h)
    constants = constants_of(h, d_out, probs, settings, tuning.for_device(h.device).activation_backward)
    # activation_backward_kernel writes all of it
    d_h = torch.empty(h.shape, dtype=d_out.dtype, device=h.device) if needs_h else None
    d_probs = None
    if probs is not None and needs_probs:
        # the same kernel writes all of it, also for empty rows
        d_probs = torch.empty(num_rows, dtype=probs.dtype, device=h.device)
    tiles = ceil_div(width, constants["BLOCK_F"])
    column_programs = 1 if d_probs is not None else tiles if needs_h else 0
    programs = ceil_div(num_rows, constants["BLOCK_P"]) * column_programs
    if has_memory() and programs:
        launch(kernels.activation_backward_kernel, (programs,), h)(
            *strided(d_out),
            *strided(h),
            *strided_or_empty(probs, 1),
            d_h,
            *present(d_probs, torch.float32 if probs is None else probs.dtype),
            *present(totals, torch.int64),
            num_rows,
            width,
            settings.between(h),
            column_programs,
            tiles // column_programs,
            *settings.numbers(),
            **constants,
        )
    return d_h, d_probs


def constants_of(
    h: Tensor, result: Tensor, probs: Tensor | None, settings: Settings, tile: tuning.Tile
) -> dict[str, Any]:
    """The constants for which a kernel is compiled. `result` has the dtype of the result.

    A tile of pairs is half as wide, so that a lane holds neighbours both of h and of the result.
    """
    layout = settings.layout(h)
    return {
        "CURVE": CURVES[settings.kind][0],
        "LAYOUT": layout,
        "CLAMPED": settings.clamp is not None,
        "ROUND_FIRST": settings.round_first and probs is not None,
        "ACCUMULATOR": accumulator(result, probs),
        "BLOCK_P": tile.tokens,
        "BLOCK_F": tile.columns // 2 if layout == "pairs" else tile.columns,
        "num_warps": tile.num_warps,
    }
