"""Sums up the ledgers: scheduled cases, outcomes, and the verdict on the implementation.

Exit codes: 0 conformant · 1 not · 2 usage · 3 harness error or lost results
4 too little was tested, or the run was ended · 5 regression against a baseline
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from conformance import __version__
from conformance.catalogue import CONTRACTS
from conformance.core.where import parsed
from conformance.engine.child.tuned import Tuned, joined
from conformance.engine.choose.profiles import PROFILES, Profile
from conformance.engine.options import Options
from conformance.engine.run.coverage import coverage
from conformance.engine.run.interrupt import TIME_LIMIT
from conformance.engine.run.launched import Configurations, configurations
from conformance.engine.run.ledger import entries
from conformance.interface import UsageError
from conformance.sanitizing import replayed

NAMES = {0: "CONFORMANT", 1: "NOT CONFORMANT", 3: "HARNESS ERROR", 4: "TOO LITTLE TESTED", 5: "REGRESSION"}
INFORMATIVE = ("PASS", "FAIL", "CRASH", "HANG", "WAIVED")
ONE_GPU = "judged on one GPU only"
SEVERAL = 8  # the fewest cases for a mean
SPECIALISING = 0.1  # the fewest kernels per change
UNCHANGED = "unchanged since"  # an earlier report, or a revision
EMPTY = "EMPTY SHARD"  # no case fell to this shard, which says nothing about the other shards
NOT_CHOSEN = "not chosen"  # by --function, or no case can match --where
UNTOUCHED = ("not run", "not offered", NOT_CHOSEN, UNCHANGED)  # statuses without a verdict
WRONG = ("FAIL", "CRASH", "HANG", "OOM", "FLAKY", "BLOCKED")
Line = dict[str, Any]  # of a ledger


class Marker(Protocol):
    """What is known of earlier results: `conformance.engine.run.since.Since`."""

    def mark(self, verdict: "Verdict") -> None: ...
    def keep(self, verdict: "Verdict") -> None: ...


@dataclass
class FunctionVerdict:
    """The verdict on one function.

    status: conformant, differs, blocked, not judged, too little tested, not run (in a part of a
    run), not offered, not chosen, or unchanged since the report or revision of `Verdict.since`
    reason: why it was judged all the same, in a run with `--since`
    earlier: of an unchanged function, its record in the report where it was judged
    transports: the informative cases of several ranks, counted by how the ranks reached each other
    missing: the cases that did not run, counted by what they need and the namespace does not offer
    note: a limit of the verdict
    scope: the predicate of what the namespace says the function is for; other cases did not run
    """

    status: str
    cases: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    without: list[str] = field(default_factory=list)
    declares: dict[str, Any] = field(default_factory=dict)
    transports: dict[str, int] = field(default_factory=dict)
    missing: dict[str, int] = field(default_factory=dict)
    note: str = ""
    scope: str = ""
    place: str = ""  # where the implementation defines it, as file:line
    # fields that are declared as data, with the kernels that a change of the field compiles on
    # average
    specialised_by: dict[str, float] = field(default_factory=dict)
    reason: str = ""
    earlier: dict[str, Any] = field(default_factory=dict)

    @property
    def unsupported(self) -> float:
        """The share of its cases that are declared unsupported."""
        return self.counts.get("DECLARED_UNSUPPORTED", 0) / max(self.cases, 1)


@dataclass
class Verdict:
    """The verdict of a run."""

    verdict: str
    exit_code: int
    implementation: str
    profile: str
    seed: int
    seconds: float
    cases: int
    device: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    missing_parts: list[str] = field(default_factory=list)  # sentences of `conformance.private_parts`, and notes
    functions: dict[str, FunctionVerdict] = field(default_factory=dict)
    failures: list[dict[str, Any]] = field(default_factory=list)
    # sentences: errors of the harness, shortfalls, regressions
    problems: list[str] = field(default_factory=list)
    evaluations: int = 0
    seconds_implementation: float = 0.0
    seconds_reference: float = 0.0
    kernels_compiled: int = 0
    idle_kernels: list[str] = field(default_factory=list)  # kernels of the implementation that no case has launched
    configurations: Configurations = field(default_factory=dict)  # the configurations of kernels that were launched
    tuned: Tuned = field(default_factory=dict)  # the configurations of tuned kernels
    ended_by: str = ""  # a signal, the time limit, …; empty: the run ended by itself
    not_run: int = 0  # cases that were drawn and have no result
    not_drawn: list[str] = field(default_factory=list)  # sections whose cases were not drawn
    is_partial: bool = False  # whether the run ended before all cases but random ones had run
    chosen: list[str] = field(default_factory=list)  # the functions of --function; empty: all
    where: str = ""  # the predicate of --where, in canonical form
    shard: str = ""  # of --shard: i/n
    sanitize: str = ""  # the tool of --sanitize
    since: str = ""  # the report or revision whose unchanged functions were not judged
    footprints: dict[str, Any] = field(default_factory=dict)  # see `conformance.engine.footprint`
    coverage: dict[str, Any] = field(default_factory=dict)  # for a page: see `conformance.engine.run.coverage`
    suite: str = field(default_factory=lambda: __version__)  # the version of this package

    @property
    def replayed(self) -> str:
        """The value of --impl and the flags after it, with which a failing case is replayed."""
        return replayed(self.implementation, self.sanitize)

    @property
    def is_unchanged(self) -> bool:
        """Whether some function is unchanged since an earlier report or revision."""
        return any(function.status == UNCHANGED for function in self.functions.values())

    def record(self) -> dict[str, Any]:
        return asdict(self)


def assemble(
    folder: Path,
    options: Options,
    seconds: float,
    waivers: Sequence[str] = (),
    baseline: dict[str, Any] | None = None,
    is_complete: bool = True,
    interrupted: str = "",
    since: Marker | None = None,
    may_be_empty: bool = False,
) -> Verdict:
    """The verdict of a run whose ledgers are in `folder`.

    Args:
        waivers: names of all waivers; an unused one is stale, if the run is complete.
        baseline: the result of `read_baseline`.
        is_complete: whether every section was scheduled; only then the minimum of cases is needed.
        interrupted: what ended the run early: missing results are then not lost. A function is
            conformant only with its minimum of cases.
        since: results of an earlier run, and footprints, which the verdict of a complete run keeps.
        may_be_empty: whether the run is a shard, to which no case may fall.
    """
    lines = list(entries(folder))
    outcomes = [line for line in lines if line["kind"] == "outcome"]
    nothing: dict[str, Any] = {"functions": {}, "device_name": "", "versions": {}, "kernels": []}
    described = next((line for line in lines if line["kind"] == "implementation"), nothing)
    out = _facts(lines, outcomes, described, options, seconds)
    out.ended_by = interrupted
    rules = PROFILES[options.profile] if is_complete and interrupted in ("", TIME_LIMIT) else None
    for name in CONTRACTS:
        offer = described["functions"].get(name, {})
        outcomes_of_function = [line for line in outcomes if line["function"] == name]
        out.functions[name] = _function(name, offer, outcomes_of_function, rules, bool(interrupted) and not rules)
    if since:
        since.mark(out)
    for name in {*CONTRACTS} - {*described.get("judged", CONTRACTS)}:  # whatever else is known about them
        out.functions[name] = FunctionVerdict(NOT_CHOSEN)
    errors = _errors(lines, outcomes) + ([] if interrupted else _unfinished_sections(lines, outcomes))
    waiving = {line["waiver"] for line in outcomes}
    unused = [name for name in waivers if name not in waiving] if rules and not interrupted else []
    errors += [f"the waiver {name} waived nothing: remove it" for name in unused]
    shortfalls = [x for name, f in out.functions.items() for x in shortfalls_of(name, f, rules, out.where)]
    shortfalls = _shortfalls_of_run(out, shortfalls, out.is_unchanged or may_be_empty, bool(rules))
    regressions = _regressions(out, baseline) if baseline else []
    out.problems = errors + shortfalls + regressions
    out.exit_code = exit_code_of(out, errors, shortfalls, regressions)
    _count_cases_not_run(out, lines, outcomes, options.accept_partial)
    out.verdict = named(out)
    if since and is_complete and not interrupted and not errors:
        since.keep(out)
    return out


def _facts(lines: list[Line], outcomes: list[Line], described: Line, options: Options, seconds: float) -> Verdict:
    """What ran, on what, and what failed, before any judgement."""
    out = Verdict(
        *("", 0, options.implementation, options.profile, options.seed, seconds),
        *(len(outcomes), described["device_name"], described["versions"]),
    )
    out.shard, out.chosen, out.where = options.shard, list(options.functions), parsed(options.where, "--where").text
    out.sanitize, out.missing_parts = options.sanitize, described.get("missing_parts", [])
    out.failures = distinct([line for line in lines if line["kind"] == "failure" and line["status"] != "ERROR"])
    out.evaluations = sum(line["evaluations"] for line in outcomes)
    out.seconds_implementation = sum(line["seconds_implementation"] for line in outcomes)
    out.seconds_reference = sum(line["seconds_reference"] for line in outcomes)
    out.coverage = coverage(outcomes, INFORMATIVE, WRONG) if options.covered else {}
    launched = {name for line in outcomes for name in line["kernels"]}
    out.kernels_compiled = len(launched)
    out.configurations = configurations(lines, INFORMATIVE)
    out.tuned = joined(line.get("tuned", {}) for line in outcomes if line["status"] in INFORMATIVE)
    if launched:
        out.idle_kernels = sorted({*described.get("kernels", ())} - {name.split()[0] for name in launched})
    return out


def _count_cases_not_run(out: Verdict, lines: list[Line], outcomes: list[Line], accept_partial: bool) -> None:
    """Count the cases and sections of an ended run that did not run.

    A conformant run is partial if they are more than random cases: a wrong kernel that the covering
    array finds may have passed so far.
    """
    done = Counter(line["section"] for line in outcomes)
    scheduled = {line["section"]: line["scheduled"] for line in lines if line["kind"] == "plan"}
    planned = [label for line in lines if line["kind"] == "sections" for label in line["labels"]]
    if not out.ended_by:
        return
    out.not_run = sum(count - done[label] for label, count in scheduled.items())
    out.not_drawn = [label for label in planned if label not in scheduled]
    unfinished = [*out.not_drawn, *(label for label, count in scheduled.items() if done[label] < count)]
    out.is_partial = out.exit_code == 0 and not all(label.startswith("drawn-") for label in unfinished)
    if out.is_partial and not accept_partial:
        out.exit_code = 4
        out.problems.append(
            f"{out.ended_by} ended the run before all fixed and covering cases had run; give it more time, "
            "or accept a verdict on a part with --accept-partial"
        )


def _shortfalls_of_run(out: Verdict, shortfalls: list[str], may_be_empty: bool, is_judged: bool) -> list[str]:
    """The functions' shortfalls, with what the run as a whole lacks.

    Args:
        may_be_empty: whether a run without a case lacks nothing.
        is_judged: whether each function's minimum of cases was asked for.
    """
    if out.ended_by and (shortfalls or not is_judged or not out.cases):  # perhaps before anything was described
        return [f"{out.ended_by} ended the run after {out.cases} cases", *shortfalls]
    if all(function.status == "not offered" for function in out.functions.values()):
        return [*shortfalls, f"{out.implementation} offers none of {', '.join(CONTRACTS)}"]
    if out.cases == 0 and not may_be_empty:
        return [*shortfalls, "no case was run: this part of the run is empty"]
    return shortfalls


def exit_code_of(out: Verdict, errors: list[str], shortfalls: list[str], regressions: list[str]) -> int:
    differs = any(function.status in ("differs", "blocked") for function in out.functions.values())
    return 3 if errors else 1 if differs else 4 if shortfalls else 5 if regressions else 0


def named(verdict: Verdict) -> str:
    if verdict.is_partial:
        return f"{NAMES[0]} SO FAR"
    if verdict.ended_by and verdict.exit_code == 4:
        return "INTERRUPTED"
    if not verdict.cases and not verdict.exit_code:
        return "UNCHANGED" if verdict.is_unchanged else EMPTY
    judged = (f for f in verdict.functions.values() if f.status not in UNTOUCHED)
    limits = ["within scope"] if any(function.scope for function in judged) else []
    limits += [f"where {verdict.where}"] if verdict.where else []
    limits += [f"under {verdict.sanitize}"] if verdict.sanitize else []
    return NAMES[verdict.exit_code] + (f" ({', '.join(limits)})" if limits and not verdict.exit_code else "")


def effective(function: dict[str, Any]) -> dict[str, Any]:
    """The record of a function in the report where it was judged."""
    return function["earlier"] if function.get("status") == UNCHANGED else function


def read_baseline(path: Path, flag: str = "--baseline") -> dict[str, Any]:
    """An earlier JSON report, given by this flag.

    Raises:
        UsageError: an unreadable file, or no report.
    """
    try:
        content = json.loads(path.read_text())
        for function in content["functions"].values():  # the fields that a comparison reads
            _ = function["status"], function["without"], function["counts"].items(), function["cases"] + 0
    except FileNotFoundError:
        raise UsageError(f"{flag} {path}: there is no such file") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{flag} {path}: not a JSON report of moe-conformance ({error})") from None
    return content


def _function(name: str, offer: Line, outcomes: list[Line], rules: Profile | None, cut: bool) -> FunctionVerdict:
    """The verdict on a function from its outcomes; `cut`: some of its cases did not run."""
    counts = Counter(line["status"] for line in outcomes)
    without, declares = offer.get("without", []), offer.get("declares", {})
    out = FunctionVerdict("", sum(counts.values()), dict(sorted(counts.items())), without, declares)
    ranked = [x for x in outcomes if x["transport"] and x["status"] in INFORMATIVE]
    out.transports = dict(sorted(Counter(line["transport"] for line in ranked).items()))
    out.missing = dict(sorted(Counter(x["reason"] for x in outcomes if x["status"] == "NOT_OFFERED").items()))
    out.note = ONE_GPU if ranked and all(line["shares_gpu"] for line in ranked) else ""
    out.specialised_by = _specialising(outcomes)
    out.scope, out.place = offer.get("scope", ""), offer.get("place", "")
    if not offer.get("offered"):
        out.status, out.without = "not offered", []
    else:
        out.status = status_of(name, out, rules, cut)
    return out


def status_of(name: str, function: FunctionVerdict, rules: Profile | None, cut: bool) -> str:
    """The status of an offered function from its counts; `cut`: some of its cases did not run."""
    counts = Counter(function.counts)
    if counts["ERROR"]:
        return "not judged"
    if any(counts[status] for status in WRONG if status != "BLOCKED"):
        return "differs"
    if counts["BLOCKED"]:
        return "blocked"
    if shortfalls_of(name, function, rules) or (counts and cut):
        return "too little tested"
    return "conformant" if counts else "not run"


def _specialising(outcomes: list[Line]) -> dict[str, float]:
    """By field, the kernels per case with a change of it, minus those of cases without it."""
    varied = [(set(line["changed"]), len(line["kernels"])) for line in outcomes if line["changed"]]
    out: dict[str, float] = {}
    for name in sorted({name for changed, _ in varied for name in changed}):
        split = [[kernels for changed, kernels in varied if (name in changed) == here] for here in (True, False)]
        if all(len(counts) >= SEVERAL for counts in split):
            extra_kernels = sum(split[0]) / len(split[0]) - sum(split[1]) / len(split[1])
            out |= {name: round(extra_kernels, 2)} if extra_kernels >= SPECIALISING else {}
    return out


def shortfalls_of(name: str, function: FunctionVerdict, rules: Profile | None, where: str = "") -> list[str]:
    """Why the function was tested too little.

    Empty if it was tested enough, if it is not offered, or if there is no minimum.

    Args:
        where: the predicate of --where.
    """
    if function.status in ("not offered", NOT_CHOSEN, UNCHANGED) or rules is None:
        return []
    scope_note = " and ".join(filter(None, (function.scope, where)))
    scope_note = f" where {scope_note}" if scope_note else ""
    out = []
    informative = sum(function.counts.get(status, 0) for status in INFORMATIVE)
    profile_name = f"the profile {rules.name}"
    if informative < rules.minimum(name):
        lacking = "".join(f"; {count} did not run: {reason}" for reason, count in function.missing.items())
        minimum = f"{profile_name} asks for {rules.minimum(name)}"
        out.append(f"{name}: {informative} informative cases{scope_note}; {minimum}{lacking}")
    share = function.unsupported
    if share > rules.unsupported:
        out.append(
            f"{name}: {share:.0%} of the cases are declared unsupported; {profile_name} allows {rules.unsupported:.0%}"
        )
    return out


def _errors(lines: list[Line], outcomes: list[Line]) -> list[str]:
    """Errors of the suite itself."""
    cases = [line for line in outcomes if line["status"] == "ERROR"]
    problems = [line["text"] for line in lines if line["kind"] == "problem"]
    return [f"{line['function']} case {line['id']}: {line['reason']}" for line in cases[:5]] + problems


def _unfinished_sections(lines: list[Line], outcomes: list[Line]) -> list[str]:
    """Sections with fewer results than cases."""
    done = Counter(line["section"] for line in outcomes)
    return [
        f"section {line['section']}: {line['scheduled']} cases were scheduled and {done[line['section']]} have a result"
        for line in lines
        if line["kind"] == "plan" and done[line["section"]] != line["scheduled"]
    ]


def distinct(failures: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One failure per function, output, check, status, and NaN or not: the smallest of all."""
    best: dict[tuple, dict[str, Any]] = {}
    for failure in failures:
        finding = failure["finding"] or {}
        named = (finding.get("output"), finding.get("check"), bool(finding.get("nan")))
        key = (failure["function"], *named, failure["status"])
        if key not in best or _size(failure) < _size(best[key]):
            best[key] = failure
    order = list(CONTRACTS)
    return sorted(best.values(), key=lambda failure: order.index(failure["function"]))


