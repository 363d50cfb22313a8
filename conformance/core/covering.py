"""Pairwise covering arrays: every pair of values of the finite axes occurs in some case.

Greedy and deterministic: of CANDIDATES rows with the first uncovered pair, the one that covers the
most pairs. An axis may be covered `once` instead: each value occurs, in no particular pair.
"""

import itertools
import random
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from conformance.core.case import Case

Row = dict[str, Any]
Pair = tuple[tuple[str, Any], ...]  # or a single value, of an axis covered once
CANDIDATES = 12


@dataclass(frozen=True)
class Covered:
    """A covering array and its coverage."""

    cases: list[Case]
    reached: list[int]  # pairs of values in the cases up to each
    impossible: int  # pairs in no legal candidate

    @property
    def pairs(self) -> int:
        """Pairs of values in some legal case."""
        return self.reached[-1] if self.reached else 0

    def first(self, most: int, share: float) -> list[Case]:
        """As few of the first cases as have this share of the pairs, and at most `most`."""
        enough = (index for index, pairs in enumerate(self.reached) if pairs >= share * self.pairs)
        return self.cases[: min(most, next(enough, -1) + 1)]


def pairs_of(row: Mapping[str, Any], once: Collection[str] = ()) -> Iterator[Pair]:
    values = sorted(row.items(), key=lambda item: item[0])
    yield from itertools.combinations([value for value in values if value[0] not in once], 2)
    yield from ((value,) for value in values if value[0] in once)


def covering(
    axes: Mapping[str, tuple[Any, ...]], legal: Callable[[Row], bool], once: Collection[str] = ()
) -> tuple[list[Row], list[int], int]:
    """Rows with every legal pair of values; the number of pairs that they cover up to each row; the
    number of impossible pairs.

    Args:
        once: axes of which only the values are covered, not their pairs.
    """
    source = random.Random(0)
    paired = {name: values for name, values in axes.items() if name not in once}
    every: list[Row] = [{name: value} for name in sorted(axes) if name in once for value in axes[name]]
    every += [
        dict((a, b))
        for x, y in itertools.combinations(sorted(paired), 2)
        for a in _values(axes, x)
        for b in _values(axes, y)
    ]
    uncovered = {next(pairs_of(pair, once)): pair for pair in every}
    rows: list[Row] = []
    reached: list[int] = []
    impossible, wanted_in_all = 0, len(uncovered)
    while uncovered:
        wanted = next(iter(uncovered.values()))
        candidates = (_completed(axes, wanted, source) for _ in range(20 * CANDIDATES))
        made = list(itertools.islice(filter(legal, candidates), CANDIDATES))
        if not made:
            impossible += 1
            del uncovered[next(pairs_of(wanted, once))]
            continue
        best = max(made, key=lambda row: sum(pair in uncovered for pair in pairs_of(row, once)))
        rows.append(best)
        for pair in pairs_of(best, once):
            uncovered.pop(pair, None)
        reached.append(wanted_in_all - impossible - len(uncovered))
    return rows, reached, impossible


def _values(axes: Mapping[str, tuple[Any, ...]], name: str) -> list[tuple[str, Any]]:
    return [(name, value) for value in axes[name]]


def _completed(axes: Mapping[str, tuple[Any, ...]], fixed: Row, source: random.Random) -> Row:
    return {name: fixed.get(name, source.choice(values)) for name, values in axes.items()}
