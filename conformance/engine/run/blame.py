"""Attributes a failure to a call: a law about two calls also fails if the second one is wrong."""

from collections.abc import Callable

from conformance.catalogue import CONTRACTS
from conformance.core.case import Case
from conformance.core.universal_laws import HISTORY, INTERLEAVED, neighbours
from conformance.engine.child.outcome import Outcome

OF_TWO_CALLS = (HISTORY.name, INTERLEAVED.name)


def blamed(case: Case, outcome: Outcome, fresh: Callable[[Case], Outcome]) -> tuple[Case, Outcome]:
    """The second call of the law, if it fails by itself in a fresh process; else the case.

    Args:
        outcome: the failure of the case.
        fresh: runs a case in a process that has run nothing before.
    """
    if not outcome.finding or outcome.finding["check"] not in OF_TWO_CALLS:
        return case, outcome
    for neighbour in neighbours(CONTRACTS[case.function], case):
        neighbour_outcome = fresh(neighbour)
        if neighbour_outcome.status in ("FAIL", "CRASH", "HANG"):
            return neighbour, neighbour_outcome
    return case, outcome
