"""Plants each defect of `defects/*/kernels.txt` in `moe_fast` and runs cases until one kills it.

    python -m tests.mutants.kernels.run --only KP        # those of permutation
    python -m tests.mutants.kernels.run --report kernels.json

On a CPU, by Triton's interpreter. Each runs on the gate's cases of its own functions alone, first
on the one that has killed it before; `killers.json` keeps which. Exit code 1 if one survives.
"""

import argparse
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from conformance.core.case import Case
from conformance.mutants.automatic import SourceMutant, home
from conformance.mutants.planted import FOLDER
from conformance.mutants.score import Mutant, Result, attempt, passed_cases
from conformance.mutants.substitution import Substitution, read, substituted
from tests.mutants.killers import killers

KILLERS = Path(__file__).with_name("killers.json")  # by the name of a defect, the id of a case


def defects() -> dict[str, Substitution]:
    """All of them, by name."""
    return {defect.header.name: defect for path in sorted(FOLDER.glob("*/kernels.txt")) for defect in read(path)}


def source_of(defect: Substitution) -> SourceMutant:
    """The changed file.

    Raises:
        ValueError: the old lines do not stand there once.
    """
    (hunk,) = defect.hunks
    source = (home("moe_fast").parent / hunk.file).read_text(encoding="utf-8")
    mutated = substituted(source, hunk)
    begin = source.index(hunk.old)
    line = source[:begin].count("\n") + 1
    return SourceMutant(defect.header.name, hunk.file, line, "written", begin, hunk.old, hunk.new, mutated)


def score(chosen: Mapping[str, Substitution], jobs: int) -> list[Result]:
    """Try each, and print one line for each."""
    wanted = dict.fromkeys(function for defect in chosen.values() for function in defect.header.functions)
    passed = {
        function: passed_cases("moe_fast", 0, jobs, (function,), trace=False, one_gpu=False) for function in wanted
    }
    killer_ids = json.loads(KILLERS.read_text())

    def result(defect: Substitution) -> Result:
        cases = [item for function in defect.header.functions for item in passed[function]]
        likely = next((item.case for item in cases if item.case.id == killer_ids.get(defect.header.name)), None)
        return attempt(_mutant(defect, likely), cases)

    results = []
    with ThreadPoolExecutor(jobs) as workers:
        for found in workers.map(result, chosen.values()):
            print(found.line, flush=True)
            results.append(found)
    return results


def _mutant(defect: Substitution, likely: Case | None) -> Mutant:
    change = source_of(defect)
    name, functions, title, _ = defect.header
    return Mutant(name, title, "moe_fast", change=change, first=functions, likely=likely)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="a part of the names")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--report", type=Path, help="write the results as JSON")
    options = parser.parse_args()
    results = score({name: defect for name, defect in defects().items() if options.only in name}, options.jobs)
    report = [asdict(result) for result in results]
    if options.report:
        options.report.write_text(json.dumps(report, indent=1) + "\n")
    killer_ids = json.loads(KILLERS.read_text()) | killers(report)
    KILLERS.write_text(json.dumps(killer_ids, indent=0, sort_keys=True) + "\n")
    survived = sum(not result.killed for result in results)
    print(f"{len(results) - survived} of {len(results)} killed")
    return int(survived > 0)


if __name__ == "__main__":
    raise SystemExit(main())
