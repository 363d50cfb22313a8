"""Plants every mutant, runs the gate's cases on each until one kills it, and prints the score.

The cases run on the implementation itself first. It must pass them, and of some the calls are
recorded, so that an automatic mutant is tried only on cases that reach it.
"""

import itertools
import math
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conformance.catalogue import CONTRACTS
from conformance.core.case import Case
from conformance.core.space import Space
from conformance.engine.child.child import MOST_RANKS
from conformance.engine.child.outcome import Outcome
from conformance.engine.choose.plan import cases_of, sections
from conformance.engine.choose.profiles import PROFILES
from conformance.engine.options import ChildOptions
from conformance.engine.run.pool import Pool
from conformance.interface import UsageError
from conformance.mutants.planted import DEFECTS

if TYPE_CHECKING:
    from conformance.mutants.automatic import SourceMutant

# cases of each function that the implementation must pass before listed defects are planted in it;
# afterwards it must also pass each case that killed one
SOUND = 10
# one case in TRACED of all functions is run again with its calls recorded, which slows an
# interpreter down, and stands for the others of its function; of chosen functions every case
TRACED = 8
TRACED_SECONDS = 600.0  # the time limit of a traced case, in seconds
QUICK = 32  # how many cases of a mutant run first
# cases, as many as a run has processes: what differs in no more may be a value that each keeps, and
# show in others
KEPT = 32
AFTER_A_CRASH = 60  # how many cases are tried after a crash, in search of a wrong value
LEAST_SECONDS = 10.0  # seconds before a case of a mutant hangs, however short the mutant's time is
HANGS = 2  # a mutant is abandoned after this many
MOST_ON_A_CPU = 2**20  # the largest size or setting of a GPU's case that a CPU also runs in time


@dataclass(frozen=True)
class PassedCase:
    """A case that the implementation itself passes."""

    case: Case
    seconds: float
    calls: frozenset[str]  # "file:function" of the implementation that it runs, or cases of its function


@dataclass(frozen=True)
class Mutant:
    """A mutant to be planted."""

    name: str
    title: str
    implementation: str
    touches: str = ""  # the changed "file:function"; empty: unknown
    change: "SourceMutant | None" = None  # of the source, in a copy of the package
    differs: frozenset[str] | None = None  # ids of the cases in which it differs; None: unknown
    first: tuple[str, ...] = ()  # functions of the interface to try before others
    likely: Case | None = None  # to be tried before all others


@dataclass(frozen=True)
class Result:
    """The result of a mutant."""

    mutant: str
    title: str
    way: str  # value, law, crash, survived, or unfinished: some cases had no time
    function: str = ""
    check: str = ""
    cases: int = 0
    seconds: float = 0.0
    case: str = ""

    def record(self) -> dict[str, Any]:
        return asdict(self) | {"killed": self.killed}

    @property
    def killed(self) -> bool:
        return self.way not in ("survived", "unfinished")

    @property
    def line(self) -> str:
        name = f"{self.mutant}: {self.title}"
        if self.way == "survived" and not self.cases:
            return f"{'SURVIVED':<24}{name} (differs in no case)"
        if not self.killed:
            return f"{self.way.upper():<24}{name} ({self.cases} cases)"
        description = f"{self.way} (only)" if self.way == "crash" else self.way
        return f"killed by {description:<13} {name} ({self.function} {self.check}, after {self.cases} cases)"


