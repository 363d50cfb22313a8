"""What finds which class of planted defects first: docs/results/detection.json from their reports.

    moe-conformance mutants --impl moe_ref --report report.json
    moe-conformance mutants --impl moe_ref --only N02 --function permute --one-gpu --report N02.json
    python -m benchmarks.detection report.json N02.json

Of a defect in several reports the last one counts: N02 and N03 show on cases of a GPU only.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks import results

PUBLIC = "public code"
COMMANDS = [
    "moe-conformance mutants --impl moe_ref --report report.json",
    "moe-conformance mutants --impl moe_ref --only N02 --function permute --one-gpu --report N02.json",
    "python -m benchmarks.detection report.json N02.json",
]


def class_of(result: dict[str, Any]) -> str:
    """The origin of a defect, without the article and without the names of projects."""
    origin = result["title"].rpartition("[")[2].rstrip("]")
    invited = origin.startswith(("a mistake that ", "a class of inputs: ", "illegal values "))
    return origin.removeprefix("a mistake that ").removeprefix("a class of inputs: ") if invited else PUBLIC


def killer_of(result: dict[str, Any]) -> str:
    """The law, or the kind of case and the check of its values."""
    if not result["killed"]:
        return "nothing"
    if result["way"] == "law":
        return f"law `{result['check']}`"
    case = json.loads(result["case"]) if result["case"] else {}
    kind = "golden case" if case.get("golden") else "illegal call" if case.get("illegal") else "case"
    return f"{kind}, {result['check']}"


def figures(report: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The record without its origin."""
    ordered = sorted(report, key=lambda result: result["mutant"])
    killed = sum(result["killed"] for result in ordered)
    counts = Counter((killer_of(result), class_of(result) == PUBLIC) for result in ordered)
    first = sorted({killer for killer, _ in counts})
    rows = [[killer, str(counts[killer, True]), str(counts[killer, False])] for killer in first]
    classes = sorted(Counter((class_of(result), killer_of(result)) for result in ordered).items())
    survivors = [f"{result['mutant']}: {result['title']}" for result in ordered if not result["killed"]]
    meaning = f"{killed} of {len(ordered)} defects are killed. "
    meaning += f"Not killed: {'; '.join(survivors)}. " if survivors else ""
    meaning += (
        "A run stops at a defect's first kill, so the table tells what finds it first, not all that would. Defects of "
        "public code have been in a release, an issue or a change; the others are mistakes that such code invites."
    )
    by_law = [[law, ", ".join(defects)] for law, defects in _by_law(ordered)]
    return {
        "title": "Planted defects, and what finds them first",
        "meaning": meaning,
        "tables": [_table(["found first by", "defects of public code", "other defects"], rows)],
        "details": [
            _table(["class", "found first by", "defects"], [[*pair, str(number)] for pair, number in classes]),
            _table(["law", "defects that it finds first"], by_law),
        ],
    }


def _table(columns: list[str], rows: list[list[str]]) -> dict[str, Any]:
    return {"title": "", "columns": columns, "rows": rows}


def _by_law(report: list[dict[str, Any]]) -> list[tuple[str, list[str]]]:
    by_law: dict[str, list[str]] = {}
    for result in report:
        if result["killed"] and result["way"] == "law":
            by_law.setdefault(result["check"], []).append(f"{result['mutant']} ({result['function']})")
    return sorted(by_law.items())


def joined(reports: Iterable[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The results of all reports; of a defect in several, the last."""
    return list({result["mutant"]: result for report in reports for result in report}.values())


if __name__ == "__main__":
    if not sys.argv[1:]:
        sys.exit("give the files of --report")
    reports = joined(json.loads(Path(path).read_text()) for path in sys.argv[1:])
    results.save("detection", figures(reports), COMMANDS)
