"""Activations that are quantised at once: the result, and the rules that make a call illegal."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_ref.config.quantization import QuantizerState, Recipe, check_quantize
from moe_ref.config.rules import require


class QuantizedGradients(NamedTuple):
    """What `glu_backward_and_quantize` and `activation_backward_and_quantize` return."""

    quantized: Any  # d_h, opaque: for `codes`, `scales`, `amax` and `dequantize` of the same implementation
    state: QuantizerState | None  # the next state; None but for delayed scaling
    d_probs: Tensor | None  # [P], the probs' dtype; None when no probs were given


def check_quantized_activation(
    h: Tensor, width: int, recipe: Recipe, role: str,
    *, splits: Tensor | None, rowwise: bool, columnwise: bool, state: QuantizerState | None,
    noise: Tensor | None = None, round_before_quantize: bool,
) -> None:  # fmt: skip
    """The rules of `quantize` for an activation of h or its gradient, [rows, width]; a transform
    needs bfloat16.
    """
    requirement = "True or False"
    require(isinstance(round_before_quantize, bool), "round_before_quantize", repr(round_before_quantize), requirement)
    x = torch.empty((h.shape[0], width), dtype=h.dtype, device="meta")
    check_quantize(x, recipe, role, splits, rowwise, columnwise, state, noise)
    transformed = bool(recipe.hadamard) and columnwise
    legal = round_before_quantize or not transformed
    require(legal, "round_before_quantize", "False with hadamard, columnwise", "True: the transform takes bfloat16")
