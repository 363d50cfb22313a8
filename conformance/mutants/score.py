"""Plants every mutant, runs the gate's cases on each until one kills it, and prints the score.

The cases are run on the implementation itself first: it must pass them, and it is recorded which of its functions some of them
run, so that an automatic mutant is tried only on cases of functions that reach it, the quickest first.
"""

import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from conformance.catalogue import CONTRACTS
from conformance.core.case import Case
from conformance.core.space import Space
from conformance.engine.child.runner import Outcome
from conformance.engine.choose.plan import cases_of, sections
from conformance.engine.choose.profiles import PROFILES
from conformance.engine.options import ChildOptions
from conformance.engine.run.pool import Pool
from conformance.interface import UsageError
from conformance.mutants.planted import DEFECTS

SOUND = 40  # cases of each function that the implementation must pass before listed defects are planted in it; all, before automatic ones
TRACED = 8  # of so many cases, one is run again with its calls recorded, which slows an interpreter down
TRACED_SECONDS = 600.0  # for such a case
AFTER_A_CRASH = 60  # cases that are still tried after a crash, in search of a value that is wrong
HANGS = 2  # after so many hangs no more are waited for


@dataclass(frozen=True)
class Known:
    """A case, and what the implementation itself does on it."""

    case: Case
    seconds: float
    calls: frozenset[str]  # what of the implementation cases of this function run


@dataclass(frozen=True)
class Mutant:
    """Something to plant."""

    name: str
    title: str
    implementation: str
    copy: Callable[[Path], None] | None = (
        None  # writes the mutated package into a folder; None: the namespace is the mutant
    )
    touches: str = ""  # "file:function" that the change is in; empty: unknown
    first: tuple[str, ...] = ()  # functions of the interface to try before others


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
            return f"SURVIVED                {self.mutant}: {self.title} ({self.cases} cases)"
        how = f"{self.how} (only)" if self.how == "crash" else self.how
        return (
            f"killed by {how:<13} {self.mutant}: {self.title} ({self.function} {self.check}, after {self.cases} cases)"
        )


