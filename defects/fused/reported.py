"""Defects that were reported of public fused kernels, planted by their mechanism; see `planted`."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from conformance.mutants.defect import Defect, Wrapper
from conformance.mutants.kinds.conditions import only
from defects.fused.combined import ACTIVATION, GLU, beside
from defects.quantization.combined import NAMES
from defects.quantization.wrappers import Beside

ALL = (*GLU, *ACTIVATION)


def _with_recipe(**options: Any) -> Any:
    return lambda inputs, settings: ((*inputs[:-1], replace(inputs[-1], **options)), settings)


def _powers_of_two(*inputs: Any, **settings: Any) -> bool:
    return bool(inputs[-1].power_of_two_scales)


def _with_least_amax(*inputs: Any, **settings: Any) -> bool:
    return bool(inputs[-1].amax_epsilon)


def _history_of_unrounded(function: Wrapper, right: Any, *inputs: Any, **settings: Any) -> Any:
    return right._replace(state=function(*inputs, **settings | {"round_before_quantize": False}).state)


def _rounded_and_delayed(*inputs: Any, **settings: Any) -> bool:
    return settings.get("state") is not None and bool(settings.get("round_before_quantize"))


def _padding_known(permute: Wrapper, *inputs: Any, **settings: Any) -> Any:
    out = permute(*inputs, **settings)
    recipe = inputs[2]
    padding = getattr(out.row_map, "token_P", torch.zeros(0)) < 0
    shown = recipe.scaling in ("block", "mxfp8") and bool(padding.any()) and settings.get("rowwise", True)
    return out._replace(quantized=Beside(out.quantized, padding)) if shown else out


def _reading(name: str) -> Wrapper:
    def read(base: Wrapper, quantized: Any, /, **how: Any) -> Any:
        if not isinstance(quantized, Beside):
            return base(quantized, **how)
        out = base(quantized.quantized, **how)
        if name != "scales" or how.get("columnwise") or how.get("layout", "compact") != "compact":
            return out
        return _left(out, quantized.known)

    return read


def _left(scale: Tensor, padding: Tensor) -> Tensor:
    """Scales of padding are what the memory held."""
    if not isinstance(scale, Tensor) or scale.shape[:1] != padding.shape:
        return scale
    raw = scale.view(torch.uint8) if scale.element_size() == 1 else scale
    return torch.where(padding[:, None], torch.full_like(raw, 90), raw).view(scale.dtype)


_PLANTED: tuple[tuple[str, str, str, dict[str, Wrapper]], ...] = (
    (
        "RB55",
        "scales of a fused stage are no powers of two",
        "vLLM #51477",
        beside(_powers_of_two, None, _with_recipe(power_of_two_scales=False), *ALL),
    ),
    (
        "RB56",
        "a fused stage has no least amax",
        "vLLM #24054 (review)",
        beside(_with_least_amax, None, _with_recipe(amax_epsilon=0.0), *ALL),
    ),
    (
        "RB57",
        "an amax is of values that are not rounded yet",
        "TransformerEngine #2355",
        dict.fromkeys(ALL, only(_rounded_and_delayed, _history_of_unrounded)),
    ),
    (
        "RB58",
        "scales of padding are not written",
        "TransformerEngine #2547",
        {"permute_and_quantize": _padding_known} | {name: _reading(name) for name in NAMES},
    ),
)
DEFECTS = tuple(Defect(*planted) for planted in _PLANTED)
