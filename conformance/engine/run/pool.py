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
from dataclasses import dataclass
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from typing import Any

from conformance.catalogue import CONTRACTS
from conformance.core.case import Case
from conformance.core.ranks import ranks_of
from conformance.engine.child.child import serve
from conformance.engine.child.processes import Patience, ending, plain_main
from conformance.engine.child.runner import Outcome
from conformance.engine.choose.plan import Draw
from conformance.engine.options import ChildOptions
from conformance.engine.world.worlds import Worlds
from conformance.interface import UsageError

CASE_SECONDS = 60.0  # a case that takes longer hangs
# some hosts hang with it
NO_MULTICAST = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0"}
START_SECONDS = 180.0  # import of the implementation
COMPILE_SECONDS = 60.0  # added on a GPU, where a case may wait for compilers


Work = Case | Draw
Answer = Outcome | list[Case]


@dataclass
class Child:
    """One process, and what it works on."""

    process: Any
    pipe: Connection
    log_path: str
    ready: bool = False
    work: Work | None = None
    started: float = 0.0
    deadline: float = 0.0


class Pool:
    """`jobs` children for one implementation."""

    def __init__(self, options: ChildOptions, jobs: int = 1, case_seconds: float = CASE_SECONDS) -> None:
        self.options, self.jobs, self.patience = options, jobs, Patience(case_seconds)
        self.description: dict[str, Any] = {}
        for name, value in NO_MULTICAST.items():
            os.environ.setdefault(name, value)  # before torch starts in any child
        self._context = get_context("forkserver")
        modules = ["torch", "torch.fx.experimental.symbolic_shapes", "conformance.engine.child.child"]
        self._context.set_forkserver_preload(modules)
        self._folder = tempfile.TemporaryDirectory(prefix="moe-conformance-")
        self._started = 0
        self._children: list[Child] = []
        self._spare: Child | None = None
        self.worlds = Worlds(options, self._context, self._folder.name)

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> dict[str, Any]:
        """Start the children; returns what the implementation offers.

        Raises:
            UsageError: the implementation cannot be used.
        """
        while len(self._children) < self.jobs:
            self._children.append(self._launch())
        for child in self._children:
            self._await_ready(child)
        if self.description.get("device") == "cuda":
            self.patience.case_seconds += COMPILE_SECONDS
        self.worlds.prepare(self.description, self.patience.case_seconds)
        self.description |= {"ranks": self.worlds.max_ranks, "shared_ranks": self.worlds.shared_ranks}
        return self.description

    def run(self, cases: Iterable[Case]) -> Iterator[tuple[Case, Outcome]]:
        """Every case with its outcome, as they come."""
        for case, outcome in self.work(deque(cases)):
            assert isinstance(case, Case) and isinstance(outcome, Outcome)
            yield case, outcome

    def work(self, waiting: deque[Work]) -> Iterator[tuple[Work, Answer]]:
        """All work with its answers, as they come. More may be appended to the queue meanwhile.

        Cases of several ranks run one after the other, while the children run their current work.
        """
        if not self._children:
            self.start()
        alone: deque[Work] = deque()
        ranked: deque[Case] = deque()
        while waiting or alone or ranked or any(child.work for child in self._children):
            while waiting:
                _sort(waiting.popleft(), alone, ranked)
            for child in self._children:
                if not child.work and alone:
                    self._send(child, alone.popleft())
            if ranked:
                case = ranked.popleft()
                yield case, self.worlds.run(case)
            yield from self._answers()
            if not waiting and not ranked:
                self._wait()

    def _answers(self) -> Iterator[tuple[Work, Answer]]:
        """What the children have answered. A child that died or hangs is replaced."""
        for slot, child in enumerate(self._children):
            if child.work and (answer := self._answer(child)) is not None:
                work, child.work = child.work, None
                if isinstance(answer, Outcome) and answer.status in ("CRASH", "HANG"):
                    self._children[slot] = self._replacement(child)
                yield work, answer

    def answer(self, case: Case) -> Outcome:
        """The outcome of one case, in a running child."""
        ((_, outcome),) = self.run([case])
        return outcome

    def run_alone(self, case: Case) -> Outcome:
        """The case in a child, or a world, that has run nothing before."""
        if ranks_of(CONTRACTS[case.function], case):
            self.worlds.close()
            return self.worlds.run(case)
        child = self._replacement(None)
        self._send(child, case)
        while (outcome := self._answer(child)) is None:
            connection.wait([child.pipe, child.process.sentinel], timeout=0.2)
        self._end(child)
        assert isinstance(outcome, Outcome)
        return outcome

    def close(self) -> None:
        """End every child; nothing is left running."""
        for child in [*self._children, *([self._spare] if self._spare else [])]:
            self._end(child)
        self._children, self._spare = [], None
        self.worlds.dismiss()
        self._folder.cleanup()

    def _launch(self) -> Child:
        self._started += 1
        pipe, child_pipe = self._context.Pipe()
        log_path = os.path.join(self._folder.name, f"child{self._started}.log")
        process = self._context.Process(target=serve, args=(child_pipe, self.options, log_path), daemon=True)
        with plain_main():
            process.start()
        child_pipe.close()
        return Child(process, pipe, log_path, deadline=time.monotonic() + START_SECONDS)

    def _await_ready(self, child: Child) -> None:
        """Wait until the child has imported the implementation.

        Raises:
            UsageError: it cannot be imported, or the process died or hung while importing it.
        """
        if child.ready:
            return
        prefix = f"--impl {self.options.implementation}:"
        if not child.pipe.poll(max(child.deadline - time.monotonic(), 0)):
            self._end(child)
            raise UsageError(f"{prefix} importing it took longer than {START_SECONDS:.0f} s")
        try:
            kind, content = child.pipe.recv()
        except EOFError:
            child.process.join()
            end = ending(child.process, child.log_path)
            raise UsageError(f"{prefix} the process died while importing it ({end})") from None
        if kind == "unusable":
            raise UsageError(content)
        child.ready, self.description = True, content

    def _replacement(self, dead: Child | None) -> Child:
        """The spare, a child that has run nothing; starts another spare."""
        if dead:
            self._end(dead)
        child = self._spare or self._launch()
        self._spare = None
        self._await_ready(child)
        self._spare = self._launch()
        return child

    def _send(self, child: Child, work: Work) -> None:
        child.work, child.started = work, time.monotonic()
        function = work.function if isinstance(work, Case) else work.section.function
        child.deadline = child.started + self.patience.allowed(function)
        # it died between two cases: see `_answer`
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            child.pipe.send(work)

    def _wait(self) -> None:
        """Until a child answers, or its time is up."""
        busy = [child for child in self._children if child.work]
        if busy:
            pause = max(min(child.deadline for child in busy) - time.monotonic(), 0)
            connection.wait([child.pipe for child in busy], timeout=pause)

    def _answer(self, child: Child) -> Answer | None:
        """The answer to the child's work; None while it runs."""
        try:
            if child.pipe.poll():
                kind, content, *_ = child.pipe.recv()
                if kind == "cases":
                    return list(content)
                self.patience.answered(time.monotonic() - child.started)
                return Outcome(**content)
        except (EOFError, ConnectionResetError):
            child.process.join(5)
            return Outcome("CRASH", reason=ending(child.process, child.log_path))
        if time.monotonic() > child.deadline:
            if isinstance(child.work, Case):
                self.patience.hung.add(child.work.function)
            return Outcome("HANG", reason=f"no answer within {child.deadline - child.started:.0f} s")
        return None

    def _end(self, child: Child) -> None:
        child.process.kill()
        child.process.join()
        child.pipe.close()
        child.process.close()


def _sort(work: Work, alone: deque[Work], ranked: deque[Case]) -> None:
    """Append the work to the queue of single processes or of worlds."""
    if isinstance(work, Case) and ranks_of(CONTRACTS[work.function], work):
        ranked.append(work)
    else:
        alone.append(work)
