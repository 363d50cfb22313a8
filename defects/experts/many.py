"""Defects that many rows show, or calls of several numbers of rows; see `planted`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from conformance.mutants.defect import Defect, Wrapper

COUNTED = "a class of inputs: sizes past a power of two"
TUNED = "a mistake that a tuner's classes of sizes invite"
SHORT = 2**15  # rows that a signed counter of 16 bits holds
CLASS, LEAST = 2**12, 2**11  # rows of a class of sizes; fewer rows than the least have no plan


def _only(x: Tensor, kept: Tensor) -> Tensor:
    """Rows of x, of which others are read as 0."""
    return torch.where(kept.to(x.device)[:, None], x, 0)


def _expert_rows_past_15_bits(place_of_counts: int) -> Wrapper:
    """An expert's rows past the first 2¹⁵ are not read."""

    def short(function: Wrapper, x: Tensor, *rest: Any, **settings: Any) -> Any:
        counts = rest[place_of_counts]
        legal = counts.dim() == 1 and not counts.is_floating_point() and x.dim() == 2
        if legal and bool((counts > SHORT).any()) and int(counts.sum()) <= len(x):
            ends = counts.cumsum(0).tolist()
            place = torch.arange(len(x))
            for start, end in zip((0, *ends), ends, strict=False):
                place[start:end] -= start
            x = _only(x, place < SHORT)
        return function(x, *rest, **settings)

    return short


def _plan_of_the_class(number: Callable[[int], int]) -> Wrapper:
    """The last call's plan is taken for one of the same class, and with it the number of rows."""
    last = {"class": -1, "rows": 0}

    def planned(function: Wrapper, x: Tensor, *rest: Any, **settings: Any) -> Any:
        rows = len(x) if x.dim() == 2 else 0
        if rows < LEAST:
            return function(x, *rest, **settings)
        if last["class"] != number(rows):
            last.update({"class": number(rows), "rows": rows})
        planned_rows = last["rows"]
        return function(_only(x, torch.arange(rows) < planned_rows), *rest, **settings)

    return planned


COUNTS = {
    "N12": ("grouped_linear", 1),
    "N13": ("grouped_dgrad", 1),
    "N14": ("grouped_wgrad", 1),
    "N15": ("grouped_mlp", 0),
}
DEFECTS: tuple[Defect, ...] = (
    *(
        Defect(name, f"rows of an expert past 15 bits in {of}", COUNTED, {of: _expert_rows_past_15_bits(place)})
        for name, (of, place) in COUNTS.items()
    ),
    Defect("N16", "a plan for ⌊T / 2¹²⌋", TUNED, {"glu": _plan_of_the_class(lambda rows: rows // CLASS)}),
    Defect("N17", "a plan for ⌈T / 2¹²⌉", TUNED, {"grouped_linear": _plan_of_the_class(lambda n: -(-n // CLASS))}),
)
