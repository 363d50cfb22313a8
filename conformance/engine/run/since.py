"""`--since`: which functions changed since an earlier report, or since a git revision.

Only functions that are unchanged for certain are left out: same parts, same suite, packages,
device and options, and conformant in the report.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from conformance.core.case import Case
from conformance.engine.footprint.footprint import Footprints
from conformance.engine.footprint.source import digest
from conformance.engine.options import Options
from conformance.engine.run.verdict import UNCHANGED, Verdict, effective
from conformance.engine.run.waivers import Waiver

SHOWN = 3  # changed parts named in a reason
GENERAL = ("(all files)", "(files)", "(files beside)")  # labels named last


@dataclass(frozen=True)
class Since:
    """The footprints of now, and what they say about an earlier state.

    origin: the report or the revision; empty: every function is judged
    unchanged: the earlier result of each function that is not judged; empty if it is not known
    reasons: by function, why it is judged
    """

    footprints: Footprints | None = None
    origin: str = ""
    unchanged: dict[str, dict[str, Any]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    def mark(self, verdict: Verdict) -> None:
        """Write into the verdict which functions are unchanged, and why the others were judged."""
        verdict.since = self.origin
        for name, function in verdict.functions.items():
            if name in self.unchanged:
                earlier = self.unchanged[name]
                verdict.functions[name] = replace(function, status=UNCHANGED, earlier=earlier)
            elif function.status != "not offered":
                function.reason = self.reasons.get(name, "")

    def keep(self, verdict: Verdict) -> None:
        """Store the footprints in the verdict of a complete run."""
        if self.footprints:
            verdict.footprints = self.footprints.record()


def under(
    footprints: Footprints,
    options: Options,
    description: dict[str, Any],
    corpus: Iterable[Case],
    waivers: Iterable[Waiver],
) -> Footprints:
    """The footprints with all else that decides a result: options, device, cases, waivers."""
    conditions = {
        "the implementation": options.implementation,
        "the profile": options.profile,
        "the seed": str(options.seed),
        "the predicate of --where": options.where,
        "the tool of --sanitize": options.sanitize,
        "the time limit of a case": str(options.case_seconds),
        "the device": f"{description['device_name']} {description['ranks']} {description.get('memory', '')}",
        "the versions": str(sorted(description["versions"].items())),
    }
    functions, cases, all_waivers = {}, list(corpus), list(waivers)
    for name, entries in footprints.functions.items():
        texts = sorted(case.text for case in cases if case.function == name)
        waived = sorted(waiver.name for waiver in all_waivers if waiver.function == name)
        scope = description.get("functions", {}).get(name, {}).get("scope", "")
        parts = {"kept cases": texts, "waivers": waived, "scope": [scope]}
        functions[name] = entries | {f"{name} ({label})": digest(*values) for label, values in parts.items()}
    return Footprints(footprints.conditions | conditions, functions)


def since_report(now: Footprints | None, report: dict[str, Any], origin: str) -> Since:
    """What has changed since a report.

    A function is left out only if it was conformant in the report.
    """
    report_footprints = footprints_in(report)
    unchanged, reasons = {}, {}
    for name in now.functions if now else ():
        earlier = effective(report["functions"].get(name, {}))
        reason = changed(now, report_footprints, name) if report_footprints else f"{origin} has no footprints"
        if not reason and earlier.get("status") != "conformant":
            reason = f"{earlier.get('status') or 'not judged'} in {origin}"
        if reason:
            reasons[name] = reason
        else:
            unchanged[name] = earlier
    return Since(now, origin, unchanged, reasons)


def since_revision(now: Footprints | None, earlier: Footprints, origin: str) -> Since:
    """What has changed since a revision, whose results are unknown."""
    reasons = {name: changed(now, earlier, name) for name in now.functions} if now else {}
    return Since(now, origin, {name: {} for name, why in reasons.items() if not why}, reasons)


def footprints_in(report: dict[str, Any]) -> Footprints | None:
    """The footprints of a report; None if it has none that can be read."""
    try:
        return Footprints.of(report["footprints"])
    except (KeyError, ValueError, IndexError, TypeError, AttributeError):
        return None


def changed(now: Footprints | None, earlier: Footprints, name: str) -> str:
    """Why a function may give another result than in the earlier state; empty if it cannot."""
    if now is None or name not in now.functions or name not in earlier.functions:
        return "new"
    shared = _different(now.conditions, earlier.conditions)
    changed_entries = shared or _different(now.functions[name], earlier.functions[name])
    remainder = f" and {len(changed_entries) - SHOWN} more" if len(changed_entries) > SHOWN else ""
    return f"changed {', '.join(changed_entries[:SHOWN])}{remainder}" if changed_entries else ""


def _different(now: dict[str, str], earlier: dict[str, str]) -> list[str]:
    """The keys that only one of the two has, or that have different values; general ones last."""
    keys = [key for key in now.keys() | earlier.keys() if now.get(key) != earlier.get(key)]
    return sorted(keys, key=lambda key: (key.endswith(GENERAL), key))
