"""Finds the calls before a failing case that make it fail, if it passes by itself."""

import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from conformance.core.case import Case
from conformance.engine.child.outcome import Outcome
from conformance.engine.run.reduction import failure_key


def with_calls_before(
    case: Case, outcome: Outcome, ran: Iterable[Case], attempt: Callable[[Case], Outcome], seconds: float
) -> tuple[Case, Outcome] | None:
    """The failing case with the shortest run of calls before it that makes it fail: the last 1, 2,
    4, … cases of its process are tried in turn. Cases of the case's own function are tried first,
    then the cases of all functions, because functions rarely share state.

    Args:
        ran: the cases that ran before it in its process, in order.
        attempt: runs a case, with those before it, in a process that has run nothing before.
    """
    key, deadline = failure_key(case, outcome), time.monotonic() + seconds
    earlier_cases = [
        replace(call, before=()) for predecessor in (*ran, case) for call in (*predecessor.before, predecessor)
    ][:-1]
    calls_of_function = [predecessor for predecessor in earlier_cases if predecessor.function == case.function]
    groups = [calls_of_function, earlier_cases] if len(calls_of_function) < len(earlier_cases) else [earlier_cases]
    for calls in groups:
        powers_of_two = {1 << power for power in range(len(calls).bit_length())}
        for count in sorted(powers_of_two | {len(calls)} - {0}):
            if time.monotonic() > deadline:
                return None
            shown = replace(case, before=tuple(calls[-count:]))
            second_outcome = attempt(shown)
            if failure_key(shown, second_outcome) == key:
                return shown, second_outcome
    return None
