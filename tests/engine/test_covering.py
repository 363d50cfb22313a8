"""Covering arrays have every legal pair."""

import itertools

import pytest

from conformance.core.case import Case
from conformance.core.space import Space
from conformance.engine.choose.draw import scope_of
from tests.engine.drawn_cases import FUNCTIONS, covered

# ---- covering arrays


def axes_of(function: str) -> dict:
    """The axes of a converted function's covering array."""
    scope = scope_of(function, Space())
    return scope.covered_axes(scope.contract.shapes.covered, scope.contract.shapes.together(scope))


def legal(function: str, row: dict) -> bool:
    """Whether the case with these values, and the array's first values elsewhere, is a call."""
    scope = scope_of(function, Space())
    return scope.fits(scope.row(scope.contract.shapes.covered, row))


def pairs_of(case: Case) -> set:
    """All pairs of values that a case of a converted function's covering array has."""
    plain = scope_of(case.function, Space()).row(scope_of(case.function, Space()).contract.shapes.covered, {})
    found = {}
    for axis, values in axes_of(case.function).items():
        moved = {name for value in values for name, _ in value}
        wanted = [{name: getattr(plain, name) for name in moved} | dict(value) for value in values]
        asked = [{name: x(case) if callable(x) else x for name, x in fields.items()} for fields in wanted]
        has = {name: getattr(case, name) for name in moved}
        found[axis] = [value for value, fields in zip(values, asked, strict=True) if fields == has]
    return {((x, a), (y, b)) for x, y in itertools.combinations(sorted(found), 2) for a in found[x] for b in found[y]}


def legal_by_few(function: str) -> set:
    """Every pair of values that is a call with at most two other axes off their first value."""
    axes, found = axes_of(function), set()
    single = [{name: value} for name, values in axes.items() for value in values]
    for x, y in itertools.combinations(sorted(axes), 2):
        others = [one for one in single if not {x, y} & set(one)]
        more = [{}, *others, *(a | b for a, b in itertools.combinations(others, 2) if len(a | b) > 1)]
        for a, b in itertools.product(axes[x], axes[y]):
            if any(legal(function, {x: a, y: b} | row) for row in more):
                found.add(((x, a), (y, b)))
    return found


def pairs(rows) -> set:
    return {pair for row in rows for pair in itertools.combinations(sorted(row.items()), 2)}


def reached_by(cases: list[Case]) -> set:
    """The pairs of values that the cases of a covering array have."""
    return set().union(*map(pairs_of, cases))


@pytest.mark.parametrize(
    "function", ["indices_to_multihot", "pad_routing_map", "gate", "sinkhorn_routing", "latent_projection"]
)
def test_pairs_that_few_axes_allow_are_those_of_all_combinations(function):
    axes = axes_of(function)
    every = (dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values()))
    assert legal_by_few(function) == pairs(row for row in every if legal(function, row))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_covering_arrays_have_every_legal_pair_in_few_cases_of_which_the_last_is_needed(function):
    cases, legal_pairs = covered(function).cases, legal_by_few(function)
    assert reached_by(cases) == legal_pairs
    assert covered(function).pairs == len(legal_pairs) > len(cases)
    assert reached_by(cases[:-1]) < legal_pairs
