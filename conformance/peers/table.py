"""The table of docs/second-opinions.md from JSON reports.

moe-conformance run --impl conformance.peers.torch_grouped --report torch_grouped.json
python -m conformance.peers.table torch_grouped.json …
"""

import itertools
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from conformance.peers.second_opinions import PAGE, replace_section

HEAD = """## Other implementations

Packages, judged by the gate through adapters in `conformance/peers`. The rows are
written by `python -m conformance.peers.table` from reports of `moe-conformance run`; nothing is
repaired by an adapter.

| adapter | versions | device | verdict | function | judged: pass | other | declared unsupported |
|---|---|---|---|---|--:|---|--:|
"""
PASSED = ("PASS", "UNINFORMATIVE")
UNTOUCHED = ("NOT_OFFERED", "DECLARED_UNSUPPORTED")
NEVER = ("not offered", "not_offered", "not chosen", "not_chosen")


def rows(report: dict[str, Any]) -> Iterable[str]:
    """A row per function that was judged."""
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items() if name != "python")
    verdict = report["verdict"] + (", ended early" if report["ended_by"] else "")
    for name, function in sorted(report["functions"].items()):
        counts = function["counts"]
        if function["status"] in NEVER or not counts:
            continue
        other_statuses = ", ".join(
            f"{n} {status}" for status, n in counts.items() if status not in (*PASSED, *UNTOUCHED)
        )
        cells = (f"`{report['implementation']}`", versions, report["device"], verdict, f"`{name}`")
        numbers = (counts.get("PASS", 0), other_statuses or "none", counts.get("DECLARED_UNSUPPORTED", 0))
        yield f"| {' | '.join(map(str, (*cells, *numbers)))} |"


def page(reports: Iterable[dict[str, Any]], notes: str = "") -> str:
    """The section, with the notes of an earlier one below the table."""
    lines = [row for report in reports for row in rows(report)]
    return HEAD + "\n".join(lines) + "\n" + notes


def notes_of(text: str) -> str:
    """What follows the first table."""
    lines = text.splitlines(keepends=True)
    below = itertools.dropwhile(lambda line: not line.startswith("|"), lines)
    return "".join(itertools.dropwhile(lambda line: line.startswith("|"), below))


if __name__ == "__main__":
    following = PAGE.read_text().partition(HEAD.partition("\n")[0])[2].partition("\n## ")[0]
    reports = [json.loads(Path(name).read_text()) for name in sys.argv[1:]]
    replace_section(page(reports, notes_of(following)))
