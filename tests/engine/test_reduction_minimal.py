"""No neighbour of a reduced case is smaller and fails too, by a search that asks no axis.

The search changes the fields of the case itself: a number to every smaller one, two numbers by one
each, any other field to its default. Lists stay: a reduced case says them in full.
"""

import itertools
from collections.abc import Iterator
from dataclasses import fields

import pytest

from conformance.core.case import Case
from conformance.core.scope import Scope
from conformance.core.space import Space
from conformance.engine.choose.draw import scope_of
from conformance.engine.run.reduction import reduce
from conformance.families.permutation.cases import RoutingCase
from tests.engine import reduction_helpers as large
from tests.engine.reduction_helpers import LARGE, LONG, failed, failing_if

CASES = (*(LARGE, large.MANY_LOGITS, large.MANY_LOADS, large.MANY_STATES, large.MANY_ACTIVATED, large.MANY_PRODUCTS),)
FIXED = ("function", "seed", "law", "golden", "illegal", "poison")  # of no size


def numbers(case: Case, live: set[str]) -> dict[str, int]:
    """The sizes and options above 0; a factor, whose default is above 1, has no order."""
    named = [x for x in fields(case) if x.name in live and x.name not in FIXED and x.default in (0, 1)]
    values = {x.name: getattr(case, x.name) for x in named}
    return {name: value for name, value in values.items() if type(value) is int and value > 0}


def neighbours(case: Case, scope: Scope) -> Iterator[Case]:
    """Legal cases that are smaller in one field, or in two numbers."""
    size = numbers(case, scope.live)
    changes = [{name: less} for name, value in size.items() for less in range(value)]
    changes += [{a: size[a] - 1, b: size[b] - 1} for a, b in itertools.combinations(size, 2)]
    words = [x for x in fields(case) if x.name in scope.live - {*FIXED, *size}]
    changes += [{x.name: x.default} for x in words if type(getattr(case, x.name)) in (str, bool)]
    for change in changes:
        try:
            neighbour = case.changed(**change)
        except ValueError:
            continue
        if neighbour != case and scope.fits(neighbour):
            yield neighbour


def needs(case: Case, seed: int):
    """A failure of two numbers, both at least half of the case's, one of them of its parity."""
    needed = sorted(numbers(case, scope_of(case.function, Space()).live))
    first, second = needed[seed % len(needed)], needed[(3 * seed + 1) % len(needed)]
    least, parity = getattr(case, first) // 2, getattr(case, second) % 2

    def fails(neighbour: Case) -> bool:
        return getattr(neighbour, first) >= least and getattr(neighbour, second) % 2 == parity

    return fails


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.function)
def test_no_neighbour_of_a_reduced_case_is_smaller_and_fails(case, seed):
    fails = needs(case, seed)
    attempt, _ = failing_if(fails)
    reduced = reduce(case, failed(), attempt, LONG)
    assert reduced.finished
    scope = scope_of(case.function, Space())
    assert [neighbour.text for neighbour in neighbours(reduced.case, scope) if fails(neighbour)] == []


def test_the_search_finds_what_a_reducer_has_left():
    """A reducer that gave up: three tokens, where one fails."""
    scope, fails = scope_of(LARGE.function, Space()), lambda case: case.tokens % 2 == 1
    larger = RoutingCase(function=LARGE.function, tokens=3, experts=2)
    assert 1 in {neighbour.tokens for neighbour in neighbours(larger, scope) if fails(neighbour)}
