"""Confirms hangs: a case that exceeds its limit while others run is run again without them before
it counts as a HANG. A case that passes then, with the longer limit, has the outcome of that run: it
was slow, and is not FLAKY. There is one exception. If the case exceeds its limit again after the
calls that ran before it in its process, these calls make it hang, and it stays a HANG. The search
for such calls takes time. If one search of a function has found none, its other cases are not
searched.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import TypeVar

from conformance.core.case import Case
from conformance.engine.child.outcome import Outcome
from conformance.engine.run.pool import Answer, Lost, Pool
from conformance.engine.run.preceding_calls import with_calls_before

Work = TypeVar("Work")


def with_hangs_confirmed(
    answers: Iterator[tuple[Work, Answer]], pool: Pool, seconds: float
) -> Iterator[tuple[Work, Answer]]:
    """The answers of the pool, with each HANG confirmed at the end, when no other case runs.

    A HANG becomes NOT_RUN if the run ends before that.

    Args:
        seconds: the limit of the search for calls that make a case hang.
    """
    suspects: deque[tuple[Work, Outcome]] = deque()
    try:
        for work, answer in answers:
            if isinstance(work, Case) and isinstance(answer, Outcome) and answer.status == "HANG":
                suspects.append((work, answer))
            else:
                yield work, answer
        while suspects:
            work, outcome = suspects[0]
            assert isinstance(work, Case)
            outcome = confirmed_hang(work, outcome, pool, seconds)
            suspects.popleft()
            yield work, outcome
    except (KeyboardInterrupt, Lost):
        for work, outcome in suspects:
            reason = f"the run ended before it ran alone: {outcome.reason}"
            yield work, replace(outcome, status="NOT_RUN", reason=reason)
        raise


def confirmed_hang(case: Case, outcome: Outcome, pool: Pool, seconds: float) -> Outcome:
    """The outcome of a case that exceeded its limit while others ran.

    It runs again without them, unless its function has already hung in this way, so that the time
    of the run stays bounded.
    """
    if pool.has_hung(case.function):
        return outcome
    earlier_cases = pool.before(case)
    second_outcome = pool.run_alone(case)
    if second_outcome.status == "PASS" and case.function not in pool.patience.slow:
        if reproduced := with_calls_before(case, outcome, earlier_cases, pool.run_alone, seconds):
            return reproduced[1]
        pool.patience.slow.add(case.function)
    return second_outcome
