"""Adds up the ledger: what was scheduled, what became of it, and what that says of the implementation.

Exit codes: 0 conformant · 1 not · 2 usage · 3 harness error or lost results · 4 too little was tested · 5 regression against a
baseline.
"""

from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from conformance.catalogue import CONTRACTS
from conformance.engine.choose.profiles import PROFILES
from conformance.engine.run.ledger import entries

NAMES = {
    0: "CONFORMANT",
    1: "NOT CONFORMANT",
    2: "USAGE ERROR",
    3: "HARNESS ERROR",
    4: "TOO LITTLE TESTED",
    5: "REGRESSION",
}
INFORMATIVE = ("PASS", "FAIL", "CRASH", "HANG", "WAIVED")
UNTOUCHED = ("not run", "not offered")  # functions of which nothing is said
WRONG = ("FAIL", "CRASH", "HANG", "OOM", "FLAKY", "BLOCKED")


@dataclass
class FunctionVerdict:
    """What is known of one function."""

    status: (
        str  # conformant, differs, blocked, not judged, too little tested, not run (in a part of a run) or not offered
    )
    cases: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    without: list[str] = field(default_factory=list)
    declares: dict[str, Any] = field(default_factory=dict)


@dataclass
class Verdict:
    """What a run says."""

    verdict: str
    exit_code: int
    implementation: str
    profile: str
    seed: int
    seconds: float
    cases: int
    device: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    functions: dict[str, FunctionVerdict] = field(default_factory=dict)
    failures: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # sentences: errors of the harness, shortfalls, regressions
    evaluations: int = 0
    seconds_implementation: float = 0.0
    seconds_reference: float = 0.0
    kernels_compiled: int = 0

    def record(self) -> dict[str, Any]:
        return asdict(self)


def assemble(
    folder: Path,
    implementation: str,
    profile: str,
    seed: int,
    seconds: float,
    waivers: list[str],
    whole: bool,
    baseline: dict[str, Any] | None = None,
) -> Verdict:
    """The verdict of a run whose ledgers are in `folder`.

    Args:
        waivers: names of all waivers; one that waived nothing is stale, if the run was a whole one.
        whole: whether every section was to be run; a part of a run is not asked for the minimum of cases.
    """
    lines = list(entries(folder))
    outcomes = [line for line in lines if line["kind"] == "outcome"]
    nothing: dict[str, Any] = {"functions": {}, "device_name": "", "versions": {}}
    described = next((line for line in lines if line["kind"] == "implementation"), nothing)
    out = Verdict(
        "", 0, implementation, profile, seed, seconds, len(outcomes), described["device_name"], described["versions"]
    )
    for function in CONTRACTS:
        out.functions[function] = _function(
            function, described["functions"].get(function, {}), outcomes, profile, whole
        )
    out.failures = _distinct([line for line in lines if line["kind"] == "failure" and line["status"] != "ERROR"])
    out.evaluations = sum(line["evaluations"] for line in outcomes)
    out.seconds_implementation = sum(line["seconds_implementation"] for line in outcomes)
    out.seconds_reference = sum(line["seconds_reference"] for line in outcomes)
    out.kernels_compiled = len({name for line in outcomes for name in line["kernels"]})
    lost = _harness_problems(lines, outcomes)
    stale = [
        f"the waiver {name} waived nothing: remove it"
        for name in waivers
        if whole and not any(line["waiver"] == name for line in outcomes)
    ]
    shortfalls = [
        text for function in out.functions for text in _shortfalls(function, out.functions[function], profile, whole)
    ]
    if all(function.status == "not offered" for function in out.functions.values()):
        shortfalls.append(f"{implementation} offers none of {', '.join(CONTRACTS)}")
    elif out.cases == 0:
        shortfalls.append("no case was run: this part of the run is empty")
    regressions = _regressions(out, baseline) if baseline else []
    wrong = any(f.status in ("differs", "blocked") for f in out.functions.values())
    out.problems = lost + stale + shortfalls + regressions
    out.exit_code = 3 if lost or stale else 1 if wrong else 4 if shortfalls else 5 if regressions else 0
    out.verdict = NAMES[out.exit_code]
    return out


