"""Checks for a project's own tests: `assert_conforms`, and `conforms` for hypothesis tests.

They judge in the process of the test, by values, gradients, laws and memory, as the gate does. What
crashes or hangs that process ends the tests with it: `moe-conformance run` has child processes.
Without a GPU, Triton kernels need TRITON_INTERPRET=1 before triton is imported.
"""

import functools
import unittest
from collections.abc import Callable
from typing import Any

from hypothesis import given, reject

import fast_interpreter
from conformance.core.case import Case, case_from
from conformance.engine.child import poison
from conformance.engine.child.child import chosen_device
from conformance.engine.child.evaluate import evaluate
from conformance.engine.child.outcome import Outcome
from conformance.engine.run import corpus
from conformance.engine.run.blame import blamed
from conformance.interface import Implementation, load
from conformance.report.terminal import picture
from conformance.strategies import cases, check_function
from conformance.texts import failure_text
from conformance.usage import UsageError

RIGHT = ("PASS", "UNINFORMATIVE")
UNSUPPORTED = "DECLARED_UNSUPPORTED"


def assert_conforms(
    implementation: Any, function: str, case: Case | dict[str, Any] | str | None = None, *, device: str = "auto"
) -> None:
    """Judge one call of `function`.

    Args:
        implementation: a namespace that offers it, or the name of one, as of `--impl`.
        case: a case, its fields, or as in `replay` its id, file or JSON text; None: the smallest.
        device: auto, cpu or cuda.

    Raises:
        AssertionError: the call is wrong; the message has the finding and the case.
        unittest.SkipTest: the implementation declares the call unsupported.
        UsageError: the function is unknown, not offered, or called by ranks together.
        CaseError: the case is none of the function's.
    """
    namespace = _offering(implementation, function)
    chosen = _case_of(function, case)
    outcome = _judged(namespace, chosen, device)
    if outcome.status == UNSUPPORTED:
        raise unittest.SkipTest(f"{namespace.name} does not support this call of {function}: {outcome.reason}")


def conforms(
    function: str, implementation: Any, *, where: str = "", device: str = "auto"
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A hypothesis test of `function`: drawn cases are judged, then the test gets each as `case`.

        @hypothesis.settings(max_examples=200)
        @conforms("glu", my_kernels, where="dtype=bfloat16")
        def test_glu(case):
            ...  # what else shall hold

    A failing case is shrunk by hypothesis and kept in its database.

    Args:
        implementation, device: as in `assert_conforms`.
        where: as in `strategies.cases`.

    Raises:
        UsageError: as in `assert_conforms` and `strategies.cases`.
    """
    namespace = _offering(implementation, function)
    drawn = cases(function, implementation=namespace, where=where, device=chosen_device(device))

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def judged(*args: Any, case: Case, **fixtures: Any) -> None:
            if _judged(namespace, case, device).status == UNSUPPORTED:
                reject()
            test(*args, case=case, **fixtures)

        tested: Callable[..., None] = given(case=drawn)(judged)
        return tested

    return decorate


def _offering(implementation: Any, function: str) -> Implementation:
    check_function(function)
    if isinstance(implementation, str):
        implementation = load(implementation)
    if not isinstance(implementation, Implementation):
        implementation = Implementation(implementation, getattr(implementation, "__name__", "the implementation"))
    if not implementation.offers(function):
        raise UsageError(f"{implementation.name} does not offer {function}")
    poison.install()
    fast_interpreter.install()
    return implementation


def _case_of(function: str, description: Case | dict[str, Any] | str | None) -> Case:
    """The case that was passed, which must be one of the function's."""
    if isinstance(description, str):
        description = corpus.find(description, corpus.DEFAULT)
    if isinstance(description, Case):
        case = description
    else:
        case = corpus.checked(case_from({"function": function} | (description or {})))
    if case.function != function:
        raise UsageError(f"the case is one of {case.function}; it must be one of {function}")
    return case


def _judged(implementation: Implementation, case: Case, device: str) -> Outcome:
    def outcome_of(case: Case) -> Outcome:
        return evaluate(case, implementation, chosen_device(device))

    case, outcome = blamed(case, outcome_of(case), outcome_of)
    if outcome.status not in (*RIGHT, UNSUPPORTED):
        message = failure_text(outcome.finding, outcome.reason)
        replay = f"moe-conformance replay '{case.text}' --impl {implementation.name}"
        lines = f"{case.function}: {outcome.status}: {message}", f"  case    {picture(case)}", f"  replay  {replay}"
        raise AssertionError("\n".join(lines))
    return outcome
