"""Count how often honest implementations are rejected: cases of several seeds on each variant.

    python -m benchmarks.honest --seeds 5 --profile smoke          # small, for Triton's interpreter
    python -m benchmarks.honest --seeds 20 --profile gate --jobs 6 # on a GPU
    # every tactic of the products, on a GPU: the smallest and the largest alone
    python -m benchmarks.honest --seeds 1 --profile gate --jobs 15 --function grouped_linear \\
        --impl tests.honest.smallest_tactics --impl tests.honest.largest_tactics

One pool of child processes per variant, so kernels are compiled once. Prints one line per variant;
exit code 1 if any case is rejected. Cases independent of the seed come last. After `--seconds` a
variant draws no more cases; its line gives the number of complete seeds. An interrupted run prints
its counts.
"""

import argparse
import math
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import takewhile

from conformance.core.case import Case
from conformance.core.space import Space
from conformance.engine.choose.plan import cases_of, sections
from conformance.engine.choose.profiles import PROFILES, Profile
from conformance.engine.options import ChildOptions
from conformance.engine.run.pool import Pool
from tests.honest import EXPERTS, HONEST, OVER_RANKS, ROUTERS, STRANGERS, SUMS, TACTICS

VARIANTS = HONEST + TACTICS + ROUTERS + SUMS + OVER_RANKS + EXPERTS + STRANGERS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--profile", choices=tuple(PROFILES), default="smoke")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--impl", action="append", help="a variant (default: all)")
    parser.add_argument("--function", action="append", help="a function (default: all)")
    parser.add_argument("--seconds", type=float, default=math.inf, help="per variant (default: no limit)")
    options = parser.parse_args()
    rejected = 0
    for implementation in options.impl or VARIANTS:
        started, counts = time.monotonic(), Counts()
        profile, last = PROFILES[options.profile], started + options.seconds
        try:
            sweep(counts, implementation, options.seeds, profile, options.jobs, options.function, last)
        finally:
            report(counts, implementation, options.seeds, time.monotonic() - started)
        rejected += len(counts.rejected)
    return int(rejected > 0)


@dataclass
class Counts:
    """The results of one variant."""

    statuses: Counter[str] = field(default_factory=Counter)
    kernels: set[str] = field(default_factory=set)  # compiled kernels
    rejected: list[str] = field(default_factory=list)
    seeds: int = 0  # completed in time


def report(counts: Counts, implementation: str, seeds: int, seconds: float) -> None:
    total = sum(counts.statuses.values())
    shown = ", ".join(f"{count} {status}" for status, count in sorted(counts.statuses.items()))
    rate = f"{counts.seeds} of {seeds} seeds, {seconds:.0f} s ({total / seconds:.0f} per second)"
    kernels = f"{len(counts.kernels)} kernels"
    print(f"{implementation}: {len(counts.rejected)} rejected of {total} cases, {rate}, {kernels}; {shown}", flush=True)
    for text in counts.rejected[:3]:
        print(f"    {text}", flush=True)


def sweep(
    counts: Counts,
    implementation: str,
    seeds: int,
    profile: Profile,
    jobs: int,
    functions: list[str] | None,
    last: float,
) -> None:
    """Judge a variant; draws no case after the time `last`."""

    def cases(space: Space) -> Iterator[Case]:
        all_sections = [section for section in sections() if section.function]  # the corpus is of no function
        wanted = [section for section in all_sections if functions is None or section.function in functions]
        for seed in range(seeds):
            for section in wanted:
                if section.kind == "drawn":
                    yield from until(last, cases_of(section, profile, space, seed))
            counts.seeds += time.monotonic() < last
        for section in wanted:
            if section.kind != "drawn":
                yield from until(last, cases_of(section, profile, space, 0))

    with Pool(ChildOptions(implementation, device_of(implementation)), jobs) as pool:
        space = Space.of(pool.start())
        for case, outcome in pool.run(cases(space)):
            counts.statuses[outcome.status] += 1
            counts.kernels.update(outcome.kernels)
            if outcome.status in ("FAIL", "CRASH", "HANG", "OOM", "BLOCKED", "ERROR"):
                counts.rejected.append(f"{outcome.status} {outcome.finding or outcome.reason}: {case.text}")


def device_of(implementation: str) -> str:
    """Where a variant runs: some are in plain torch for a CPU."""
    return "cpu" if implementation in EXPERTS + STRANGERS else "auto"


def until(last: float, cases: list[Case]) -> Iterator[Case]:
    """The cases drawn before the time `last`."""
    return takewhile(lambda _: time.monotonic() < last, cases)


if __name__ == "__main__":
    sys.exit(main())
