"""A failure that needs earlier calls is shown with as few of them as bring it back."""

import contextlib
from dataclasses import replace

import pytest

from conformance.core.case import CaseError, case_from
from conformance.engine.child.outcome import Outcome
from conformance.engine.options import Options
from conformance.engine.run.corpus import checked
from conformance.engine.run.preceding_calls import with_calls_before
from conformance.engine.run.reduction import failure_key, reduce
from conformance.engine.run.session import Session
from conformance.families.dispatch.cases import DispatchCase
from conformance.families.permutation.cases import ChunksCase, RoutingCase
from conformance.report.terminal import picture
from tests.engine.reduction_helpers import LONG, failed, failing_if

TINY = RoutingCase(function="permute", tokens=3, experts=2, hidden=2, routing=(1, 2, 3))
CAUSE = RoutingCase(function="permute", tokens=2, experts=1, hidden=2, routing=(1, 1))
OTHERS = tuple(replace(TINY, seed=seed) for seed in range(1, 6))
CHUNKS = ChunksCase(function="sort_chunks", sizes=(2, 1), order=(1, 0), hidden=2)


def attempts_needing(*needed):
    """An attempt that fails after all these calls, and the cases attempted."""
    return failing_if(lambda case: all(call in case.before for call in needed))


def test_the_last_calls_that_bring_the_failure_back_are_part_of_the_case():
    attempt, tried = attempts_needing(CAUSE)
    ran = (*OTHERS[:2], CAUSE, *OTHERS[2:])
    shown, outcome = with_calls_before(TINY, failed(), ran, attempt, LONG)
    assert (shown, outcome) == (replace(TINY, before=ran[2:]), failed())
    assert [len(case.before) for case in tried] == [1, 2, 4]


def test_calls_of_other_functions_are_tried_after_those_of_its_own():
    attempt, tried = attempts_needing(CHUNKS)
    shown, _ = with_calls_before(TINY, failed(), (CHUNKS, *OTHERS), attempt, LONG)
    assert shown.before == (CHUNKS, *OTHERS)
    assert [len(case.before) for case in tried] == [1, 2, 4, 5, 1, 2, 4, 6]


def test_calls_before_calls_count_once():
    attempt, _ = attempts_needing(CAUSE)
    reduced = with_calls_before(TINY, failed(), [replace(OTHERS[0], before=(CAUSE,))], attempt, LONG)
    assert reduced is not None and reduced[0].before == (CAUSE, OTHERS[0])


@pytest.mark.parametrize("calls_again", [Outcome("PASS"), failed("probs"), Outcome("CRASH")], ids=lambda x: x.status)
def test_a_failure_that_no_calls_bring_back_stays_as_it_is(calls_again):
    assert with_calls_before(TINY, failed(), OTHERS, lambda case: calls_again, LONG) is None
    assert with_calls_before(TINY, failed(), (), lambda case: failed(), LONG) is None
    assert with_calls_before(TINY, failed(), OTHERS, lambda case: failed(), -1) is None


def test_calls_before_are_left_out_and_made_smaller():
    attempt, _ = failing_if(lambda case: sum(call.experts == 1 and call.tokens > 1 for call in case.before) > 1)
    reduced = reduce(replace(TINY, before=(*OTHERS, CAUSE, *OTHERS, CAUSE, CAUSE)), failed(), attempt, LONG)
    least = RoutingCase(function="permute", tokens=2, experts=1, hidden=0, routing=(0, 0))
    assert reduced.finished
    assert reduced.case.before == (least, least)
    assert (reduced.case.tokens, reduced.case.hidden) == (0, 0)


def test_the_record_holds_the_calls_before():
    case = replace(TINY, before=(CAUSE, CHUNKS))
    assert case_from(case.record()) == checked(case) == case
    assert case.id != TINY.id
    assert picture(case) == f"{picture(TINY)}, after permute({picture(CAUSE)}), then sort_chunks({picture(CHUNKS)})"


RANKED = DispatchCase(function="alltoall_dispatch", counts=(1, 1), local_experts=1, hidden=1)


@pytest.mark.parametrize(
    "record, sentence",
    [
        (TINY.record() | {"before": 3}, "must be a list of cases"),
        (TINY.record() | {"before": [TINY.record(), {"function": "fly"}]}, r"before\[1\]: function is 'fly'"),
        (TINY.record() | {"before": [replace(TINY, before=(CAUSE,)).record()]}, "a before of its own"),
        (RANKED.record() | {"before": [TINY.record()]}, "several ranks run before one of several"),
        (TINY.record() | {"before": [RANKED.record()]}, "several ranks run before one of several"),
        (TINY.record() | {"before": [replace(TINY, law="gravity").record()]}, r"before\[0\]: law is 'gravity'"),
    ],
)
def test_calls_before_that_cannot_run_are_refused(record, sentence):
    with pytest.raises(CaseError, match=sentence):
        checked(case_from(record))


def smallest(name, folder):
    """What a session reports after four cases with one expert and one with two, which fails."""
    causes = [RoutingCase(function="permute", tokens=0, experts=1, hidden=0)] * 4
    failing = RoutingCase(function="permute", tokens=1, experts=2, hidden=1, routing=(1,))
    options = Options(
        f"tests.engine.misbehaving:{name}", profile="nightly", device="cpu", jobs=1, corpus=str(folder / "corpus")
    )
    with contextlib.closing(Session(options, folder / "ledger")) as session:
        session.start()
        ran = list(session.pool.run([*causes, failing]))
        ((case, outcome),) = [(case, outcome) for case, outcome in ran if outcome.status == "FAIL"]
        failure = session.smallest(failure_key(case, outcome), case, outcome, "here")
        assert failure is not None
        return failure, session.pool.run_alone(failure.case).status


def test_a_session_reports_a_case_that_fails_alone_with_its_calls_before(tmp_path):
    failure, outcome_alone = smallest("Remembers", tmp_path)
    assert (failure.outcome.status, failure.smallest, outcome_alone) == ("FAIL", True, "FAIL")
    assert len(failure.case.before) == 3
    assert {call.experts for call in failure.case.before} == {1}


def test_a_fault_that_does_not_come_back_is_flaky(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    failure, outcome_alone = smallest("WrongOnce", tmp_path)
    assert (failure.outcome.status, failure.case.before, outcome_alone) == ("FLAKY", (), "PASS")
    assert "after the calls before it" in failure.outcome.reason