def _function(
    name: str, described: dict[str, Any], outcomes: list[dict[str, Any]], profile: str, whole: bool
) -> FunctionVerdict:
    counts = Counter(line["status"] for line in outcomes if line["function"] == name)
    out = FunctionVerdict(
        "",
        sum(counts.values()),
        dict(sorted(counts.items())),
        described.get("without", []),
        described.get("declares", {}),
    )
    if not described.get("offered"):
        out.status, out.without = "not offered", []
    elif counts["ERROR"]:
        out.status = "not judged"
    elif any(counts[status] for status in WRONG if status != "BLOCKED"):
        out.status = "differs"
    elif counts["BLOCKED"]:
        out.status = "blocked"
    elif _shortfalls(name, out, profile, whole):
        out.status = "too little tested"
    elif not counts:
        out.status = "not run"
    else:
        out.status = "conformant"
    return out


def _shortfalls(name: str, function: FunctionVerdict, profile: str, whole: bool) -> list[str]:
    """Why the function was tested too little; nothing for one that is not offered."""
    if function.status == "not offered" or not whole:
        return []
    rules, out = PROFILES[profile], []
    informative = sum(function.counts.get(status, 0) for status in INFORMATIVE)
    if informative < rules.minimum(name):
        out.append(f"{name}: {informative} informative cases; the profile {profile} asks for {rules.minimum(name)}")
    share = function.counts.get("DECLARED_UNSUPPORTED", 0) / max(function.cases, 1)
    if share > rules.unsupported:
        out.append(
            f"{name}: {share:.0%} of the cases are declared unsupported; the profile {profile} allows {rules.unsupported:.0%}"
        )
    return out


def _harness_problems(lines: list[dict[str, Any]], outcomes: list[dict[str, Any]]) -> list[str]:
    """Errors of the suite itself, and results that are missing."""
    out = [f"{line['function']} case {line['id']}: {line['reason']}" for line in outcomes if line["status"] == "ERROR"][
        :5
    ]
    out += [line["text"] for line in lines if line["kind"] == "problem"]
    done = Counter(line["section"] for line in outcomes)
    for line in lines:
        if line["kind"] == "plan" and done[line["section"]] != line["scheduled"]:
            out.append(
                f"section {line['section']}: {line['scheduled']} cases were scheduled and {done[line['section']]} have a result"
            )
    return out


def _distinct(failures: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One failure for each function, output, check and status, the smallest where several workers found it."""
    best: dict[tuple, dict[str, Any]] = {}
    for failure in failures:
        finding = failure["finding"] or {}
        key = (failure["function"], finding.get("output"), finding.get("check"), failure["status"])
        if key not in best or _size(failure) < _size(best[key]):
            best[key] = failure
    order = list(CONTRACTS)
    return sorted(best.values(), key=lambda failure: order.index(failure["function"]))


def _size(failure: dict[str, Any]) -> tuple[bool, int]:
    """Literal cases last: they are small, but no search for a smaller one was made."""
    case = failure["case"]
    return bool(case.get("golden") or case.get("illegal")), len(str(case))


def _regressions(now: Verdict, before: dict[str, Any]) -> list[str]:
    """What an earlier report had and this one has not."""
    out = []
    for name, old in before.get("functions", {}).items():
        new = now.functions.get(name)
        if new is None or (old["status"] == "conformant" and new.status == "not offered"):
            out.append(f"{name} was conformant in the baseline and is not offered any more")
            continue
        more = sorted(set(new.without) - set(old["without"]))
        if more and old["status"] != "not offered":
            out.append(f"{name} no longer accepts {', '.join(more)}")
        shares = [f["counts"].get("DECLARED_UNSUPPORTED", 0) / max(f["cases"], 1) for f in (old, asdict(new))]
        if old["status"] != "not offered" and shares[1] > shares[0] + 0.02:
            out.append(f"{name}: {shares[1]:.0%} declared unsupported, {shares[0]:.0%} in the baseline")
    return out
