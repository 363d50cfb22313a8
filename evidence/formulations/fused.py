"""Fused functions in a second formulation: the formulations of their stages, one after the
other.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from evidence.formulations.experts import acts
from evidence.formulations.permutation import permute
from evidence.formulations.quantization import quantize
from moe_ref.config import PermutedQuantization, Quantization, Recipe
from moe_ref.config.fused_activations import QuantizedGradients

FORMS = ("rowwise", "columnwise", "state", "noise")  # arguments of the quantiser


def permute_and_quantize(
    tokens_TH: Tensor, routing_map_TE: Tensor, recipe: Recipe, *, role: str = "input", rowwise: bool = True,
    columnwise: bool = False, state: Any = None, **settings: Any,
) -> PermutedQuantization:  # fmt: skip
    """Rows, then the codes of each segment."""
    permuted = permute(tokens_TH, routing_map_TE, **settings)
    forms: dict[str, Any] = {"rowwise": rowwise, "columnwise": columnwise, "state": state}
    quantized = quantize(permuted.rows, recipe, role=role, splits=permuted.tokens_per_expert, **forms)
    return PermutedQuantization(*quantized, *permuted[1:])


def activate_and_quantize(
    default: str, h: Tensor, recipe: Recipe, *, splits: Tensor | None = None, probs: Tensor | None = None,
    kind: str = "", round_before_quantize: bool = False, **settings: Any,
) -> Quantization:  # fmt: skip
    """The codes of the activation of the groups' rows, followed by zeros."""
    forms = {name: settings.pop(name) for name in FORMS if name in settings}
    act = acts(kind or default, **settings)
    rows = len(h) if splits is None else int(splits.sum())
    out = act(h[:rows], probs=None if probs is None else probs[:rows])
    padded = torch.cat([out, torch.zeros(len(h) - rows, out.shape[1], dtype=out.dtype)])
    return quantize(padded, recipe, splits=splits, **forms)


def gradients_and_quantize(
    default: str, d_out: Tensor, h: Tensor, recipe: Recipe, *, splits: Tensor | None = None,
    probs: Tensor | None = None, kind: str = "", round_before_quantize: bool = False, **settings: Any,
) -> QuantizedGradients:  # fmt: skip
    """Autograd's gradients of the activation, and the codes of the first of them."""
    forms = {name: settings.pop(name) for name in FORMS if name in settings}
    act: Callable[..., Tensor] = acts(kind or default, **settings)
    rows = len(h) if splits is None else int(splits.sum())
    leaves = [h[:rows].detach().clone().requires_grad_()]
    leaves += [] if probs is None else [probs[:rows].detach().clone().requires_grad_()]
    with torch.enable_grad():
        out = act(leaves[0], probs=None if probs is None else leaves[1])
        gradients = torch.autograd.grad(out, leaves, d_out[:rows])
    d_h = torch.cat([gradients[0], torch.zeros_like(h[rows:])]).detach()
    d_probs = None if probs is None else torch.cat([gradients[1], torch.zeros_like(probs[rows:])]).detach()
    quantized, state = quantize(d_h, recipe, role="grad_output", splits=splits, **forms)
    return QuantizedGradients(quantized, state, d_probs)


glu_and_quantize = partial(activate_and_quantize, "swiglu")
activation_and_quantize = partial(activate_and_quantize, "squared_relu")
glu_backward_and_quantize = partial(gradients_and_quantize, "swiglu")
activation_backward_and_quantize = partial(gradients_and_quantize, "squared_relu")
