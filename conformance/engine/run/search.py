"""The search of functions for failing cases, one function after another.

Rounds follow each other until the time of a function is up. A round has three parts: drawn cases
with rare combinations of values; cases drawn by hypothesis, from changes of the kept cases too,
which climb towards the targets; and sequences of calls, if the function has a machine. Every round
is seeded, so only the time limit and the names of compiled kernels make two searches differ.
"""

import tempfile
import time
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from conformance.catalogue import MACHINES
from conformance.core.case import Case
from conformance.core.machine import run_machine
from conformance.core.scope import Scope
from conformance.engine.child.outcome import Outcome
from conformance.engine.choose.draw import drawn, run_seed, scope_of
from conformance.engine.options import Options
from conformance.engine.run import interrupt
from conformance.engine.run.corpus import REACHED
from conformance.engine.run.failure import Failure
from conformance.engine.run.hangs import confirmed_hang
from conformance.engine.run.interesting_cases import InterestingCases
from conformance.engine.run.pool import Lost
from conformance.engine.run.progress import Progress
from conformance.engine.run.rarity import Rarity
from conformance.engine.run.reduction import Key, failure_key
from conformance.engine.run.session import FAILING, Session
from conformance.interface import UsageError

RARE, OF = 150, 450  # cases of a round, and the drawn cases from which they are chosen
PARTS = 30  # the batches in which they are drawn and run
CLIMBED = 50  # cases of a round of hypothesis, which climbs in the second half
SEQUENCES, STEPS = 20, 8  # sequences of a round, and their most steps
TARGETS = ("error", "ratio", "lines")


class TimeIsUp(KeyboardInterrupt):
    """Passes through hypothesis, which takes an Exception for a failure of the test."""


@dataclass
class Searched:
    """What a search has found."""

    failures: list[Failure] = field(default_factory=list)
    cases: int = 0
    judged: int = 0  # of these cases, those that passed or failed
    waived: int = 0
    kept: dict[str, int] = field(default_factory=dict)  # the number of cases kept, by function
    unsaved: dict[str, str] = field(default_factory=dict)  # why its cases could not be kept, by function
    best: dict[str, dict[str, float]] = field(default_factory=dict)  # the largest scores, by function
    lines: dict[str, int] = field(default_factory=dict)  # lines and kernels reached, by function
    ended_by: str = ""  # a signal or the loss of the device; empty: the time was up

    @property
    def exit_code(self) -> int:
        """As of a run: 3 error of the suite, 1 found, 4 interrupted or nothing judged, else 0."""
        if any(failure.outcome.status == "ERROR" for failure in self.failures):
            return 3
        if self.failures:
            return 1
        return 4 if self.ended_by or not self.judged else 0


class SearchProgress(Progress):
    """The live line of a search."""

    def __init__(self, ends: float, searched: Searched) -> None:
        self.ends, self.searched = ends, searched
        self.function, self.lines, self.new, self.distinct = "", 0, 0, 0
        super().__init__()

    def line(self) -> str:
        now = time.monotonic()
        scores = self.searched.best.get(self.function, {})
        phrases = [
            f"{max(self.ends - now, 0):.0f} s left",
            f"{self.done} cases",
            f"{self.done / max(now - self.started, 1e-9):.0f} cases per second",
            " ".join([self.function, *(f"{name} {score:.2f}" for name, score in scores.items())]),
            f"{self.lines} lines and kernels ({self.new} new)",
            f"{self.distinct} distinct failures",
        ]
        return " · ".join(phrases)


