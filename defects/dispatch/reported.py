"""Defects that were reported of public dispatchers, planted by their mechanism; see `planted`."""

from typing import Any

import torch
from torch import Tensor

from conformance.mutants.defect import Defect, Wrapper, with_values
from conformance.mutants.kinds.conditions import given, only

BLOCK = 128  # columns that a transfer moves at once
LINE = 16  # bytes that a copy engine moves


def _whole_blocks(x: Tensor) -> Tensor:
    columns = torch.arange(x.shape[1], device=x.device)
    return torch.where(columns >= x.shape[1] // BLOCK * BLOCK, 0, x)


def _last_part_lost(dispatch: Wrapper, right: Any, tokens: Tensor, *rest: Any, **settings: Any) -> Any:
    return right._replace(rows=with_values(right.rows, _whole_blocks))


def _last_part_not_added(combine: Wrapper, right: Any, rows: Tensor, *rest: Any, **settings: Any) -> Any:
    return right._replace(tokens=with_values(right.tokens, _whole_blocks))


def _not_whole(x: Tensor, *rest: Any, **settings: Any) -> bool:
    return x.shape[1] > BLOCK and x.shape[1] % BLOCK > 0 and x.element_size() > 1


def _first_scales_overwritten(dispatch: Wrapper, right: Any, *inputs: Any, **settings: Any) -> Any:
    """The barrier of a transfer lies over the first 8 bytes of scales that travel by 16 bytes."""
    scales = right.scales
    if scales.dim() != 2 or not scales.numel() or scales.shape[1] * scales.element_size() % LINE:
        return right
    lost = torch.arange(scales.shape[1], device=scales.device) * scales.element_size() < LINE // 2
    return right._replace(scales=torch.where(lost, torch.zeros((), dtype=scales.dtype, device=scales.device), scales))


def _added_in_the_rows_dtype(
    combine: Wrapper, right: Tensor, rows: Tensor, indices: Tensor, probs: Tensor, handle: Any, **settings: Any
) -> Tensor:
    """The sum of a token's weighted rows is rounded after each."""
    slots = torch.arange(indices.shape[1], device=indices.device)
    with torch.no_grad():
        parts = [
            combine(rows, torch.where(slots == k, indices, -1), torch.where(slots == k, probs, 0), handle, **settings)
            for k in range(indices.shape[1])
        ]
    total = torch.zeros_like(right)
    for part in parts:
        total = (total + part).detach()
    return with_values(right, lambda _: total)


def _narrow(rows: Tensor, *rest: Any, **settings: Any) -> bool:
    return rows.dtype in (torch.bfloat16, torch.float16)


_PLANTED: tuple[tuple[str, str, str, dict[str, Wrapper]], ...] = (
    (
        "RB69",
        "columns past the last whole block do not travel",
        "DeepEP #413",
        {"deepep_dispatch": only(_not_whole, _last_part_lost)},
    ),
    (
        "RB70",
        "columns past the last whole block are not added",
        "DeepEP #413",
        {"deepep_combine": only(_not_whole, _last_part_not_added)},
    ),
    (
        "RB71",
        "the first scales of a row are overwritten",
        "DeepEP #399",
        {"deepep_dispatch": only(given("scales"), _first_scales_overwritten)},
    ),
    (
        "RB72",
        "a token's weighted rows are added in 16 bits",
        "TensorRT-LLM #16778",
        {"deepep_low_latency_combine": only(_narrow, _added_in_the_rows_dtype)},
    ),
)
DEFECTS = tuple(Defect(*planted) for planted in _PLANTED)
