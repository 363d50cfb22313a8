"""Covering arrays have every legal pair."""

import functools
import itertools

import pytest

from conformance.core.case import Case
from conformance.core.space import Space
from conformance.engine.choose.draw import scope_of
from tests.engine.drawn_cases import FUNCTIONS, covered

# ---- covering arrays


@functools.cache
def axes_of(function: str) -> dict:
    """The axes of a converted function's covering array."""
    scope = scope_of(function, Space())
    return scope.covered_axes(scope.contract.shapes.covered, scope.contract.shapes.together(scope))


def legal(function: str, row: dict) -> bool:
    """Whether the case with these values, and the array's first values elsewhere, is a call."""
    scope = scope_of(function, Space())
    return scope.fits(scope.row(scope.contract.shapes.covered, row))


@functools.cache
def fields_of(function: str) -> dict[str, list[tuple]]:
    """By axis, each value with all fields that the axis changes, as the case has them with it."""
    scope = scope_of(function, Space())
    default = scope.row(scope.contract.shapes.covered, {})
    fields = {}
    for axis, values in axes_of(function).items():
        unchanged = {name: getattr(default, name) for value in values for name, _ in value}
        fields[axis] = [(value, unchanged | dict(value)) for value in values]
    return fields


def pairs_of(case: Case) -> set:
    """All pairs of values that a case of a converted function's covering array has."""

    def has(fields: dict) -> bool:
        return all(getattr(case, name) == (x(case) if callable(x) else x) for name, x in fields.items())

    axes = {axis: [value for value, fields in pairs if has(fields)] for axis, pairs in fields_of(case.function).items()}
    return {((x, a), (y, b)) for x, y in itertools.combinations(sorted(axes), 2) for a in axes[x] for b in axes[y]}


def legal_by_few(function: str) -> set:
    """Every pair of values that is a call with at most two other axes off their first value."""
    axes, legal_pairs = axes_of(function), set()
    changes = [{name: value} for name, values in axes.items() for value in values[1:]]
    for x, y in itertools.combinations(sorted(axes), 2):
        other_changes = [change for change in changes if not {x, y} & set(change)]
        rows = [{}, *other_changes, *(a | b for a, b in itertools.combinations(other_changes, 2) if len(a | b) > 1)]
        for a, b in itertools.product(axes[x], axes[y]):
            if any(legal(function, {x: a, y: b} | row) for row in rows):
                legal_pairs.add(((x, a), (y, b)))
    return legal_pairs


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
    rows = (dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values()))
    assert legal_by_few(function) == pairs(row for row in rows if legal(function, row))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_covering_arrays_have_every_legal_pair_in_few_cases_of_which_the_last_is_needed(function):
    cases, legal_pairs = covered(function).cases, legal_by_few(function)
    reached = reached_by(cases[:-1])
    assert reached < legal_pairs
    assert reached | pairs_of(cases[-1]) == legal_pairs
    assert covered(function).pairs == len(legal_pairs) > len(cases)
