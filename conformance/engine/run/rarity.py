"""Chooses, of many drawn cases, those whose combinations of field values have not run yet.

A draw takes each field by itself, so that a fault that needs three rare values waits long for them.
A case is rare if it has many triples of values that no case before it had.
"""

from collections.abc import Sequence
from functools import cache
from itertools import combinations
from typing import Any
from zlib import crc32

import numpy as np

from conformance.core.axes import Seed, Size, size_class
from conformance.core.case import Case, axes_of

TRIPLE = 3
SLOTS = 2**24  # slots of the table of triples; two triples in one slot count as one


class Rarity:
    """The triples of values of the cases so far."""

    def __init__(self) -> None:
        self._seen = np.zeros(SLOTS, dtype=bool)

    def new(self, case: Case) -> int:
        """The number of triples that no case has had."""
        return int((~self._seen[_triples(case)]).sum())

    def add(self, case: Case) -> None:
        self._seen[_triples(case)] = True

    def rarest(self, cases: Sequence[Case], count: int) -> list[Case]:
        """`count` of the cases: each has the most new triples, given the cases chosen before it.
        They are added to the table.
        """
        candidates = {case: _triples(case) for case in cases}
        chosen: list[Case] = []
        while candidates and len(chosen) < count:
            best = max(candidates, key=lambda case: int((~self._seen[candidates[case]]).sum()))
            self._seen[candidates.pop(best)] = True
            chosen.append(best)
        return chosen


def _triples(case: Case) -> np.ndarray:
    """The slots of the case's triples."""
    words = np.array([crc32(word.encode()) for word in values(case)], dtype=np.uint64)
    first, second, third = _places(len(words))
    mixed: np.ndarray = (words[first] * np.uint64(1_000_003) + words[second]) * np.uint64(1_000_003) + words[third]
    return (mixed >> np.uint64(20)) % np.uint64(SLOTS)


@cache
def _places(count: int) -> np.ndarray:
    return np.array(list(combinations(range(count), TRIPLE)), dtype=np.int64).reshape(-1, TRIPLE).T


def values(case: Case) -> list[str]:
    """The values of the case's axes, and its law.

    Sizes are given by class, and seeds are left out.
    """
    words = [f"law={case.law}"]
    for axis in axes_of(type(case)).values():
        value = getattr(case, axis.name)
        of_class: Any = size_class(value) if isinstance(axis, Size) else value
        of_class = len(value).bit_length() if isinstance(value, tuple) else of_class
        words += [] if isinstance(axis, Seed) else [f"{axis.name}={of_class}"]
    return words
