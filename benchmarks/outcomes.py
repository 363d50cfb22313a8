"""Counts how every case of a run ended: a report keeps one case of each distinct failure.

    python -m benchmarks.outcomes --impl M [--function F] [--seconds 290] [--keep FILE.jsonl]

Prints the cases of each function by status, and of those that fail by the output and the check,
with one message. `--keep` writes the outcomes of the run, one JSON object a line, to count by more.
"""

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.common import table
from conformance.engine.options import Options
from conformance.engine.run.ledger import entries
from conformance.engine.run.session import judge_with

MESSAGE = 100  # characters shown


def by_status(outcomes: Iterable[dict[str, Any]]) -> list[str]:
    """Lines of a table: each function's cases, and how many ended in each status."""
    counts = Counter((line["function"], line["status"]) for line in outcomes)
    statuses = sorted({status for _, status in counts})
    functions = dict.fromkeys(function for function, _ in counts)
    rows = [[name, *(str(counts[name, status]) for status in statuses)] for name in functions]
    return table("", ["function", *statuses], rows).splitlines()


def by_failure(outcomes: Iterable[dict[str, Any]]) -> list[str]:
    """Lines of a table: failing cases by function, output and check, with the first message."""
    counts: Counter[tuple[str, str, str]] = Counter()
    first: dict[tuple[str, str, str], str] = {}
    for line in outcomes:
        if found := line["finding"]:
            key = (line["function"], found["output"], found["check"])
            counts[key] += 1
            first.setdefault(key, found["message"].replace("|", "¦")[:MESSAGE])
    rows = [[*key, str(count), first[key]] for key, count in counts.most_common()]
    return table("", ["function", "output", "check", "cases", "for example"], rows).splitlines()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--impl", required=True)
    parser.add_argument("--function", default="")
    parser.add_argument("--profile", default="gate")
    parser.add_argument("--seconds", type=float, default=0.0, help="end the run after this time")
    parser.add_argument("--keep", type=Path)
    given = parser.parse_args()
    options = Options(given.impl, profile=given.profile, function=given.function, seconds=given.seconds)
    with tempfile.TemporaryDirectory() as folder:
        verdict = judge_with(options, Path(folder))
        outcomes = [line for line in entries(Path(folder)) if line["kind"] == "outcome"]
    print("\n".join([*by_status(outcomes), *by_failure(outcomes)]))
    if given.keep:
        given.keep.write_text("".join(json.dumps(line) + "\n" for line in outcomes))
    return verdict.exit_code


if __name__ == "__main__":
    sys.exit(main())
