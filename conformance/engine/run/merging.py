"""The verdict of a run from the JSON reports of its shards."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from conformance.catalogue import CONTRACTS
from conformance.engine.child.tuned import joined
from conformance.engine.choose.profiles import PROFILES, Profile
from conformance.engine.run.launched import merged
from conformance.engine.run.verdict import (
    NOT_CHOSEN,
    UNCHANGED,
    FunctionVerdict,
    Verdict,
    distinct,
    named,
    shortfalls_of,
    status_of,
)
from conformance.interface import UsageError

SAME = ("implementation", "device", "profile", "seed", "versions", "chosen", "where", "sanitize", "since")
KEPT = ("not offered", NOT_CHOSEN, UNCHANGED)  # statuses that no case decides

Report = dict[str, Any]


def merge(reports: list[Report], ended_by: str = "") -> Verdict:
    """One verdict, with the minimum of cases that a whole run needs.

    A shard that is given twice counts once, as its later report has it.

    Args:
        ended_by: what ended the run before all shards had run; empty: nothing.

    Raises:
        UsageError: reports of different runs, or a shard that is missing.
    """
    parts = _parts(reports, bool(ended_by))
    first = parts[0]
    out = Verdict("", 0, first["implementation"], first["profile"], first["seed"], 0.0, 0)
    for name in ("device", "versions", "chosen", "where", "sanitize", "since"):
        setattr(out, name, first[name])
    out.seconds = max(part["seconds"] for part in parts)
    for name in ("cases", "evaluations", "seconds_implementation", "seconds_reference", "kernels_compiled"):
        setattr(out, name, sum(part[name] for part in parts))
    idle = [set(part.get("idle_kernels", ())) for part in parts]
    out.idle_kernels = sorted(set.intersection(*idle)) if idle else []
    out.configurations = merged(part.get("configurations", {}) for part in parts)
    out.tuned = joined(part.get("tuned", {}) for part in parts)
    out.coverage = _sum([part.get("coverage", {}) for part in parts])
    reasons = [ended_by, *(part["ended_by"] for part in parts)]
    out.ended_by = "; ".join(dict.fromkeys(filter(None, reasons)))
    rules = None if out.ended_by else PROFILES[out.profile]
    for name in CONTRACTS:
        own = [FunctionVerdict(**part["functions"][name]) for part in parts if name in part["functions"]]
        out.functions[name] = _joined(name, own, rules, bool(out.ended_by))
    out.failures = distinct([failure for part in parts for failure in part["failures"]])
    return _judged(out, parts, rules)


def _parts(reports: list[Report], cut: bool) -> list[Report]:
    """The report of each shard, in order."""
    by_shard: dict[str, Report] = {}
    for report in reports:
        if not report.get("shard"):
            raise UsageError(f"a report of {report['implementation']} is not of a shard: it is the verdict already")
        by_shard[report["shard"]] = report
        for name in SAME:
            if report.get(name) != reports[0].get(name):
                raise UsageError(f"the reports differ in {name}: {reports[0].get(name)} and {report.get(name)}")
    count = {shard.split("/")[1] for shard in by_shard}
    wanted = [f"{i + 1}/{n}" for n in count for i in range(int(n))]
    missing = [shard for shard in wanted if shard not in by_shard]
    if missing and not cut:
        raise UsageError(f"there is no report of the shard {', '.join(missing)}")
    return [by_shard[shard] for shard in wanted if shard in by_shard]


def _joined(name: str, parts: list[FunctionVerdict], rules: Profile | None, cut: bool) -> FunctionVerdict:
    """The verdict on a function from all its cases."""
    if not parts or parts[0].status in KEPT:
        return parts[0] if parts else FunctionVerdict("not offered")
    out = FunctionVerdict("", without=parts[0].without, declares=parts[0].declares, scope=parts[0].scope)
    out.cases, out.reason = sum(part.cases for part in parts), parts[0].reason
    out.counts = _added(part.counts for part in parts)
    out.transports = _added(part.transports for part in parts)
    out.missing = _added(part.missing for part in parts)
    ranked = [part.note for part in parts if part.transports]
    out.note = ranked[0] if len(set(ranked)) == 1 else ""
    out.status = status_of(name, out, rules, cut)
    return out


def _added(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    return dict(sorted(sum(map(Counter, counts), Counter()).items()))


def _judged(out: Verdict, parts: list[Report], rules: Profile | None) -> Verdict:
    """The verdict with its problems and its exit code."""
    problems: dict[int, list[str]] = {3: [], 1: [], 5: []}  # of shards, by exit code
    for part in parts:
        problems.get(part["exit_code"], []).extend(part["problems"])
    shortfalls = [x for name, f in out.functions.items() for x in shortfalls_of(name, f, rules, out.where)]
    if out.ended_by:
        shortfalls = [f"{out.ended_by} ended a shard", *shortfalls]
    differs = any(f.status in ("differs", "blocked") for f in out.functions.values())
    out.problems = list(dict.fromkeys(problems[3] + shortfalls + problems[1] + problems[5]))
    out.exit_code = 3 if problems[3] else 1 if differs else 4 if shortfalls else 5 if problems[5] else 0
    unchanged = any(function.status == UNCHANGED for function in out.functions.values())
    out.verdict = named(out, out.ended_by, unchanged)
    return out


def _sum(values: list[Any]) -> Any:
    """Numbers added, in lists and dicts of the same form; a key that is absent adds nothing."""
    if isinstance(values[0], dict):
        keys = dict.fromkeys(key for value in values for key in value)
        return {key: _sum([value[key] for value in values if key in value]) for key in keys}
    if isinstance(values[0], list):
        return [sum(column) for column in zip(*values, strict=True)]
    return sum(values)
