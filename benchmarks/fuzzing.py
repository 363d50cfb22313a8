"""Counts the cases that find a planted defect, by blind draws and by the steps of the search.

    python -m benchmarks.fuzzing --function permute --most 600 --seeds 3 > table

`blind` draws cases by themselves, `rare` takes the rarest of three, `climb:LABEL` is hypothesis
with one target, `climb` with all, `search` both in turn. Each defect is planted in `moe_ref`, and
the cases run in this process. A cell has the cases until the first failure, one number per seed.
"""

import argparse
import tempfile
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from conformance.core.case import Case
from conformance.core.space import Space
from conformance.engine.child.evaluate import evaluate
from conformance.engine.child.outcome import Outcome
from conformance.engine.choose.draw import drawn, run_seed, scope_of
from conformance.engine.options import Options
from conformance.engine.run.search import TARGETS, Search, Searched
from conformance.interface import load
from conformance.mutants.defect import Defect
from conformance.mutants.planted import DEFECTS

BATCH = 50
NEVER = 10**9  # seconds


class Failed(KeyboardInterrupt):
    """A case failed. Passes through hypothesis, as `Exhausted` does."""


class Exhausted(KeyboardInterrupt):
    """The number of cases is used up."""


class Counted:
    """Judges cases on one implementation, up to a number of them."""

    def __init__(self, implementation: str, most: int) -> None:
        self.implementation, self.most, self.cases = load(implementation), most, 0

    def run(self, cases: list[Case]) -> list[tuple[Case, Outcome]]:
        return [(case, self.answer(case)) for case in cases]

    def answer(self, case: Case) -> Outcome:
        if self.cases == self.most:
            raise Exhausted
        self.cases += 1
        outcome = evaluate(case, self.implementation, scores=True, lines=True)
        if outcome.status == "FAIL":
            raise Failed
        return outcome


def _search(counted: Counted, function: str, seed: int, targets: tuple[str, ...]) -> Search:
    folder = tempfile.mkdtemp(prefix="fuzzing-")
    options = Options("planted", corpus=folder, seed=seed)
    session: Any = SimpleNamespace(options=options, space=Space(), pool=counted, waivers=[])
    search = Search(session, [function], NEVER, Searched())
    search.targets = targets
    return search


def _steps(arm: str, counted: Counted, function: str, seed: int) -> Iterator[Callable[[int], object]]:
    """The steps of each turn of this arm, to be called with the turn's seed."""
    scope = scope_of(function, Space())
    if arm == "blind":
        yield lambda turn: [counted.answer(case) for case in drawn(scope.drawn(), turn, BATCH)]
        return
    label = arm.partition(":")[2]
    search = _search(counted, function, seed, (label,) if label else TARGETS)
    if arm in ("rare", "search"):
        yield lambda turn: search.rare(scope, turn, search.ends)
    if arm != "rare":
        yield lambda turn: search.climb(scope, search.kept[function], turn, search.ends)


def cases_until_found(defect: Defect, arm: str, function: str, seed: int, most: int) -> int:
    """The cases that the arm needs; `most` + 1 if it does not find the defect."""
    counted = Counted(f"conformance.mutants.planted:{defect.name}.moe_ref", most)
    steps, turn = list(_steps(arm, counted, function, seed)), 0
    try:
        while True:
            for step in steps:
                step(run_seed(function, seed, turn))
            turn += 1
    except Failed:
        return counted.cases
    except Exhausted:
        return most + 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--function", required=True)
    parser.add_argument("--defects", default="", help="names separated by commas; default: all that wrap the function")
    parser.add_argument("--arms", default="blind,rare,climb,search")
    parser.add_argument("--most", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    named, arms = options.defects.split(","), options.arms.split(",")
    chosen = [d for d in DEFECTS.values() if (d.name in named if options.defects else options.function in d.wrappers)]
    print(f"| defect | {' | '.join(arms)} |\n|---|{'--:|' * len(arms)}")
    for defect in chosen:
        cells = []
        for arm in arms:
            counts = [
                cases_until_found(defect, arm, options.function, seed, options.most) for seed in range(options.seeds)
            ]
            cells.append(", ".join(str(n) if n <= options.most else f"> {options.most}" for n in counts))
        print(f"| {defect.name}: {defect.title} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
