"""A child that dies, hangs or writes where it must not has its own status; the run goes on."""

import contextlib
import multiprocessing
import re
from dataclasses import replace
from pathlib import Path

import pytest

from conformance.core.case import Case
from conformance.core.scope import Scope
from conformance.engine.choose.plan import Section, cases_of
from conformance.engine.options import ChildOptions, Options
from conformance.engine.run.corpus import find
from conformance.engine.run.ledger import entries
from conformance.engine.run.pool import AHEAD, Pool
from conformance.engine.run.session import Session
from conformance.engine.run.verdict import assemble
from conformance.families.permutation.cases import RoutingCase, routed
from conformance.interface import UsageError
from conformance.report.terminal import failure_lines
from tests.engine.waiting import all_gone

FIXTURES = "tests.engine.misbehaving"
DRAWN = Section("drawn", "permute")
TINY = RoutingCase(function="permute", tokens=3, experts=2, hidden=2, routing=(1, 2, 3))
THIRD_EXPERT = RoutingCase(function="permute", tokens=3, experts=3, hidden=2, routing=(1, 2, 4))


class Swept:
    """One section run to its end, and what it left behind."""

    def __init__(self, implementation: str, folder: Path) -> None:
        self.implementation, self.folder = implementation, folder
        corpus = str(folder / "corpus")
        options = Options(implementation, profile="smoke", device="cpu", jobs=2, corpus=corpus, case_seconds=1.0)
        session = Session(options, folder / "ledger")
        # a reduction ends when no case is smaller, however slow the machine is
        session.profile = replace(session.profile, reduce_seconds=3600)
        with contextlib.closing(session):
            session.start()
            drawn = cases_of(DRAWN, session.profile, session.space, options.seed)
            self.cases = {case.id: case for case in drawn}
            self.failures = session.sweep(DRAWN)
            self.processes = [child.process.pid for child in (*session.pool._children, session.pool._spare) if child]
        self.ledger = list(entries(folder / "ledger"))
        self.verdict = assemble(folder / "ledger", options, 1.0, is_complete=False)

    def found(self, status: str) -> list[Case]:
        """The cases as drawn that had this status."""
        return [
            self.cases[line["id"]] for line in self.ledger if line["kind"] == "outcome" and line["status"] == status
        ]


@pytest.fixture(scope="module", params=["Segfaults", "Hangs", "WritesOutOfBounds", "LeavesRowsUnwritten"])
def swept(request, tmp_path_factory) -> Swept:
    return Swept(f"{FIXTURES}:{request.param}", tmp_path_factory.mktemp(request.param))


# what a fixture does: its status, its finding's output and check, the form of the smallest case
EXPECTED = {
    "Segfaults": ("CRASH", None, lambda case: case.experts == 3),
    "Hangs": ("HANG", None, lambda case: not routed(case).any(0).all()),
    "WritesOutOfBounds": ("FAIL", ("memory", "memory"), lambda case: case.tokens == case.experts == case.hidden == 1),
    "LeavesRowsUnwritten": ("FAIL", ("rows", "exact"), lambda case: routed(case).sum() == 3 and case.hidden == 1),
}


def expected_of(swept: Swept):
    return EXPECTED[swept.implementation.partition(":")[2]]


def test_each_misbehaviour_has_its_status(swept):
    status, finding, _ = expected_of(swept)
    failure = swept.failures[0]
    assert failure.outcome.status == status
    assert finding is None or (failure.outcome.finding["output"], failure.outcome.finding["check"]) == finding
    assert (swept.verdict.exit_code, swept.verdict.functions["permute"].status) == (1, "differs")


def test_one_defect_is_one_failure(swept):
    assert [failure.outcome.status for failure in swept.failures] == [expected_of(swept)[0]]
    assert len(swept.verdict.failures) == 1


def test_the_run_goes_on_to_its_end(swept):
    assert {line["id"] for line in swept.ledger if line["kind"] == "outcome"} == set(swept.cases)
    assert swept.verdict.problems == []
    assert len(swept.verdict.functions["permute"].counts) > 1  # other cases have another status


def test_the_failure_is_reduced(swept):
    status, _, smallest = expected_of(swept)
    case = swept.failures[0].case
    assert smallest(case)
    assert len(case.text) < min(len(failing.text) for failing in swept.found(status))


def test_the_reduced_case_replays(swept):
    failure = swept.failures[0]
    saved = find(failure.case.id, swept.folder / "corpus")
    assert saved == failure.case
    with Pool(ChildOptions(swept.implementation), case_seconds=0.4) as pool:
        assert pool.run_alone(saved).status == failure.outcome.status
    replay = failure_lines(swept.verdict.failures[0], swept.implementation)[-1]
    assert replay.endswith(f"moe-conformance replay {failure.case.id} --impl {swept.implementation}")


def test_nothing_is_left_running(swept):
    assert len(swept.processes) >= 2
    assert all_gone(swept.processes)
    assert multiprocessing.active_children() == []


def test_a_crash_says_where_in_the_implementation_it_was(tmp_path):
    (tmp_path / "faulty.py").write_text("import ctypes\ndef permute(tokens, routing_map):\n    ctypes.string_at(1)\n")
    with Pool(ChildOptions("faulty", search=(str(tmp_path),))) as pool:
        outcome = pool.run_alone(TINY)
    assert outcome.reason == f'SIGSEGV at "{tmp_path}/faulty.py", line 3 in permute'


