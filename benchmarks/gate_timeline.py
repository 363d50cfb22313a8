"""Plots a run: busy processes and compiled kernels over time. Prints what each function costs.

    python -m benchmarks.gate_timeline --impl moe_fast --out gate-timeline.svg

Idle processes, and kernels per case, are what a slow gate has too many of. Needs matplotlib.
"""

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from conformance.engine.child import server
from conformance.engine.collecting import uncollected

SHOWN = 25  # sections, and cases


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


def costs(outcomes: list[dict[str, Any]]) -> list[str]:
    """Per function cases, seconds of its processes and kernels that no other function needs; per
    section of the plan the slowest ones; the slowest cases.
    """
    users: dict[str, set[str]] = {}
    for line in outcomes:
        for kernel in line["kernels"]:
            users.setdefault(kernel, set()).add(line["function"])
    rows = []
    for name in dict.fromkeys(line["function"] for line in outcomes):
        own = [line for line in outcomes if line["function"] == name]
        kernels = {kernel for line in own for kernel in line["kernels"]}
        alone = sum(users[kernel] == {name} for kernel in kernels)
        seconds = sum(line["seconds"] for line in own)
        rows.append((seconds, f"{name:<32} {len(own):5} {seconds:8.1f} {len(kernels):5} {alone:5}"))
    sections = Counter()
    for line in outcomes:
        sections[line["section"]] += line["seconds"]
    slowest = sorted(outcomes, key=lambda line: -line["seconds"])[:SHOWN]
    return [
        f"{'function':<32} {'cases':>5} {'seconds':>8} {'kernels':>5} alone",
        *(text for _, text in sorted(rows, reverse=True)),
        *(f"{seconds:8.1f} s {label}" for label, seconds in sections.most_common(SHOWN)),
        *(f"{line['seconds']:8.2f} s {line['section']} {line['id']} {line['changed']}" for line in slowest),
    ]


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
    server.start()  # as the command does, before this process imports torch
    with uncollected():
        from conformance.engine.options import Options
        from conformance.engine.run.ledger import entries
        from conformance.engine.run.session import judge_with
        from conformance.report.terminal import lines
    with tempfile.TemporaryDirectory() as folder:
        verdict = judge_with(Options(given.impl, profile=given.profile, device=given.device), Path(folder))
        outcomes = [line for line in entries(Path(folder)) if line["kind"] == "outcome"]
    print("\n".join([*lines(verdict), "", *costs(outcomes)]))
    summary = f"{verdict.cases} cases, {verdict.kernels_compiled} kernels, {verdict.seconds:.0f} s"
    plot(outcomes, f"{given.impl}, {given.profile}, {verdict.device}: {summary}", given.out)
    return verdict.exit_code


if __name__ == "__main__":
    sys.exit(main())
