"""Runs cases on child processes, and replaces a child that dies or hangs.

A forkserver with torch loaded starts a child in milliseconds. A spare child with the implementation
imported is kept ready, because a crashing mutant restarts often.
"""

import contextlib
import os
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing import connection
from multiprocessing.connection import Connection
from typing import Any

from conformance.catalogue import ranks_with_calls_before
from conformance.core.case import Case
from conformance.engine.child import server
from conformance.engine.child.child import serve
from conformance.engine.child.outcome import LAST, Outcome
from conformance.engine.child.patience import LOOK_SECONDS, CaseClock, Patience
from conformance.engine.child.processes import end, ended, ending, kill, received, started, where
from conformance.engine.child.sanitizer import explained
from conformance.engine.choose.plan import Draw, Structure
from conformance.engine.options import ChildOptions
from conformance.engine.run.agenda import Agenda, Work, function_of, is_heavy
from conformance.engine.run.interrupt import check, deferred
from conformance.engine.world.background import Background
from conformance.engine.world.worlds import Worlds
from conformance.interface import UsageError

CASE_SECONDS = 60.0  # a case that takes longer hangs: see `conformance.engine.child.patience`
START_SECONDS = 180.0  # seconds for the import of the implementation
STARTS = 3  # attempts to start a process again
COMPILE_SECONDS = 60.0  # seconds added on a GPU, where a case may wait for compilers
IN_ORDER = 8  # how many cases may change places
AHEAD = 4 * IN_ORDER  # how many cases wait or run
HEAVY_BYTES = 24 * 2**30  # device memory for one child with far addresses

Answer = Outcome | list[Structure]


class Lost(UsageError):
    """The implementation cannot be started again, because the device is lost."""


@dataclass
class Child:
    """One process and its work. The first entry of `cases` is the case that runs."""

    process: Any
    pipe: Connection
    log_path: str
    ready: bool = False
    ended: bool = False
    last: str = ""  # the function of its last work, if any
    began: float = 0.0  # its last work
    started: float = 0.0  # the first case in `cases`
    request: Draw | None = None
    cases: deque[Case] = field(default_factory=deque)
    ran: list[Case] = field(default_factory=list)
    clock: CaseClock = field(default_factory=lambda: CaseClock([]))
    limit: float = START_SECONDS  # the time limit, by the clock
    alone: bool = False  # whether no other case runs meanwhile

    @property
    def idle(self) -> bool:
        return not self.request and not self.cases


