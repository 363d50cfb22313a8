"""What counts against a case's limit: its CPU time and its sleep, but no time without a core."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from conformance.engine.child import patience
from conformance.engine.child.patience import CONFIRMING, LOOK_SECONDS, SHORT_SECONDS, CaseClock, Patience, usage
from tests.engine.waiting import until


class Machine:
    """Processes that use CPU time as the test says, on a clock that the test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.processes: dict[int, tuple[float, bool]] = {}
        monkeypatch.setattr(patience, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(patience, "usage", lambda process: self.processes[process])
        self.paces(monkeypatch, 1.0)

    def paces(self, monkeypatch: pytest.MonkeyPatch, pace: float) -> None:
        monkeypatch.setattr(patience, "pace", lambda: pace)

    def run(self, clock: CaseClock, seconds: float, looks: int, **shares: float | None) -> None:
        """Let time pass with `looks` looks. Shares of a core by "p" and id; None: it sleeps."""
        for _ in range(looks):
            self.now += seconds / looks
            for name, share in shares.items():
                used, _ = self.processes.get(int(name[1:]), (0.0, False))
                self.processes[int(name[1:])] = used + (share or 0.0) * seconds / looks, share is not None
            assert clock.seconds >= 0


@pytest.fixture
def machine(monkeypatch) -> Machine:
    return Machine(monkeypatch)


def clock_of(machine: Machine, *processes: int) -> CaseClock:
    """A clock that has looked once, at processes without any CPU time."""
    clock = CaseClock(processes)
    machine.processes |= dict.fromkeys(processes, (0.0, True))
    machine.now += LOOK_SECONDS
    assert clock.seconds == 0
    return clock


@pytest.mark.parametrize(
    ("shares", "looks", "seconds"),
    [
        ({"p1": 0.1}, 500, 10.0),  # a tenth of a core uses a tenth of the time
        ({"p1": 1.0}, 500, 100.0),  # a busy loop
        ({"p1": None}, 500, 100.0),  # a process that sleeps uses all of the time
        ({"p1": 16.0}, 500, 100.0),  # many threads use no more than the time that passes
        ({"p1": 0.1, "p2": None}, 500, 10.0),  # a rank that waits for a rank without a core uses no time
        ({"p1": None}, 2, 4 * LOOK_SECONDS),  # what a parent without a core has missed does not count
    ],
)
def test_what_counts_of_100_seconds(machine, shares, looks, seconds):
    clock = clock_of(machine, *(int(name[1:]) for name in shares))
    machine.run(clock, 100.0, looks, **shares)
    assert clock.seconds == pytest.approx(seconds)


def test_a_limit_is_longer_on_a_slow_machine_and_the_reason_says_so(machine, monkeypatch):
    clock = clock_of(machine, 1)
    machine.paces(monkeypatch, 3.0)
    machine.run(clock, 100.0, 500, p1=1.0)
    assert clock.passed(30.0)
    assert not clock.passed(40.0)
    assert clock.told == "100.0 s of CPU time in 100.2 s, on a machine 3.0 times slower than usual"


def test_a_case_alone_has_a_longer_limit_and_a_function_that_hung_a_short_one(machine):
    limits = Patience(60.0)
    clock = clock_of(machine, 1)
    assert (limits.allowed("permute"), limits.allowed("permute", is_only=True)) == (60.0, CONFIRMING * 60.0)
    limits.hangs("permute", clock, 60.0, is_only=False)
    assert limits.hung == {}
    assert (limits.allowed("permute"), limits.allowed("permute", is_only=True)) == (SHORT_SECONDS, CONFIRMING * 60.0)
    limits.hangs("permute", clock, CONFIRMING * 60.0, is_only=True)
    assert (limits.allowed("permute"), limits.allowed("permute", is_only=True)) == (SHORT_SECONDS, SHORT_SECONDS)
    assert limits.allowed("unpermute") == 60.0


def test_a_reason_names_the_limit_what_was_measured_and_the_way_out(machine):
    limits = Patience(60.0)
    clock = clock_of(machine, 1)
    machine.run(clock, 300.0, 1500, p1=1.0)
    measured = "300.0 s of CPU time in 300.2 s; if the kernel is only slow, raise --case-seconds"
    assert limits.hangs("permute", clock, 300.0, True, " at x") == f"no answer within 300 s at x: {measured}"
    short = "no answer within 2 s (the function has hung for 300 s): "
    assert limits.hangs("permute", clock, 2.0, True).startswith(short)


# ---- processes of this machine

BUSY = "while True: pass"
IDLE = "import time\nprint(flush=True)\ntime.sleep(3600)"
PARENT = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {BUSY!r}])"


@pytest.fixture
def started(request):
    process = subprocess.Popen(
        [sys.executable, "-c", request.param], stdout=subprocess.PIPE, start_new_session=True, text=True
    )
    yield process
    os.killpg(process.pid, 9)
    process.wait()
    process.stdout.close()


@pytest.mark.parametrize("started", [BUSY, PARENT], indirect=True)
def test_a_busy_process_and_a_busy_descendant_are_seen(started):
    assert until(lambda: usage(started.pid) >= (0.3, True))


@pytest.mark.parametrize("started", [IDLE], indirect=True)
def test_a_process_that_sleeps_is_not_runnable(started):
    started.stdout.readline()
    assert until(lambda: not usage(started.pid)[1])
    used = usage(started.pid)[0]
    assert [usage(started.pid) for _ in range(100)] == [(used, False)] * 100


def test_a_process_that_is_gone_uses_nothing():
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert usage(gone.pid) == (0.0, False)


def test_a_machine_is_never_faster_than_usual():
    assert 1.0 <= patience.pace() <= patience.LARGEST_PACE
