"""The section of docs/second-opinions.md about releases of one package, from their reports.

    pip install --no-deps megatron-core==0.15.3     # each release in an environment of its own
    cp -r conformance/peers/megatron.corpus corpus  # what is found anew is kept in it
    moe-conformance run --impl conformance.peers.megatron --corpus corpus \\
        --waivers conformance/peers/megatron.waivers.toml --report 0.15.3.json
    python -m conformance.peers.versions 0.15.3.json …

The waivers are for 0.16.1. Those that waive nothing in an earlier release are problems of its
report, so its exit code is 3; its failures beyond the waivers are listed below the tables.
Reports of `conformance.peers.transformer_engine` make the section of that package.
"""

import json
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conformance.peers.second_opinions import replace_section
from conformance.peers.table import NEVER, UNTOUCHED


@dataclass(frozen=True)
class Package:
    """A package whose releases were judged."""

    key: str  # in the versions of a report
    heading: str
    introduction: str
    failures: bool  # whether failures are listed


MEGATRON = Package(
    "megatron.core",
    "## megatron-core by release\n",
    """
Written by `python -m conformance.peers.versions` from one report per release. What a release has is
probed by signatures (`conformance/peers/megatron_features.py`); the head of a report names an
unknown release. *Differs*: cases that fail or are waived, of those that were judged.
[Findings](findings.md) has the causes, and the table of releases from 0.17 on; failures that 0.16.1
does not have are below the tables.
""",
    failures=True,
)
ENGINE = Package(
    "transformer_engine",
    "## Transformer Engine by release\n",
    """
Written in the same way, from reports of `conformance.peers.transformer_engine` on a GPU. A cause
may be met by many cases: [findings](findings.md#transformer-engine) has the causes.
""",
    failures=False,
)
PACKAGES = (MEGATRON, ENGINE)
DIFFERS = ("FAIL", "CRASH", "HANG", "WAIVED", "FLAKY")


def section(reports: Sequence[dict[str, Any]]) -> str:
    """Both tables: the releases; and the functions that differ. Failures follow if the page lists
    them.

    Args:
        reports: all of one package.
    """
    judged, package = [_judged(report) for report in reports], package_of(reports)
    releases = [report["versions"][package.key] for report in reports]
    lines = [
        package.heading + package.introduction,
        "| release | functions | cases | differs | missing |",
        "|---|--:|--:|--:|---|",
    ]
    for release, report, functions in zip(releases, reports, judged, strict=True):
        cases, differing_cases = (sum(column) for column in zip(*functions.values(), strict=True))
        lines.append(f"| {release} | {len(functions)} | {cases} | {differing_cases} | {_missing(report, reports)} |")
    lines += ["", f"| function | {' | '.join(releases)} |", f"|---|{'--:|' * len(releases)}"]
    differing = dict.fromkeys(name for functions in judged for name, (_, failures) in functions.items() if failures)
    for name in differing:
        lines.append(f"| `{name}` | {' | '.join(_share(functions.get(name)) for functions in judged)} |")
    failures = {name: _failures(name, reports) for name in differing} if package.failures else {}
    lines += [""] if any(failures.values()) else []
    for name, texts in failures.items():
        text = f"- `{name}`: {'; '.join(texts)}."
        lines += (
            textwrap.wrap(text, 100, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
            if texts
            else []
        )
    return "\n".join(lines) + "\n"


def package_of(reports: Sequence[dict[str, Any]]) -> Package:
    """The package that all reports are of.

    Raises:
        ValueError: there is none.
    """
    for package in PACKAGES:
        if reports and all(package.key in report["versions"] for report in reports):
            return package
    raise ValueError(f"the reports are of no one package; they must all name {' or '.join(x.key for x in PACKAGES)}")


def _judged(report: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """The numbers of judged cases and of those that differ, by function."""
    judged = {}
    for name, function in report["functions"].items():
        counts = {status: n for status, n in function["counts"].items() if status not in UNTOUCHED}
        if function["status"] not in NEVER and counts:
            judged[name] = (sum(counts.values()), sum(counts.get(status, 0) for status in DIFFERS))
    return judged


def _share(counts: tuple[int, int] | None) -> str:
    return "not offered" if counts is None else f"{counts[1]} of {counts[0]}" if counts[1] else "0"


def _missing(report: dict[str, Any], reports: Sequence[dict[str, Any]]) -> str:
    """The functions and settings that the release lacks and another release has."""
    functions_elsewhere = {
        name: function for other_report in reports for name, function in _functions(other_report).items()
    }
    functions_of_release = _functions(report)
    absent = [f"`{name}`" for name in functions_elsewhere if name not in functions_of_release]
    for name, settings in functions_of_release.items():
        had = set.intersection(*(set(_functions(other_report).get(name, settings)) for other_report in reports))
        absent += [f"`{setting}` of `{name}`" for setting in settings if setting not in had]
    return ", ".join(absent) or "none"


def _functions(report: dict[str, Any]) -> dict[str, list[str]]:
    """By judged function: the settings that it lacks."""
    return {name: report["functions"][name]["without"] for name in _judged(report)}


def _failures(function: str, reports: Sequence[dict[str, Any]]) -> list[str]:
    """The failures of the function that no waiver has, with their releases."""
    releases_by_message: dict[str, list[str]] = {}
    for report in reports:
        for failure in report["failures"]:
            if failure["function"] == function:
                message = (failure["finding"] or {}).get("message") or failure["reason"]
                fields = {name: value for name, value in failure["case"].items() if name not in ("schema", "function")}
                message += f" ({json.dumps(fields, separators=(',', ':'))})"
                releases_by_message.setdefault(message, []).append(report["versions"][MEGATRON.key])
    return [f"{', '.join(releases)}: {message}" for message, releases in releases_by_message.items()]


if __name__ == "__main__":
    release_reports = [json.loads(Path(name).read_text()) for name in sys.argv[1:]]
    replace_section(section(release_reports))
