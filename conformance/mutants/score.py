"""Plants every mutant, runs the gate's cases on each until one kills it, and prints the score.

The cases run on the implementation itself first. It must pass them, and some are traced, so that an
automatic mutant is tried only on cases of functions that reach it, the quickest first.
"""

import itertools
import tempfile
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from conformance.catalogue import CONTRACTS
from conformance.core.case import Case
from conformance.core.space import Space
from conformance.engine.child.child import MOST_RANKS
from conformance.engine.child.runner import Outcome
from conformance.engine.choose.plan import cases_of, sections
from conformance.engine.choose.profiles import PROFILES
from conformance.engine.options import ChildOptions
from conformance.engine.run.pool import Pool
from conformance.interface import UsageError
from conformance.mutants.planted import DEFECTS

# cases of each function that the implementation must pass before listed defects are planted in it;
# afterwards it must also pass each case that killed one
SOUND = 10
# one case in TRACED of all functions is run again with its calls recorded, which slows an
# interpreter down; of one function every case
TRACED = 8
TRACED_SECONDS = 600.0  # time limit of a traced case
AFTER_A_CRASH = 60  # cases tried after a crash, in search of a wrong value
HANGS = 2  # a mutant is abandoned after this many
MOST_ON_A_CPU = 2**20  # the largest size or setting of a GPU's case that a CPU also runs in time


@dataclass(frozen=True)
class PassedCase:
    """A case that the implementation itself passes."""

    case: Case
    seconds: float
    calls: frozenset[str]  # "file:function" of the implementation that cases of this function run


@dataclass(frozen=True)
class Mutant:
    """A mutant to be planted."""

    name: str
    title: str
    implementation: str
    copy: Callable[[Path], None] | None = None  # writes the mutated package into a folder
    touches: str = ""  # the changed "file:function"; empty: unknown
    first: tuple[str, ...] = ()  # functions of the interface to try before others
    likely: Case | None = None  # to be tried before all others


@dataclass(frozen=True)
class Result:
    """The result of a mutant."""

    mutant: str
    title: str
    way: str  # value, law, crash, or survived
    function: str = ""
    check: str = ""
    cases: int = 0
    seconds: float = 0.0
    case: str = ""

    def record(self) -> dict[str, Any]:
        return asdict(self) | {"killed": self.killed}

    @property
    def killed(self) -> bool:
        return self.way != "survived"

    @property
    def line(self) -> str:
        name = f"{self.mutant}: {self.title}"
        if not self.killed:
            return f"SURVIVED                {name} ({self.cases} cases)"
        way = f"{self.way} (only)" if self.way == "crash" else self.way
        return f"killed by {way:<13} {name} ({self.function} {self.check}, after {self.cases} cases)"


