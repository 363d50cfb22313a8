"""How large the gate's cases are, on a CPU and on one GPU: docs/results/reach.json from the cases.

    python -m benchmarks.reach

Takes a minute or two: all cases of all functions are drawn, for both.
"""

import heapq
from collections.abc import Iterable
from typing import Any

import torch

from benchmarks import results
from conformance.catalogue import CONTRACTS
from conformance.core.axes import Size
from conformance.core.case import Case, axes_of
from conformance.core.ranks import ranks_of
from conformance.core.space import Space
from conformance.engine.choose.plan import cases_of, sections
from conformance.engine.choose.profiles import PROFILES

SPACES = {"CPU": Space(), "GPU": Space(device="cuda", ranks=1, shared_ranks=4)}
MAPS = 8  # cases with the most tokens, whose maps are made
TITLE = "How large the gate's cases are"
COMMANDS = ["python -m benchmarks.reach"]
MEANING = (
    "The largest sizes of the gate's cases of seed 0, on a CPU / on one GPU; one number where both are equal. The "
    "sizes of a row are of different cases. Tokens are the rows of all experts together where a function takes "
    "rows; columns are a hidden size or a width, whichever is more; – under ranks means that one rank calls the "
    "function. On a GPU each pair of options, and each recipe in each direction, also has a case at the sizes of "
    "released models (conformance/core/model_sizes.py)."
)
HEADS = ["function", "tokens", "experts", "rows of an expert", "columns", "top-k", "ranks", "tokens of a rank"]
COLUMNS = ("tokens", "experts", "rows", "columns", "topk", "ranks", "on a rank")


def sizes_of(case: Case) -> dict[str, int]:
    """The case's sizes, by column; those that it has."""
    lengths = {axis.name: getattr(case, axis.name) for axis in axes_of(type(case)).values() if isinstance(axis, Size)}
    ranks, counts = ranks_of(CONTRACTS[case.function], case), getattr(case, "counts", ())
    named = [name for name in ("tokens", "experts", "topk") if name in lengths or (ranks and hasattr(case, name))]
    sizes: dict[str, int] = {name: getattr(case, name) for name in named}
    columns = [lengths[name] * case.unit for name in ("hidden", "width") if name in lengths]
    sizes |= {"columns": max(columns)} if columns else {}
    if not ranks and "tokens_per_expert" in CONTRACTS[case.function].signature.names:  # rows in units
        sizes["tokens"] *= case.unit
        sizes |= {"rows": max(counts) * case.unit} if counts else {}
    chunks = getattr(case, "sizes", ())
    sizes |= {"tokens": sum(chunks)} if chunks else {}
    return sizes | ({"ranks": ranks, "on a rank": max(counts, default=0)} if ranks else {})


def rows_of_maps(cases: Iterable[Case]) -> int:
    """The most rows of an expert by the routing maps of the cases with the most tokens."""
    most_rows = 0
    for case in heapq.nlargest(MAPS, cases, key=lambda case: getattr(case, "tokens", 0)):
        routing_map = CONTRACTS[case.function].problem(case).shown.get("routing_map")
        if isinstance(routing_map, torch.Tensor) and routing_map.numel():
            most_rows = max(most_rows, int((routing_map != 0).sum(0).max()))
    return most_rows


def reached(function: str, space: Space) -> dict[str, int]:
    """The largest of each column."""
    wanted = [section for section in sections() if section.function == function]
    cases = [case for section in wanted for case in cases_of(section, PROFILES["gate"], space, 0)]
    legal = [case for case in cases if not case.golden and not case.illegal]
    largest: dict[str, int] = {}
    for case in legal:
        for name, number in sizes_of(case).items():
            largest[name] = max(largest.get(name, 0), number)
    on_one_rank = [case for case in legal if not ranks_of(CONTRACTS[function], case)]
    rows = largest.get("rows") or rows_of_maps(on_one_rank)
    return largest | ({"rows": rows} if rows else {})


def cell(both: list[dict[str, int]], name: str) -> str:
    numbers = [f"{sizes[name]:,}" for sizes in both if name in sizes]
    return " / ".join(dict.fromkeys(numbers)) or "–"


def row(function: str) -> list[str]:
    both = [reached(function, space) for space in SPACES.values()]
    return [f"`{function}`", *(cell(both, name) for name in COLUMNS)]


def figures() -> dict[str, Any]:
    """The record without its origin."""
    table = {"title": "", "columns": HEADS, "rows": list(map(row, CONTRACTS))}
    return {"title": TITLE, "meaning": MEANING, "tables": [table]}


if __name__ == "__main__":
    results.save("reach", figures(), COMMANDS)
