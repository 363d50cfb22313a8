"""What the harness itself costs: wall time of a gate run less the time of the reference and of the implementation, a case.

    python benchmarks/harness.py [--impl moe_ref] [--seed 0]

One child process, so that no time passes twice. Drawing, sending, building inputs, poisoning, judging, laws, controls and the
ledger are all harness. The start of the process and the import of the implementation are not: they are paid once a run.
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
    reference, implementation = (
        sum(line[f"seconds_{who}"] for line in outcomes) for who in ("reference", "implementation")
    )
    cost = (wall - reference - implementation) / len(outcomes)
    print(
        f"{len(outcomes)} cases of {options.impl} in {wall:.2f} s: reference {reference:.2f} s, implementation {implementation:.2f} s"
    )
    print(
        f"harness {1e3 * cost:.2f} ms a case (goal: under 3), {sum(line['evaluations'] for line in outcomes) / len(outcomes):.2f} evaluations a case"
    )


if __name__ == "__main__":
    main()