def score_mutants(
    implementation: str,
    kind: str,
    seed: int = 0,
    jobs: int = 2,
    sample: int = 0,
    only: str = "",
    functions: Collection[str] = (),
    one_gpu: bool = False,
    seconds: float = math.inf,
    likely: Mapping[str, str] | None = None,
) -> list[Result]:
    """Try every mutant of a kind on the gate's cases; prints a line as each ends, and the score.

    Args:
        sample: number of mutants, spread over all; 0 for all.
        only: part of the name of the mutants to try.
        functions: use only the cases of these, and only the mutants that they reach; none for all.
        one_gpu: use the cases of a gate on one GPU; on a CPU without the laws that need a GPU.
        seconds: for one mutant, and for one of its cases; afterwards no more of its cases run.
        likely: by the name of a mutant, the id of the case that has killed it before.

    Raises:
        UsageError: an unusable or wrong implementation, automatic mutants of the reference, no such
            function or mutant, no time.
    """
    _check(implementation, kind, functions, seconds)
    passed = passed_cases(implementation, seed, jobs, functions, kind != "planted", one_gpu)
    by_id = {item.case.id: item.case for item in passed} if likely else {}
    # rewriting every file costs more than trying a few mutants
    files = {call.partition(":")[0] for item in passed for call in item.calls} if functions else None
    chosen = [
        replace(mutant, likely=by_id.get((likely or {}).get(mutant.name, "")))
        for mutant in _mutants(implementation, kind, files)
        if only in mutant.name and (not functions or _is_reached(mutant, functions, passed))
    ]
    if not chosen:
        mutant = "mutant" if kind == "all" else f"{kind} mutant"
        reached = f" that {', '.join(functions)} reaches" if functions else ""
        raise UsageError(f"there is no {mutant} whose name contains {only!r}{reached}")
    count = min(sample or len(chosen), len(chosen))
    chosen = [chosen[i * len(chosen) // count] for i in range(count)]
    chosen = compared(chosen, implementation, passed, jobs) if functions else chosen
    with ThreadPoolExecutor(jobs) as workers:
        futures = [workers.submit(attempt, mutant, passed, seconds) for mutant in chosen]
        for future in as_completed(futures):
            print(future.result().line, flush=True)
    results = [future.result() for future in futures]
    killed = [result for result in results if result.killed]
    if kind == "planted":
        texts = {result.case for result in killed}
        with Pool(ChildOptions(implementation), jobs) as pool:
            _require_sound(implementation, (item.case for item in passed if item.case.text in texts), pool)
    count_of = Counter(result.way for result in results)
    share = f"{len(killed)} of {len(results)} ({len(killed) / len(results):.1%})"
    kills = ", ".join(f"{count_of[name]} by {name}" for name in ("value", "law", "crash"))
    endings = ("survived", "unfinished") if seconds < math.inf else ("survived",)
    print(f"\nscore {share}: {kills}; {', '.join(f'{count_of[name]} {name}' for name in endings)}")
    return results


def _check(implementation: str, kind: str, functions: Collection[str], seconds: float) -> None:
    if not seconds > 0:
        raise UsageError(f"--mutant-seconds is {seconds}; it must be more than 0")
    if unknown := [name for name in functions if name not in CONTRACTS]:
        raise UsageError(f"--function is {unknown[0]!r}; the functions are {', '.join(CONTRACTS)}")
    if kind != "planted" and implementation.partition(".")[0] == "moe_ref":
        copy = "a copy of it, by `python -m benchmarks.reference_copy`: its mutants would change the oracle too"
        raise UsageError(f"--impl is {implementation!r} with --kind {kind}; it must be {copy}")


def _mutants(implementation: str, kind: str, files: Container[str] | None) -> Iterator[Mutant]:
    judged_by: dict[str, str] = {}  # the functions of the interface whose cases call a function
    for name, contract in CONTRACTS.items():
        judged_by = dict.fromkeys((name, *contract.companions), name) | judged_by
    if kind in ("planted", "all"):
        for defect in DEFECTS.values():
            name = f"conformance.mutants.planted:{defect.name}.{implementation}"
            first = tuple(dict.fromkeys(judged_by.get(function, function) for function in defect.wrappers))
            yield Mutant(defect.name, f"{defect.title} [{defect.origin}]", name, first=first)
    if kind in ("automatic", "all"):
        from conformance.mutants.automatic import SourceMutant, enclosing_function, source_mutants

        def planted(mutant: SourceMutant) -> Mutant:
            touches = f"{mutant.file}:{enclosing_function(mutant)}"
            title = " ".join(f"{mutant.before} → {mutant.after}".split())  # one line
            return Mutant(mutant.name, title, implementation, touches, mutant)

        yield from map(planted, source_mutants(implementation, files))


def compared(mutants: list[Mutant], implementation: str, passed: list[PassedCase], jobs: int) -> list[Mutant]:
    """The mutants, each with the cases in which it differs, if it can be compared."""
    changes = [mutant.change for mutant in mutants if mutant.change]
    if not changes:
        return mutants
    from conformance.mutants.comparing import differing

    touched = {mutant.touches for mutant in mutants}
    cases = [item.case for item in passed if not touched.isdisjoint(item.calls)]
    differs = differing(changes, implementation, cases, jobs)
    return [
        replace(mutant, differs=frozenset(differs[mutant.name])) if mutant.name in differs else mutant
        for mutant in mutants
    ]


def _is_reached(mutant: Mutant, functions: Collection[str], passed: list[PassedCase]) -> bool:
    return any(function in mutant.first for function in functions) or any(
        mutant.touches in item.calls for item in passed
    )


def passed_cases(
    implementation: str, seed: int, jobs: int, functions: Collection[str], trace: bool, one_gpu: bool
) -> list[PassedCase]:
    """The gate's cases of these or all offered functions, passed by the implementation itself.

    Raises:
        UsageError: it fails one, which makes its mutants meaningless.
    """
    profile = PROFILES["gate"]
    with Pool(ChildOptions(implementation), jobs) as pool:
        description = pool.start()
        here = space = Space.of(description)
        if one_gpu:
            space = replace(here, device="cuda", ranks=1, shared_ranks=MOST_RANKS)
        offers = description["functions"].items()
        offered = {name for name, offer in offers if offer["offered"] and (not functions or name in functions)}
        cases: dict[str, list[Case]] = {name: [] for name in offered}
        for section in sections():
            for case in cases_of(section, profile, space, seed) if section.function in offered else ():
                law = CONTRACTS[case.function].laws.get(case.law)
                can_check = law is None or law.device in ("", here.device)
                cases[section.function].append(case if can_check else replace(case, law=""))
        if here.device == "cpu":
            cases = _without_huge(cases)
        if not trace:
            _require_sound(implementation, (case for group in cases.values() for case in group[:SOUND]), pool)
            return [PassedCase(case, 0.0, frozenset()) for group in cases.values() for case in group]
        outcomes = _require_sound(implementation, (case for group in cases.values() for case in group), pool)
    ran = [(case, outcome.seconds_implementation) for case, outcome in outcomes if outcome.evaluations]
    calls = _calls(implementation, [case for case, _ in (ran if functions else ran[::TRACED])], jobs)
    return [PassedCase(case, seconds, calls(case)) for case, seconds in ran]


def _without_huge(cases: dict[str, list[Case]]) -> dict[str, list[Case]]:
    """The cases without those that a CPU cannot run within a case's time, which it prints."""
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
            problem = f"{implementation} itself fails ({cause}), so that its mutants show nothing"
            raise UsageError(f"{problem}: case {case.text}")
        outcomes.append((case, outcome))
    return outcomes


def _calls(implementation: str, cases: list[Case], jobs: int) -> Callable[[Case], frozenset[str]]:
    """The implementation's own functions that a case runs; of a case that is not among these, those
    of all cases of its function.

    What no more cases than processes ran may be kept by a process, so it counts for all cases of
    their function.
    """
    from conformance.mutants.automatic import home

    with Pool(ChildOptions(implementation, trace=str(home(implementation))), jobs, TRACED_SECONDS) as pool:
        of_case = {case.id: (case.function, frozenset(outcome.calls)) for case, outcome in pool.run(cases)}
    counts: dict[str, Counter[str]] = {}
    for function, calls in of_case.values():
        counts.setdefault(function, Counter()).update(calls)
    of_function = {function: frozenset(count) for function, count in counts.items()}
    once = {function: {call for call in count if count[call] <= jobs} for function, count in counts.items()}

    def of(case: Case) -> frozenset[str]:
        if case.id in of_case:
            return of_case[case.id][1] | once[case.function]
        return of_function.get(case.function, frozenset())

    return of


def _order(mutant: Mutant, passed: list[PassedCase]) -> Iterator[Case]:
    """The cases that reach a mutant, or in which it differs: QUICK ones, then quick and slow in
    turn, for slow ones are the large ones, which show more. Without traces, its functions first.
    """
    reaching = [item for item in passed if mutant.touches and mutant.touches in item.calls]
    if mutant.differs is not None:
        yield from _mixed([item for item in passed if item.case.id in mutant.differs])
        if len(mutant.differs) <= KEPT:
            yield from _mixed([item for item in reaching if item.case.id not in mutant.differs])
        return
    if reaching:
        yield from _mixed(reaching)
        return
    for group in (mutant.first, tuple(name for name in CONTRACTS if name not in mutant.first)):
        rows = itertools.zip_longest(*([item.case for item in passed if item.case.function == name] for name in group))
        yield from (case for row in rows for case in row if case is not None)


def _mixed(items: list[PassedCase]) -> Iterator[Case]:
    cases = [item.case for item in sorted(items, key=lambda item: item.seconds)]
    yield from cases[:QUICK]
    yield from _spread_evenly(cases[QUICK:])


def _spread_evenly(cases: list[Case]) -> Iterator[Case]:
    """The cases so that every beginning is spread over all: by their numbers' bits, reversed."""
    bits = max(len(cases) - 1, 0).bit_length()
    places = (int(f"{number:0{bits}b}"[::-1], 2) for number in range(1 << bits))
    yield from (cases[position] for position in places if position < len(cases))


def attempt(mutant: Mutant, passed: list[PassedCase], seconds: float = math.inf) -> Result:
    """Run cases until a wrong value or a broken law, or to the end."""
    if mutant.differs is not None and not mutant.differs:
        return Result(mutant.name, mutant.title, "survived")
    started, count, crash, hangs, end = time.monotonic(), 0, None, 0, "survived"
    with tempfile.TemporaryDirectory(prefix="moe-conformance-mutant-") as folder:
        if mutant.change:
            from conformance.mutants.automatic import write_copy

            write_copy(mutant.change, mutant.implementation, Path(folder))
        options = ChildOptions(mutant.implementation, search=(folder,) if mutant.change else ())
        try:
            with Pool(options) as pool:
                pool.start()
                pool.patience.case_seconds = min(pool.patience.case_seconds, max(seconds, LEAST_SECONDS))
                first = pool.run([mutant.likely] if mutant.likely else [])  # alone: a run may change the order
                for case, outcome in itertools.chain(first, pool.run(_order(mutant, passed))):
                    count += 1
                    kill_kind = _kill(case, outcome)
                    may_need_others = kill_kind == "value" and not mutant.change and count > 1
                    if may_need_others and pool.run_alone(case).status == "PASS":  # wrong only after other cases
                        kill_kind, outcome = "law", replace(outcome, finding={"check": "history"})
                    if kill_kind in ("value", "law"):
                        return _killed(mutant, kill_kind, case, outcome, count, started)
                    if kill_kind == "crash" and crash is None:
                        crash = _killed(mutant, kill_kind, case, outcome, count, started)
                    hangs += outcome.status == "HANG"
                    if crash and (count > crash.cases + AFTER_A_CRASH or hangs == HANGS):
                        break
                    if time.monotonic() - started > seconds:
                        end = "unfinished"
                        break
        except UsageError as error:
            check, took = f"cannot be imported: {error}", time.monotonic() - started
            return Result(mutant.name, mutant.title, "crash", check=check, seconds=took)
    return crash or Result(mutant.name, mutant.title, end, cases=count, seconds=time.monotonic() - started)


def _kill(case: Case, outcome: Outcome) -> str:
    """How the outcome kills a mutant; empty if it does not kill it."""
    if outcome.status in ("CRASH", "HANG", "OOM"):
        return "crash"
    if outcome.status != "FAIL" or outcome.finding is None:
        return ""
    return "law" if outcome.finding["check"] in CONTRACTS[case.function].laws else "value"


def _killed(mutant: Mutant, kill_kind: str, case: Case, outcome: Outcome, count: int, started: float) -> Result:
    check, seconds = (outcome.finding or {}).get("check", outcome.status), time.monotonic() - started
    return Result(mutant.name, mutant.title, kill_kind, case.function, check, count, seconds, case.text)
