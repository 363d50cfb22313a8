"""A failure of ranks that needs earlier calls is shown with as few of them as bring it back."""

import contextlib
import json
from dataclasses import replace

import pytest

from conformance.core.case import Case, case_from
from conformance.engine.child.outcome import Outcome
from conformance.engine.options import ChildOptions, Options
from conformance.engine.run.corpus import checked
from conformance.engine.run.pool import Pool
from conformance.engine.run.reduction import failure_key, reduce
from conformance.engine.run.session import Session
from conformance.families.dispatch.cases import DispatchCase
from conformance.families.router.cases import GateCase
from tests.engine.reduction_helpers import LONG, failed
from tests.engine.world_fixtures import ShiftCase

pytestmark = pytest.mark.usefixtures("with_shift")
LONGER = ShiftCase(function="shift", ranks=2, rows=4)
WRONG = ShiftCase(function="shift", ranks=2, rows=2)
OTHERS = (replace(WRONG, rows=0), replace(WRONG, rows=1))


@contextlib.contextmanager
def session_of(name, folder):
    name, saved = f"tests.engine.world_fixtures:{name}", str(folder / "corpus")
    options = Options(name, profile="nightly", device="cpu", jobs=1, corpus=saved)
    with contextlib.closing(Session(options, folder / "ledger")) as session:
        session.start()
        session.pool.worlds.max_ranks = 2
        yield session


def test_a_world_reports_a_case_that_fails_alone_with_its_calls_before(tmp_path):
    with session_of("KEEPS", tmp_path) as session:
        ran = list(session.pool.run([*OTHERS, LONGER, OTHERS[0], WRONG]))
        ((case, outcome),) = [(case, outcome) for case, outcome in ran if outcome.status == "FAIL"]
        assert (case, session.pool.before(case)) == (WRONG, [*OTHERS, LONGER, OTHERS[0]])
        failure = session.smallest(failure_key(case, outcome), case, outcome, "here")
        assert failure is not None
        assert (failure.outcome.status, failure.smallest) == ("FAIL", True)
        # rank 1 gave back the buffer that it had two calls before
        first, two = (ShiftCase(function="shift", ranks=2, rows=rows) for rows in (1, 2))
        assert failure.case == replace(first, before=(two, replace(first, rows=0)))
        reread = checked(case_from(json.loads(failure.case.text)))
        assert session.pool.run_alone(reread).status == "FAIL"
        assert session.pool.run_alone(replace(reread, before=reread.before[1:])).status == "PASS"


def test_a_call_before_that_ends_the_ranks_is_named(tmp_path):
    with session_of("DIES", tmp_path) as session:
        outcome = session.pool.run_alone(replace(WRONG, before=(replace(WRONG, ranks=1), WRONG)))
        assert outcome.status == "NOT_RUN"
        assert outcome.reason.startswith("before[1] ended the ranks: rank 1 of 2: SIGABRT")


def test_a_case_of_ranks_keeps_its_ranks_while_others_run_before_it():
    tried: list[Case] = []

    def attempt(case: Case) -> Outcome:
        tried.append(case)
        return failed() if case.before else Outcome("PASS")

    gate = GateCase(function="gate", counts=(1, 1), experts=1, hidden=1)
    reduced = reduce(replace(gate, before=(gate,)), failed(), attempt, LONG)
    assert reduced.finished
    assert {bool(call.counts) for case in tried if case.before for call in (case, *case.before)} == {True}
    assert any(not case.before and not case.counts for case in tried) is False


def test_a_dispatcher_that_keeps_an_older_buffer_has_a_small_case():
    """AD77: two rows, then any call, then one row, which is that of the first call."""
    first = DispatchCase(function="alltoall_dispatch", hidden=5, slots=(0,))
    two = replace(first, local_experts=2, topk=2, slots=(1, 0), seed=1)
    case = checked(case_from(json.loads(replace(first, before=(two, first)).text)))
    with Pool(ChildOptions("conformance.mutants.planted:AD77.moe_ref", "cpu")) as pool:
        pool.start()
        assert pool.run_alone(case).status == "FAIL"
        assert pool.run_alone(replace(case, before=(first, first))).status == "PASS"
