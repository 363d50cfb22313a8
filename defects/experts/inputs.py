"""Defects that few inputs show: values at the ends of a row, single values, illegal counts."""

from typing import Any

import torch
from torch import Tensor

from conformance.mutants.defect import Defect, Wrapper, with_values
from moe_ref.config.quantization import BLOCK, WHOLE_BLOCKS

STRANGE = "a class of inputs: strange values at the ends of a row"
EVERY = "a class of inputs: every bit pattern of a dtype"
ILLEGAL = "illegal values that only the device sees"
PATTERN = {torch.bfloat16: 0x3E6D, torch.float16: 0x33A7}  # of a number below 1


def _legal(h: Tensor) -> bool:
    return h.dim() == 2 and h.shape[1] > 0


def _one_value(activation: Wrapper, h: Tensor, /, **settings: Any) -> Any:
    """The table of a curve has one wrong entry."""
    out = activation(h, **settings)
    if not _legal(h) or h.dtype not in PATTERN or h.shape != out.shape:
        return out
    hit = h.detach().view(torch.int16) == PATTERN[h.dtype]
    return with_values(out, lambda x: torch.where(hit, x * 1.0625, x))


def _one_gate(glu: Wrapper, h: Tensor, /, **settings: Any) -> Any:
    out = glu(h, **settings)
    if not _legal(h) or h.dtype not in PATTERN or h.shape[1] % 2 or settings.get("interleave"):
        return out
    hit = h.detach()[:, : h.shape[1] // 2].contiguous().view(torch.int16) == PATTERN[h.dtype]
    return with_values(out, lambda x: torch.where(hit, x * 1.0625, x))


def _last_is_finite(activation: Wrapper, h: Tensor, /, **settings: Any) -> Any:
    """The last element of the tensor is read through a mask that a NaN does not pass."""
    if not _legal(h) or not len(h) or not bool(h.detach()[-1, -1].isnan()):
        return activation(h, **settings)
    last = torch.zeros(h.shape, dtype=torch.bool, device=h.device)
    last[-1, -1] = True
    return activation(torch.where(last, 0.0, h), **settings)


def _counts_within_the_rows(
    product: Wrapper, left: Tensor, right: Tensor, counts: Tensor, *rest: Any, **settings: Any
) -> Any:
    """Counts are cut where the rows end, and to whole blocks, without a sign of it."""
    if counts.is_floating_point() or left.dim() != 2:
        return product(left, right, counts, *rest, **settings)
    ends = counts.clamp(min=0).cumsum(0).clamp(max=len(left))
    recipe = settings.get("recipe")
    multiple = BLOCK[recipe.scaling] if recipe is not None and recipe.scaling in WHOLE_BLOCKS else 1
    return product(left, right, ends.diff(prepend=ends.new_zeros(1)) // multiple * multiple, *rest, **settings)


DEFECTS: tuple[Defect, ...] = (
    Defect("V06", "one entry of a curve's table is wrong", EVERY, {"activation": _one_value, "glu": _one_gate}),
    Defect(
        "V07",
        "the last element of a tensor is never NaN",
        STRANGE,
        {"activation": _last_is_finite, "glu": _last_is_finite},
    ),
    *(
        Defect(name, f"illegal counts are cut, silently, by {function}", ILLEGAL, {function: _counts_within_the_rows})
        for name, function in (("I03", "grouped_linear"), ("I04", "grouped_dgrad"), ("I05", "grouped_wgrad"))
    ),
)