class Search:
    """The search of several functions."""

    def __init__(self, session: Session, functions: list[str], seconds: float, searched: Searched) -> None:
        self.session, self.searched = session, searched
        self.ends = time.monotonic() + seconds
        root = Path(session.options.corpus) / REACHED
        self.kept = {function: InterestingCases.read(root / function, function) for function in functions}
        self.targets = TARGETS
        self.outcomes: dict[Case, Outcome] = {}  # outcomes of the function that is searched
        self.rarity = Rarity()  # the rarity of its cases
        self._shapes: dict[str, list[Case]] = {}
        self.failed: dict[Key, tuple[Case, Outcome]] = {}
        self.progress = SearchProgress(self.ends, searched)

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
        """Write the cases that are kept, and the failures, even those that could not be reduced."""
        self.progress.end()
        for case, outcome in self.failed.values():
            failure = Failure(case, outcome, f"fuzz-{case.function}", 0, False)
            self.searched.failures.append(self.session.keep(failure))
        finding = {"implementation": self.session.options.implementation, "status": "interesting"}
        for function, kept_cases in self.kept.items():
            self.searched.lines[function] = kept_cases.lines
            try:
                self.searched.kept[function] = kept_cases.save(finding)
            except OSError as error:  # the failures are reported all the same
                self.searched.kept[function] = 0
                self.searched.unsaved[function] = str(error)

    def _function(self, function: str, ends: float) -> None:
        self.outcomes, self.rarity = {}, Rarity()
        self.progress.function = function
        kept_cases, scope = self.kept[function], scope_of(function, self.session.space)
        turn = 0
        try:
            for case in kept_cases.seeds:
                self.judged(case, ends)
            self.progress.new = 0
            while True:
                seed = run_seed(function, self.session.options.seed, turn)
                self.rare(scope, seed, ends)
                self.climb(scope, kept_cases, seed, ends)
                self.sequences(scope, seed, ends)
                turn += 1
        except TimeIsUp:
            return

    def rare(self, scope: Scope, seed: int, ends: float) -> None:
        """Judge the rarest of many cases: drawn ones, and changes of shapes that every run has."""
        source = st.one_of(scope.drawn(), scope.drawn(), scope.near(self.shapes(scope)))
        for round_index in range(PARTS):  # checked here too, because drawing takes time
            cases = drawn(source, run_seed("rare", seed, round_index), OF // PARTS)
            cases = [case for case in cases if self.session.choice.holds(case)]
            chosen = self.rarity.rarest([case for case in cases if case not in self.outcomes], RARE // PARTS)
            outcomes = dict(self.session.pool.run(chosen))  # runs on all children at once
            for case in chosen:
                self._note(case, outcomes[case])
            if time.monotonic() > ends:
                raise TimeIsUp

    def shapes(self, scope: Scope) -> list[Case]:
        """The shapes that always run, made once."""
        if scope.function not in self._shapes:
            self._shapes = {scope.function: scope.always() or [scope.case({})]}
        return self._shapes[scope.function]

    def climb(self, scope: Scope, kept_cases: InterestingCases, seed: int, ends: float) -> None:
        """Run hypothesis once, over drawn cases and over changes of the cases kept so far."""
        cases = scope.drawn()
        interesting = kept_cases.distilled()
        if interesting:
            cases = st.one_of(cases, scope.near(interesting))
        quiet_settings = settings(
            max_examples=CLIMBED,
            database=None,
            deadline=None,
            phases=(Phase.generate, Phase.target),
            suppress_health_check=list(HealthCheck),
        )

        @hypothesis.seed(seed)
        @quiet_settings
        @given(cases)
        def climbed(case: Case) -> None:
            outcome = self.judged(case, ends)
            # a failure is found: nothing climbs from it
            scores = ({} if outcome.status in FAILING else outcome.scores) | {"lines": float(len(outcome.lines))}
            for label in self.targets:
                if label in scores:
                    hypothesis.target(scores[label], label=label)

        climbed()
        if time.monotonic() > ends:
            raise TimeIsUp

    def sequences(self, scope: Scope, seed: int, ends: float) -> None:
        """Judge sequences of steps of the function's machine, if it has one.

        A failing sequence does not end the search.
        """

        def noted(case: Case) -> Outcome:
            self.judged(case, ends)
            return Outcome("PASS")

        if scope.function in MACHINES:
            run_machine(MACHINES[scope.function], scope, noted, SEQUENCES, STEPS, seed)

    def judged(self, case: Case, ends: float) -> Outcome:
        """The outcome of a case, which runs once."""
        if time.monotonic() > ends:
            raise TimeIsUp
        if case in self.outcomes:
            return self.outcomes[case]
        if not self.session.choice.holds(case):
            return Outcome("NOT_RUN")
        outcome = self.session.pool.answer(case)
        self._note(case, outcome)
        return self.outcomes[case]

    def _note(self, case: Case, outcome: Outcome) -> None:
        """Remember the outcome, and the first case of each failure."""
        if outcome.status == "HANG":
            outcome = confirmed_hang(case, outcome, self.session.pool, self.session.profile.reduce_seconds)
        self.outcomes[case] = outcome
        self.rarity.add(case)
        failing = outcome.status in FAILING
        waived = failing and any(waiver.covers(case, outcome) for waiver in self.session.waivers)
        if failing and not waived:
            self.failed.setdefault(failure_key(case, outcome), (case, outcome))
            if not self.progress.failures:
                self.progress.failure(case, outcome)
        self._count(case, outcome, failing, waived)

    def _count(self, case: Case, outcome: Outcome, failing: bool, waived: bool) -> None:
        """Add the case to the results, and show the progress."""
        best, kept_cases = self.searched.best.setdefault(case.function, {}), self.kept[case.function]
        self.searched.cases += 1
        self.searched.judged += outcome.status == "PASS" or failing
        self.searched.waived += waived
        if not failing:
            lines_before = kept_cases.lines
            kept_cases.add(case, outcome)
            self.progress.new += kept_cases.lines - lines_before
            for name, score in outcome.scores.items():
                best[name] = max(best.get(name, 0.0), score)
        self.progress.lines, self.progress.distinct = kept_cases.lines, len(self.failed)
        self.progress.case(outcome, failing and not waived)


def fuzz(options: Options, minutes: float) -> Searched:
    """Search the chosen functions, or all offered ones, each for an equal share of the time.

    Failures are confirmed and reduced after the search. A signal, or the loss of the device, ends
    it with what was found.

    Raises:
        UsageError: an unknown function, one that is not offered, or an unusable implementation.
        CaseError: a kept file is no case.
    """
    searched = Searched()
    with (
        tempfile.TemporaryDirectory(prefix="moe-conformance-ledger-") as folder,
        closing(Session(options, Path(folder), search=True)) as session,
    ):
        search = None
        try:
            with interrupt.interruptible():
                session.start()
                functions = session.description["functions"]
                offered = [function for function in session.choice.functions if functions[function]["offered"]]
                if not offered:
                    raise UsageError(f"{options.implementation} offers no function that can be judged")
                search = Search(session, offered, 60 * minutes, searched)
                search.run()
        except KeyboardInterrupt:
            searched.ended_by = interrupt.reason() or "SIGINT"
        except Lost as error:
            searched.ended_by = f"the loss of the device ({error})"
        if search:
            search.end()
    return searched
