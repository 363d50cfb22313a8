"""Defects of long contractions in one dtype, or by one recipe; see `planted`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from conformance.mutants.defect import Defect, Wrapper, with_values

LOOP = "a mistake that a loop over a contraction invites"
STEPS = 128  # two steps of 64
Applies = Callable[[Tensor, Any], bool]  # to rows, and the recipe or None


def _in(*dtypes: torch.dtype) -> Applies:
    return lambda rows, recipe: recipe is None and rows.dtype in dtypes


def _by(scaling: str) -> Applies:
    return lambda rows, recipe: recipe is not None and recipe.scaling == scaling


def _two_steps_of_columns(applies: Applies) -> Wrapper:
    """A loop that ends after two steps."""

    def product(base: Wrapper, rows: Tensor, *rest: Any, **settings: Any) -> Any:
        long = rows.dim() == 2 and rows.shape[1] > STEPS and applies(rows, settings.get("recipe"))
        read = torch.arange(rows.shape[-1]) < STEPS if long else None
        changed = rows if read is None else with_values(rows, lambda x: torch.where(read, x, 0))
        return base(changed, *rest, **settings)

    return product


def _two_steps_of_rows(applies: Applies) -> Wrapper:
    """The same over the rows of each expert."""

    def product(base: Wrapper, d_out: Tensor, rows: Tensor, counts: Tensor, **settings: Any) -> Any:
        out = base(d_out, rows, counts, **settings)
        if not applies(rows, settings.get("recipe")):
            return out
        place = torch.cat([torch.arange(count) for count in counts.tolist()] or [torch.arange(0)])
        read = torch.cat([place < STEPS, torch.ones(len(rows) - len(place), dtype=torch.bool)])
        return base(d_out, torch.where(read[:, None], rows, 0), counts, **settings)

    return product


def _lost(name: str, applies: Applies, where: str, function: str) -> Defect:
    wrapper = _two_steps_of_rows if function == "grouped_wgrad" else _two_steps_of_columns
    return Defect(name, f"{function}: terms past the second step are lost, {where}", LOOP, {function: wrapper(applies)})


NARROW, WIDE = (torch.float16,), (torch.float32, torch.float64)
DEFECTS = (
    _lost("T06", _in(torch.float32), "in float32", "grouped_linear"),
    _lost("T07", _in(torch.float64), "in float64", "grouped_linear"),
    _lost("T08", _in(*NARROW), "in float16", "grouped_linear"),
    _lost("T09", _by("current"), "by one scale per tensor", "grouped_linear"),
    _lost("T10", _by("delayed"), "by delayed scales", "grouped_linear"),
    _lost("T11", _by("mxfp8"), "by MXFP8", "grouped_linear"),
    _lost("T12", _by("nvfp4"), "by NVFP4", "grouped_linear"),
    _lost("T13", _in(*WIDE), "in float32 and float64", "grouped_dgrad"),
    _lost("T14", _by("mxfp8"), "by MXFP8", "grouped_dgrad"),
    _lost("T15", _in(*NARROW), "in float16", "grouped_wgrad"),
    _lost("T16", _by("nvfp4"), "by NVFP4", "grouped_wgrad"),
    _lost("T17", _in(*NARROW), "in float16", "grouped_mlp"),
    _lost("T18", _by("block"), "by blocks", "sequential_mlp"),
    _lost("T19", _by("mxfp8"), "by MXFP8", "shared_experts"),
    _lost("T20", _in(*NARROW), "in float16", "latent_projection"),
)
