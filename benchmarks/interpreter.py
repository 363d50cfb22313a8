"""Processor seconds per case in Triton's interpreter: `python -m benchmarks.interpreter [--plain]`.

Judges the first covering cases of functions of `moe_fast` in one process, without a GPU. With
`--plain` Triton's interpreter runs as it is. PYTHONPATH chooses another checkout to compare with.
"""

import argparse
import statistics
import time

import torch

import fast_interpreter
from conformance.core.space import Space
from conformance.engine.child import poison
from conformance.engine.child.evaluate import evaluate
from conformance.engine.choose.draw import covering_cases
from conformance.interface import load

FUNCTIONS = ("permute", "route", "grouped_linear", "topk_routing", "grouped_mlp", "quantize")


def main() -> None:
    """Print a row for each function."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--plain", action="store_true", help="leave Triton's interpreter as it is")
    parser.add_argument("--cases", type=int, default=40, help="cases of each function")
    options = parser.parse_args()
    torch.set_num_threads(1)
    poison.install()
    implementation = load("moe_fast")
    if not options.plain:
        fast_interpreter.install()
    print("| function | median s | sum s |\n|---|---|---|")
    for function in FUNCTIONS:
        seconds = []
        for case in covering_cases(function, Space()).cases[: options.cases]:
            started = time.process_time()
            evaluate(case, implementation)
            seconds.append(time.process_time() - started)
        print(f"| {function} | {statistics.median(seconds):.3f} | {sum(seconds):.2f} |", flush=True)


if __name__ == "__main__":
    main()
