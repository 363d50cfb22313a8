"""A case that was over its limit beside others runs again alone before it counts as a HANG.

What passes alone, with the longer limit, takes the outcome that it has there: it was slow, and is
not FLAKY. One exception: if it is over its limit again after the calls that ran before it in its
process, these calls make it hang, and it stays a HANG. The search for such calls takes time, so a
function in which one search found none has no other.
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
    """The answers of the pool. Each HANG comes last, when no other case runs, as it is alone; as
    NOT_RUN where the run ends before that.

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
    """The outcome that counts for a case that was over its limit while others ran.

    It runs alone, unless its function has hung alone before: the run stays bounded.
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
