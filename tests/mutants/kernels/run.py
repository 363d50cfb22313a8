"""Plants each defect of kernels in `moe_fast` and runs cases until one kills it.

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
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

import tests.mutants.kernels as kernels
from conformance.core.case import Case
from conformance.core.rewritten import changed
from conformance.mutants.automatic import SourceMutant, home
from conformance.mutants.score import Mutant, Result, attempt, passed_cases
from tests.mutants.kernels import KernelDefect
from tests.mutants.killers import killers

KILLERS = Path(__file__).with_name("killers.json")  # by the name of a defect, the id of a case


def defects() -> dict[str, KernelDefect]:
    """All of them, by name."""
    modules = (import_module(f"{kernels.__name__}.{module.name}") for module in iter_modules(kernels.__path__))
    return {defect.name: defect for module in modules for defect in getattr(module, "DEFECTS", ())}


def source_of(defect: KernelDefect) -> SourceMutant:
    """The changed file.

    Raises:
        ValueError: the text does not occur once.
    """
    file, old, new = defect.change
    source = (home("moe_fast") / file).read_text(encoding="utf-8")
    begin = source.find(old)
    line = source[:begin].count("\n") + 1
    mutated = changed(source, defect.change)
    return SourceMutant(defect.name, f"moe_fast/{file}", line, "written", begin, old, new, mutated)


def score(chosen: Mapping[str, KernelDefect], jobs: int) -> list[Result]:
    """Try each, and print one line for each."""
    wanted = dict.fromkeys(function for defect in chosen.values() for function in defect.functions)
    passed = {
        function: passed_cases("moe_fast", 0, jobs, (function,), trace=False, one_gpu=False) for function in wanted
    }
    known = json.loads(KILLERS.read_text())

    def result(defect: KernelDefect) -> Result:
        cases = [item for function in defect.functions for item in passed[function]]
        likely = next((item.case for item in cases if item.case.id == known.get(defect.name)), None)
        return attempt(_mutant(defect, likely), cases)

    results = []
    with ThreadPoolExecutor(jobs) as workers:
        for found in workers.map(result, chosen.values()):
            print(found.line, flush=True)
            results.append(found)
    return results


def _mutant(defect: KernelDefect, likely: Case | None) -> Mutant:
    change = source_of(defect)
    return Mutant(defect.name, defect.title, "moe_fast", change=change, first=defect.functions, likely=likely)


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
    known = json.loads(KILLERS.read_text()) | killers(report)
    KILLERS.write_text(json.dumps(known, indent=0, sort_keys=True) + "\n")
    survived = sum(not result.killed for result in results)
    print(f"{len(results) - survived} of {len(results)} killed")
    return int(survived > 0)


if __name__ == "__main__":
    raise SystemExit(main())
