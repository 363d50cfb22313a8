"""The machine of route: sequences are legal, right implementations pass, lost state is found."""

from dataclasses import replace

import pytest

from conformance.core.space import Space
from conformance.engine.child.outcome import Outcome
from conformance.engine.choose.draw import scope_of
from tests.common.fast import interpreted
from tests.common.machines import cases_of, judge_of, smallest

FAILED = ("FAIL", "CRASH", "HANG", "ERROR")
SCOPE = scope_of("route", Space())


def test_every_sequence_is_legal_and_replays_are_among_them():
    """The twin: a replay alone, which no machine draws, is refused."""
    cases = [case for case, _ in cases_of("route", lambda case: Outcome("PASS"), 40, 8)]
    assert {SCOPE.refused(case) for case in cases} == {None}
    assert sum("backward" in case.steps for case in cases) > len(cases) // 10
    assert SCOPE.refused(replace(cases[0], steps="backward")) is not None


@pytest.mark.parametrize("implementation", ["moe_ref", pytest.param("moe_fast", marks=interpreted)])
def test_a_right_router_passes_every_sequence(implementation):
    judged = cases_of("route", judge_of(implementation), 5, 6)
    assert {outcome.status for _, outcome in judged}.isdisjoint(FAILED)
    assert sum(outcome.status == "PASS" for _, outcome in judged) > 10


@pytest.mark.parametrize(
    ("defect", "steps"),
    [
        ("U36", "record+forward+record+forward+backward"),  # the newest replay first
        ("U38", "record+frozen"),  # counters stay after a frozen batch
    ],
)
def test_a_router_that_loses_state_is_found_and_shrinks_to_a_short_sequence(defect, steps):
    case = smallest("route", judge_of(f"conformance.mutants.planted:{defect}.moe_ref"), 40, 8)
    assert len(case.steps.split("+")) <= len(steps.split("+")), case.steps
    assert case.tokens <= 2
