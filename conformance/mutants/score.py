"""Plants every mutant, runs the gate's cases on each until one kills it, and prints the score."""

import itertools
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from conformance.case import Case
from conformance.execute.child import Settings
from conformance.execute.evaluate import Outcome
from conformance.execute.pool import Pool
from conformance.interface import UsageError
from conformance.mutants.planted import DEFECTS
from conformance.plan import cases_of, sections
from conformance.profiles import PROFILES
from conformance.registry import CONTRACTS
from conformance.strategies.space import Space

CASE_SECONDS = 30.0
SOUND = 60  # cases of each function that the implementation must pass without a mutant
AFTER_A_CRASH = 60  # cases that are still tried after a crash, in search of a value that is wrong


@dataclass(frozen=True)
class Mutant:
    """Something to plant: a namespace, and the folder that holds its source if it is not the installed one."""

    name: str
    title: str
    implementation: str
    folder: str = ""
    first: tuple[str, ...] = ()  # functions to try first


@dataclass(frozen=True)
class Result:
    """What became of a mutant."""

    mutant: str
    title: str
    killed: bool
    how: str  # value, law, crash, or survived
    function: str = ""
    check: str = ""
    cases: int = 0
    seconds: float = 0.0
    case: str = ""

    def record(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def line(self) -> str:
        if not self.killed:
            return f"SURVIVED          {self.mutant}: {self.title} ({self.cases} cases)"
        only = " (only)" if self.how == "crash" else ""
        return f"killed by {self.how + only:<13} {self.mutant}: {self.title} ({self.function} {self.check}, after {self.cases} cases)"


def hunt(implementation: str, kind: str, seed: int, jobs: int, sample: int, only: str) -> list[Result]:
    """Try every mutant of a kind on the gate's cases; prints a line each and the score.

    Raises:
        UsageError: the implementation cannot be used or is itself wrong, or there is no such mutant.
    """
    with tempfile.TemporaryDirectory(prefix="moe-conformance-mutants-") as folder:
        chosen = [mutant for mutant in _mutants(implementation, kind, sample, Path(folder)) if only in mutant.name]
        if not chosen:
            raise UsageError(f"there is no {'' if kind == 'all' else kind + ' '}mutant whose name contains {only!r}")
        cases = _cases(implementation, seed)
        results = []
        with ThreadPoolExecutor(jobs) as workers:
            for result in workers.map(lambda mutant: _try(mutant, cases), chosen):
                print(result.line, flush=True)
                results.append(result)
    killed = [result for result in results if result.killed]
    ways = ", ".join(f"{sum(r.how == how for r in killed)} by {how}" for how in ("value", "law", "crash"))
    print(f"\nscore {len(killed)} of {len(results)} ({len(killed) / len(results):.1%}): {ways}; {len(results) - len(killed)} survived")
    return results


def _mutants(implementation: str, kind: str, sample: int, folder: Path) -> Iterator[Mutant]:
    if kind in ("planted", "all"):
        for defect in DEFECTS.values():
            name = f"conformance.mutants.planted:{defect.name}.{implementation}"
            yield Mutant(defect.name, f"{defect.title} [{defect.origin}]", name, first=tuple(defect.wrappers))
    if kind in ("automatic", "all"):
        from conformance.mutants.automatic import source_mutants, write_copy

        every = source_mutants(implementation)
        step = max(len(every) / sample, 1) if sample else 1
        for index, mutant in enumerate([every[int(i * step)] for i in range(int(len(every) / step))]):
            place = folder / str(index)
            write_copy(mutant, implementation, place)
            yield Mutant(mutant.name, f"{mutant.before} → {mutant.after}", implementation, str(place))


def _cases(implementation: str, seed: int) -> dict[str, list[Case]]:
    """The gate's cases of each function that is offered, fixed ones first."""
    profile = PROFILES["gate"]
    with Pool(Settings(implementation)) as pool:
        known = pool.start()
        space = Space.of(known)
        out: dict[str, list[Case]] = {}
        for section in sections(profile):
            if section.function and known["functions"][section.function]["offered"]:
                out.setdefault(section.function, []).extend(cases_of(section, profile, space, seed, []))
        for case, outcome in pool.run(case for function in out.values() for case in function[:SOUND]):
            if _kill(case, outcome):
                raise UsageError(f"{implementation} itself fails, so that nothing would be learned from its mutants: case {case.text}")
    return out


def _order(cases: dict[str, list[Case]], first: tuple[str, ...]) -> Iterator[Case]:
    """Functions in turn, case by case; those in `first` before all others."""
    for group in (first, tuple(name for name in CONTRACTS if name not in first)):
        rows = itertools.zip_longest(*(cases[name] for name in group if name in cases))
        yield from (case for row in rows for case in row if case is not None)


def _try(mutant: Mutant, cases: dict[str, list[Case]]) -> Result:
    """Run cases until one shows a wrong value or law, or all are through."""
    started, count, crash = time.monotonic(), 0, None
    settings = Settings(mutant.implementation, search=(mutant.folder,) if mutant.folder else ())
    try:
        with Pool(settings, case_seconds=CASE_SECONDS) as pool:
            for case, outcome in pool.run(_order(cases, mutant.first)):
                count += 1
                how = _kill(case, outcome)
                if how == "value" and pool.run_alone(case).status == "PASS":
                    how, outcome = "law", replace(outcome, finding={"check": "history"})  # only after other cases: the answer depends on them
                if how in ("value", "law"):
                    return _killed(mutant, how, case, outcome, count, started)
                if how == "crash" and crash is None:
                    crash = _killed(mutant, how, case, outcome, count, started)
                if crash and count > crash.cases + AFTER_A_CRASH:
                    break
    except UsageError as error:
        return Result(mutant.name, mutant.title, True, "crash", check=f"cannot be imported: {error}", seconds=time.monotonic() - started)
    return crash or Result(mutant.name, mutant.title, False, "survived", cases=count, seconds=time.monotonic() - started)


def _kill(case: Case, outcome: Outcome) -> str:
    """How the outcome kills a mutant, if it does."""
    if outcome.status in ("CRASH", "HANG", "OOM"):
        return "crash"
    if outcome.status != "FAIL" or outcome.finding is None:
        return ""
    return "law" if outcome.finding["check"] in CONTRACTS[case.function].laws else "value"


def _killed(mutant: Mutant, how: str, case: Case, outcome: Outcome, count: int, started: float) -> Result:
    check = (outcome.finding or {}).get("check", outcome.status)
    return Result(mutant.name, mutant.title, True, how, case.function, check, count, time.monotonic() - started, case.text)
