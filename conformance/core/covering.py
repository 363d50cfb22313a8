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
Numbers = tuple[int, ...]  # the numbers of values: a pair, a single value of an axis covered once, or a candidate row
CANDIDATES = 12


@dataclass(frozen=True)
class Covered:
    """A covering array and its coverage."""

    cases: list[Case]
    reached: list[int]  # pairs of values in the cases up to each
    impossible: int  # pairs in no legal candidate

    @property
    def pairs(self) -> int:
        """The number of pairs of values that occur in some legal case."""
        return self.reached[-1] if self.reached else 0

    def first(self, most: int, share: float) -> list[Case]:
        """The first cases that have this share of the pairs, but at most `most` cases."""
        enough = (index for index, pairs in enumerate(self.reached) if pairs >= share * self.pairs)
        return self.cases[: min(most, next(enough, -1) + 1)]


def covering(
    axes: Mapping[str, tuple[Any, ...]], legal: Callable[[Row], bool], once: Collection[str] = ()
) -> tuple[list[Row], list[int], int]:
    """Rows with every legal pair of values; the number of pairs that they cover up to each row; the
    number of impossible pairs.

    Args:
        once: axes of which only the values are covered, not their pairs.
    """
    table = _Table(axes, once)
    uncovered = dict.fromkeys(table.every())
    rows: list[Row] = []
    reached: list[int] = []
    impossible, wanted_in_all = 0, len(uncovered)
    while uncovered:
        wanted = next(iter(uncovered))
        candidates = (table.completed(wanted) for _ in range(20 * CANDIDATES))
        legal_candidates = list(
            itertools.islice((numbers for numbers in candidates if legal(table.row(numbers))), CANDIDATES)
        )
        if not legal_candidates:
            impossible += 1
            del uncovered[wanted]
            continue
        best = max(legal_candidates, key=lambda numbers: sum(map(uncovered.__contains__, table.pairs(numbers))))
        rows.append(table.row(best))
        for pair in table.pairs(best):
            uncovered.pop(pair, None)
        reached.append(wanted_in_all - impossible - len(uncovered))
    return rows, reached, impossible


class _Table:
    """The values of all axes, numbered. A candidate is the numbers of its values, axis by axis."""

    def __init__(self, axes: Mapping[str, tuple[Any, ...]], once: Collection[str]) -> None:
        self._source = random.Random(0)
        self._names = list(axes)
        self._values = [value for values in axes.values() for value in values]
        ends = itertools.accumulate(map(len, axes.values()))
        self._numbers = [range(end - len(values), end) for end, values in zip(ends, axes.values(), strict=True)]
        self._place = [axis for axis, numbers in enumerate(self._numbers) for _ in numbers]
        self._bounds = [(numbers.start, len(numbers), len(numbers).bit_length()) for numbers in self._numbers]
        in_order = sorted(range(len(axes)), key=self._names.__getitem__)
        self._paired = [axis for axis in in_order if self._names[axis] not in once]
        self._once = [axis for axis in in_order if self._names[axis] in once]

    def every(self) -> Iterator[Numbers]:
        """The values of axes covered once, then all pairs of the others."""
        yield from ((number,) for axis in self._once for number in self._numbers[axis])
        for x, y in itertools.combinations(self._paired, 2):
            yield from itertools.product(self._numbers[x], self._numbers[y])

    def completed(self, wanted: Numbers) -> Numbers:
        """A candidate with these values, the others at random."""
        drawn = [self._number(*bounds) for bounds in self._bounds]
        for number in wanted:
            drawn[self._place[number]] = number
        return tuple(drawn)

    def _number(self, first: int, count: int, bits: int) -> int:
        """A random number counted from `first`.

        It is computed by hand, because a candidate takes ten of them.
        """
        draw = self._source.getrandbits
        while (number := draw(bits)) >= count:
            pass
        return first + number

    def pairs(self, candidate: Numbers) -> Iterator[Numbers]:
        """The candidate's pairs, and its values of axes covered once."""
        pairs = itertools.combinations([candidate[axis] for axis in self._paired], 2)
        return itertools.chain(pairs, ((candidate[axis],) for axis in self._once))

    def row(self, candidate: Numbers) -> Row:
        return dict(zip(self._names, map(self._values.__getitem__, candidate), strict=True))
