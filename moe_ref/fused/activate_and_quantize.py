"""An activation, times the row's probability, and quantised at once; and its gradient likewise.

Rows are those of `quantize`: groups one after the other, and behind the last one rows that belong to nobody, which are not looked at, have
code 0 and no gradient.

Where it rounds. Unless `round_before_quantize` is set, what is quantised is the float32 number that `glu` would have rounded to the dtype
of h: amax, scales and codes come from it, and the dtype of h is met only by what `dequantize` returns. That is one rounding, as in `glu`
itself, and what Transformer Engine's kernels that cast to FP8 in the same step do. With `round_before_quantize` the number is rounded to
the dtype of h first, and the result is that of `glu` and `quantize` one after the other: Transformer Engine's fused MXFP8 kernels do so on
purpose, and so does everything that is not fused, Megatron's experts among it (the activation is cast to the dtype of h, and the linear
layer quantises what it is given).

Mirrors the gated and activation casts of transformer_engine/common (cast/fp8/gated_fp8.cuh, cast/mxfp8/gated_mxfp8.cuh), and
`moe_ref.experts.activations` followed by `moe_ref.quantization`, of which it is made.
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
    h_PF2: Tensor,
    recipe: Recipe,
    *,
    splits: Tensor | None = None,
    probs: Tensor | None = None,
    kind: str = "swiglu",
    offset: float = 0.0,
    clamp: float | None = None,
    alpha: float | None = None,
    interleave: int | None = None,
    rowwise: bool = True,
    columnwise: bool = False,
    state: QuantizerState | None = None,
    round_before_quantize: bool = False,
) -> Quantization:
    """A gated activation times the row's probability, quantised as the input of the next linear layer.

        a = f(u) · (v + offset) · p            see `moe_ref.experts.activations.glu`
        quantize(a, recipe, role="input")      see `moe_ref.quantization.quantize`

    Args:
        h_PF2: [P,2F] bfloat16, float16, float32 or float64.
        splits: [G] integers, rows of each group, one after the other; None: all rows are one group.
        probs: [P] floating point, or None for 1.
        kind, offset, clamp, alpha, interleave: as in `glu`.
        rowwise, columnwise: the forms that are made, both of a.
        state: delayed scaling's, of G groups.
        round_before_quantize: whether a is rounded to the dtype of h first; NVFP4 with a Hadamard transform, columnwise, asks for it.

    Returns:
        `Quantization`. `dequantize` returns [P,F] in the dtype of h, and its gradient is straight through the quantiser: that of `glu`
        (the Hadamard transform's first, where there is one), and 0 for rows behind the last group.

    Rounding: a in float32 (float64 if h or probs are, and then rounded to float32), then as `quantize` rounds; see above.

    Raises:
        ValueError: see `moe_ref.config`: check_glu, check_quantize (there x is a), check_splits; also for a Hadamard transform of what is
            not rounded before.

    Source: nvte_swiglu, nvte_geglu, nvte_reglu, nvte_qgeglu, nvte_clamped_swiglu with a quantised output.
    """
    check_glu(h_PF2, probs, kind, offset, clamp, alpha, interleave)
    forms: dict[str, Any] = {"splits": splits, "rowwise": rowwise, "columnwise": columnwise, "state": state}
    check_quantized_activation(
        h_PF2, h_PF2.shape[1] // 2, recipe, "input", **forms, round_before_quantize=round_before_quantize
    )
    rows = _owned(splits, len(h_PF2), recipe)
    how: dict[str, Any] = {"kind": kind, "offset": offset, "clamp": clamp, "alpha": alpha, "interleave": interleave}
    a_RF = glu(_wide(h_PF2, probs)[:rows], probs=None if probs is None else probs[:rows], **how)
    return _quantized(a_RF, h_PF2, recipe, round_before_quantize, role="input", **forms)


def glu_backward_and_quantize(
    d_out_PF: Tensor,
    h_PF2: Tensor,
    recipe: Recipe,
    *,
    splits: Tensor | None = None,
    probs: Tensor | None = None,
    kind: str = "swiglu",
    offset: float = 0.0,
    clamp: float | None = None,
    alpha: float | None = None,
    interleave: int | None = None,
    rowwise: bool = True,
    columnwise: bool = False,
    state: QuantizerState | None = None,
    noise: Tensor | None = None,
    round_before_quantize: bool = False,
) -> QuantizedGradients:
    """The gradients of `glu`, that of h quantised as the gradient that the linear layer before goes back with.

        d_h, d_probs of `moe_ref.experts.activations.glu_backward`;   quantize(d_h, recipe, role="grad_output")

    d_h has the layout of h, and blocks are those of its 2F columns. d_probs is 0 behind the last group.

    Args:
        d_out_PF: [P,F] in the dtype of h.
        noise: [2,P,2F], as in `quantize`.
        splits, probs, …: as in `glu_and_quantize`.

    Returns:
        `QuantizedGradients`; `dequantize` returns [P,2F] in the dtype of h. Nothing has a gradient.

    Rounding: d_h as a in `glu_and_quantize`; d_probs once, to the dtype of the probs.

    Raises:
        ValueError: as `glu_and_quantize`, and see `moe_ref.config.check_cotangent`.

    Source: nvte_dswiglu, nvte_dgeglu, nvte_dreglu, nvte_dqgeglu, nvte_clamped_dswiglu with a quantised output.
    """
    check_glu(h_PF2, probs, kind, offset, clamp, alpha, interleave)
    check_cotangent(d_out_PF, h_PF2.shape[0], h_PF2.shape[1] // 2, h_PF2)
    how: dict[str, Any] = {"kind": kind, "offset": offset, "clamp": clamp, "alpha": alpha, "interleave": interleave}
    forms: dict[str, Any] = {
        "splits": splits,
        "rowwise": rowwise,
        "columnwise": columnwise,
        "state": state,
        "noise": noise,
    }
    return _gradients(glu_backward, d_out_PF, h_PF2, recipe, probs, how, forms, round_before_quantize)


def activation_and_quantize(
    h_PF: Tensor,
    recipe: Recipe,
    *,
    splits: Tensor | None = None,
    probs: Tensor | None = None,
    kind: str = "squared_relu",
    rowwise: bool = True,
    columnwise: bool = False,
    state: QuantizerState | None = None,
    round_before_quantize: bool = False,
) -> Quantization:
    """An activation without a gate times the row's probability, quantised as the input of the next linear layer.

        a = f(h) · p                           see `moe_ref.experts.activations.activation`
        quantize(a, recipe, role="input")

    Args, returns, rounding, gradients, raises: as in `glu_and_quantize`, with the kinds of `activation`.

    Source: nvte_silu, nvte_gelu, nvte_qgelu, nvte_relu, nvte_srelu with a quantised output.
    """
    check_activation(h_PF, probs, kind)
    forms: dict[str, Any] = {"splits": splits, "rowwise": rowwise, "columnwise": columnwise, "state": state}
    check_quantized_activation(
        h_PF, h_PF.shape[1], recipe, "input", **forms, round_before_quantize=round_before_quantize
    )
    rows = _owned(splits, len(h_PF), recipe)
    a_RF = activation(_wide(h_PF, probs)[:rows], probs=None if probs is None else probs[:rows], kind=kind)
    return _quantized(a_RF, h_PF, recipe, round_before_quantize, role="input", **forms)


def activation_backward_and_quantize(
    d_out_PF: Tensor,
    h_PF: Tensor,
    recipe: Recipe,
    *,
    splits: Tensor | None = None,
    probs: Tensor | None = None,
    kind: str = "squared_relu",
    rowwise: bool = True,
    columnwise: bool = False,
    state: QuantizerState | None = None,
    noise: Tensor | None = None,
    round_before_quantize: bool = False,
) -> QuantizedGradients:
    """The gradients of `activation`, that of h quantised as the gradient that the linear layer before goes back with.

        d_h, d_probs of `moe_ref.experts.activations.activation_backward`;   quantize(d_h, recipe, role="grad_output")

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


def _owned(splits: Tensor | None, rows: int, recipe: Recipe) -> int:
    """Rows of all groups."""
    sizes = [rows] if splits is None else splits.tolist()
    check_splits(sizes, rows, recipe)
    return sum(sizes)


def _wide(x: Tensor, probs: Tensor | None) -> Tensor:
    """x in the dtype that everything is computed in, so that an activation of it is not rounded."""
    return x.to(accumulator_dtype(x.dtype if probs is None else torch.promote_types(x.dtype, probs.dtype)))


def _quantized(x_RN: Tensor, h: Tensor, recipe: Recipe, round_before_quantize: bool, **forms: Any) -> Quantization:
    """The rows of all groups quantised, and rows of zeros behind them."""
    if round_before_quantize:
        x_RN = round_to(x_RN, h.dtype)
    x_PN = torch.cat([x_RN, x_RN.new_zeros(len(h) - len(x_RN), x_RN.shape[1])])
    quantized, state = quantize(x_PN, recipe, **forms)
    return Quantization(
        Quantized(_in_dtype(quantized.rowwise, h.dtype), _in_dtype(quantized.columnwise, h.dtype)), state
    )


def _in_dtype(form: Form | None, dtype: torch.dtype) -> Form | None:
    """The form of a tensor of that dtype, in which `dequantize` returns its values."""
    return None if form is None else replace(form, source_MN=round_to(form.source_MN, dtype))


def _gradients(
    backward: Callable[..., ActivationGradients],
    d_out_PF: Tensor,
    h: Tensor,
    recipe: Recipe,
    probs: Tensor | None,
    how: dict[str, Any],
    forms: dict[str, Any],
    round_before_quantize: bool,
) -> QuantizedGradients:
    """d_h quantised, and d_probs."""
    check_quantized_activation(
        h, h.shape[1], recipe, "grad_output", **forms, round_before_quantize=round_before_quantize
    )
    rows = _owned(forms["splits"], len(h), recipe)
    own_probs = None if probs is None else probs.detach()[:rows]
    d_h_RN, d_probs = backward(
        _wide(d_out_PF.detach(), probs)[:rows], _wide(h.detach(), probs)[:rows], probs=own_probs, **how
    )
    quantized, state = _quantized(d_h_RN, h, recipe, round_before_quantize, role="grad_output", **forms)
    if d_probs is not None:
        d_probs = torch.cat([d_probs, d_probs.new_zeros(len(h) - rows)])
    return QuantizedGradients(quantized, state, d_probs)
