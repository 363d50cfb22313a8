"""Compile the kernels' configurations for sm_90 and print a table; 1 if one has a defect."""

import os

os.environ["TRITON_INTERPRET"] = "0"  # before the first import of Triton

import json
import sys
import warnings
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from evidence.machine_code.calls import calls
from evidence.machine_code.check import Result, all_judged, in_turn
from evidence.machine_code.compiling import versions
from evidence.machine_code.launches import recorded


def table(results: list[Result], recorded_of: Counter[str]) -> Iterator[str]:
    """A line per kernel; spills are the most of a configuration."""
    yield "| kernel | compiled | recorded | instructions | spills | with findings |"
    yield "|---|--:|--:|--:|--:|--:|"
    for name, total in sorted(recorded_of.items()):
        of_kernel = [result for result in results if result.kernel == name]
        instructions, spills = sum(x.instructions for x in of_kernel), max((x.spills for x in of_kernel), default=0)
        num_findings = sum(bool(x.findings) for x in of_kernel)
        short = name.removeprefix("moe_fast.")
        yield f"| {short} | {len(of_kernel)} | {total} | {instructions:,} | {spills} | {num_findings} |"


def main(options: Namespace) -> int:
    warnings.simplefilter("ignore")
    configurations, errors = recorded(calls())
    surprises = {call: text for call, text in errors.items() if not text.startswith("ValueError")}  # not illegal calls
    chosen = [item for item in configurations if not options.kernels or item.name.rpartition(".")[2] in options.kernels]
    results = list(all_judged(in_turn(chosen), options.seconds, options.jobs))
    print(*table(results, Counter(item.name for item in chosen)), sep="\n")
    for item in results:
        for text in item.findings:
            print(f"\n{item.kernel} {item.constants} {item.options}\n    {item.call}\n    {text}")
    for call, text in surprises.items():
        print(f"\n{call} raises {text}")
    about = {**versions(), "recorded": len(chosen), "compiled": len(results)}
    print("\n" + " · ".join(f"{name} {value}" for name, value in about.items()))
    if options.json:
        records = [item.record() for item in results if item.findings or item.spills]
        Path(options.json).write_text(json.dumps(about | {"records": records}, indent=1) + "\n")
    return int(bool(surprises) or not results or any(item.findings for item in results))


if __name__ == "__main__":
    parser = ArgumentParser(prog="python -m evidence.machine_code", description=__doc__)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="of compiling, at most")
    parser.add_argument("--kernels", type=lambda text: text.split(","), help="names, as NAME,NAME")
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile")
    parser.add_argument("--json", help="a file for the configurations with findings or spills")
    sys.exit(main(parser.parse_args()))
