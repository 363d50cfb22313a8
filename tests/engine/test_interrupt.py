"""Signals: noted, raised, or raised at the end of a block that starts a process."""

import os
import signal
import time
from types import SimpleNamespace

import pytest

from conformance.engine.options import Options
from conformance.engine.run import interrupt, session


def test_a_signal_outside_the_run_is_noted_and_raised_when_the_run_begins():
    with interrupt.noted():
        os.kill(os.getpid(), signal.SIGTERM)
        assert interrupt.reason() == "SIGTERM"
        with pytest.raises(KeyboardInterrupt), interrupt.interruptible():
            pytest.fail("the run has begun")


def test_a_signal_ends_the_run_and_a_second_one_changes_nothing():
    reached = []
    with interrupt.noted():
        with pytest.raises(KeyboardInterrupt), interrupt.interruptible():
            os.kill(os.getpid(), signal.SIGINT)
            reached.append("after the signal")
        os.kill(os.getpid(), signal.SIGTERM)
        assert (interrupt.reason(), reached) == ("SIGINT", [])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_in_a_destructor_whose_exception_python_drops_is_raised_at_the_next_step():
    class Freed:
        def __del__(self):
            os.kill(os.getpid(), signal.SIGTERM)

    reached = []
    with interrupt.noted(), pytest.raises(KeyboardInterrupt), interrupt.interruptible():
        Freed()
        reached.append("after the signal")
        interrupt.check()
        reached.append("the next step")
    assert reached == ["after the signal"]


@pytest.mark.parametrize("deferring", [True, False])
def test_a_signal_while_a_process_starts_is_raised_when_it_has_an_owner(deferring):
    owned = []
    with interrupt.noted(), pytest.raises(KeyboardInterrupt), interrupt.interruptible():
        if deferring:
            with interrupt.deferred():
                os.kill(os.getpid(), signal.SIGTERM)
                owned.append("process")
        os.kill(os.getpid(), signal.SIGTERM)
        owned.append("more")
    assert owned == ["process"] * deferring


def test_a_block_without_a_signal_leaves_the_run_interruptible():
    with interrupt.noted(), pytest.raises(KeyboardInterrupt), interrupt.interruptible():
        with interrupt.deferred():
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        pytest.fail("not raised")


def test_outside_a_run_nothing_is_raised_by_the_module():
    with interrupt.noted(), interrupt.deferred():
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is not interrupt._note


def test_the_time_limit_counts_from_when_it_was_set(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(interrupt, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with interrupt.noted():
        interrupt.limit(3600.0)
        now[0] = 3599.9
        with pytest.raises(KeyboardInterrupt), interrupt.interruptible():
            time.sleep(600)
        assert interrupt.reason() == interrupt.TIME_LIMIT


def test_a_run_that_was_ended_early_does_not_end_the_next_one():
    with interrupt.noted():
        os.kill(os.getpid(), signal.SIGTERM)
    with interrupt.interruptible():
        pass
    assert interrupt.reason() == ""


@pytest.mark.parametrize("line", ["start", "run", "close"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_signal_at_any_time_before_the_verdict_is_in_the_verdict(monkeypatch, tmp_path, line, number):
    class Quick(session.Session):
        def __init__(self, *_, **__):
            for name in ("start", "run", "find_footprints", "close"):
                setattr(self, name, lambda name=name: name == line and os.kill(os.getpid(), number))

        def verdict(self, folder, is_complete, interrupted, may_be_empty):
            return interrupted

    monkeypatch.setattr(session, "Session", Quick)
    with interrupt.noted():
        assert session.judge_with(Options("moe_ref", corpus=str(tmp_path)), tmp_path) == number.name
        line = ""
    with interrupt.noted():
        assert session.judge_with(Options("moe_ref", corpus=str(tmp_path)), tmp_path) == ""


def test_a_signal_before_the_children_have_started_ends_in_a_verdict(monkeypatch, tmp_path):
    def killed(_):
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(session.corpus, "read_folder", killed)
    with interrupt.noted():
        verdict = session.judge_with(Options("moe_ref", corpus=str(tmp_path)), tmp_path)
    assert (verdict.verdict, verdict.exit_code, verdict.ended_by) == ("INTERRUPTED", 4, "SIGTERM")
