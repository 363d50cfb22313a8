"""Runs cases on child processes, and replaces a child that dies or hangs.

A forkserver with torch loaded starts a child in milliseconds. A spare child with the implementation
imported is kept ready, because a crashing mutant restarts often.
"""

import contextlib
import os
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from typing import Any

from conformance.catalogue import CONTRACTS
from conformance.core.case import Case
from conformance.core.ranks import ranks_of
from conformance.engine.child.child import serve
from conformance.engine.child.processes import Patience, ending, plain_main
from conformance.engine.child.runner import Outcome
from conformance.engine.options import ChildOptions
from conformance.engine.world.worlds import Worlds
from conformance.interface import UsageError

CASE_SECONDS = 60.0  # a case that takes longer hangs
# some hosts hang with it
NO_MULTICAST = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0"}
START_SECONDS = 180.0  # import of the implementation
COMPILE_SECONDS = 60.0  # added on a GPU, where a case may wait for compilers


@dataclass
class Child:
    """One process, and the case it runs."""

    process: Any
    pipe: Connection
    log_path: str
    ready: bool = False
    case: Case | None = None
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
        self.description["ranks"] = self.worlds.max_ranks
        return self.description

    def run(self, cases: Iterable[Case]) -> Iterator[tuple[Case, Outcome]]:
        """Every case with its outcome, as it finishes; cases of several ranks in their place."""
        if not self._children:
            self.start()
        for has_ranks, group in groupby(cases, lambda case: bool(ranks_of(CONTRACTS[case.function], case))):
            if has_ranks:
                yield from ((case, self.worlds.run(case)) for case in group)
            else:
                yield from self._spread(group)

    def _spread(self, waiting: Iterator[Case]) -> Iterator[tuple[Case, Outcome]]:
        """The cases of single processes, over the children."""
        for child in self._children:
            self._give(child, waiting)
        while any(child.case for child in self._children):
            for slot, child in enumerate(self._children):
                if child.case and (outcome := self._outcome(child)) is not None:
                    case = child.case
                    child.case = None
                    if outcome.status in ("CRASH", "HANG"):
                        self._children[slot] = self._replacement(child)
                    self._give(self._children[slot], waiting)
                    yield case, outcome
            self._wait()

    def run_alone(self, case: Case) -> Outcome:
        """The case in a child, or a world, that has run nothing before."""
        if ranks_of(CONTRACTS[case.function], case):
            self.worlds.close()
            return self.worlds.run(case)
        child = self._replacement(None)
        self._send(child, case)
        while (outcome := self._outcome(child)) is None:
            connection.wait([child.pipe, child.process.sentinel], timeout=0.2)
        self._end(child)
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

    def _give(self, child: Child, waiting: Iterator[Case]) -> None:
        case = next(waiting, None)
        if case is not None:
            self._send(child, case)

    def _send(self, child: Child, case: Case) -> None:
        child.case, child.started = case, time.monotonic()
        child.deadline = child.started + self.patience.allowed(case.function)
        # it died between two cases: see `_outcome`
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            child.pipe.send(case)

    def _wait(self) -> None:
        busy = [child for child in self._children if child.case]
        if busy:
            pause = max(min(child.deadline for child in busy) - time.monotonic(), 0)
            connection.wait([child.pipe for child in busy], timeout=pause)

    def _outcome(self, child: Child) -> Outcome | None:
        """The outcome of the child's case; None while it runs."""
        try:
            if child.pipe.poll():
                outcome = Outcome(**child.pipe.recv()[1])
                self.patience.answered(time.monotonic() - child.started)
                return outcome
        except (EOFError, ConnectionResetError):
            child.process.join(5)
            return Outcome("CRASH", reason=ending(child.process, child.log_path))
        if time.monotonic() > child.deadline:
            self.patience.hung.add(child.case.function if child.case else "")
            return Outcome("HANG", reason=f"no answer within {child.deadline - child.started:.0f} s")
        return None

    def _end(self, child: Child) -> None:
        child.process.kill()
        child.process.join()
        child.pipe.close()
        child.process.close()
