"""The verdict of a run from the JSON reports of its shards."""

from collections import Counter
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
    exit_code_of,
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
    shard_reports = _ordered_reports(reports, bool(ended_by))
    first = shard_reports[0]
    out = Verdict("", 0, first["implementation"], first["profile"], first["seed"], 0.0, 0)
    for name in ("device", "versions", "chosen", "where", "sanitize", "since"):
        setattr(out, name, first[name])
    out.seconds = max(shard_report["seconds"] for shard_report in shard_reports)
    for name in ("cases", "evaluations", "seconds_implementation", "seconds_reference", "kernels_compiled"):
        setattr(out, name, sum(shard_report[name] for shard_report in shard_reports))
    idle = [set(shard_report.get("idle_kernels", ())) for shard_report in shard_reports]
    out.idle_kernels = sorted(set.intersection(*idle)) if idle else []
    out.configurations = merged(shard_report.get("configurations", {}) for shard_report in shard_reports)
    out.tuned = joined(shard_report.get("tuned", {}) for shard_report in shard_reports)
    out.coverage = _sum([shard_report.get("coverage", {}) for shard_report in shard_reports])
    reasons = [ended_by, *(shard_report["ended_by"] for shard_report in shard_reports)]
    out.ended_by = "; ".join(dict.fromkeys(filter(None, reasons)))
    rules = None if out.ended_by else PROFILES[out.profile]
    functions = [shard_report["functions"] for shard_report in shard_reports]
    for name in CONTRACTS:
        shard_verdicts = [FunctionVerdict(**records[name]) for records in functions if name in records]
        out.functions[name] = _joined(name, shard_verdicts, rules, bool(out.ended_by))
    out.failures = distinct([failure for shard_report in shard_reports for failure in shard_report["failures"]])
    return _judged(out, shard_reports, rules)


def _ordered_reports(reports: list[Report], cut: bool) -> list[Report]:
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


def _joined(name: str, shard_verdicts: list[FunctionVerdict], rules: Profile | None, cut: bool) -> FunctionVerdict:
    """The verdict on a function from all its cases."""
    if not shard_verdicts or shard_verdicts[0].status in KEPT:
        return shard_verdicts[0] if shard_verdicts else FunctionVerdict("not offered")
    first, cases = shard_verdicts[0], sum(shard_verdict.cases for shard_verdict in shard_verdicts)
    out = FunctionVerdict(
        "", cases, without=first.without, declares=first.declares, scope=first.scope, reason=first.reason
    )
    for name_of_counts in ("counts", "transports", "missing"):
        counts = (Counter(getattr(shard_verdict, name_of_counts)) for shard_verdict in shard_verdicts)
        setattr(out, name_of_counts, dict(sorted(sum(counts, Counter()).items())))
    ranked = [shard_verdict.note for shard_verdict in shard_verdicts if shard_verdict.transports]
    out.note = ranked[0] if len(set(ranked)) == 1 else ""
    out.status = status_of(name, out, rules, cut)
    return out


def _judged(out: Verdict, shard_reports: list[Report], rules: Profile | None) -> Verdict:
    """The verdict with its problems and its exit code."""
    problems: dict[int, list[str]] = {3: [], 1: [], 5: []}  # of shards, by exit code
    for shard_report in shard_reports:
        problems.get(shard_report["exit_code"], []).extend(shard_report["problems"])
    shortfalls = [x for name, f in out.functions.items() for x in shortfalls_of(name, f, rules, out.where)]
    if out.ended_by:
        shortfalls = [f"{out.ended_by} ended a shard", *shortfalls]
    out.problems = list(dict.fromkeys(problems[3] + shortfalls + problems[1] + problems[5]))
    out.exit_code = exit_code_of(out, problems[3], shortfalls, problems[5])
    out.verdict = named(out)
    return out


def _sum(values: list[Any]) -> Any:
    """The sum of numbers in lists and dicts of the same form. An absent key adds nothing."""
    if isinstance(values[0], dict):
        keys = dict.fromkeys(key for value in values for key in value)
        return {key: _sum([value[key] for value in values if key in value]) for key in keys}
    if isinstance(values[0], list):
        return [sum(column) for column in zip(*values, strict=True)]
    return sum(values)
