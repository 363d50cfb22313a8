"""Plots a run: busy processes and compiled kernels over time.

    python -m benchmarks.gate_timeline --impl moe_fast --out docs/results/gate-timeline.svg

Idle processes, and kernels per case, are what a slow gate has too many of. Needs matplotlib.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from conformance.engine.options import Options
from conformance.engine.run.ledger import entries
from conformance.engine.run.session import judge_with
from conformance.report.terminal import lines


def curves(outcomes: list[dict[str, Any]], step: float = 1.0) -> tuple[list[float], list[float], list[int], list[int]]:
    """Per step of time, in seconds: busy processes on average, cases and kernels so far."""
    end = max((line["ended"] for line in outcomes), default=0.0)
    times = [i * step for i in range(int(end / step) + 1)]
    busy = [0.0] * len(times)
    for line in outcomes:
        begin = max(line["ended"] - line["seconds"], 0.0)
        for i in range(int(begin / step), int(line["ended"] / step) + 1):
            busy[i] += max(min(line["ended"], (i + 1) * step) - max(begin, i * step), 0.0) / step
    ordered = sorted(outcomes, key=lambda line: line["ended"])
    cases, kernels, known, place = [], [], set(), 0
    for time in times:
        while place < len(ordered) and ordered[place]["ended"] <= time + step:
            known.update(ordered[place]["kernels"])
            place += 1
        cases.append(place)
        kernels.append(len(known))
    return times, busy, cases, kernels


def plot(outcomes: list[dict[str, Any]], title: str, path: Path) -> None:
    import matplotlib.pyplot as plt

    times, busy, cases, kernels = curves(outcomes)
    figure, (above, below) = plt.subplots(2, 1, sharex=True, figsize=(9, 5.5))
    above.fill_between(times, busy, step="post", alpha=0.5)
    above.set_ylabel("busy processes")
    above.set_title(title)
    below.plot(times, kernels, label="kernels compiled or loaded")
    below.plot(times, [n / 10 for n in cases], label="cases / 10")
    below.set_xlabel("seconds")
    below.legend()
    figure.tight_layout()
    figure.savefig(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--impl", required=True)
    parser.add_argument("--profile", default="gate")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        verdict = judge_with(Options(given.impl, profile=given.profile, device=given.device), Path(folder))
        outcomes = [line for line in entries(Path(folder)) if line["kind"] == "outcome"]
    print("\n".join(lines(verdict)))
    summary = f"{verdict.cases} cases, {verdict.kernels_compiled} kernels, {verdict.seconds:.0f} s"
    plot(outcomes, f"{given.impl}, {given.profile}, {verdict.device}: {summary}", given.out)
    return verdict.exit_code


if __name__ == "__main__":
    sys.exit(main())
