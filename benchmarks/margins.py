"""How far honest errors stay below the limit, and wrong ones above it: docs/results/margins.json.

    python -m benchmarks.margins honest --seconds 40 > honest.json           # of each variant
    python -m benchmarks.margins wrong report.json --seconds 4 > wrong.json  # of each listed defect
    python -m benchmarks.margins record honest.json wrong.json

`report.json` is of a run of the listed defects; those that an error bound or a ratio found are run
again, on more cases of the function that found them. Errors are in `Outcome.scores`: 0 is rounded
correctly, 1 the limit.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Iterable, Iterator
from datetime import date
from itertools import chain, takewhile, zip_longest
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.honest import VARIANTS, device_of
from conformance.core.case import Case, case_from
from conformance.core.space import Space
from conformance.engine.child.outcome import Outcome
from conformance.engine.choose.plan import cases_of, sections
from conformance.engine.choose.profiles import PROFILES
from conformance.engine.options import ChildOptions
from conformance.engine.run.pool import Pool

GATE = PROFILES["gate"]
KINDS = {"error": "bound", "ratio": "ratio"}  # of a score, and the check that has it
Largest = dict[str, dict[str, float]]  # by function and kind
TITLE = "Margins between honest and wrong results"
COMMANDS = [
    "python -m benchmarks.margins honest --seconds 40 > honest.json",
    "python -m benchmarks.margins wrong report.json --seconds 4 > wrong.json",
    "python -m benchmarks.margins record honest.json wrong.json",
]
COLUMNS = ["function", "check", "honest", "of", "variants", "wrong", "of", "defects"]
MEANING = (
    "The largest error of all honest variants, and the smallest of the listed defects that an error bound or a "
    "ratio of errors found, each by its largest error. Errors are shares of what the limit leaves beyond correct "
    "rounding: 0 is rounded correctly, 1 the limit, and above 1 is rejected. A variant ran for "
    "{honest_seconds:.0f} s on cases of all its functions, a defect for {wrong_seconds:.0f} s on those of its "
    "own: {variants} variants, {defects} defects, {cases} cases."
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    honest = commands.add_parser("honest")
    defects = commands.add_parser("wrong")
    defects.add_argument("report", type=Path)
    for command in (honest, defects):
        command.add_argument("--seconds", type=float, default=math.inf, help="of each (default: all cases)")
    record = commands.add_parser("record")
    record.add_argument("honest", type=Path)
    record.add_argument("wrong", type=Path)
    options = parser.parse_args()
    if options.command == "honest":
        print(json.dumps(recorded(of_variants(VARIANTS, options.seconds), options.seconds)))
    elif options.command == "wrong":
        by_degree = [x for x in json.loads(options.report.read_text()) if x["check"] in KINDS.values()]
        print(json.dumps(recorded(of_defects(by_degree, options.seconds), options.seconds)))
    else:
        results.save(
            "margins", figures(*(json.loads(path.read_text()) for path in (options.honest, options.wrong))), COMMANDS
        )
    return 0


def recorded(errors: Iterator[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """The errors, with the limit and the day of the run."""
    return {"date": date.today().isoformat(), "seconds": seconds, "found": list(errors)}


def of_variants(variants: Iterable[str], seconds: float) -> Iterator[dict[str, Any]]:
    """The largest errors of each honest variant on the cases that it passes."""
    for name in variants:
        with Pool(ChildOptions(name, device_of(name), scores=True)) as pool:
            offered = [function for function, about in pool.start()["functions"].items() if about["offered"]]
            largest, cases = _largest(pool, offered, seconds, "PASS")
        yield {"name": name, "cases": cases, "largest": largest}
        print(f"{name}: {cases} cases", file=sys.stderr, flush=True)


def of_defects(defects: Iterable[dict[str, Any]], seconds: float) -> Iterator[dict[str, Any]]:
    """The largest errors of each defect on the cases that it fails, by degree."""
    for defect in defects:
        name = f"conformance.mutants.planted:{defect['mutant']}.moe_ref"
        with Pool(ChildOptions(name, scores=True)) as pool:
            pool.start()
            first = [case_from(json.loads(defect["case"]))]
            largest, cases = _largest(pool, [defect["function"]], seconds, "FAIL", first)
        yield {"name": defect["mutant"], "cases": cases, "largest": largest}
        print(f"{defect['mutant']}: {cases} cases, {largest}", file=sys.stderr, flush=True)


def _largest(
    pool: Pool, functions: list[str], seconds: float, status: str, first: Iterable[Case] = ()
) -> tuple[Largest, int]:
    """The largest score of each function and kind over such outcomes, and how many cases ran."""
    largest: Largest = {}
    ends, count = time.monotonic() + seconds, 0
    drawn = takewhile(lambda _: time.monotonic() < ends, _turns(functions, Space.of(pool.description)))
    for case, outcome in pool.run(chain(first, drawn)):
        count += 1
        for kind, score in _degrees(outcome).items() if outcome.status == status else ():
            of_function = largest.setdefault(case.function, {})
            of_function[kind] = max(of_function.get(kind, 0.0), score)
    return largest, count


def _degrees(outcome: Outcome) -> dict[str, float]:
    """The scores by their kinds; of a failure, those of the check that failed, if by a degree."""
    if not outcome.finding:
        return outcome.scores
    check = outcome.finding["check"]
    return {kind: score for kind, score in outcome.scores.items() if KINDS[kind] == check and score > 1}


def _turns(functions: list[str], space: Space) -> Iterator[Case]:
    """The gate's cases of the functions, of each in turn."""

    def of(function: str) -> Iterator[Case]:
        return (
            case for section in sections() if section.function == function for case in cases_of(section, GATE, space, 0)
        )

    return (case for row in zip_longest(*map(of, functions)) for case in row if case is not None)


def figures(honest: dict[str, Any], defective: dict[str, Any]) -> dict[str, Any]:
    """The record without its origin."""
    functions = sorted({function for variant in honest["found"] for function in variant["largest"]})
    cases = sum(run["cases"] for errors in (honest, defective) for run in errors["found"])
    rows = [row for function in functions for kind in KINDS if (row := _row(function, kind, honest, defective))]
    meaning = MEANING.format(
        honest_seconds=honest["seconds"],
        wrong_seconds=defective["seconds"],
        variants=len(honest["found"]),
        defects=len(defective["found"]),
        cases=f"{cases:,}",
    )
    return {"title": TITLE, "meaning": meaning, "tables": [{"title": "", "columns": COLUMNS, "rows": rows}]}


def _row(function: str, kind: str, honest: dict[str, Any], defective: dict[str, Any]) -> list[str]:
    """A row of the table; empty if neither a variant nor a defect has such a score."""
    of_honest, of_defects = (
        [
            (run["largest"][function][kind], run["name"])
            for run in errors["found"]
            if kind in run["largest"].get(function, ())
        ]
        for errors in (honest, defective)
    )
    if not of_honest and not of_defects:
        return []
    largest = [f"{max(of_honest)[0]:.3f}", max(of_honest)[1]] if of_honest else ["–", "–"]
    nearest = [f"{min(of_defects)[0]:.3g}", min(of_defects)[1]] if of_defects else ["–", "–"]
    return [f"`{function}`", KINDS[kind], *largest, str(len(of_honest)), *nearest, str(len(of_defects))]


if __name__ == "__main__":
    sys.exit(main())
