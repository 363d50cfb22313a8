"""One worker's part of a run: sweeps sections of cases, then confirms and reduces what failed."""

import datetime
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from conformance.core.case import Case
from conformance.core.space import Space
from conformance.engine.child.child import Settings
from conformance.engine.child.runner import Outcome
from conformance.engine.choose.plan import Section, cases_of, sections
from conformance.engine.choose.profiles import PROFILES, Profile
from conformance.engine.run import corpus
from conformance.engine.run.ledger import Ledger
from conformance.engine.run.pool import Pool
from conformance.engine.run.reduction import Key, failure_key, reduce
from conformance.engine.run.waivers import Waiver, read_waivers

FAILING = ("FAIL", "CRASH", "HANG", "OOM", "ERROR")


@dataclass(frozen=True)
class Options:
    """What the user asked for."""

    implementation: str
    profile: str = "gate"
    device: str = "auto"
    seed: int = 0
    jobs: int = 1
    corpus: str = str(corpus.DEFAULT)
    waivers: str = ""
    case_seconds: float = 60.0
    search: tuple[str, ...] = ()

    @property
    def settings(self) -> Settings:
        return Settings(self.implementation, self.device, search=self.search)


@dataclass(frozen=True)
class Failure:
    """One distinct failure, at its smallest."""

    case: Case
    outcome: Outcome
    found_in: str
    attempts: int
    smallest: bool


