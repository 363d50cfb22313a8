"""Measure the harness per case: wall time of a gate without reference and implementation.

    python -m benchmarks.harness [--impl moe_ref] [--seed 0]

One child process, so times do not overlap. Harness: drawing, transport, inputs, poison, judging,
laws, controls, ledger. Not harness: process start and import, which occur once per run.
"""

import argparse
import tempfile
import time
from pathlib import Path

from conformance.engine.options import Options
from conformance.engine.run.ledger import entries
from conformance.engine.run.session import Session


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--impl", default="moe_ref")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        session = Session(Options(options.impl, seed=options.seed, jobs=1, corpus=folder), Path(folder))
        session.start()
        started = time.perf_counter()
        for section in session.plan:
            session.sweep(section)
        wall = time.perf_counter() - started
        session.close()
        outcomes = [line for line in entries(Path(folder)) if line["kind"] == "outcome"]
    count, reference = len(outcomes), sum(line["seconds_reference"] for line in outcomes)
    implementation = sum(line["seconds_implementation"] for line in outcomes)
    cost, evaluations = 1e3 * (wall - reference - implementation) / count, sum(x["evaluations"] for x in outcomes)
    print(f"{count} cases of {options.impl} in {wall:.2f} s")
    print(f"reference {reference:.2f} s, implementation {implementation:.2f} s")
    print(f"harness {cost:.2f} ms per case (goal: under 3), {evaluations / count:.2f} evaluations per case")


if __name__ == "__main__":
    main()