def _size(failure: dict[str, Any]) -> tuple[bool, int]:
    """A sort key: literal cases come last, because they are small but cannot be reduced."""
    case = failure["case"]
    return bool(case.get("golden") or case.get("illegal")), len(str(case))


def _regressions(now: Verdict, baseline: dict[str, Any]) -> list[str]:
    """Results that are worse than in the earlier report, as sentences.

    Only functions that both runs chose are compared.
    """
    out = []
    for name, record in baseline.get("functions", {}).items():
        old = effective(record) or {"status": "not offered"}
        new = now.functions.get(name)
        if old["status"] == NOT_CHOSEN or (new and new.status == NOT_CHOSEN):
            continue
        if new is None or (old["status"] == "conformant" and new.status == "not offered"):
            out.append(f"{name} was conformant in the baseline and is not offered any more")
            continue
        if old["status"] == "not offered":
            continue
        if new.scope != old.get("scope", ""):
            out.append(f"{name} has the scope {new.scope!r}, {old.get('scope', '')!r} in the baseline")
        if removed := sorted(set(new.without) - set(old["without"])):
            out.append(f"{name} no longer accepts {', '.join(removed)}")
        share = old["counts"].get("DECLARED_UNSUPPORTED", 0) / max(old["cases"], 1)
        if new.unsupported > share + 0.02:
            out.append(f"{name}: {new.unsupported:.0%} declared unsupported, {share:.0%} in the baseline")
    return out
