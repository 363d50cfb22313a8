"""Covering arrays: every pair of values of the small finite axes stands in some case.

Greedy, and deterministic: of some candidates made from the first uncovered pair, take the one that covers most pairs.
"""

import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from conformance.core.case import Case
from conformance.core.space import Space
from conformance.families.dispatch import axes as axes_dispatch
from conformance.families.experts import axes as axes_experts
from conformance.families.experts import axes_mlp
from conformance.families.fused import axes as axes_permuted_quantization
from conformance.families.fused import axes_activate as axes_quantized_activations
from conformance.families.permutation import axes as axes_permutation
from conformance.families.quantization import axes as axes_quantization
from conformance.families.router import axes as axes_routing

Row = dict[str, Any]
Pair = tuple[tuple[str, Any], tuple[str, Any]]
CANDIDATES = 12


@dataclass(frozen=True)
class Covered:
    """A covering array and what it covers."""

    cases: list[Case]
    pairs: int  # pairs of values that some legal case has
    impossible: int  # pairs that no candidate could have


def pairs_of(row: Mapping[str, Any]) -> Iterator[Pair]:
    return itertools.combinations(sorted(row.items(), key=lambda item: item[0]), 2)


def covering(axes: Mapping[str, tuple[Any, ...]], legal: Callable[[Row], bool]) -> tuple[list[Row], int, int]:
    """Rows that have every legal pair of values; the number of pairs they have, and of those that no legal row was found for."""
    source = random.Random(0)
    every = [
        dict((a, b))
        for x, y in itertools.combinations(sorted(axes), 2)
        for a in _values(axes, x)
        for b in _values(axes, y)
    ]
    uncovered = {next(pairs_of(pair)): pair for pair in every}
    rows: list[Row] = []
    impossible = 0
    while uncovered:
        wanted = next(iter(uncovered.values()))
        made = [row for row in (_completed(axes, wanted, source) for _ in range(20 * CANDIDATES)) if legal(row)][
            :CANDIDATES
        ]
        if not made:
            impossible += 1
            del uncovered[next(pairs_of(wanted))]
            continue
        best = max(made, key=lambda row: sum(pair in uncovered for pair in pairs_of(row)))
        rows.append(best)
        for pair in pairs_of(best):
            uncovered.pop(pair, None)
    return rows, len(every) - impossible, impossible


def _values(axes: Mapping[str, tuple[Any, ...]], name: str) -> list[tuple[str, Any]]:
    return [(name, value) for value in axes[name]]


def _completed(axes: Mapping[str, tuple[Any, ...]], fixed: Row, source: random.Random) -> Row:
    return {name: fixed.get(name, source.choice(values)) for name, values in axes.items()}


HOMES = (
    axes_permutation,
    axes_routing,
    axes_experts,
    axes_mlp,
    axes_dispatch,
    axes_quantization,
    axes_permuted_quantization,
    axes_quantized_activations,
)
AXES = {function: axes for home in HOMES for function, axes in home.AXES.items()}


def _home(function: str) -> Any:
    return next(home for home in HOMES if function in home.AXES)


def legal(function: str, row: Row, space: Space) -> bool:
    """Whether the row describes a call that can be made."""
    layout, of = row["layout"]
    return (
        not (row.get("grads") and function in space.not_differentiable)
        and not (layout != "contiguous" and function in space.contiguous_only)
        and not (of.startswith("d_") and "grads" in row and not row["grads"])
        and bool(_home(function).legal(function, row, space))
    )


def case_of(function: str, row: Row, index: int) -> Case:
    """The case that the row describes."""
    fields = dict(row)
    fields["layout"], fields["layout_of"] = fields["layout"]
    case: Case = _home(function).case_of(function, fields | {"seed": index})
    return case


def _with_law(case: Case, index: int, space: Space) -> Case:
    laws = space.laws(case)
    return replace(case, law=laws[index % len(laws)])


def covering_cases(function: str, space: Space) -> Covered:
    """The covering array of a function's axes, in what the implementation accepts; laws go round over its cases."""
    rows, pairs, impossible = covering(AXES[function], lambda row: legal(function, row, space))
    cases = [_with_law(case_of(function, row, index), index, space) for index, row in enumerate(rows)]
    return Covered(cases, pairs, impossible)
