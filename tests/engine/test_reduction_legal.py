"""Reduction tries only legal cases and ends at a minimum."""

from types import SimpleNamespace

import pytest

from conformance.catalogue import CONTRACTS
from conformance.core.case import Case
from conformance.core.space import Space
from conformance.engine.child.outcome import Outcome
from conformance.engine.choose.draw import drawn, scope_of, strategy
from conformance.engine.choose.plan import fixed_cases
from conformance.engine.run import reduction
from conformance.engine.run.reduction import failure_key, reduce
from conformance.families.permutation.cases import ChunksCase
from tests.engine.reduction_helpers import EVERY_LARGE, LARGE, LONG, failed, failing_if
from tests.engine.reduction_helpers import two_tokens_and_somebody_in_a_third_expert as is_needed


def test_what_differs_only_in_its_words_is_the_same_failure():
    reworded = Outcome("FAIL", {"output": "rows", "check": "exact", "message": "row 3", "index": (3,)})
    assert failure_key(LARGE, reworded) == failure_key(LARGE, failed())
    assert failure_key(LARGE, failed("probs")) != failure_key(LARGE, failed())
    nan = Outcome("FAIL", reworded.finding | {"nan": "rows"})
    assert failure_key(LARGE, nan) != failure_key(LARGE, reworded)


def test_time_that_runs_out_leaves_the_smallest_case_so_far(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(reduction, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def attempt(case):
        now[0] += 1.0
        return failed() if is_needed(case) else Outcome("PASS")

    reduced = reduce(LARGE, failed(), attempt, seconds=4.0)
    assert (reduced.finished, reduced.attempts) == (False, 5)
    assert is_needed(reduced.case)


def test_no_time_leaves_the_case_as_it_is():
    attempt, tried = failing_if(lambda case: True)
    reduced = reduce(LARGE, failed(), attempt, seconds=-1)
    assert (reduced.case, reduced.finished, tried) == (LARGE, False, [])


def test_no_case_is_tried_twice():
    attempt, tried = failing_if(is_needed)
    reduce(LARGE, failed(), attempt, LONG)
    assert len({case.text for case in tried}) == len(tried)


@pytest.mark.parametrize("function", CONTRACTS)
def test_literal_cases_are_not_reduced(function):
    for case in fixed_cases(function, Space()):
        attempt, tried = failing_if(lambda case: True)
        reduced = reduce(case, failed(), attempt, LONG)
        assert (reduced.case, reduced.finished, tried) == (case, True, [])


@pytest.mark.parametrize("function", CONTRACTS)
def test_only_legal_cases_are_tried(function):
    contract = CONTRACTS[function]
    small = [case for case in drawn(strategy(function, Space()), 5, 12) if work(case) < 2000]
    for turn, case in enumerate(small):
        candidates = list(scope_of(case.function, Space()).smaller(case))
        for simpler in candidates[turn % 4 :: len(candidates) // 4 + 1]:
            problem = contract.problem(simpler)
            assert set(problem.wanted) <= set(problem.tensors)
            contract.expected(simpler, problem, {})


def work(case: Case) -> int:
    """Elements of the case, so that large ones can be left out."""
    chunks = isinstance(case, ChunksCase)
    rows = sum(case.sizes) + case.tail if chunks else getattr(case, "tokens", 1) * getattr(case, "experts", 1)
    return rows * max(getattr(case, "hidden", 1), 1)


@pytest.mark.parametrize("case", EVERY_LARGE, ids=lambda c: c.function)
def test_whatever_fails_a_reduction_ends(case):
    """Everything fails: the greedy walk reaches a case that nothing is simpler than."""
    reduced = reduce(case, failed(), lambda smaller: failed(), LONG)
    assert reduced.finished
    smaller = scope_of(case.function, Space()).smaller(reduced.case)
    assert [simpler for simpler in smaller if len(simpler.text) < len(reduced.case.text)] == []
