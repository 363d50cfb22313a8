"""How often honest implementations are rejected: the gate's cases from several seeds, on each of them.

    python benchmarks/honest.py --seeds 5 --profile smoke          # reduced size, for Triton's interpreter
    python benchmarks/honest.py --seeds 20 --profile gate --jobs 6 # on a GPU

One pool of children a variant, so that kernels are compiled once. Prints a line a variant; exit code 1 if any was rejected.
"""

import argparse
import sys
import time
from collections import Counter

from conformance.execute.child import Settings
from conformance.execute.pool import Pool
from conformance.plan import cases_of, sections
from conformance.profiles import PROFILES
from conformance.strategies.space import Space
from tests.variants import HONEST, ROUTERS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--profile", choices=tuple(PROFILES), default="smoke")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--impl", action="append", help="one of the variants (default: all)")
    parser.add_argument("--function", action="append", help="one of the functions (default: all)")
    options = parser.parse_args()
    rejected = 0
    for implementation in options.impl or HONEST + ROUTERS:
        started = time.monotonic()
        counts, kernels, wrong = sweep(implementation, options.seeds, PROFILES[options.profile], options.jobs, options.function)
        seconds = time.monotonic() - started
        total = sum(counts.values())
        shown = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
        rate = f"{options.seeds} seeds, {seconds:.0f} s ({total / seconds:.0f} a second), {kernels} kernels"
        print(f"{implementation}: {len(wrong)} rejected of {total} cases, {rate}; {shown}", flush=True)
        for text in wrong[:3]:
            print(f"    {text}")
        rejected += len(wrong)
    return int(rejected > 0)


def sweep(implementation: str, seeds: int, profile, jobs: int, functions: list[str] | None) -> tuple[Counter, int, list[str]]:
    """Statuses, kernels that were compiled, and what was rejected."""
    counts: Counter = Counter()
    kernels: set[str] = set()
    wrong = []
    with Pool(Settings(implementation), jobs) as pool:
        space = Space.of(pool.start())
        wanted = [section for section in sections(profile) if functions is None or section.function in functions]
        planned = ((section, seed) for seed in range(seeds) for section in wanted if section.kind == "drawn" or not seed)  # fixed ones once
        for case, outcome in pool.run(case for section, seed in planned for case in cases_of(section, profile, space, seed, [])):
            counts[outcome.status] += 1
            kernels.update(outcome.kernels)
            if outcome.status in ("FAIL", "CRASH", "HANG", "OOM", "BLOCKED", "ERROR"):
                wrong.append(f"{outcome.status} {outcome.finding or outcome.reason}: {case.text}")
    return counts, len(kernels), wrong


if __name__ == "__main__":
    sys.exit(main())
