"""Defects of two stages in one launch that kernels of other libraries have had, or could have."""

from typing import Any

import torch
from torch import Tensor

from conformance.mutants.defect import Defect, Wrapper

FUSED = "a mistake that two stages in one launch invite"
FORWARDS = ("glu_and_quantize", "activation_and_quantize")
BACKWARDS = ("glu_backward_and_quantize", "activation_backward_and_quantize")
MOVED = "permute_and_quantize"


def _rounded_between(base: Wrapper, h: Tensor, recipe: Any, /, **settings: Any) -> Any:
    base(h, recipe, **settings)
    return base(h, recipe, **settings | {"round_before_quantize": True})


def _amax_of_every_token(base: Wrapper, tokens: Tensor, routing_map: Tensor, recipe: Any, /, **settings: Any) -> Any:
    """The history gets the amax of all tokens, those without a row too."""
    out = base(tokens, routing_map, recipe, **settings)
    if out.state is None or not tokens.numel():
        return out
    history, amax = out.state.amax_history, tokens.detach().float().nan_to_num(0.0).abs().max()
    some = (out.tokens_per_expert > 0)[:, None]
    first = torch.where(some, torch.maximum(history[:, :1], amax), history[:, :1])
    return out._replace(state=out.state._replace(amax_history=torch.cat([first, history[:, 1:]], 1)))


def _counts_before_the_budget(base: Wrapper, tokens: Tensor, routing_map: Tensor, *rest: Any, **settings: Any) -> Any:
    out, align = base(tokens, routing_map, *rest, **settings), settings.get("align") or 1
    if settings.get("num_rows") is None:
        return out
    return out._replace(tokens_per_expert=-(-(routing_map != 0).sum(0) // align) * align)


def _probs_twice(base: Wrapper, *inputs: Any, **settings: Any) -> Any:
    out, probs = base(*inputs, **settings), settings.get("probs")
    if probs is None:
        return out
    again = base(*inputs, **settings | {"probs": probs * probs})
    return again._replace(d_probs=out.d_probs)


DEFECTS: tuple[Defect, ...] = (
    Defect("AD61", "values are rounded between the stages, unasked", FUSED, dict.fromkeys(FORWARDS, _rounded_between)),
    Defect("AD62", "tokens without a row enter the amax", FUSED, {MOVED: _amax_of_every_token}),
    Defect("AD63", "counts are those before the budget", FUSED, {MOVED: _counts_before_the_budget}),
    Defect("AD64", "the gradient of h has the probs twice", FUSED, dict.fromkeys(BACKWARDS, _probs_twice)),
)
