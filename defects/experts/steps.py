"""Defects of the loop over a contraction, which a sum of one step does not show; see `planted`."""

from typing import Any

import torch
from torch import Tensor

from conformance.mutants.defect import Defect, Wrapper

STEP = 128  # terms of a sum that one step of the loop adds
WIDE = 2 * STEP  # more terms need a third step


def _sixteen_bits(rows: Tensor, settings: dict[str, Any]) -> bool:
    return rows.dtype in (torch.bfloat16, torch.float16) and settings.get("recipe") is None


def _rounded_per_step(grouped_linear: Wrapper, rows: Tensor, weight: Tensor, counts: Tensor, /, **settings: Any) -> Any:
    """out = Σ over steps of the step's sum, rounded to the storage dtype."""
    legal = rows.dim() == 2 and weight.dim() == 3 and rows.shape[1] == weight.shape[2]
    if not legal or rows.shape[1] <= WIDE or not _sixteen_bits(rows, settings):
        return grouped_linear(rows, weight, counts, **settings)
    out = grouped_linear(rows[:, :STEP], weight[:, :, :STEP], counts, **settings)
    plain = {name: x for name, x in settings.items() if name != "bias"}
    for start in range(STEP, rows.shape[1], STEP):
        step = slice(start, start + STEP)
        out = out + grouped_linear(rows[:, step], weight[:, :, step], counts, **plain)
    return out


def _without_the_last_step(
    grouped_dgrad: Wrapper, d_out: Tensor, weight: Tensor, counts: Tensor, /, **settings: Any
) -> Any:
    """A last step that is not whole is left out, once there are two."""
    features = d_out.shape[1] if d_out.dim() == 2 else 0
    if features > WIDE and settings.get("recipe") is None:
        whole = torch.arange(features, device=d_out.device) < features // STEP * STEP
        d_out = torch.where(whole, d_out, 0)
    return grouped_dgrad(d_out, weight, counts, **settings)


def _two_steps_per_expert(
    grouped_wgrad: Wrapper, d_out: Tensor, rows: Tensor, counts: Tensor, /, **settings: Any
) -> Any:
    """An expert's rows past the second step are left out."""
    legal = counts.dim() == 1 and not counts.is_floating_point() and bool((counts >= 0).all())
    if not legal or int(counts.sum()) > len(d_out) or settings.get("recipe") is not None:
        return grouped_wgrad(d_out, rows, counts, **settings)
    place = torch.zeros(len(d_out), dtype=torch.int64)
    for start, count in zip((counts.cumsum(0) - counts).tolist(), counts.tolist(), strict=True):
        place[start : start + count] = torch.arange(count)
    return grouped_wgrad(torch.where((place < WIDE).to(d_out.device)[:, None], d_out, 0), rows, counts, **settings)


LOOP = "a mistake that a loop over a contraction invites"
DEFECTS: tuple[Defect, ...] = (
    Defect("T01", f"sums of {STEP} products are rounded to 16 bits", LOOP, {"grouped_linear": _rounded_per_step}),
    Defect("T02", "a third step that is not whole is left out", LOOP, {"grouped_dgrad": _without_the_last_step}),
    Defect("T03", "a third step over an expert's rows is left out", LOOP, {"grouped_wgrad": _two_steps_per_expert}),
)
