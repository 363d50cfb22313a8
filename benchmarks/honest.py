"""How often honest implementations are rejected: the gate's cases from several seeds, on each of them.

    python benchmarks/honest.py --seeds 5 --profile smoke          # reduced size, for Triton's interpreter
    python benchmarks/honest.py --seeds 20 --profile gate --jobs 6 # on a GPU

One pool of children a variant, so that kernels are compiled once. Prints a line a variant; exit code 1 if any was rejected. The cases that no
seed changes come last. With `--seconds`, a variant draws no case after that time, and the line says how many seeds were drawn whole. A run that is
interrupted says what it has found.
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
from tests.honest import EXPERTS, HONEST, ROUTERS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--profile", choices=tuple(PROFILES), default="smoke")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--impl", action="append", help="one of the variants (default: all)")
    parser.add_argument("--function", action="append", help="one of the functions (default: all)")
    parser.add_argument("--seconds", type=float, default=math.inf, help="of a variant (default: until all is done)")
    options = parser.parse_args()
    rejected = 0
    for implementation in options.impl or HONEST + ROUTERS + EXPERTS:
        started = time.monotonic()
        seen = Seen()
        try:
            sweep(
                seen,
                implementation,
                options.seeds,
                PROFILES[options.profile],
                options.jobs,
                options.function,
                started + options.seconds,
            )
        finally:
            seconds = time.monotonic() - started
            total = sum(seen.statuses.values())
            shown = ", ".join(f"{count} {status}" for status, count in sorted(seen.statuses.items()))
            rate = f"{seen.seeds} of {options.seeds} seeds, {seconds:.0f} s ({total / seconds:.0f} a second), {len(seen.kernels)} kernels"
            print(f"{implementation}: {len(seen.rejected)} rejected of {total} cases, {rate}; {shown}", flush=True)
            for text in seen.rejected[:3]:
                print(f"    {text}", flush=True)
        rejected += len(seen.rejected)
    return int(rejected > 0)


@dataclass
class Seen:
    """What has been found of a variant."""

    statuses: Counter[str] = field(default_factory=Counter)
    kernels: set[str] = field(default_factory=set)  # that were compiled
    rejected: list[str] = field(default_factory=list)
    seeds: int = 0  # drawn whole, in time


def sweep(
    seen: Seen, implementation: str, seeds: int, profile: Profile, jobs: int, functions: list[str] | None, last: float
) -> None:
    """Judge a variant, and draw no case after the time `last`."""

    def cases(space: Space) -> Iterator[Case]:
        wanted = [section for section in sections(profile) if functions is None or section.function in functions]
        for seed in range(seeds):
            for section in wanted:
                if section.kind == "drawn":
                    yield from before(last, cases_of(section, profile, space, seed, []))
            seen.seeds += time.monotonic() < last
        for section in wanted:
            if section.kind != "drawn":
                yield from before(last, cases_of(section, profile, space, 0, []))

    with Pool(ChildOptions(implementation, "cpu" if implementation in EXPERTS else "auto"), jobs) as pool:
        space = Space.of(pool.start())
        for case, outcome in pool.run(cases(space)):
            seen.statuses[outcome.status] += 1
            seen.kernels.update(outcome.kernels)
            if outcome.status in ("FAIL", "CRASH", "HANG", "OOM", "BLOCKED", "ERROR"):
                seen.rejected.append(f"{outcome.status} {outcome.finding or outcome.reason}: {case.text}")


def before(last: float, cases: list[Case]) -> Iterator[Case]:
    """Those that are asked for in time."""
    return takewhile(lambda _: time.monotonic() < last, cases)


if __name__ == "__main__":
    sys.exit(main())
