"""Sequences of a machine's steps on an implementation, in this process."""

from collections.abc import Callable
from typing import Any

from conformance.catalogue import MACHINES
from conformance.core.case import Case
from conformance.core.machine import Differs, run_machine
from conformance.core.space import Space
from conformance.engine.child.evaluate import evaluate
from conformance.engine.child.outcome import Outcome
from conformance.engine.choose.draw import scope_of
from conformance.engine.run.reduction import reduce
from conformance.interface import load

Judge = Callable[[Any], Outcome]


def judge_of(implementation: str) -> Judge:
    """Judges cases on the implementation in this process."""
    loaded = load(implementation)
    return lambda case: evaluate(case, loaded)


def cases_of(function: str, judge: Judge, examples: int, steps: int, seed: int = 0) -> list[tuple[Case, Outcome]]:
    """All sequences with their outcomes; the last one is the first that fails, if one does."""
    outcomes: dict[Case, Outcome] = {}

    def noted(case: Any) -> Outcome:
        if case not in outcomes:
            outcomes[case] = judge(case)
        return outcomes[case]

    try:
        run_machine(MACHINES[function], scope_of(function, Space()), noted, examples, steps, seed)
    except Differs as differs:
        outcomes.pop(differs.case, None)
        outcomes[differs.case] = differs.outcome
    return list(outcomes.items())


def smallest(function: str, judge: Judge, examples: int, steps: int, seed: int = 0) -> Case:
    """The first failing sequence, reduced."""
    case, outcome = cases_of(function, judge, examples, steps, seed)[-1]
    assert outcome.status == "FAIL"
    return reduce(case, outcome, judge, seconds=3600).case