class Session:
    """Runs sections on a pool of children and writes the ledger."""

    def __init__(self, options: Options, folder: Path, worker: str = "main", progress: bool = False) -> None:
        self.options = options
        self.profile: Profile = PROFILES[options.profile]
        self.ledger = Ledger(folder, worker)
        self.pool = Pool(options.settings, options.jobs, options.case_seconds)
        self.waivers: list[Waiver] = (
            read_waivers(Path(options.waivers), datetime.date.today()) if options.waivers else []
        )
        self.known: set[Key] = set()
        self._artist = ThreadPoolExecutor(1)
        sys.setswitchinterval(2e-4)  # a child that has answered waits no longer than this for the thread that draws
        self._drawn: dict[str, Future[list[Case]]] = {}
        self.progress = Progress(len(sections(self.profile))) if progress else None

    def start(self) -> None:
        """Start the children.

        Raises:
            UsageError: the implementation or a waiver cannot be used.
        """
        self.description = self.pool.start()
        self.space = Space.of(self.description)
        self.corpus = corpus.read_folder(corpus.COMMITTED)
        if Path(self.options.corpus).resolve() != corpus.DEFAULT.resolve():
            self.corpus += corpus.read_folder(Path(self.options.corpus))
        self.ledger.write("implementation", **self.description)

    def close(self) -> None:
        self._artist.shutdown(cancel_futures=True)
        self.pool.close()
        self.ledger.close()

    def cases(self, section: Section) -> list[Case]:
        """The section's cases. Those of the next section in the plan are drawn while these run."""
        cases = self._drawn.pop(section.label).result() if section.label in self._drawn else self._cases(section)
        plan = sections(self.profile)
        for following in plan[plan.index(section) + 1 : plan.index(section) + 2]:
            self._drawn[following.label] = self._artist.submit(self._cases, following)
        return cases

    def _cases(self, section: Section) -> list[Case]:
        """The section's cases; none of a function that is not offered."""
        if section.kind == "corpus":
            return [case for case in self.corpus if self.description["functions"][case.function]["offered"]]
        if section.function and not self.description["functions"][section.function]["offered"]:
            return []
        return cases_of(section, self.profile, self.space, self.options.seed, self.corpus)

    def sweep(self, section: Section) -> list[Failure]:
        """Run a section to its end, whatever happens; then find the smallest case of every new failure."""
        cases = self.cases(section)
        self.ledger.write("plan", section=section.label, scheduled=len(cases))
        place = {case.text: index for index, case in enumerate(cases)}
        failed: dict[Key, tuple[Case, Outcome]] = {}
        failures = []
        try:
            for case, outcome in self.pool.run(cases):
                waiver = self._waiver(case, outcome)
                status = "WAIVED" if waiver else outcome.status
                self._record(
                    "outcome", case, outcome, section=section.label, status=status, waiver=waiver.name if waiver else ""
                )
                if status in FAILING:
                    key = failure_key(case, outcome)
                    if key not in failed or _rank(case, place) < _rank(failed[key][0], place):
                        failed[key] = case, outcome
                if self.progress:
                    self.progress.case(status in FAILING)
            for key in sorted(failed, key=lambda key: _rank(failed[key][0], place)):
                if key not in self.known:
                    failures.append(self._smallest(key, *failed[key], section))
                del failed[key]
        except KeyboardInterrupt:  # what was found is told as it was found
            for case, outcome in failed.values():
                self._keep(Failure(case, outcome, section.label, 0, False))
            raise
        if self.progress:
            self.progress.section()
        return [failure for failure in failures if failure]

    def _waiver(self, case: Case, outcome: Outcome) -> Waiver | None:
        if outcome.status not in FAILING:
            return None
        return next((waiver for waiver in self.waivers if waiver.covers(case, outcome)), None)

    def _record(self, kind: str, case: Case, outcome: Outcome, **more: Any) -> None:
        content = {"id": case.id, "function": case.function} | asdict(outcome) | {"law": case.law} | more
        self.ledger.write(kind, **content)

    def _smallest(self, key: Key, case: Case, outcome: Outcome, section: Section) -> Failure | None:
        if not _fixed(case):  # one that cannot be reduced leaves the search open to the other sections
            self.known.add(key)
        case, outcome = self._confirmed(case, outcome)
        if outcome.status != "FLAKY" and failure_key(case, outcome) != key and failure_key(case, outcome) in self.known:
            return None  # in a fresh process it fails like another one, which is reported already
        if not _fixed(case):
            self.known.add(failure_key(case, outcome))
        attempts, smallest = 0, False
        if outcome.status not in ("FLAKY", "ERROR", "OOM"):
            found = reduce(case, outcome, self.attempt, self.profile.reduce_seconds)
            again = self._attempt(found.case, fresh=True)
            if failure_key(found.case, again) == failure_key(case, outcome):
                case, outcome = found.case, again
            attempts, smallest = found.attempts, found.finished
        failure = Failure(case, outcome, section.label, attempts, smallest)
        self._keep(failure)
        return failure

    def _confirmed(self, case: Case, outcome: Outcome) -> tuple[Case, Outcome]:
        """The failure as it shows in a process that has run nothing else; FLAKY if it does not show there."""
        alone = self._attempt(case, fresh=True)
        if alone.status in FAILING:
            return case, alone
        after_another = replace(case, law="history", golden="", illegal="")
        if not case.golden and not case.illegal:
            again = self._attempt(after_another, fresh=True)
            if again.status in FAILING:
                return after_another, again
        flaky = replace(outcome, status="FLAKY", reason="failed once and passed when it was run again")
        return case, flaky

    def attempt(self, case: Case) -> Outcome:
        """One try of a reduction: in a process that is there already, unless what ran before matters."""
        return self._attempt(case, fresh=case.law == "history")

    def _attempt(self, case: Case, fresh: bool) -> Outcome:
        outcome = self.pool.run_alone(case) if fresh else next(iter(list(self.pool.run([case]))))[1]
        self._record("request", case, outcome)
        return outcome

    def _keep(self, failure: Failure) -> None:
        outcome = failure.outcome
        found = {
            "implementation": self.options.implementation,
            "status": outcome.status,
            "finding": outcome.finding,
            "reason": outcome.reason,
            "versions": self.description["versions"],
            "device": self.description["device_name"],
        }
        try:
            path = str(corpus.save(Path(self.options.corpus), failure.case, found))
        except OSError as error:  # the failure is told all the same
            path = f"not saved: {error}"
        self.ledger.write(
            "failure", id=failure.case.id, case=failure.case.record(), function=failure.case.function, found_in=failure.found_in,
            attempts=failure.attempts, smallest=failure.smallest, file=path, **asdict(outcome),
        )  # fmt: skip


def _rank(case: Case, place: dict[str, int]) -> tuple[bool, int]:
    """Which of several failing cases is reduced: a literal last, else the first in the plan, whichever child was faster."""
    return _fixed(case), place[case.text]


def _fixed(case: Case) -> bool:
    """Whether the case is a literal that has no smaller neighbours."""
    return bool(case.golden or case.illegal)


class Progress:
    """One line on stderr: rewritten in place on a terminal, else printed now and then."""

    def __init__(self, total: int) -> None:
        self.total, self.done, self.cases, self.failures = total, 0, 0, 0
        self.started = self.shown = time.monotonic()
        self.live = sys.stderr.isatty()

    def case(self, failing: bool) -> None:
        self.cases += 1
        self.failures += failing
        if time.monotonic() - self.shown > (0.2 if self.live else 15):
            self._show()

    def section(self) -> None:
        self.done += 1
        if self.live:
            self._show("\n" if self.done == self.total else "")

    def _show(self, end: str = "") -> None:
        self.shown = time.monotonic()
        rate = self.cases / max(self.shown - self.started, 1e-9)
        text = (
            f"{self.cases} cases · {rate:.0f} a second · {self.done} of {self.total} sections · {self.failures} failing"
        )
        print(f"\r\x1b[K{text}{end}" if self.live else text, end="" if self.live else "\n", file=sys.stderr, flush=True)
