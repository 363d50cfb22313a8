"""Defects of two stages in one launch; see `planted`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from conformance.mutants.defect import Defect, Wrapper, with_values
from conformance.mutants.kinds.gradients import rounded_to, with_gradient

FUSED = "a mistake that two stages in one launch invite"
EDGE = "a mistake that groups at an edge invite"
FORWARDS = ("glu_and_quantize", "activation_and_quantize")
BACKWARDS = ("glu_backward_and_quantize", "activation_backward_and_quantize")
MOVED = "permute_and_quantize"


def _with(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Wrapper:
    """The function with change(settings); the base refuses illegal calls first."""

    def wrapper(base: Wrapper, *inputs: Any, **settings: Any) -> Any:
        out, other = base(*inputs, **settings), change(settings)
        return out if other is settings else base(*inputs, **other)

    return wrapper


def _without(name: str) -> Wrapper:
    """An option is ignored."""
    return _with(lambda given: {key: x for key, x in given.items() if key != name} if given.get(name) else given)


def _probs_in_the_dtype_of(place: int) -> Wrapper:
    def wrapper(base: Wrapper, *inputs: Any, **settings: Any) -> Any:
        out, probs = base(*inputs, **settings), settings.get("probs")
        if probs is None:
            return out
        return base(*inputs, **settings | {"probs": with_values(probs, rounded_to(inputs[place].dtype))})

    return wrapper


def _history_without_probs(base: Wrapper, *inputs: Any, **settings: Any) -> Any:
    """The amax is measured before the probs are applied."""
    out = base(*inputs, **settings)
    if out.state is None or settings.get("probs") is None:
        return out
    return out._replace(state=base(*inputs, **settings | {"probs": None}).state)


def _probs_have_no_gradient(base: Wrapper, *inputs: Any, **settings: Any) -> Any:
    out, probs = base(*inputs, **settings), settings.get("probs")
    return out if probs is None else base(*inputs, **settings | {"probs": with_gradient(probs, torch.zeros_like)})


def _d_probs(change: Callable[[Tensor, tuple[Any, ...], dict[str, Any]], Tensor]) -> Wrapper:
    def wrapper(base: Wrapper, *inputs: Any, **settings: Any) -> Any:
        out = base(*inputs, **settings)
        return out if out.d_probs is None else out._replace(d_probs=change(out.d_probs, inputs, settings))

    return wrapper


def _in_the_dtype_of_h(d_probs: Tensor, inputs: tuple[Any, ...], settings: dict[str, Any]) -> Tensor:
    return rounded_to(inputs[1].dtype)(d_probs)


def _of_rows_past_the_groups(d_probs: Tensor, inputs: tuple[Any, ...], settings: dict[str, Any]) -> Tensor:
    splits = settings.get("splits")
    if splits is None:
        return d_probs
    behind = torch.arange(len(d_probs), device=d_probs.device) >= splits.sum()
    return torch.where(behind, torch.empty_like(d_probs), d_probs)


def _without_the_offset(base: Wrapper, *inputs: Any, **settings: Any) -> Any:
    out = base(*inputs, **settings)
    if out.d_probs is None or not settings.get("offset"):
        return out
    return out._replace(d_probs=base(*inputs, **settings | {"offset": 0.0}).d_probs)


def _clamped_values_have_gradients(base: Wrapper, d_out: Tensor, h: Tensor, *rest: Any, **settings: Any) -> Any:
    out, clamp = base(d_out, h, *rest, **settings), settings.get("clamp")
    if clamp is None:
        return out
    size = settings.get("interleave") or max(h.shape[1] // 2, 1)
    gates = (torch.arange(h.shape[1], device=h.device) // size % 2 == 0)[None]
    inside = torch.where(gates, h.clamp(max=clamp), h.clamp(-clamp, clamp))
    return base(d_out, inside, *rest, **settings)


def _one_noise(given: dict[str, Any]) -> dict[str, Any]:
    noise = given.get("noise")
    return given if noise is None else given | {"noise": noise[:1].expand_as(noise)}


def _full_has_overflowed(base: Wrapper, *inputs: Any, **settings: Any) -> Any:
    out = base(*inputs, **settings)
    full = settings.get("num_rows") is not None and out.tokens_per_expert.sum() == settings["num_rows"]
    return out._replace(overflow=torch.ones_like(out.overflow)) if full else out


def _counts_without_padding(base: Wrapper, tokens: Tensor, routing_map: Tensor, *rest: Any, **settings: Any) -> Any:
    out = base(tokens, routing_map, *rest, **settings)
    real = (routing_map != 0).sum(0).to(out.tokens_per_expert)
    return out._replace(tokens_per_expert=torch.minimum(out.tokens_per_expert, real))


def _amax_of_an_empty_expert(base: Wrapper, *inputs: Any, **settings: Any) -> Any:
    """An expert without rows leaves -∞, the start of a maximum, in its history."""
    out = base(*inputs, **settings)
    if out.state is None:
        return out
    counts = out.tokens_per_expert if hasattr(out, "tokens_per_expert") else settings.get("splits")
    if counts is None:
        return out
    history = out.state.amax_history.clone()
    history[:, 0] = torch.where(counts == 0, -torch.inf, history[:, 0])
    return out._replace(state=out.state._replace(amax_history=history))


DEFECTS: tuple[Defect, ...] = (
    Defect(
        "O01",
        "the clamp does not reach the fused activation",
        "as Megatron-LM #5940, 0.15 to 0.19",
        {FORWARDS[0]: _without("clamp")},
    ),
    Defect(
        "O02",
        "alpha does not reach the fused activation",
        FUSED,
        {FORWARDS[0]: _without("alpha"), BACKWARDS[0]: _without("alpha")},
    ),
    Defect(
        "O03",
        "interleaved columns are taken for halves",
        FUSED,
        {FORWARDS[0]: _without("interleave"), BACKWARDS[0]: _without("interleave")},
    ),
    Defect(
        "O04",
        "probs are rounded to the dtype of h",
        FUSED,
        dict.fromkeys(FORWARDS, _probs_in_the_dtype_of(0)) | dict.fromkeys(BACKWARDS, _probs_in_the_dtype_of(1)),
    ),
    Defect(
        "O05",
        "an amax is measured before the probs are applied",
        FUSED,
        dict.fromkeys(FORWARDS, _history_without_probs),
    ),
    Defect("O06", "probs have no gradient", FUSED, dict.fromkeys((*FORWARDS, MOVED), _probs_have_no_gradient)),
    Defect(
        "O07",
        "the gradient of probs is rounded to the dtype of h",
        FUSED,
        dict.fromkeys(BACKWARDS, _d_probs(_in_the_dtype_of_h)),
    ),
    Defect(
        "O08",
        "the gradient of probs past the groups is not written",
        EDGE,
        dict.fromkeys(BACKWARDS, _d_probs(_of_rows_past_the_groups)),
    ),
    Defect("O09", "the gradient of probs forgets the offset", FUSED, {BACKWARDS[0]: _without_the_offset}),
    Defect("O10", "clamped values keep their gradient", FUSED, {BACKWARDS[0]: _clamped_values_have_gradients}),
    Defect("O11", "both directions round by one noise", FUSED, dict.fromkeys(BACKWARDS, _with(_one_noise))),
    Defect("O12", "a buffer that is exactly full has overflowed", EDGE, {MOVED: _full_has_overflowed}),
    Defect("O13", "counts leave out the padding", EDGE, {MOVED: _counts_without_padding}),
    Defect(
        "O14",
        "an empty group leaves -∞ in its history",
        EDGE,
        dict.fromkeys((*FORWARDS, *BACKWARDS, MOVED), _amax_of_an_empty_expert),
    ),
)