def score_mutants(
    implementation: str, kind: str, seed: int = 0, jobs: int = 2, sample: int = 0, only: str = "", function: str = ""
) -> list[Result]:
    """Try every mutant of a kind on the gate's cases; prints a line each and the score.

    Args:
        sample: so many of the automatic mutants, spread over all; 0 for all.
        only: part of the name of the mutants to try.
        function: use this function's cases only, and of the automatic mutants those that they reach.

    Raises:
        UsageError: the implementation cannot be used or is itself wrong, or there is no such mutant.
    """
    if function and function not in CONTRACTS:
        raise UsageError(f"--function is {function!r}; the functions are {', '.join(CONTRACTS)}")
    known = _known(implementation, seed, jobs, function, trace=kind != "planted")
    chosen = [
        mutant
        for mutant in _mutants(implementation, kind)
        if only in mutant.name and (not function or _reached(mutant, function, known))
    ]
    if not chosen:
        raise UsageError(
            f"there is no {'' if kind == 'all' else kind + ' '}mutant whose name contains {only!r}{f' that {function} reaches' if function else ''}"
        )
    count = min(sample or len(chosen), len(chosen))
    chosen = [chosen[i * len(chosen) // count] for i in range(count)]
    results = []
    with ThreadPoolExecutor(jobs) as workers:
        for result in workers.map(lambda mutant: _try(mutant, known), chosen):
            print(result.line, flush=True)
            results.append(result)
    killed = [result for result in results if result.killed]
    ways = ", ".join(f"{sum(r.how == how for r in killed)} by {how}" for how in ("value", "law", "crash"))
    print(
        f"\nscore {len(killed)} of {len(results)} ({len(killed) / len(results):.1%}): {ways}; {len(results) - len(killed)} survived"
    )
    return results


def _mutants(implementation: str, kind: str) -> Iterator[Mutant]:
    if kind in ("planted", "all"):
        for defect in DEFECTS.values():
            name = f"conformance.mutants.planted:{defect.name}.{implementation}"
            first = tuple(dict.fromkeys(_tried_by(function) for function in defect.wrappers))
            yield Mutant(defect.name, f"{defect.title} [{defect.origin}]", name, first=first)
    if kind in ("automatic", "all"):
        from conformance.mutants.automatic import SourceMutant, enclosing_function, source_mutants, write_copy

        def planted(mutant: SourceMutant) -> Mutant:
            touches = f"{mutant.file}:{enclosing_function(mutant)}"
            title = f"{mutant.before} → {mutant.after}"
            return Mutant(
                mutant.name, title, implementation, lambda folder: write_copy(mutant, implementation, folder), touches
            )

        yield from map(planted, source_mutants(implementation))


def _tried_by(function: str) -> str:
    """The function of the interface whose cases call this one."""
    return next((name for name, contract in CONTRACTS.items() if function in (name, *contract.companions)), function)


def _reached(mutant: Mutant, function: str, known: list[Known]) -> bool:
    return function in mutant.first or any(mutant.touches in item.calls for item in known)


def _known(implementation: str, seed: int, jobs: int, function: str, trace: bool) -> list[Known]:
    """The gate's cases of every function that is offered, or of one, and what the implementation itself does on each.

    Raises:
        UsageError: it fails one, so that nothing would be learned from its mutants.
    """
    profile = PROFILES["gate"]
    with Pool(ChildOptions(implementation), jobs) as pool:
        described = pool.start()
        space = Space.of(described)
        offered = {name for name, what in described["functions"].items() if what["offered"] and function in ("", name)}
        planned = [section for section in sections(profile) if section.function in offered]
        cases = {
            name: [case for s in planned if s.function == name for case in cases_of(s, profile, space, seed, [])]
            for name in offered
        }
        if not trace:
            return _sound(implementation, cases, pool)
        ran = []
        for case, outcome in pool.run(case for some in cases.values() for case in some):
            if _kill(case, outcome):
                raise UsageError(_unsound(implementation, case, outcome))
            if outcome.evaluations:
                ran.append((case, outcome.seconds_implementation))
    calls = _calls(implementation, [case for case, _ in ran[::TRACED]], jobs) if trace else {}
    return [Known(case, seconds, calls.get(case.function, frozenset())) for case, seconds in ran]


def _sound(implementation: str, cases: dict[str, list[Case]], pool: Pool) -> list[Known]:
    """All cases, after the implementation has passed the first ones of every function.

    Raises:
        UsageError: it fails one.
    """
    for case, outcome in pool.run(case for some in cases.values() for case in some[:SOUND]):
        if _kill(case, outcome):
            raise UsageError(_unsound(implementation, case, outcome))
    return [Known(case, 0.0, frozenset()) for some in cases.values() for case in some]


def _unsound(implementation: str, case: Case, outcome: Outcome) -> str:
    how = outcome.finding["message"] if outcome.finding else outcome.reason
    return f"{implementation} itself fails ({outcome.status}: {how}), so that nothing would be learned from its mutants: case {case.text}"


def _calls(implementation: str, cases: list[Case], jobs: int) -> dict[str, frozenset[str]]:
    """Which of its own functions the implementation runs in the cases of each function of the interface."""
    from conformance.mutants.automatic import home

    out: dict[str, frozenset[str]] = {}
    with Pool(ChildOptions(implementation, trace=str(home(implementation))), jobs, TRACED_SECONDS) as pool:
        for case, outcome in pool.run(cases):
            out[case.function] = out.get(case.function, frozenset()) | frozenset(outcome.calls)
    return out


def _order(mutant: Mutant, known: list[Known]) -> Iterator[Case]:
    """The cases for a mutant: those that reach it, the quickest first; or, where that is not known, its functions in turn."""
    if mutant.touches and any(mutant.touches in item.calls for item in known):
        yield from (item.case for item in sorted(known, key=lambda item: item.seconds) if mutant.touches in item.calls)
        return
    for group in (mutant.first, tuple(name for name in CONTRACTS if name not in mutant.first)):
        rows = itertools.zip_longest(*([item.case for item in known if item.case.function == name] for name in group))
        yield from (case for row in rows for case in row if case is not None)


def _try(mutant: Mutant, known: list[Known]) -> Result:
    """Run cases until one shows a wrong value or law, or all are through."""
    started, count, crash, hangs = time.monotonic(), 0, None, 0
    with tempfile.TemporaryDirectory(prefix="moe-conformance-mutant-") as folder:
        if mutant.copy:
            mutant.copy(Path(folder))
        settings = ChildOptions(mutant.implementation, search=(folder,) if mutant.copy else ())
        try:
            with Pool(settings) as pool:
                for case, outcome in pool.run(_order(mutant, known)):
                    count += 1
                    how = _kill(case, outcome)
                    if how == "value" and not mutant.copy and pool.run_alone(case).status == "PASS":
                        how, outcome = (
                            "law",
                            replace(outcome, finding={"check": "history"}),
                        )  # wrong only after other cases
                    if how in ("value", "law"):
                        return _killed(mutant, how, case, outcome, count, started)
                    if how == "crash" and crash is None:
                        crash = _killed(mutant, how, case, outcome, count, started)
                    hangs += outcome.status == "HANG"
                    if crash and (count > crash.cases + AFTER_A_CRASH or hangs == HANGS):
                        break
        except UsageError as error:
            return Result(
                mutant.name,
                mutant.title,
                True,
                "crash",
                check=f"cannot be imported: {error}",
                seconds=time.monotonic() - started,
            )
    return crash or Result(
        mutant.name, mutant.title, False, "survived", cases=count, seconds=time.monotonic() - started
    )


def _kill(case: Case, outcome: Outcome) -> str:
    """How the outcome kills a mutant, if it does."""
    if outcome.status in ("CRASH", "HANG", "OOM"):
        return "crash"
    if outcome.status != "FAIL" or outcome.finding is None:
        return ""
    return "law" if outcome.finding["check"] in CONTRACTS[case.function].laws else "value"


def _killed(mutant: Mutant, how: str, case: Case, outcome: Outcome, count: int, started: float) -> Result:
    check = (outcome.finding or {}).get("check", outcome.status)
    return Result(
        mutant.name, mutant.title, True, how, case.function, check, count, time.monotonic() - started, case.text
    )
