"""A slow case is no hang, and a hang is one in each of its forms, on a busy machine too."""

import contextlib
import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

from conformance.core.case import Case
from conformance.engine.child import processes
from conformance.engine.child.outcome import Outcome
from conformance.engine.child.patience import Patience
from conformance.engine.options import ChildOptions, Options
from conformance.engine.run.hangs import confirmed_hang, with_hangs_confirmed
from conformance.engine.run.pool import Pool
from conformance.engine.run.session import Session
from conformance.families.permutation.cases import RoutingCase
from tests.engine.slow import SLOW_SECONDS
from tests.engine.waiting import BACKSTOP_SECONDS

ONE = RoutingCase(function="permute", tokens=3, experts=1, hidden=2, routing=(1, 1, 1))
TWO = RoutingCase(function="permute", tokens=3, experts=2, hidden=2, routing=(1, 2, 3))
HOGS = 4


@contextlib.contextmanager
def without_a_core(process: int):
    """The process shares one core with many busy ones."""
    core = min(os.sched_getaffinity(process))
    os.sched_setaffinity(process, {core})
    busy = [
        subprocess.Popen(
            [sys.executable, "-c", "while True: pass"],
            start_new_session=True,  # where the scheduler shares out cores by session, each has its share
            preexec_fn=lambda: os.sched_setaffinity(0, {core}),
        )
        for _ in range(HOGS)
    ]
    try:
        yield
    finally:
        for hog in busy:
            hog.kill()
        for hog in busy:
            hog.wait()


def test_a_slow_case_without_a_core_passes_although_its_limit_is_over_by_the_clock_on_the_wall():
    limit = 3 * SLOW_SECONDS
    with Pool(ChildOptions("tests.engine.slow:Slow", "cpu"), case_seconds=limit) as pool:
        pool.start()
        with without_a_core(pool._children[0].process.pid):
            outcome = pool.answer(TWO)
    assert outcome.status == "PASS"
    assert outcome.seconds > limit


@pytest.mark.parametrize("name", ["Spins", "Sleeps", "Deadlocks", "HoldsTheInterpreter"])
def test_each_way_to_hang_is_a_hang_with_its_place_even_without_a_core(name):
    with Pool(ChildOptions(f"tests.engine.slow:{name}", "cpu"), case_seconds=0.4) as pool:
        pool.start()
        with without_a_core(pool._children[0].process.pid):
            outcome = pool.answer(TWO)
        confirmed = confirmed_hang(TWO, outcome, pool, 60.0)
    assert (outcome.status, confirmed.status) == ("HANG", "HANG")
    assert '/slow.py", line ' in outcome.reason
    assert confirmed.reason.startswith("no answer within 2 s at ")


def test_code_that_goes_on_is_not_interrupted_to_say_where_it_is(monkeypatch):
    with Pool(ChildOptions("tests.engine.slow:Spins", "cpu"), case_seconds=0.4) as pool:
        pool.start()
        monkeypatch.setattr(processes, "PLACE_SECONDS", BACKSTOP_SECONDS)
        kill, signals = os.kill, []
        monkeypatch.setattr(os, "kill", lambda process, number: (signals.append(number), kill(process, number)))
        assert '/slow.py", line ' in pool.answer(TWO).reason
    assert signal.SIGUSR1 not in signals and signal.SIGKILL in signals


def test_a_place_is_a_line_of_a_traceback_and_nothing_that_broke_into_it(tmp_path):
    frame = 'File "/kernels.py", line 3 in permute'
    log = tmp_path / "log"
    log.write_text(f"Current thread 0x1:\n  File Fatal Python error: Segmentation fault\n\n  {frame}\n")
    assert processes.at(str(log)) == ' at "/kernels.py", line 3 in permute'


# ---- confirmation

HANG = Outcome("HANG", reason="no answer")


class Fake:
    """A pool in which cases have set outcomes, and a case alone takes from a list."""

    def __init__(self, *outcomes_alone: Outcome, calls_before: tuple[Case, ...] = ()) -> None:
        self.patience = Patience(60.0)
        self.alone, self._before, self.hung = list(outcomes_alone), calls_before, False
        self.ran: list[Case] = []

    def has_hung(self, function: str) -> bool:
        return self.hung

    def before(self, case: Case) -> list[Case]:
        return list(self._before)

    def run_alone(self, case: Case) -> Outcome:
        self.ran.append(case)
        outcome = self.alone.pop(0)
        self.hung = self.hung or outcome.status == "HANG"
        return outcome


PASSES = Outcome("PASS")


AFTER_ONE = replace(TWO, before=(ONE,))


@pytest.mark.parametrize(
    ("pool", "outcomes", "ran"),
    [
        (Fake(PASSES), [PASSES], [TWO]),
        (Fake(PASSES, HANG, calls_before=(ONE,)), ["HANG"], [TWO, AFTER_ONE]),
        # a function whose case passed in both ways is not searched again
        (Fake(PASSES, PASSES, PASSES, calls_before=(ONE,)), [PASSES, PASSES], [TWO, AFTER_ONE, TWO]),
    ],
)
def test_a_hang_is_confirmed_alone_or_after_the_calls_before_it(pool, outcomes, ran):
    confirmed = [confirmed_hang(TWO, HANG, pool, 60.0) for _ in outcomes]
    assert [x if x is PASSES else x.status for x in confirmed] == outcomes
    assert pool.ran == ran


def test_a_function_hangs_alone_only_once_and_hangs_come_last():
    pool = Fake(HANG)
    outcomes = list(with_hangs_confirmed(iter([(ONE, HANG), (TWO, HANG), (TWO, PASSES)]), pool, 60.0))
    assert outcomes == [(TWO, PASSES), (ONE, HANG), (TWO, HANG)]
    assert pool.ran == [ONE]


def test_a_case_that_had_no_time_to_run_alone_is_not_run():
    def interrupted():
        yield ONE, HANG
        raise KeyboardInterrupt

    answers = with_hangs_confirmed(interrupted(), Fake(), 60.0)
    case, outcome = next(answers)
    assert (case, outcome.status) == (ONE, "NOT_RUN")
    assert outcome.reason == "the run ended before it ran alone: no answer"
    with pytest.raises(KeyboardInterrupt):
        next(answers)


# ---- whole runs


@pytest.mark.parametrize(
    ("name", "limit", "failures"),
    [
        *(("Slow", 3 * SLOW_SECONDS, []), ("HangsOnce", 0.4, [])),
        *(("HangsLater", 0.4, [("HANG", 1)]), ("Sleeps", 0.4, [("HANG", 0)])),
    ],
)
def test_a_run_reports_the_hangs_that_are_confirmed_and_no_others(name, limit, failures, tmp_path, monkeypatch):
    """By their status, and the number of calls before the reduced case."""
    monkeypatch.chdir(tmp_path)
    where = {"profile": "smoke", "device": "cpu", "function": "permute", "corpus": str(tmp_path / "corpus")}
    options = Options(f"tests.engine.slow:{name}", jobs=1, case_seconds=limit, **where)
    session = Session(options, tmp_path / "ledger")
    session.profile = replace(session.profile, reduce_seconds=3600)
    with contextlib.closing(session):
        session.start()
        session.corpus = [replace(ONE, seed=seed) for seed in range(3)] + [TWO]
        section = next(section for section in session.plan if section.kind == "corpus")
        outcomes = session.sweep(section)
    assert [(failure.outcome.status, len(failure.case.before)) for failure in outcomes] == failures
