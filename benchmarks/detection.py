"""Which check finds which class of planted defects: docs/detection.md from a report of mutants.

moe-conformance mutants --impl moe_ref --report report.json
moe-conformance mutants --impl moe_ref --only N02 --function permute --one-gpu --report N02.json
python -m benchmarks.detection report.json N02.json > docs/detection.md

Of a defect in several reports the last one counts: N02 and N03 show on cases of a GPU only.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

PUBLIC = "public code"
INTRODUCTION = """# What finds which defects

From the report of a run of the listed defects ([mutants](mutants.md)): classes are the origins of
the defects, and those with the number of a change or an issue are *public code*. A run stops at a
defect's first kill, so the table tells what finds it first, not all that would.

    moe-conformance mutants --impl moe_ref --report report.json
    moe-conformance mutants --impl moe_ref --only N02 --function permute --one-gpu --report N02.json
    python -m benchmarks.detection report.json N02.json N03.json … > docs/detection.md

N02, N03 and N12 to N17 need a GPU's cases, which `--one-gpu` also runs on a CPU: each has a report of
its own, of its function. The others were tried first on the case that had killed them before, as
`make test` does (`tests/mutants/killers.json`).

A list is killed by cases that were made for it, so the share says little about defects to come. Of
215 that were written without reading the cases (AE), the cases of that day killed 175 at once; 14
were right by the interface, and 26 showed classes that were missing. Of 80 that public code had (RB)
they killed 70 in every function, of 240 changes of the reference's source (RC) 196, and of 278 fast
paths and shortcuts, 38 of which are RD, a CPU's cases 203 ([mutants](mutants.md)).
"""


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


def document(results: Iterable[dict[str, Any]]) -> str:
    """docs/detection.md."""
    found = sorted(results, key=lambda result: result["mutant"])
    counts = Counter((class_of(result), killer_of(result)) for result in found)
    rows = [f"| {what} | {by} | {number} |" for (what, by), number in sorted(counts.items())]
    killed = sum(result["killed"] for result in found)
    lines = [INTRODUCTION, f"{killed} of {len(found)} defects are killed.\n"]
    lines += ["| class | found first by | defects |", "|---|---|--:|", *rows, ""]
    lines += ["## Found first by a law\n", *_by_law(found), ""]
    missed = [f"- {result['mutant']}: {result['title']}" for result in found if not result["killed"]]
    return "\n".join(lines + (["## Not killed\n", *missed, ""] if missed else []))


def _by_law(found: list[dict[str, Any]]) -> list[str]:
    by_law: dict[str, list[str]] = {}
    for result in found:
        if result["killed"] and result["way"] == "law":
            by_law.setdefault(result["check"], []).append(f"{result['mutant']} ({result['function']})")
    return [f"- `{law}`: {', '.join(names)}" for law, names in sorted(by_law.items())]


def joined(reports: Iterable[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The results of all reports; of a defect in several, the last."""
    return list({result["mutant"]: result for report in reports for result in report}.values())


if __name__ == "__main__":
    if not sys.argv[1:]:
        sys.exit("give the files of --report")
    print(document(joined(json.loads(Path(path).read_text()) for path in sys.argv[1:])), end="")