class Pool:
    """`jobs` children for one implementation."""

    def __init__(self, options: ChildOptions, jobs: int = 1, case_seconds: float = CASE_SECONDS) -> None:
        self.options, self.jobs, self.patience = options, jobs, Patience(case_seconds)
        self.description: dict[str, Any] = {}
        self._context = server.start()
        self._folder = tempfile.TemporaryDirectory(prefix="moe-conformance-")
        self._started = 0
        self._children: list[Child] = []
        self._spare: Child | None = None
        self._most_heavy = jobs  # how many children may have heavy work at a time
        self._before: dict[int, tuple[list[Case], int]] = {}  # by the identity of a case that failed
        self.worlds = Worlds(options, self._context, self._folder.name)
        self._lanes = [Background(self.worlds)]

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def launch(self) -> None:
        """Start the children, which then import the implementation."""
        while len(self._children) < self.jobs:
            with deferred():
                self._children.append(self._launch())

    def start(self) -> dict[str, Any]:
        """Start the children that do not run yet; returns what the implementation offers.

        Raises:
            UsageError: the implementation cannot be used.
        """
        self.launch()
        for child in self._children:
            self._await_ready(child)
        if self.description.get("device") == "cuda":
            self.patience.case_seconds += COMPILE_SECONDS
            self._most_heavy = max(self.description["memory"] // HEAVY_BYTES, 1)
        self.worlds.prepare(self.description, self.patience.case_seconds)
        self._lanes += [Background(self.worlds) for _ in range(self.worlds.lanes - len(self._lanes))]
        self.description |= {"ranks": self.worlds.max_ranks, "shared_ranks": self.worlds.shared_ranks}
        return self.description

    def run(self, cases: Iterable[Case]) -> Iterator[tuple[Case, Outcome]]:
        """Every case with its outcome, as they come. The cases start about in their order.

        They are taken a few at a time: a world forms only when a case of it is near.
        """
        agenda, remaining_cases = Agenda(), enumerate(cases)
        for index, case in islice(remaining_cases, AHEAD):
            agenda.add([case], index // IN_ORDER)
        for work, answer in self.work(agenda):
            assert isinstance(work, Case) and isinstance(answer, Outcome)
            for index, case in islice(remaining_cases, 1):
                agenda.add([case], index // IN_ORDER)
            yield work, answer

    def work(self, agenda: Agenda) -> Iterator[tuple[Case | Draw, Answer]]:
        """All requests and cases with their answers, as they come.

        More work may be added during the iteration.

        Raises:
            Lost: no process can use the device any more.
        """
        if not self._children:
            self.start()
        while agenda or any(lane.case for lane in self._lanes) or not all(child.idle for child in self._children):
            for child in self._children:
                if child.idle:
                    busy = [child for child in self._children if not child.idle]
                    heavy = sum(is_heavy(child.cases) for child in busy) < self._most_heavy
                    if work := agenda.take(heavy, child.last, [child.last for child in busy]):
                        self._send(child, work)
            for number, lane in enumerate(self._lanes):
                if not lane.case and (case := agenda.take_ranked(number, len(self._lanes))):
                    lane.start(case)
            check()
            self._wait()
            yield from self._answers(agenda)

    def _answers(self, agenda: Agenda) -> Iterator[tuple[Case | Draw, Answer]]:
        """The answers of the children and worlds. A child that died or hangs is replaced."""
        for lane in self._lanes:
            if (case := lane.case) and (outcome := lane.outcome()):
                yield case, outcome
        for slot, child in enumerate(self._children):
            while not child.idle and (answer := self._answer(child)) is not None:
                work = child.request or child.cases.popleft()
                child.request = None
                if isinstance(work, Case) and isinstance(answer, Outcome):
                    if answer.finding or answer.status in LAST:
                        self._before[id(work)] = child.ran, len(child.ran)
                    child.ran.append(work)
                if isinstance(answer, Outcome) and answer.status in LAST:
                    if child.cases:
                        agenda.add(list(child.cases), first=True)
                        child.cases.clear()
                    self._children[slot] = self._replacement(child)
                elif child.idle and isinstance(answer, Outcome):
                    agenda.took(child.last, time.monotonic() - child.began)
                yield work, answer

    def before(self, case: Case) -> list[Case]:
        """The cases that ran before this failing case in its process or world."""
        if ranks_with_calls_before(case):
            return self.worlds.before(case)
        ran, count = self._before.get(id(case), ([], 0))
        return ran[:count]

    def has_hung(self, function: str) -> bool:
        """Whether a case of the function hung while no other case ran."""
        return function in self.patience.hung or self.worlds.has_hung(function)

    def answer(self, case: Case) -> Outcome:
        """The outcome of one case, in a running child."""
        ((_, outcome),) = self.run([case])
        return outcome

    def run_alone(self, case: Case) -> Outcome:
        """The outcome of the case in a fresh child, or world, with the longer limit."""
        if ranks_with_calls_before(case):
            self.worlds.close()
            return self.worlds.run(case, alone=True)
        child = self._fresh()
        child.alone = True
        self._send(child, [case])
        while (outcome := self._answer(child)) is None:
            connection.wait([child.pipe, child.process.sentinel], timeout=LOOK_SECONDS)
        self._end(child)
        assert isinstance(outcome, Outcome)
        return outcome

    def close(self) -> None:
        """End every child; nothing is left running."""
        children = [*self._children, *([self._spare] if self._spare else [])]
        # all ends are requested first, and awaited together
        kill(child.process for child in children if not child.ended)
        for lane in self._lanes:
            lane.close()
        for child in children:
            self._end(child)
        self._children, self._spare = [], None
        self.worlds.dismiss()
        self._folder.cleanup()

    def _launch(self) -> Child:
        self._started += 1
        log_path = os.path.join(self._folder.name, f"child{self._started}.log")
        process, pipe = started(self._context, serve, self.options, log_path)
        return Child(process, pipe, log_path, clock=CaseClock([process.pid]))

    def _await_ready(self, child: Child) -> None:
        """Wait until the child has imported the implementation.

        Raises:
            UsageError: it cannot be imported, or the process died or hung while importing it.
        """
        if child.ready:
            return
        prefix = f"--impl {self.options.implementation}:"
        while not connection.wait([child.pipe, child.process.sentinel], LOOK_SECONDS):
            if child.clock.passed(START_SECONDS):
                self._end(child)
                raise UsageError(f"{prefix} importing it took longer than {START_SECONDS:.0f} s ({child.clock.told})")
        try:
            kind, content = received(child.pipe) if child.pipe.poll() else ("dead", "")
        except EOFError as error:
            kind, content = "dead", str(error)
        if kind == "dead":
            reason = content or ending(child.process, child.log_path)
            self._end(child)
            raise UsageError(f"{prefix} the process died while importing it ({reason})") from None
        if kind == "unusable":
            raise UsageError(content)
        child.ready, self.description = True, content

    def _replacement(self, dead: Child) -> Child:
        """The spare, a child that has run nothing; starts another spare.

        Raises:
            Lost: it cannot import the implementation, which was imported before.
        """
        self._end(dead)
        child = self._fresh()
        with deferred():
            self._spare = self._launch()
        return child

    def _fresh(self) -> Child:
        """The spare if there is one, else a new child.

        A start that fails is tried again: after a kernel has crashed on a GPU, the GPU can be out
        of reach for a moment.

        Raises:
            Lost: it cannot import the implementation, which was imported before.
        """
        for attempt in range(STARTS):
            time.sleep(attempt)
            with deferred():
                child = self._spare = self._spare or self._launch()
            try:
                self._await_ready(child)
            except UsageError as error:
                self._end(child)
                self._spare, problem = None, str(error)
            else:
                self._spare = None
                return child
        raise Lost(problem)

    def _send(self, child: Child, work: Work) -> None:
        child.last, child.began = function_of(work), time.monotonic()
        if isinstance(work, Draw):
            child.request = work
        else:
            child.cases = deque(work)
        self._allow(child, child.last)
        # it died between two cases: see `_answer`
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            child.pipe.send(work)

    def _allow(self, child: Child, function: str) -> None:
        """The child starts on a case: set the time limit."""
        child.started, child.clock = time.monotonic(), CaseClock([child.process.pid])
        child.limit = self.patience.allowed(function, child.alone)

    def _wait(self) -> None:
        """Wait for an answer, or until the clocks must look at the children again."""
        busy = [child for child in self._children if not child.idle]
        pipes: list[Any] = [ready for child in busy for ready in (child.pipe, child.process.sentinel)]
        pipes += [lane.pipe for lane in self._lanes if lane.case]
        if pipes:
            connection.wait(pipes, timeout=LOOK_SECONDS if busy else None)

    def _answer(self, child: Child) -> Answer | None:
        """The answer to the child's request or first case; None while it works on that."""
        alive = child.process.is_alive()  # asked first: an answer may be the last thing that it sends
        try:
            if child.pipe.poll():
                kind, content, *_ = received(child.pipe)
                if kind == "structures":
                    return list(content)
                self.patience.answered(time.monotonic() - child.started)
                if len(child.cases) > 1:
                    self._allow(child, child.cases[1].function)
                return explained(Outcome(**content))
            reason = ""
        except EOFError as error:
            alive, reason = False, str(error)
        if not alive:  # another process that it has started may hold the pipe open
            return ended(reason or ending(child.process, child.log_path))
        if child.clock.passed(child.limit):
            function, position = child.cases[0].function if child.cases else "", where(child.process, child.log_path)
            reason = self.patience.hangs(function, child.clock, child.limit, child.alone, position)
            return Outcome("HANG", reason=reason)
        return None

    def _end(self, child: Child) -> None:
        """End the child, which may have been ended when a signal came."""
        if child.ended:
            return
        child.ended = True
        end(child.process)
        child.pipe.close()
        child.process.close()
