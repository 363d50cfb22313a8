"""Finds the smallest case that fails in the same way.

Greedy over the calls before the case and its fields: try each simpler case, the largest step first,
and restart from the first one with the same failure. Wrong values, crashes and hangs share the
loop, because each attempt runs in a child.
"""

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from conformance.catalogue import runs_in_one_place
from conformance.core.axes import blocks
from conformance.core.case import Case
from conformance.core.space import Space
from conformance.engine.child.outcome import Outcome
from conformance.engine.choose.draw import scope_of
from conformance.interface import UsageError
from conformance.texts import described

Key = tuple[str, str, str, str]
NUMBERED = r"(?<![^.])\d+(?![^.])"  # a number between the dots of a name


def failure_key(case: Case, outcome: Outcome) -> Key:
    """The identity of a failure: function, output, check and status. A result that is NaN without
    need is another failure than a wrong number.

    Outputs of a sequence of calls are numbered (`3.probs`): the number is left out, because in a
    shorter sequence it is another one.
    """
    finding = outcome.finding or {}
    output = re.sub(NUMBERED, "#", finding.get("output", ""))
    check = finding.get("check", "") + (" with NaN" if finding.get("nan") else "")
    return case.function, output, check, outcome.status


@dataclass(frozen=True)
class Reduced:
    """The smallest failing case, and the extent of the search."""

    case: Case
    outcome: Outcome
    attempts: int
    finished: bool  # False: out of time, or ended by an error, so that a smaller case may exist
    error: str = ""  # an error of the suite that ended the search


def reduce(case: Case, outcome: Outcome, attempt: Callable[[Case], Outcome], seconds: float) -> Reduced:
    """The smallest case reachable from `case` that fails with the same key within `seconds`.

    Raises:
        UsageError: no attempt can be made any more.
    """
    key, deadline = failure_key(case, outcome), time.monotonic() + seconds
    tried_texts, attempts = {case.text}, 0
    progress = True
    try:
        while progress:
            progress = False
            for candidate in _smaller(case):
                if candidate.text in tried_texts:
                    continue
                tried_texts.add(candidate.text)
                if time.monotonic() > deadline:
                    return Reduced(case, outcome, attempts, finished=False)
                attempts += 1
                result = attempt(candidate)
                if failure_key(candidate, result) == key:
                    case, outcome, progress = candidate, result, True
                    break
    except UsageError:
        raise
    except Exception as error:  # the failure is reported all the same
        return Reduced(case, outcome, attempts, finished=False, error=described(error))
    return Reduced(case, outcome, attempts, finished=True)


def _smaller(case: Case) -> Iterator[Case]:
    """The simpler cases whose calls all run in one place."""
    yield from filter(runs_in_one_place, _each_smaller(case))


PLAIN = {"law": "", "grads": "", "unused": "", "layout": "contiguous", "layout_of": ""}


def _each_smaller(case: Case) -> Iterator[Case]:
    """Simpler variants: with fewer calls before the case, with plain calls before it, with a
    simpler case, with simpler calls before it.
    """
    for start, stop in blocks(len(case.before)):
        yield replace(case, before=case.before[:start] + case.before[stop:])
    plain_calls = tuple(earlier.changed(**PLAIN) for earlier in case.before)
    if plain_calls != case.before:  # all calls at once, because each attempt may need new processes
        yield replace(case, before=plain_calls)
    yield from _simpler(case)
    for index, earlier in enumerate(case.before):
        for simpler in _simpler(earlier):
            yield replace(case, before=(*case.before[:index], simpler, *case.before[index + 1 :]))


def _simpler(case: Case) -> Iterator[Case]:
    yield from () if case.golden or case.illegal else scope_of(case.function, Space()).smaller(case)