def test_a_hang_says_how_long_it_was_waited_for_and_where():
    with Pool(ChildOptions(f"{FIXTURES}:Hangs"), case_seconds=0.4) as pool:
        outcome = pool.run_alone(RoutingCase(function="permute", tokens=0, routing=()))
    assert outcome.status == "HANG"
    measured = r"\d+\.\d s of CPU time in \d+\.\d s(, on a machine \d+\.\d times slower than usual)?"
    location = r'at ".*/misbehaving\.py", line \d+ in permute'
    way_out = "if the kernel is only slow, raise --case-seconds"
    assert re.fullmatch(rf"no answer within 2 s {location}: {measured}; {way_out}", outcome.reason)


def test_a_dead_child_costs_no_other_case_its_result():
    with Pool(ChildOptions(f"{FIXTURES}:Segfaults"), jobs=2) as pool:
        outcomes = {case: outcome.status for case, outcome in pool.run([TINY, THIRD_EXPERT] * 3)}
        assert pool.run_alone(TINY).status == "PASS"
    assert outcomes == {TINY: "PASS", THIRD_EXPERT: "CRASH"}


def test_cases_are_taken_a_few_at_a_time():
    taken = []

    def cases():
        for seed in range(3 * AHEAD):
            taken.append(seed)
            yield replace(TINY, seed=seed)

    with Pool(ChildOptions(f"{FIXTURES}:Segfaults")) as pool:
        outcomes = pool.run(cases())
        next(outcomes)
        assert len(taken) <= AHEAD + 1
        assert sum(1 for _ in outcomes) == 3 * AHEAD - 1


def test_a_case_alone_runs_in_a_process_that_has_run_nothing():
    with Pool(ChildOptions(f"{FIXTURES}:Segfaults")) as pool:
        pool.start()
        first, second = pool._fresh(), pool._fresh()
        assert first.process.pid != second.process.pid
        pool._end(first)
        pool._end(second)


# ---- implementations that cannot be imported

MODULES = {
    "raises": ("raise RuntimeError('no such card')", "importing it raised RuntimeError: no such card"),
    "leaves": ("raise SystemExit(3)", "importing it raised SystemExit"),
    "dies": ("import os\nos._exit(3)", r"the process died while importing it \(exit code 3"),
    "crashes": ("import ctypes\nctypes.string_at(1)", r"the process died while importing it \(SIGSEGV at .*crashes.py"),
    "broken": ("def permute(:", "importing it raised SyntaxError"),
    "needy": ("import a_module_that_nobody_has", "it imports 'a_module_that_nobody_has'"),
    "boastful": (
        "def permute(tokens): ...\ndef declares(function): return {'fast': True}",
        "declares 'fast' for permute; the vocabulary is",
    ),
}


@pytest.mark.parametrize("name", MODULES)
def test_what_cannot_be_imported_is_a_usage_error_in_one_sentence(tmp_path, name):
    text, sentence = MODULES[name]
    (tmp_path / f"{name}.py").write_text(text)
    with Pool(ChildOptions(name, search=(str(tmp_path),))) as pool, pytest.raises(UsageError, match=sentence) as raised:
        pool.start()
    assert "\n" not in str(raised.value)
    assert name in str(raised.value)


@pytest.mark.parametrize(
    ("name", "device", "sentence"),
    [
        ("a_module_that_nobody_has", "auto", "no module"),
        ("moe_ref:permutation.nothing", "auto", "moe_ref has no 'permutation.nothing'"),
        ("moe_ref.nothing", "auto", "no module"),
        ("moe_ref", "cuda", "--device cuda: torch sees no GPU"),
    ],
)
def test_what_is_not_there_is_a_usage_error(name, device, sentence, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with Pool(ChildOptions(name, device=device)) as pool, pytest.raises(UsageError, match=sentence):
        pool.start()


def test_an_interrupted_section_tells_what_it_had_found(tmp_path, monkeypatch):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Session, "_confirmed", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Swept(f"{FIXTURES}:LeavesRowsUnwritten", tmp_path)
    failures = [line for line in entries(tmp_path / "ledger") if line["kind"] == "failure"]
    assert [(line["status"], line["smallest"]) for line in failures] == [("FAIL", False)]
    assert Path(failures[0]["file"]).exists()


def test_a_reduction_that_an_error_ends_costs_nothing_but_the_smaller_case(tmp_path, monkeypatch):
    def smaller(scope, case):
        raise ZeroDivisionError("no smaller case")

    monkeypatch.setattr(Scope, "smaller", smaller)
    swept = Swept(f"{FIXTURES}:LeavesRowsUnwritten", tmp_path)
    assert [failure.error for failure in swept.failures] == ["ZeroDivisionError: no smaller case"]
    assert (swept.verdict.exit_code, swept.verdict.problems) == (1, [])
    assert {line["id"] for line in swept.ledger if line["kind"] == "outcome"} == set(swept.cases)


def test_a_signal_while_a_dead_child_is_replaced_still_ends_in_order(monkeypatch):
    """The dead child is ended once; the spare, which was not ready yet, is ended too."""
    with Pool(ChildOptions(f"{FIXTURES}:Segfaults", device="cpu")) as pool:
        pool.start()
        processes = [child.process.pid for child in pool._children]

        def interrupted(child) -> None:
            processes.append(child.process.pid)
            raise KeyboardInterrupt

        monkeypatch.setattr(pool, "_await_ready", interrupted)
        with pytest.raises(KeyboardInterrupt):
            list(pool.run([THIRD_EXPERT]))
    assert len(processes) == 2
    assert all_gone(processes)
