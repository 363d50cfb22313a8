"""Mistakes of a dispatcher whose rows travel as codes and scales, planted in one that makes what the reference makes."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moe_ref.formats import E4M3, encode
from moe_ref.quantization import Quantized
from moe_ref.recipes import Scaled, over, scale_from_amax, spread

Wrapper = Callable[..., Any]
TILE = 8  # rows that are quantised at once, by mistake
INVITED = "a mistake that dispatchers invite"


def _changed(out: Any, change: Callable[[Scaled, Tensor], Scaled]) -> Any:
    """The result with each expert's codes and scales changed; where rows are no such thing, as it is."""
    if not isinstance(out.rows, Quantized):
        return out
    form = out.rows.form(False)
    sources = form.source_MN.detach().split([*(len(group.codes) for group in form.groups), len(form.source_MN) - sum(len(g.codes) for g in form.groups)])
    groups = tuple(change(group, source.float()) for group, source in zip(form.groups, sources, strict=False))
    return out._replace(rows=replace(out.rows, rowwise=replace(form, groups=groups)))


def _scale_of_another_row(dispatch: Wrapper, *tensors: Tensor, **settings: Any) -> Any:
    return _changed(dispatch(*tensors, **settings), lambda group, source: group._replace(scale=group.scale.roll(1, 0)))


def _padding_without_scales(dispatch: Wrapper, *tensors: Tensor, **settings: Any) -> Any:
    def unwritten(group: Scaled, source: Tensor) -> Scaled:
        return group._replace(scale=torch.where((source == 0).all(1, keepdim=True), 0.0, group.scale))

    return _changed(dispatch(*tensors, **settings), unwritten)


def _quantized_by_tiles(dispatch: Wrapper, *tensors: Tensor, **settings: Any) -> Any:
    """One scale for some rows of an expert, from the largest number of them."""

    def by_tiles(group: Scaled, source: Tensor) -> Scaled:
        if not group.amax.numel():
            return group
        amax = torch.cat([own.amax(0, keepdim=True).expand_as(own) for own in group.amax.split(TILE)])
        recipe = settings["recipe"]
        scale = scale_from_amax(amax, E4M3.max, epsilon=recipe.amax_epsilon or 0.0, power_of_two=bool(recipe.power_of_two_scales))
        return Scaled(encode(source * spread(scale, (1, 128), source), E4M3), over(1.0, scale), amax)

    return _changed(dispatch(*tensors, **settings), by_tiles)


LISTED: tuple[tuple[str, str, str, dict[str, Wrapper]], ...] = (
    ("W01", "scales in the order of another row", INVITED, {"hybridep_dispatch": _scale_of_another_row}),
    ("W02", "padding has codes and no scale", INVITED, {"hybridep_dispatch": _padding_without_scales}),
    ("W03", "quantised where rows have arrived, several at once", INVITED, {"hybridep_dispatch": _quantized_by_tiles}),
)
