"""An activation times the row's probability, quantised in one step; and its gradient, quantised in
one step.

Rows past the last group of `quantize` are never read, have code 0 and no gradient.

By default the quantised value is the float32 number that `glu` would have rounded: amax, scales and
codes come from it, and only `dequantize` rounds to h's dtype. With `round_before_quantize` it is
rounded to h's dtype first: the result is `glu`, then `quantize`.

Mirrors the gated and activation casts of transformer_engine/common (cast/fp8/gated_fp8.cuh,
cast/mxfp8/gated_mxfp8.cuh). Differs: docs/differences.md#fused.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moe_ref.config import (
    ActivationGradients,
    Quantization,
    QuantizerState,
    Recipe,
    check_activation,
    check_cotangent,
    check_glu,
    check_splits,
)
from moe_ref.config.fused_activations import QuantizedGradients, check_quantized_activation
from moe_ref.experts.activations import activation, activation_backward, glu, glu_backward
from moe_ref.quantization.quantize import Form, Quantized, quantize
from moe_ref.rounding import accumulator_dtype, round_to


def glu_and_quantize(
    h_PF2: Tensor, recipe: Recipe,
    *, splits: Tensor | None = None, probs: Tensor | None = None, kind: str = "swiglu",
    offset: float = 0.0, clamp: float | None = None, alpha: float | None = None,
    interleave: int | None = None, rowwise: bool = True, columnwise: bool = False,
    state: QuantizerState | None = None, round_before_quantize: bool = False,
) -> Quantization:  # fmt: skip
    """A gated activation times the row's probability, quantised as the next linear layer's input.

        a = f(u) · (v + offset) · p            see `moe_ref.experts.activations.glu`
        quantize(a, recipe, role="input")      see `moe_ref.quantization.quantize`

    Args:
        h_PF2: [P,2F] bfloat16, float16, float32 or float64.
        splits: [G] integers, rows of each group, in order; None: all rows are one group.
        probs: [P] floating point, or None for 1.
        kind, offset, clamp, alpha, interleave: as in `glu`.
        rowwise, columnwise: the forms to make, both of a.
        state: delayed scaling's, of G groups.
        round_before_quantize: a is rounded to h's dtype first; a Hadamard transform needs it.

    Returns:
        `Quantization`. `dequantize` returns [P,F] in h's dtype; its gradient is straight through to
        `glu` (after the transpose of a Hadamard transform), and 0 for rows past the last group.

    Rounding: a in float32 (float64 if h or probs are, then rounded to float32), then `quantize`'s.

    Raises:
        ValueError: see `moe_ref.config`: check_glu, check_quantize (of a), check_splits,
            check_quantized_activation.

    Source: nvte_swiglu, nvte_geglu, nvte_reglu, nvte_qgeglu, nvte_clamped_swiglu.
    """
    check_glu(h_PF2, probs, kind, offset, clamp, alpha, interleave)
    forms: dict[str, Any] = {"splits": splits, "rowwise": rowwise, "columnwise": columnwise, "state": state}
    check_quantized_activation(
        h_PF2, h_PF2.shape[1] // 2, recipe, "input", **forms, round_before_quantize=round_before_quantize
    )
    rows = _rows_of_groups(splits, len(h_PF2), recipe)
    options: dict[str, Any] = {"kind": kind, "offset": offset, "clamp": clamp, "alpha": alpha, "interleave": interleave}
    a_RF = glu(_widened(h_PF2, probs)[:rows], probs=None if probs is None else probs[:rows], **options)
    return _quantized(a_RF, h_PF2, recipe, round_before_quantize, role="input", **forms)


def glu_backward_and_quantize(
    d_out_PF: Tensor, h_PF2: Tensor, recipe: Recipe,
    *, splits: Tensor | None = None, probs: Tensor | None = None, kind: str = "swiglu",
    offset: float = 0.0, clamp: float | None = None, alpha: float | None = None,
    interleave: int | None = None, rowwise: bool = True, columnwise: bool = False,
    state: QuantizerState | None = None, noise: Tensor | None = None,
    round_before_quantize: bool = False,
) -> QuantizedGradients:  # fmt: skip
    """The gradients of `glu`; d_h quantised as the output gradient of the linear layer before.

        d_h, d_probs = glu_backward(…);   quantize(d_h, recipe, role="grad_output")

    d_h has the layout of h, with blocks of its 2F columns. d_probs is 0 past the last group.

    Args:
        d_out_PF: [P,F] in the dtype of h.
        noise: [2,P,2F], as in `quantize`.
        splits, probs, …: as in `glu_and_quantize`.

    Returns:
        `QuantizedGradients`; `dequantize` returns [P,2F] in the dtype of h. Nothing has a gradient.

    Rounding: d_h as a in `glu_and_quantize`; d_probs once, to the dtype of the probs.

    Raises:
        ValueError: as `glu_and_quantize`, and see `moe_ref.config.check_cotangent`.

    Source: nvte_dswiglu, nvte_dgeglu, nvte_dreglu, nvte_dqgeglu, nvte_clamped_dswiglu with a
    quantised output.
    """
    check_glu(h_PF2, probs, kind, offset, clamp, alpha, interleave)
    check_cotangent(d_out_PF, h_PF2.shape[0], h_PF2.shape[1] // 2, h_PF2)
    options: dict[str, Any] = {"kind": kind, "offset": offset, "clamp": clamp, "alpha": alpha, "interleave": interleave}
    forms: dict[str, Any] = {
        "splits": splits,
        "rowwise": rowwise,
        "columnwise": columnwise,
        "state": state,
        "noise": noise,
    }
    return _gradients(glu_backward, d_out_PF, h_PF2, recipe, probs, options, forms, round_before_quantize)


def activation_and_quantize(
    h_PF: Tensor, recipe: Recipe,
    *, splits: Tensor | None = None, probs: Tensor | None = None, kind: str = "squared_relu",
    rowwise: bool = True, columnwise: bool = False, state: QuantizerState | None = None,
    round_before_quantize: bool = False,
) -> Quantization:  # fmt: skip
    """An activation without a gate times the row's probability, quantised as the input of the next
    linear layer.

        a = f(h) · p                           see `moe_ref.experts.activations.activation`
        quantize(a, recipe, role="input")

    Args, returns, rounding, gradients, raises: as in `glu_and_quantize`, with the kinds of
    `activation`.

    Source: nvte_silu, nvte_gelu, nvte_qgelu, nvte_relu, nvte_srelu with a quantised output.
    """
    check_activation(h_PF, probs, kind)
    forms: dict[str, Any] = {"splits": splits, "rowwise": rowwise, "columnwise": columnwise, "state": state}
    check_quantized_activation(
        h_PF, h_PF.shape[1], recipe, "input", **forms, round_before_quantize=round_before_quantize
    )
    rows = _rows_of_groups(splits, len(h_PF), recipe)
    a_RF = activation(_widened(h_PF, probs)[:rows], probs=None if probs is None else probs[:rows], kind=kind)
    return _quantized(a_RF, h_PF, recipe, round_before_quantize, role="input", **forms)


def activation_backward_and_quantize(
    d_out_PF: Tensor, h_PF: Tensor, recipe: Recipe,
    *, splits: Tensor | None = None, probs: Tensor | None = None, kind: str = "squared_relu",
    rowwise: bool = True, columnwise: bool = False, state: QuantizerState | None = None,
    noise: Tensor | None = None, round_before_quantize: bool = False,
) -> QuantizedGradients:  # fmt: skip
    """The gradients of `activation`; d_h quantised as the output gradient of the linear layer
    before.

        d_h, d_probs = activation_backward(…);   quantize(d_h, recipe, role="grad_output")

    Args, returns, rounding, raises: as in `glu_backward_and_quantize`, with noise [2,P,F].

    Source: nvte_dsilu, nvte_dgelu, nvte_dqgelu, nvte_drelu, nvte_dsrelu with a quantised output.
    """
    check_activation(h_PF, probs, kind)
    check_cotangent(d_out_PF, h_PF.shape[0], h_PF.shape[1], h_PF)
    forms: dict[str, Any] = {
        "splits": splits,
        "rowwise": rowwise,
        "columnwise": columnwise,
        "state": state,
        "noise": noise,
    }
    return _gradients(activation_backward, d_out_PF, h_PF, recipe, probs, {"kind": kind}, forms, round_before_quantize)


def _rows_of_groups(splits: Tensor | None, rows: int, recipe: Recipe) -> int:
    """Rows of all groups."""
    sizes = [rows] if splits is None else splits.tolist()
    check_splits(sizes, rows, recipe)
    return sum(sizes)


def _widened(x: Tensor, probs: Tensor | None) -> Tensor:
    """x in the accumulator dtype, so that its activation is not rounded."""
    return x.to(accumulator_dtype(x.dtype if probs is None else torch.promote_types(x.dtype, probs.dtype)))


def _quantized(x_RN: Tensor, h: Tensor, recipe: Recipe, round_before_quantize: bool, **forms: Any) -> Quantization:
    """The rows of all groups quantised, then rows of zeros."""
    if round_before_quantize:
        x_RN = round_to(x_RN, h.dtype)
    x_PN = torch.cat([x_RN, x_RN.new_zeros(len(h) - len(x_RN), x_RN.shape[1])])
    quantized, state = quantize(x_PN, recipe, **forms)
    return Quantization(
        Quantized(_in_dtype(quantized.rowwise, h.dtype), _in_dtype(quantized.columnwise, h.dtype)), state
    )


def _in_dtype(form: Form | None, dtype: torch.dtype) -> Form | None:
    """The form, with `dequantize` in that dtype."""
    return None if form is None else replace(form, source_MN=round_to(form.source_MN, dtype))


def _gradients(
    backward: Callable[..., ActivationGradients], d_out_PF: Tensor, h: Tensor, recipe: Recipe,
    probs: Tensor | None, options: dict[str, Any], forms: dict[str, Any],
    round_before_quantize: bool,
) -> QuantizedGradients:  # fmt: skip
    """d_h quantised, and d_probs."""
    check_quantized_activation(
        h, h.shape[1], recipe, "grad_output", **forms, round_before_quantize=round_before_quantize
    )
    rows = _rows_of_groups(forms["splits"], len(h), recipe)
    row_probs = None if probs is None else probs.detach()[:rows]
    d_h_RN, d_probs = backward(
        _widened(d_out_PF.detach(), probs)[:rows], _widened(h.detach(), probs)[:rows], probs=row_probs, **options
    )
    quantized, state = _quantized(d_h_RN, h, recipe, round_before_quantize, role="grad_output", **forms)
    if d_probs is not None:
        d_probs = torch.cat([d_probs, d_probs.new_zeros(len(h) - rows)])
    return QuantizedGradients(quantized, state, d_probs)
