"""Defects of fused stages that only some calls show; see `planted`."""

from typing import Any

import torch
from torch import Tensor

from conformance.mutants.defect import Defect, Wrapper
from conformance.mutants.kinds.conditions import called_with, given, only
from defects.quantization.combined import NAMES
from defects.quantization.wrappers import Beside

SEVERAL = "a mistake that one option alone does not show"
STATES = "a mistake in a result that is seldom read"
GLU = ("glu_and_quantize", "glu_backward_and_quantize")
ACTIVATION = ("activation_and_quantize", "activation_backward_and_quantize")


def beside(where: Any, columnwise: bool | None, change: Any, *names: str) -> dict[str, Wrapper]:
    """Readers of a direction read what the function makes of change(inputs, settings)."""

    def planted(base: Wrapper, *inputs: Any, **settings: Any) -> Any:
        out = base(*inputs, **settings)
        if not where(*inputs, **settings):
            return out
        others, options = change(inputs, settings)
        return out._replace(quantized=Beside(out.quantized, base(*others, **options).quantized))

    def read(base: Wrapper, quantized: Any, /, **how: Any) -> Any:
        if not isinstance(quantized, Beside):
            return base(quantized, **how)
        here = columnwise is None or bool(how.get("columnwise")) == columnwise
        return base(quantized.known if here else quantized.quantized, **how)

    return dict.fromkeys(names, planted) | dict.fromkeys(NAMES, read)


def _without(name: str) -> Any:
    return lambda inputs, settings: (inputs, {key: x for key, x in settings.items() if key != name})


def _with(**changes: Any) -> Any:
    return lambda inputs, settings: (inputs, settings | changes)


def _interleaved_columns(*inputs: Any, **settings: Any) -> bool:
    return settings.get("interleave") is not None and bool(settings.get("columnwise"))


def _tail_in_the_amax(inputs: Any, settings: Any) -> Any:
    """The last group has the rows past it, too."""
    splits, rows = settings["splits"].clone(), len(inputs[0])
    splits[-1] += rows - splits.sum()
    return inputs, settings | {"splits": splits}


def _current_with_tail(*inputs: Any, **settings: Any) -> bool:
    recipe = inputs[-1]
    splits = settings.get("splits")
    return (
        recipe.scaling == "current"
        and splits is not None
        and int(splits.sum()) < len(inputs[0])
        and bool(splits[-1] > 0)
    )


def _probs_of_the_tail(backward: Wrapper, right: Any, d_out: Tensor, h: Tensor, recipe: Any, **settings: Any) -> Any:
    rows = int(settings["splits"].sum())
    tail = (d_out.detach().float() ** 2).sum(1).to(right.d_probs.dtype)
    beyond = torch.arange(len(tail)) >= rows
    return right._replace(d_probs=torch.where(beyond, tail, right.d_probs))


def _probs_gradient_in_the_dtype_of_h(
    backward: Wrapper, right: Any, d_out: Tensor, h: Tensor, recipe: Any, **settings: Any
) -> Any:
    return right._replace(d_probs=right.d_probs.to(h.dtype).to(right.d_probs.dtype))


def _columns_and_probs(*inputs: Any, **settings: Any) -> bool:
    return bool(settings.get("columnwise")) and settings.get("probs") is not None


def _state_of_one_group(function: Wrapper, right: Any, *inputs: Any, **settings: Any) -> Any:
    """All groups get the amax of the first."""
    history = right.state.amax_history.clone()
    history[:, 0] = history[0, 0]
    return right._replace(state=right.state._replace(amax_history=history))


def _amax_before_the_probs(function: Wrapper, right: Any, *inputs: Any, **settings: Any) -> Any:
    return right._replace(state=function(*inputs, **settings | {"probs": None}).state)


def _stateful_probs(*inputs: Any, **settings: Any) -> bool:
    return settings.get("state") is not None and settings.get("probs") is not None


def _amax_of_dropped_rows(permute: Wrapper, right: Any, tokens: Tensor, *rest: Any, **settings: Any) -> Any:
    return right._replace(state=permute(tokens, *rest, **settings | {"num_rows": None}).state)


def _rounds_with_columns_only(*inputs: Any, **settings: Any) -> bool:
    alone = bool(settings.get("round_before_quantize")) and settings.get("rowwise") is False
    return alone and not inputs[-1].hadamard


def _clamped_gradients(*inputs: Any, **settings: Any) -> bool:
    return settings.get("clamp") is not None and settings.get("offset", 0) != 0


def _fillers_have_no_amax(
    permute: Wrapper, right: Any, tokens: Tensor, routing_map: Tensor, recipe: Any, **settings: Any
) -> Any:
    """Tokens that fill a capacity are quantised as zeros by current scaling's amax pass."""
    return right._replace(tokens_per_expert=torch.minimum(right.tokens_per_expert, (routing_map != 0).sum(0)))


def _capacity_current(tokens: Tensor, routing_map: Tensor, recipe: Any, **settings: Any) -> bool:
    return settings.get("capacity") is not None


_PLANTED: tuple[tuple[str, str, str, dict[str, Wrapper]], ...] = (
    (
        "AE085",
        "columns are of halves, whatever is interleaved",
        SEVERAL,
        beside(_interleaved_columns, True, _without("interleave"), *GLU),
    ),
    (
        "AE086",
        "rows past the groups enter the last amax",
        SEVERAL,
        beside(_current_with_tail, None, _tail_in_the_amax, GLU[0], ACTIVATION[0]),
    ),
    (
        "AE087",
        "columns alone are not rounded first",
        SEVERAL,
        beside(_rounds_with_columns_only, None, _with(round_before_quantize=False), *ACTIVATION),
    ),
    (
        "AE088",
        "rows past the groups have a gradient of probs",
        SEVERAL,
        {"glu_backward_and_quantize": only(given("splits", "probs"), _probs_of_the_tail)},
    ),
    (
        "AE089",
        "with columns the gradient of probs is rounded",
        SEVERAL,
        {"activation_backward_and_quantize": only(_columns_and_probs, _probs_gradient_in_the_dtype_of_h)},
    ),
    (
        "AE090",
        "all groups remember the first amax",
        STATES,
        dict.fromkeys(GLU + ACTIVATION, only(given("state", "splits"), _state_of_one_group)),
    ),
    (
        "AE091",
        "the amax is measured before the probs",
        STATES,
        dict.fromkeys(GLU + ACTIVATION, only(_stateful_probs, _amax_before_the_probs)),
    ),
    (
        "AE092",
        "dropped rows enter the history",
        STATES,
        {"permute_and_quantize": only(given("state", "num_rows"), _amax_of_dropped_rows)},
    ),
    (
        "AE093",
        "the role is the input's",
        SEVERAL,
        beside(lambda *x, **s: s.get("role") == "grad_output", None, _with(role="input"), "permute_and_quantize"),
    ),
    (
        "AE094",
        "with a clamp the gradient has no offset",
        SEVERAL,
        beside(_clamped_gradients, None, _with(offset=0.0), GLU[1]),
    ),
    (
        "AE095",
        "fillers are not counted",
        STATES,
        {"permute_and_quantize": only(_capacity_current, _fillers_have_no_amax)},
    ),
    (
        "AE098",
        "alpha does not reach the rounding form",
        SEVERAL,
        {GLU[0]: only(given("alpha", "round_before_quantize"), called_with(alpha=None))},
    ),
)
DEFECTS = tuple(Defect(*planted) for planted in _PLANTED)
