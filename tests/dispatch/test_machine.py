"""The machine of handles, in worlds of real ranks: sequences in any order, on any handle."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from conformance.core.case import CaseError, case_from
from conformance.core.space import Space
from conformance.engine.choose.draw import drawn, scope_of
from conformance.engine.choose.plan import Section
from conformance.engine.choose.plan import cases_of as cases_of_section
from conformance.engine.choose.profiles import PROFILES
from conformance.engine.options import ChildOptions
from conformance.engine.run.pool import Pool
from conformance.engine.run.reduction import reduce
from tests.common.fast import interpreted
from tests.common.machines import cases_of

DISPATCHES = ("allgather_dispatch", "alltoall_dispatch", "deepep_dispatch", "hybridep_dispatch")
REFERENCE = "conformance.peers.reference_world"


@contextmanager
def started(implementation: str) -> Iterator[Pool]:
    with Pool(ChildOptions(implementation, "cpu")) as pool:
        pool.start()
        yield pool


@pytest.mark.parametrize(
    ("function", "implementation"),
    [
        *((name, REFERENCE) for name in DISPATCHES[:2]),
        pytest.param("hybridep_dispatch", "moe_fast", marks=interpreted),
        pytest.param("deepep_dispatch", "moe_fast", marks=interpreted),
    ],
)
def test_right_dispatchers_pass_every_sequence(function, implementation):
    with started(implementation) as pool:
        judged = cases_of(function, pool.answer, 6, 5)
    assert {outcome.status for _, outcome in judged} <= {"PASS", "UNINFORMATIVE", "DECLARED_UNSUPPORTED"}
    assert {case.law for case, _ in judged} == {"sequence"}
    assert sum(outcome.status == "PASS" for _, outcome in judged) > 5


@pytest.mark.parametrize(
    ("defect", "function", "most"),
    [
        ("F02", "alltoall_dispatch", 2),  # the second dispatch writes over the first
        # a handle is right for one combine: three steps show it, four where no copy is sent
        ("C26", "alltoall_dispatch", 4),
        # a cached dispatch has the width of its handle: two steps show it, three without rows
        ("M19", "hybridep_dispatch", 3),
        ("L16", "deepep_dispatch", 3),  # a cached dispatch gives the tokens of its first call
    ],
)
def test_a_handle_that_goes_wrong_is_found_and_shrinks_to_a_short_sequence(defect, function, most):
    with started(f"conformance.mutants.planted:{defect}.moe_ref") as pool:
        case, outcome = cases_of(function, pool.answer, 20, 6)[-1]
        assert (outcome.status, outcome.finding["check"]) == ("FAIL", "sequence")
        shortest = reduce(case, outcome, pool.answer, seconds=3600).case
    assert len(shortest.journey.split("+")) <= most, shortest.text


@pytest.mark.parametrize("function", DISPATCHES)
def test_one_chosen_case_is_a_sequence_and_no_drawn_one(function):
    scope = scope_of(function, Space())
    assert {case.journey for case in drawn(scope.drawn(), 0, 30)} == {""}
    chosen = cases_of_section(Section("covering", function), PROFILES["gate"], Space(ranks=2), 0)
    assert {case.law for case in chosen if case.journey} == {"sequence"}


@pytest.mark.parametrize(
    ("journey", "reason"),
    [("back", "must begin with send"), ("send+again", "alltoall has not"), ("send+there", "joined by")],
)
def test_an_impossible_sequence_is_no_case(journey, reason):
    with pytest.raises(CaseError, match=reason):
        case_from({"function": "alltoall_dispatch", "journey": journey})
