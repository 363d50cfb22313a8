"""Decides when a case hangs: its time limit, and the time that counts against it.

A busy machine makes an honest kernel slow, so the limit is not a limit of wall time. The parent
looks at the processes of the case a few times per second, without their help. If a thread is
running or waits for a core, the CPU time since the last look counts, but at most the time that has
passed: a busy loop uses up its limit, and a kernel that gets a tenth of a core uses it ten times
more slowly. If all threads sleep, as in a deadlock or while they wait for a GPU, the time that has
passed counts. Time that a starved parent missed between two looks does not count. At the limit the
parent measures the pace of the machine, by the CPU time of a fixed piece of work: if it is three
times slower than usual, the limit is three times longer. A case beyond its limit is a suspect. It
runs again without other cases and with CONFIRMING times the limit, and only then is it a HANG.
After a function has hung in this way, its other cases get a short limit and run only once.
"""

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

LOOK_SECONDS = 0.2  # seconds between two looks at the processes of a case
SHORT = 10  # the limit of a function that has hung, in multiples of its slowest answer
SHORT_SECONDS = 2.0  # the shortest such limit, in seconds
CONFIRMING = 5  # limit of a case that runs alone, in multiples of the limit beside others
WORK, USUAL_SECONDS = 500_000, 0.05  # the fixed piece of work: additions, and their time on a usual core
LARGEST_PACE = 16.0
TICKS = os.sysconf("SC_CLK_TCK")
RUNNABLE = "R"  # the state of a thread that runs or waits for a core


@dataclass
class Patience:
    """The limits of cases, in seconds of a `CaseClock`."""

    case_seconds: float
    slowest: float = 0.0
    suspected: set[str] = field(default_factory=set)  # functions with a case beyond its limit
    hung: dict[str, float] = field(default_factory=dict)  # functions that hung while no other case ran, with the limit
    slow: set[str] = field(default_factory=set)  # functions whose suspects are not made to hang by earlier calls

    def answered(self, seconds: float) -> None:
        self.slowest = max(self.slowest, seconds)

    def allowed(self, function: str, is_only: bool = False) -> float:
        """The limit of a case: short for a function that has hung, long for a case alone."""
        if function in self.hung or (function in self.suspected and not is_only):
            return min(self.case_seconds, max(SHORT * self.slowest, SHORT_SECONDS))
        return CONFIRMING * self.case_seconds if is_only else self.case_seconds

    def hangs(self, function: str, clock: "CaseClock", limit: float, is_only: bool, silent: str = "") -> str:
        """Note that a case was over its limit; returns the reason, for its outcome.

        Args:
            silent: where its processes are.
        """
        earlier_limit = self.hung.get(function)
        if is_only:
            self.hung[function] = max(limit, earlier_limit or 0.0)
        self.suspected.add(function)
        short = f" (the function has hung for {earlier_limit:.0f} s)" if earlier_limit and earlier_limit > limit else ""
        way_out = "if the kernel is only slow, raise --case-seconds"
        return f"no answer within {limit:.0f} s{short}{silent}: {clock.told}; {way_out}"


class CaseClock:
    """Measures the seconds that count against a case; see the module.

    Args:
        processes: of the case, by id, without their descendants, which the clock finds. A rank on
            another host cannot be looked at.
    """

    def __init__(self, processes: Sequence[int]) -> None:
        self._processes = processes
        self._started = self._looked = time.monotonic()
        self._used: dict[int, float] = {}  # CPU seconds of the processes at the last look
        self._counted = self._cpu = 0.0
        self._pace = 1.0

    @property
    def seconds(self) -> float:
        """The seconds that count so far.

        Looks at the processes if the last look was LOOK_SECONDS ago.
        """
        if time.monotonic() - self._looked >= LOOK_SECONDS:
            self._look()
        return self._counted

    def passed(self, limit: float) -> bool:
        """Whether the limit is over, on a machine that is as slow as this one is at present."""
        if self.seconds >= limit * self._pace:
            self._pace = max(self._pace, pace())
        return self.seconds >= limit * self._pace

    @property
    def told(self) -> str:
        """What was measured, in words."""
        wall = time.monotonic() - self._started
        slow = f", on a machine {self._pace:.1f} times slower than usual" if self._pace > 1 else ""
        return f"{self._cpu:.1f} s of CPU time in {wall:.1f} s{slow}"

    def _look(self) -> None:
        now = time.monotonic()
        elapsed, self._looked = now - self._looked, now
        most, wanted = 0.0, False
        for process in self._processes:
            used, runnable = usage(process)
            step = max(used - self._used.get(process, used), 0.0)  # the first look has no look before it
            self._used[process] = used
            self._cpu += step
            most, wanted = max(most, step), wanted or runnable
        self._counted += min(most, elapsed) if wanted else min(elapsed, 2 * LOOK_SECONDS)


def usage(process: int) -> tuple[float, bool]:
    """The CPU seconds of a process and its descendants, and whether one of their threads runs or
    waits for a core. For a process that is gone, and on a system without /proc, it is 0 and False:
    then all time counts.
    """
    seconds, runnable = 0.0, False
    for process_id in _tree(process):
        with contextlib.suppress(OSError):
            fields = _stat(f"/proc/{process_id}/stat")
            seconds += sum(map(int, fields[11:15])) / TICKS  # with that of its children that have ended
            threads = os.listdir(f"/proc/{process_id}/task")
            runnable = runnable or any(_is_runnable(f"/proc/{process_id}/task/{thread}/stat") for thread in threads)
    return seconds, runnable


def _tree(process: int) -> Iterator[int]:
    yield process
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{process}/task"):
            with open(f"/proc/{process}/task/{thread}/children") as children:
                for child in children.read().split():
                    yield from _tree(int(child))


def _is_runnable(path: str) -> bool:
    with contextlib.suppress(OSError):
        return _stat(path)[0] == RUNNABLE
    return False


def _stat(path: str) -> list[str]:
    """The fields of a stat file after the name, which may hold spaces and parentheses."""
    with open(path) as file:
        return file.read().rpartition(")")[2].split()


def pace() -> float:
    """How many times slower than usual a core computes at present, at least 1."""
    started = time.thread_time()
    total = 0
    for number in range(WORK):
        total += number
    return min(max((time.thread_time() - started) / USUAL_SECONDS, 1.0), LARGEST_PACE)
