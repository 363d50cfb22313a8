"""A mistake without memory is not put down to the call before it."""

from conformance.catalogue import CONTRACTS
from conformance.core.universal_laws import neighbours
from conformance.engine.child.outcome import Outcome
from conformance.engine.run.blame import blamed
from conformance.families.permutation.cases import RoutingCase

CASE = RoutingCase(function="permute", tokens=3, experts=2, hidden=4, routing=(1, 2, 3), law="history")
AFTER_ANOTHER = Outcome("FAIL", finding={"output": "rows", "check": "history", "message": "after another case it …"})
ALONE = Outcome("FAIL", finding={"output": "rows", "check": "exact", "message": "…"})


def test_a_second_call_that_fails_alone_is_the_failure():
    for failing in neighbours(CONTRACTS["permute"], CASE):
        blame = blamed(CASE, AFTER_ANOTHER, lambda case, failing=failing: ALONE if case == failing else Outcome("PASS"))
        assert blame == (failing, ALONE)
        assert failing.law == ""


def test_a_second_call_that_passes_alone_fails_because_of_the_first():
    assert blamed(CASE, AFTER_ANOTHER, lambda case: Outcome("PASS")) == (CASE, AFTER_ANOTHER)


def test_another_failure_needs_no_further_run():
    def never(case):
        raise AssertionError(case)

    assert blamed(CASE, ALONE, never) == (CASE, ALONE)
    assert blamed(CASE, Outcome("CRASH"), never) == (CASE, Outcome("CRASH"))
