"""Machines: calls that follow one another, drawn step by step and judged after each step.

A case of such a function names its steps. A machine grows a case by one step at a time, only by
steps that are legal there, and the whole sequence is judged after each: so a failing sequence is a
case, which replays and shrinks as every other case does. A sequence drawn at once is seldom legal
and long: most are mended to their first step.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, Protocol

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, get_state_machine_test, initialize

from conformance.core.case import Case
from conformance.core.scope import Scope

BYTES = 8192  # random bytes of a sequence's draws: more than the longest sequence consumes
TRIES = 4  # draws per wanted sequence, because some begin with a case that the machine cannot use


class Judged(Protocol):
    """The part of an outcome that a machine reads."""

    status: str


class Differs(AssertionError):
    """The implementation fails the case."""

    def __init__(self, case: Case, outcome: Any) -> None:
        super().__init__(f"{outcome.status} {outcome.finding or outcome.reason}: {case.text}")
        self.case, self.outcome = case, outcome


class Machine(RuleBasedStateMachine):
    """The base of a family's machines: their rules call `step`."""

    field: ClassVar[str] = "steps"  # of the case, its words joined by +
    fixed: ClassVar[dict[str, Any]] = {}  # fields that every case of the machine has
    start: ClassVar[st.SearchStrategy[Any]]  # cases, whatever their steps
    judge: ClassVar[Callable[[Any], Judged]]

    @classmethod
    def suits(cls, case: Any) -> bool:
        """Whether sequences that begin with this case can be judged."""
        return True

    def __init__(self) -> None:
        super().__init__()
        self.words: list[str] = []
        self.case: Any = None

    @initialize(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        """The settings of all calls."""
        self.case = data.draw(self.start, label="case")

    def step(self, word: str) -> None:
        """Append the step, and judge the sequence.

        Raises:
            Differs: the implementation fails it.
        """
        self.words.append(word)
        self.case = replace(self.case, **{self.field: "+".join(self.words)})
        outcome: Any = type(self).judge(self.case)
        if outcome.status in ("FAIL", "CRASH", "HANG"):
            raise Differs(self.case, outcome)


def starts(machine: type[Machine], scope: Scope) -> st.SearchStrategy[Any]:
    """Cases of the function with the machine's fixed fields, no steps and no law."""
    axes = {axis.name: axis.default for axis in scope.axes}
    fixed_fields = {name: axes[name] for name in (machine.field, "layout", "grads", "unused") if name in axes}
    fixed_fields |= {"law": "", "layout_of": ""} | machine.fixed
    cases = scope.drawn().map(lambda case: scope.mended(replace(case, **fixed_fields)))
    return cases.filter(
        lambda case: machine.suits(case) and all(getattr(case, name) == x for name, x in machine.fixed.items())
    )


def run_machine(
    machine: type[Machine], scope: Scope, judge: Callable[[Any], Judged], examples: int, steps: int, seed: int
) -> None:
    """Run sequences of the machine's steps on an implementation.

    They are drawn from random bytes. Hypothesis's own loop would draw constants of all imported
    code too, so that the sequences of a seed depended on what else is imported. Nor would it shrink
    them: the reducer of cases does, with fewer calls.

    Raises:
        Differs: with the first failing sequence.
    """
    machine_of_scope = type(
        machine.__name__, (machine,), {"start": starts(machine, scope), "judge": staticmethod(judge)}
    )
    options = settings(stateful_step_count=steps, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    run: Any = get_state_machine_test(machine_of_scope, settings=options)
    source, done = random.Random(seed), 0
    for _ in range(TRIES * examples):
        if done == examples:
            break
        done += run.hypothesis.fuzz_one_input(source.randbytes(BYTES)) is not None