def score_mutants(
    implementation: str,
    kind: str,
    seed: int = 0,
    jobs: int = 2,
    sample: int = 0,
    only: str = "",
    function: str = "",
    one_gpu: bool = False,
    likely: Mapping[str, str] | None = None,
) -> list[Result]:
    """Try every mutant of a kind on the gate's cases; prints one line per mutant and the score.

    Args:
        sample: number of mutants, spread over all; 0 for all.
        only: part of the name of the mutants to try.
        function: use only this function's cases, and only the mutants that they reach.
        one_gpu: use the cases of a gate on one GPU; on a CPU without the laws that need a GPU.
        likely: by the name of a mutant, the id of the case that has killed it before.

    Raises:
        UsageError: an unusable or wrong implementation, automatic mutants of the reference, or no
            such mutant.
    """
    _check(implementation, kind, function)
    passed = passed_cases(implementation, seed, jobs, function, kind != "planted", one_gpu)
    by_id = {item.case.id: item.case for item in passed} if likely else {}
    # rewriting every file costs more than trying a few mutants
    files = {call.partition(":")[0] for item in passed for call in item.calls} if function else None
    chosen = [
        replace(mutant, likely=by_id.get((likely or {}).get(mutant.name, "")))
        for mutant in _mutants(implementation, kind, files)
        if only in mutant.name and (not function or _reached(mutant, function, passed))
    ]
    if not chosen:
        mutant, reached = (
            f"{'' if kind == 'all' else kind + ' '}mutant",
            f" that {function} reaches" if function else "",
        )
        raise UsageError(f"there is no {mutant} whose name contains {only!r}{reached}")
    count = min(sample or len(chosen), len(chosen))
    chosen = [chosen[i * len(chosen) // count] for i in range(count)]
    results = []
    with ThreadPoolExecutor(jobs) as workers:
        for result in workers.map(lambda mutant: attempt(mutant, passed), chosen):
            print(result.line, flush=True)
            results.append(result)
    killed = [result for result in results if result.killed]
    if kind == "planted":
        texts = {result.case for result in killed}
        with Pool(ChildOptions(implementation), jobs) as pool:
            _require_sound(implementation, (item.case for item in passed if item.case.text in texts), pool)
    ways = ", ".join(f"{sum(r.way == way for r in killed)} by {way}" for way in ("value", "law", "crash"))
    share = f"{len(killed)} of {len(results)} ({len(killed) / len(results):.1%})"
    print(f"\nscore {share}: {ways}; {len(results) - len(killed)} survived")
    return results


def _check(implementation: str, kind: str, function: str) -> None:
    if function and function not in CONTRACTS:
        raise UsageError(f"--function is {function!r}; the functions are {', '.join(CONTRACTS)}")
    if kind != "planted" and implementation.partition(".")[0] == "moe_ref":
        copy = "a copy of it, by `python -m benchmarks.reference_copy`: its mutants would change the oracle too"
        raise UsageError(f"--impl is {implementation!r} with --kind {kind}; it must be {copy}")


def _mutants(implementation: str, kind: str, files: Container[str] | None) -> Iterator[Mutant]:
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
            copy = lambda folder: write_copy(mutant, implementation, folder)  # noqa: E731
            return Mutant(mutant.name, title, implementation, copy, touches)

        yield from map(planted, source_mutants(implementation, files))


def _tried_by(function: str) -> str:
    """The function of the interface whose cases call this one."""
    return next((name for name, contract in CONTRACTS.items() if function in (name, *contract.companions)), function)


def _reached(mutant: Mutant, function: str, passed: list[PassedCase]) -> bool:
    return function in mutant.first or any(mutant.touches in item.calls for item in passed)


def passed_cases(
    implementation: str, seed: int, jobs: int, function: str, trace: bool, one_gpu: bool
) -> list[PassedCase]:
    """The gate's cases of one or all offered functions, passed by the implementation itself.

    Raises:
        UsageError: it fails one, which makes its mutants meaningless.
    """
    profile = PROFILES["gate"]
    with Pool(ChildOptions(implementation), jobs) as pool:
        description = pool.start()
        here = space = Space.of(description)
        if one_gpu:
            space = replace(here, device="cuda", ranks=1, shared_ranks=MOST_RANKS)
        functions = description["functions"].items()
        offered = {name for name, offer in functions if offer["offered"] and function in ("", name)}
        cases = {
            name: [
                _without_laws_of(here.device, case)
                for s in sections()
                if s.function == name
                for case in cases_of(s, profile, space, seed)
            ]
            for name in offered
        }
        if here.device == "cpu":
            cases = _without_huge(cases)
        if not trace:
            _require_sound(implementation, (case for group in cases.values() for case in group[:SOUND]), pool)
            return [PassedCase(case, 0.0, frozenset()) for group in cases.values() for case in group]
        outcomes = _require_sound(implementation, (case for group in cases.values() for case in group), pool)
    ran = [(case, outcome.seconds_implementation) for case, outcome in outcomes if outcome.evaluations]
    calls = _calls(implementation, [case for case, _ in (ran if function else ran[::TRACED])], jobs)
    return [PassedCase(case, seconds, calls.get(case.function, frozenset())) for case, seconds in ran]


def _without_laws_of(device: str, case: Case) -> Case:
    """The case, without a law that another device cannot check."""
    law = CONTRACTS[case.function].laws.get(case.law)
    return replace(case, law="") if law and law.device not in ("", device) else case


def _without_huge(cases: dict[str, list[Case]]) -> dict[str, list[Case]]:
    """The cases, without those of a GPU that a CPU cannot run in the time of a case; says which."""
    huge = [case for group in cases.values() for case in group if _largest(case) > MOST_ON_A_CPU]
    for case in huge:
        print(f"left out: a case of {_largest(case):,} rows takes a CPU minutes: {case.text}")
    return {name: [case for case in group if case not in huge] for name, group in cases.items()}


def _largest(case: Case) -> int:
    """The largest number among the sizes and settings of the case."""
    return max((value for value in case.record().values() if isinstance(value, int)), default=0)


def _require_sound(implementation: str, cases: Iterable[Case], pool: Pool) -> list[tuple[Case, Outcome]]:
    """The cases with the outcomes of the implementation itself.

    Raises:
        UsageError: it fails one.
    """
    outcomes = []
    for case, outcome in pool.run(cases):
        if _kill(case, outcome):
            cause = f"{outcome.status}: {outcome.finding['message'] if outcome.finding else outcome.reason}"
            raise UsageError(
                f"{implementation} itself fails ({cause}), so that its mutants show nothing: case {case.text}"
            )
        outcomes.append((case, outcome))
    return outcomes


def _calls(implementation: str, cases: list[Case], jobs: int) -> dict[str, frozenset[str]]:
    """The implementation's own functions that run in the cases of each judged function."""
    from conformance.mutants.automatic import home

    out: dict[str, frozenset[str]] = {}
    with Pool(ChildOptions(implementation, trace=str(home(implementation))), jobs, TRACED_SECONDS) as pool:
        for case, outcome in pool.run(cases):
            out[case.function] = out.get(case.function, frozenset()) | frozenset(outcome.calls)
    return out


def _order(mutant: Mutant, passed: list[PassedCase]) -> Iterator[Case]:
    """The cases that reach a mutant, the quickest first; without traces, its functions first."""
    reaching = [item for item in passed if mutant.touches and mutant.touches in item.calls]
    if reaching:
        yield from (item.case for item in sorted(reaching, key=lambda item: item.seconds))
        return
    for group in (mutant.first, tuple(name for name in CONTRACTS if name not in mutant.first)):
        rows = itertools.zip_longest(*([item.case for item in passed if item.case.function == name] for name in group))
        yield from (case for row in rows for case in row if case is not None)


def attempt(mutant: Mutant, passed: list[PassedCase]) -> Result:
    """Run cases until a wrong value or a broken law, or to the end."""
    started, count, crash, hangs = time.monotonic(), 0, None, 0
    with tempfile.TemporaryDirectory(prefix="moe-conformance-mutant-") as folder:
        if mutant.copy:
            mutant.copy(Path(folder))
        options = ChildOptions(mutant.implementation, search=(folder,) if mutant.copy else ())
        try:
            with Pool(options) as pool:
                first = pool.run([mutant.likely] if mutant.likely else [])  # alone: a run may change the order
                for case, outcome in itertools.chain(first, pool.run(_order(mutant, passed))):
                    count += 1
                    way = _kill(case, outcome)
                    if way == "value" and not mutant.copy and count > 1 and pool.run_alone(case).status == "PASS":
                        # only after other cases
                        way, outcome = "law", replace(outcome, finding={"check": "history"})
                    if way in ("value", "law"):
                        return _killed(mutant, way, case, outcome, count, started)
                    if way == "crash" and crash is None:
                        crash = _killed(mutant, way, case, outcome, count, started)
                    hangs += outcome.status == "HANG"
                    if crash and (count > crash.cases + AFTER_A_CRASH or hangs == HANGS):
                        break
        except UsageError as error:
            check, seconds = f"cannot be imported: {error}", time.monotonic() - started
            return Result(mutant.name, mutant.title, "crash", check=check, seconds=seconds)
    return crash or Result(mutant.name, mutant.title, "survived", cases=count, seconds=time.monotonic() - started)


def _kill(case: Case, outcome: Outcome) -> str:
    """The way the outcome kills a mutant; empty if it does not."""
    if outcome.status in ("CRASH", "HANG", "OOM"):
        return "crash"
    if outcome.status != "FAIL" or outcome.finding is None:
        return ""
    return "law" if outcome.finding["check"] in CONTRACTS[case.function].laws else "value"


def _killed(mutant: Mutant, way: str, case: Case, outcome: Outcome, count: int, started: float) -> Result:
    check, seconds = (outcome.finding or {}).get("check", outcome.status), time.monotonic() - started
    return Result(mutant.name, mutant.title, way, case.function, check, count, seconds, case.text)
