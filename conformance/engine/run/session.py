"""One run: draws the cases, runs them on child processes, then confirms and reduces what failed."""

import datetime
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch

from conformance.catalogue import CONTRACTS
from conformance.core.case import Case
from conformance.core.space import Space
from conformance.engine.child.outcome import Outcome
from conformance.engine.choose.plan import KINDS, Draw, Section, Structure, sections
from conformance.engine.choose.profiles import PROFILES, Profile
from conformance.engine.options import Options
from conformance.engine.run import corpus, interrupt
from conformance.engine.run.agenda import REQUESTS, Agenda
from conformance.engine.run.blame import blamed
from conformance.engine.run.choice import Choice, asked, must_compare
from conformance.engine.run.coverage import settings_of
from conformance.engine.run.failure import Failure
from conformance.engine.run.hangs import with_hangs_confirmed
from conformance.engine.run.ledger import Ledger
from conformance.engine.run.pool import Lost, Pool
from conformance.engine.run.preceding_calls import with_calls_before
from conformance.engine.run.progress import Progress
from conformance.engine.run.reduction import Key, failure_key, reduce
from conformance.engine.run.revision import Inquiry, footprints_at
from conformance.engine.run.since import Since, since_report, since_revision, under
from conformance.engine.run.verdict import Verdict, assemble, read_baseline
from conformance.engine.run.waivers import Waiver, read_waivers

FAILING = ("FAIL", "CRASH", "HANG", "OOM", "ERROR")

Place = tuple[int, int]  # of a case: number of its section in the plan, its index there
Failed = dict[Key, tuple[Place, Case, Outcome]]  # the first case in the plan of each failure


def judge(options: Options) -> Verdict:
    """Run all requested sections and return the verdict.

    A signal, the time limit and the loss of the device end the run early, with the verdict on the
    cases judged so far.

    Raises:
        UsageError: the implementation or a file that the user gave cannot be used.
    """
    with tempfile.TemporaryDirectory(prefix="moe-conformance-ledger-") as folder:
        return judge_with(options, Path(folder))


def judge_with(options: Options, ledgers: Path) -> Verdict:
    """`judge` with a given folder for the ledger, which is not deleted."""
    interrupt.limit(options.seconds)
    interrupted = ""
    with closing(Session(options, ledgers, progress=True)) as session:
        try:
            with interrupt.interruptible():
                session.start()
                session.run()
                session.find_footprints()
        except KeyboardInterrupt:
            interrupted = interrupt.reason() or "SIGINT"
        except Lost as error:
            interrupted = f"the loss of the device ({error})"
    # also reports a signal that came after the last case, while the children were ended
    interrupted = interrupted or interrupt.reason()
    return session.verdict(ledgers, options.part == (0, 1), interrupted, options.part[1] > 1)


