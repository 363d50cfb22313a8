"""A search for failing cases: hypothesis draws, and climbs towards the largest error.

Rounds of drawn and of changed cases follow each other until the time of a function is up. Every
round is seeded, so only the time limit and the names of compiled kernels make two searches differ.
"""

import tempfile
import time
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from conformance.catalogue import CONTRACTS
from conformance.core.case import Case
from conformance.core.scope import Scope
from conformance.engine.child.runner import Outcome
from conformance.engine.choose.draw import run_seed, scope_of
from conformance.engine.options import Options
from conformance.engine.run import interrupt
from conformance.engine.run.kept import Kept
from conformance.engine.run.pool import Lost
from conformance.engine.run.progress import Progress
from conformance.engine.run.reduction import Key, failure_key
from conformance.engine.run.session import FAILING, Failure, Session
from conformance.interface import UsageError

ROUND = 200  # cases; hypothesis climbs in the second half
FOLDER = "fuzz"  # below that of the failing cases


class TimeIsUp(KeyboardInterrupt):
    """Passes through hypothesis, which takes an Exception for a failure of the test."""


@dataclass
class Searched:
    """What a search has found."""

    failures: list[Failure] = field(default_factory=list)
    cases: int = 0
    kept: dict[str, int] = field(default_factory=dict)  # cases kept, by function
    best: dict[str, float] = field(default_factory=dict)  # the largest error over its bound
    ended_by: str = ""  # a signal or the loss of the device; empty: the time was up

    @property
    def exit_code(self) -> int:
        """0 nothing found, 1 found, 3 only errors of the suite, 4 interrupted without a finding."""
        if self.failures:
            return 1 if any(failure.outcome.status != "ERROR" for failure in self.failures) else 3
        return 4 if self.ended_by else 0


class FuzzProgress(Progress):
    """The live line of a search."""

    def __init__(self, ends: float) -> None:
        self.ends, self.best, self.reached, self.distinct = ends, 0.0, 0, 0
        super().__init__()

    def line(self) -> str:
        now = time.monotonic()
        parts = [
            f"{max(self.ends - now, 0):.0f} s left",
            f"{self.done} cases",
            f"{self.done / max(now - self.started, 1e-9):.0f} cases per second",
            f"largest error {self.best:.2f} of its bound",
            f"{self.reached} lines and kernels",
            f"{self.distinct} distinct failures",
        ]
        return " · ".join(parts)


def fuzz(options: Options, functions: list[str], minutes: float) -> Searched:
    """Search each function, all offered ones if none is named, for an equal share of the time.

    Failures are confirmed and reduced after the search. A signal, or the loss of the device, ends
    it with what was found.

    Raises:
        UsageError: an unknown function, one that is not offered, or an unusable implementation.
        CaseError: a kept file is no case.
    """
    for function in functions:
        if function not in CONTRACTS:
            raise UsageError(f"--function is {function!r}; known are {', '.join(CONTRACTS)}")
    searched = Searched()
    with (
        tempfile.TemporaryDirectory(prefix="moe-conformance-ledger-") as folder,
        closing(Session(options, Path(folder), scores=True)) as session,
    ):
        search = None
        try:
            with interrupt.interruptible():
                session.start()
                search = Search(session, _offered(session, functions), 60 * minutes, searched)
                search.run()
        except KeyboardInterrupt:
            searched.ended_by = interrupt.reason() or "SIGINT"
        except Lost as error:
            searched.ended_by = f"the loss of the device ({error})"
        if search:
            search.end()
    return searched


def _offered(session: Session, functions: list[str]) -> list[str]:
    """The named functions, or all that the implementation offers.

    Raises:
        UsageError: there is none, or a named one is not offered.
    """
    known = session.description["functions"]
    offered = [function for function in CONTRACTS if known[function]["offered"]]
    for function in functions:
        if function not in offered:
            raise UsageError(f"--function {function} is not offered by {session.options.implementation}")
    if not offered:
        raise UsageError(f"{session.options.implementation} offers no function that can be judged")
    return functions or offered


class Search:
    """The search of several functions, one after another."""

    def __init__(self, session: Session, functions: list[str], seconds: float, searched: Searched) -> None:
        self.session, self.searched = session, searched
        self.ends = time.monotonic() + seconds
        root = Path(session.options.corpus) / FOLDER
        self.kept = {function: Kept.read(root / function, function) for function in functions}
        self.outcomes: dict[Case, Outcome] = {}  # of the function that is searched
        self.failed: dict[Key, tuple[Case, Outcome]] = {}
        self.progress = FuzzProgress(self.ends)

    def run(self) -> None:
        """Search, then find the smallest case of each failure."""
        for index, function in enumerate(self.kept):
            now = time.monotonic()
            self._function(function, now + (self.ends - now) / (len(self.kept) - index))
        for key in list(self.failed):
            case, outcome = self.failed[key]
            failure = self.session.smallest(key, case, outcome, f"fuzz-{case.function}")
            del self.failed[key]
            if failure:
                self.searched.failures.append(failure)

    def end(self) -> None:
        """Write what is kept, also failures that could not be reduced."""
        self.progress.end()
        for case, outcome in self.failed.values():
            failure = Failure(case, outcome, f"fuzz-{case.function}", 0, False)
            self.session.keep(failure)
            self.searched.failures.append(failure)
        finding = {"implementation": self.session.options.implementation, "status": "interesting"}
        for function, kept in self.kept.items():
            self.searched.kept[function] = kept.save(finding)

    def _function(self, function: str, ends: float) -> None:
        self.outcomes = {}
        kept, scope = self.kept[function], scope_of(function, self.session.space)
        turn = 0
        try:
            for case in kept.seeds:
                self._judged(case, ends)
            while True:
                self._round(scope, kept, run_seed(function, self.session.options.seed, turn), ends)
                turn += 1
        except TimeIsUp:
            return

    def _round(self, scope: Scope, kept: Kept, seed: int, ends: float) -> None:
        """One run of hypothesis, over drawn cases and changed cases of those kept so far."""
        cases = scope.drawn()
        interesting = kept.distilled()
        if interesting:
            cases = st.one_of(cases, scope.near(interesting))
        plain = settings(
            max_examples=ROUND,
            database=None,
            deadline=None,
            phases=(Phase.generate, Phase.target),
            suppress_health_check=list(HealthCheck),
        )

        @hypothesis.seed(seed)
        @plain
        @given(cases)
        def climb(case: Case) -> None:
            outcome = self._judged(case, ends)
            hypothesis.target(min(outcome.used, 1.0), label="error")

        climb()
        if time.monotonic() > ends:
            raise TimeIsUp

    def _judged(self, case: Case, ends: float) -> Outcome:
        """The outcome of a case, which runs once."""
        if time.monotonic() > ends:
            raise TimeIsUp
        if case in self.outcomes:
            return self.outcomes[case]
        outcome = self.session.pool.answer(case)
        self.outcomes[case] = outcome
        failing = outcome.status in FAILING
        if failing:
            key = failure_key(case, outcome)
            if not self.failed:
                self.progress.failure(case, outcome)
            self.failed.setdefault(key, (case, outcome))
        else:
            self.kept[case.function].add(case, outcome)
        best = self.searched.best
        best[case.function] = max(best.get(case.function, 0.0), outcome.used)
        self.searched.cases += 1
        self.progress.best, self.progress.distinct = best[case.function], len(self.failed)
        self.progress.reached = len(self.kept[case.function].seen)
        self.progress.case(outcome, failing)
        return outcome