class Session:
    """One worker's part of a run: sweeps sections on a pool of children and writes the ledger.

    Raises:
        UsageError: a file of waivers or a baseline cannot be used, or an option is wrong.
    """

    def __init__(
        self, options: Options, folder: Path, worker: str = "main", progress: bool = False, search: bool = False
    ) -> None:
        self.options, self.started = options, time.monotonic()
        self.profile: Profile = PROFILES[options.profile]
        self.plan: list[Section] = []  # set by `start`
        self.choice = Choice()  # judges nothing until `start` has the namespace's description
        asked(options)
        today = datetime.date.today()
        self.waivers: list[Waiver] = read_waivers(Path(options.waivers), today) if options.waivers else []
        self.baseline = read_baseline(Path(options.baseline)) if options.baseline else None
        if self.baseline:
            must_compare(self.baseline, options)
        is_report = options.since.endswith(".json") or Path(options.since).is_file()
        self.earlier = read_baseline(Path(options.since), "--since") if is_report else None
        self.since = Since()
        self.inquiry: Inquiry | None = None
        self.ledger = Ledger(folder, worker)
        child = replace(options.child, scores=search or options.covered, lines=search)
        self.pool = Pool(child, options.jobs or default_jobs(options), options.case_seconds)
        self.known: set[Key] = set()
        self.progress = Progress() if progress else None

    def start(self) -> None:
        """Start the children and read the corpus.

        Raises:
            UsageError: the implementation cannot be used, or does not offer what is asked for.
            CaseError: a file of the corpus is no case.
        """
        with interrupt.deferred():
            is_asked = bool(self.options.since) or any(Path(path).suffix == ".json" for path in self.options.report)
            self.inquiry = Inquiry(self.options.child) if is_asked else None
        self.pool.launch()
        self.corpus = corpus.read_folder(corpus.COMMITTED)
        if Path(self.options.corpus).resolve() != corpus.DEFAULT.resolve():
            self.corpus += corpus.read_all(Path(self.options.corpus))
        self.description = self.pool.start()
        self.space = Space.of(self.description)
        self.choice = Choice.of(self.options, self.description)
        self.ledger.write("implementation", **self.description, judged=self.choice.functions)
        if self.options.since:
            self.find_footprints()
        shard_index, num_shards = self.options.part
        mine = [section for section in sections() if self._has_cases(section)][shard_index::num_shards]
        self.plan = [section for section in mine if section.function not in self.since.unchanged]

    def find_footprints(self) -> None:
        """Take the footprints from the process that finds them, once: before a run that leaves out
        what is unchanged, else after it, when a report needs them.
        """
        if self.inquiry:
            self.since, self.inquiry = self._since(self.inquiry), None

    def _since(self, inquiry: Inquiry) -> Since:
        """The footprints, and the functions that are unchanged since the report or revision.

        Raises:
            UsageError: there is no such report or revision.
        """
        footprints, roots, reason = inquiry.answer()
        conditions = self.options, self.description, self.corpus, self.waivers
        now = under(footprints, *conditions) if footprints else None
        if self.earlier is not None:
            out = since_report(now, self.earlier, self.options.since)
        elif self.options.since:
            revision_footprints = footprints_at(self.options.since, self.options.child, roots)
            out = since_revision(now, under(revision_footprints, *conditions), self.options.since)
        else:
            out = Since(now)
        return out if now else replace(out, reasons=dict.fromkeys(CONTRACTS, f"its footprint is not known: {reason}"))

    def close(self) -> None:
        self.pool.close()
        if self.inquiry:
            self.inquiry.close()
        self.ledger.close()
        if self.progress:
            self.progress.end()

    def verdict(self, folder: Path, whole: bool, interrupted: str, may_be_empty: bool = False) -> Verdict:
        """The verdict from the ledgers of all workers."""
        seconds, left_out = time.monotonic() - self.started, {*self.since.unchanged}
        left_out |= {*CONTRACTS} - {*self.choice.functions}
        # with --where, cases that a waiver covers may not run, so no waiver counts as stale
        waivers = [waiver.name for waiver in self.waivers if waiver.function not in left_out and not self.options.where]
        context = self.baseline, whole, interrupted, self.since, may_be_empty
        return assemble(folder, self.options, seconds, waivers, *context)

    def problem(self, location: str, error: BaseException | str) -> None:
        """Record an error of the suite, which is no verdict on the implementation."""
        text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        self.ledger.write("problem", text=f"{location}: {text}")

    def _offered(self, function: str) -> bool:
        return bool(self.description["functions"][function]["offered"])

    def _is_judged(self, case: Case) -> bool:
        chosen = case.function in {*self.choice.functions} - {*self.since.unchanged}
        return chosen and self._offered(case.function) and self.choice.holds(case)

    def _has_cases(self, section: Section) -> bool:
        """Whether cases may fall to the section.

        Shards that consist of other sections would be empty.
        """
        if section.kind == "covering" and not self.profile.amount(section.function, self.space).rows:
            return False
        if section.kind == "models" and not self.profile.judges_model_sizes(section.function, self.space):
            return False
        chosen = section.function in self.choice.functions
        return section.kind == "corpus" or (chosen and self._offered(section.function))

    def run(self) -> list[Failure]:
        """Run the whole plan from one queue, then find the smallest case of every new failure.

        The children draw the cases too, so that one is idle only when no work is left.
        """
        return self._run(self.plan)

    def sweep(self, section: Section) -> list[Failure]:
        """Run one section to its end, then find the smallest case of every new failure."""
        return self._run([section])

    def _run(self, plan: list[Section]) -> list[Failure]:
        agenda = Agenda()
        places: dict[int, Place] = {}  # by the identity of the case
        varied: dict[int, Case] = {}  # the first case of the structure, by the identity of the case

        def schedule(section: Section, structures: list[Structure]) -> None:
            number, count = plan.index(section), 0
            for structure in structures:
                agenda.add(structure, KINDS.index(section.kind), first=structure[0].is_large)
                for case in structure:
                    places[id(case)], varied[id(case)] = (number, count), structure[0]
                    count += 1
            self.ledger.write("plan", section=section.label, scheduled=count)
            if self.progress:
                self.progress.scheduled(count)

        for section in plan:
            if section.kind == "corpus":
                schedule(section, [[case] for case in self.corpus if self._is_judged(case)])
            else:
                where = self.choice.where[section.function]
                agenda.add(Draw(section, self.profile, self.space, self.options.seed, where), REQUESTS)
        self.ledger.write("sections", labels=[section.label for section in plan])
        failed: Failed = {}
        try:
            answers = with_hangs_confirmed(self.pool.work(agenda), self.pool, self.profile.reduce_seconds)
            for work, answer in answers:
                if isinstance(work, Case) and isinstance(answer, Outcome):
                    position = places[id(work)]
                    self._judged(plan[position[0]], work, varied[id(work)], answer, position, failed)
                elif isinstance(work, Draw) and isinstance(answer, list):
                    schedule(work.section, answer)
                elif isinstance(work, Draw) and isinstance(answer, Outcome):
                    self.problem(work.section.label, answer.reason)
            return self._smallest_of(failed, plan)
        except (KeyboardInterrupt, Lost):  # failures that are not reduced yet are reported as they are
            for position, case, outcome in failed.values():
                self.keep(Failure(case, outcome, plan[position[0]].label, 0, False))
            raise

    def _smallest_of(self, failed: Failed, plan: list[Section]) -> list[Failure]:
        """The smallest case of each new failure, in the order of the plan, literal cases last."""
        failures = []
        for key in sorted(failed, key=lambda key: _priority(*failed[key])):
            position, case, outcome = failed[key]
            if key not in self.known:
                failures.append(self.smallest(key, case, outcome, plan[position[0]].label))
            del failed[key]
        return [failure for failure in failures if failure]

    def _judged(
        self, section: Section, case: Case, first: Case, outcome: Outcome, position: Place, failed: Failed
    ) -> None:
        """Write the outcome of a case, or WAIVED if a waiver covers it, and keep the first case of
        each failure.

        Args:
            first: the case of the same structure that ran first.
        """
        covering = (waiver for waiver in self.waivers if outcome.status in FAILING and waiver.covers(case, outcome))
        waiver = next(covering, None)
        status = "WAIVED" if waiver else outcome.status
        changed = [field.name for field in fields(case) if getattr(case, field.name) != getattr(first, field.name)]
        covered = {"settings": settings_of(case), "scores": outcome.scores} if self.options.covered else {}
        name = waiver.name if waiver else ""
        self._record(
            "outcome", case, outcome, section=section.label, status=status, waiver=name, changed=changed, **covered
        )
        if self.progress:
            self.progress.case(outcome, status in FAILING)
            if status in FAILING and not failed:
                self.progress.failure(case, outcome)
        key = failure_key(case, outcome)
        earliest = key not in failed or _priority(position, case, outcome) < _priority(*failed[key])
        if status in FAILING and earliest:
            failed[key] = position, case, outcome

    def _record(self, kind: str, case: Case, outcome: Outcome, **fields: Any) -> None:
        ended = round(time.monotonic() - self.started, 3)
        about = {"id": case.id, "function": case.function, "ended": ended}
        self.ledger.write(kind, **about | asdict(outcome) | {"law": case.law} | fields)

    def smallest(self, key: Key, case: Case, outcome: Outcome, found_in: str) -> Failure | None:
        """Confirm, reduce, save and record a failure; None: it is one that is known.

        Args:
            found_in: the label of the part of the run that found it.
        """
        # one that cannot be reduced leaves the search open to the other sections
        if not _literal(case):
            self.known.add(key)
        case, outcome = self._confirmed(case, outcome)
        case, outcome = blamed(case, outcome, lambda candidate: self._outcome_in_scope(candidate, fresh=True))
        if outcome.status != "FLAKY" and failure_key(case, outcome) != key and failure_key(case, outcome) in self.known:
            return None  # in a fresh process it fails like another one, which is reported already
        if not _literal(case):
            self.known.add(failure_key(case, outcome))
        attempts, smallest, error = 0, False, ""
        if outcome.status not in ("FLAKY", "ERROR", "OOM"):
            reduced = reduce(case, outcome, self.attempts(case), self.profile.reduce_seconds)
            confirmed = self._attempt(reduced.case, fresh=True)
            attempts, error = reduced.attempts, reduced.error
            if failure_key(reduced.case, confirmed) == failure_key(case, outcome):  # not by chance, or by earlier calls
                case, outcome, smallest = reduced.case, confirmed, reduced.finished
        failure = Failure(case, outcome, found_in, attempts, smallest, error)
        return self.keep(failure)

    def _confirmed(self, case: Case, outcome: Outcome) -> tuple[Case, Outcome]:
        """The failure in a fresh process; FLAKY if it passes there."""
        fresh_outcome = self._attempt(case, fresh=True)
        if fresh_outcome.status in FAILING:
            return case, fresh_outcome
        after_another = replace(case, law="history", golden="", illegal="")
        if not _literal(case):
            repeated = self._attempt(after_another, fresh=True)
            if repeated.status in FAILING:
                return after_another, repeated
        fresh, ran = (lambda candidate: self._attempt(candidate, fresh=True)), self.pool.before(case)
        if shown := with_calls_before(case, outcome, ran, fresh, self.profile.reduce_seconds):
            return shown
        circumstances = "alone, and after the calls before it" if ran else "again"
        return case, replace(outcome, status="FLAKY", reason=f"failed once and passed when it was run {circumstances}")

    def attempts(self, failing: Case) -> Callable[[Case], Outcome]:
        """The tries of a reduction: in a running child, unless earlier calls matter."""
        stateful = bool(failing.before)
        return lambda case: self._outcome_in_scope(case, fresh=stateful or case.law == "history")

    def _outcome_in_scope(self, case: Case, fresh: bool) -> Outcome:
        """The outcome of a case that is judged; another one does not run."""
        return self._attempt(case, fresh) if self.choice.holds(case) else Outcome("NOT_RUN", reason="outside")

    def _attempt(self, case: Case, fresh: bool) -> Outcome:
        outcome = self.pool.run_alone(case) if fresh else self.pool.answer(case)
        self._record("request", case, outcome)
        return outcome

    def keep(self, failure: Failure) -> Failure:
        """Save the case and record the failure; returns it with its file.

        A failure whose case cannot be saved is reported all the same.
        """
        outcome = failure.outcome
        finding = {
            "implementation": self.options.implementation,
            "status": outcome.status,
            "finding": outcome.finding,
            "reason": outcome.reason,
            "versions": self.description["versions"],
            "device": self.description["device_name"],
        }
        failure = replace(failure, file=corpus.try_save(Path(self.options.corpus), failure.case, finding))
        self.ledger.write("failure", **failure.record())
        return failure


def default_jobs(options: Options) -> int:
    """On a GPU one process per core and an eighth more, because processes compile kernels at the
    same time and wait for the device in turns. On a CPU two, and under memcheck, where a process
    takes seconds to start.
    """
    cores = os.cpu_count() or 1
    many = options.device != "cpu" and options.sanitize != "memcheck" and torch.cuda.is_available()
    return min(cores + cores // 8, 32) if many else min(cores, 2)


def _priority(position: Place, case: Case, outcome: Outcome) -> tuple[bool, Place]:
    """The order of reduction: literal cases last, else as in the plan."""
    return _literal(case), position


def _literal(case: Case) -> bool:
    """Whether the case is a literal one, which cannot be made smaller."""
    return bool(case.golden or case.illegal)
