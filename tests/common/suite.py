"""Helpers for tests of the suite: cases run in this process against the reference, honest variants
and planted mistakes.
"""

import functools
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import moe_ref
from conformance.core.case import Case
from conformance.core.space import Space
from conformance.engine.child import poison
from conformance.engine.child.evaluate import evaluate
from conformance.engine.child.outcome import Outcome
from conformance.engine.choose.draw import covering_cases, drawn, scope_of, strategy
from conformance.engine.choose.plan import fixed_cases
from conformance.interface import Implementation

poison.install()
EVERYTHING, SEEDS = Space(), range(11, 13)
JUDGED = ("PASS", "UNINFORMATIVE")
WITH_UNSUPPORTED = (*JUDGED, "DECLARED_UNSUPPORTED")


def reference(**replacements: Any) -> SimpleNamespace:
    """The reference, with other functions in the place of some."""
    return SimpleNamespace(**{name: getattr(moe_ref, name) for name in moe_ref.__all__} | replacements)


def wrapped(function: str, wrapper: Callable[..., Any], **declared: Any) -> SimpleNamespace:
    """The reference, with `wrapper(original, *args, **settings)` in the place of one function."""
    original = getattr(moe_ref, function)
    replacements = {function: functools.wraps(original)(lambda *args, **settings: wrapper(original, *args, **settings))}
    return reference(**replacements, declares=lambda name: declared)


def outcome_of(case: Case, implementation: Any) -> Outcome:
    """What a namespace or an `Implementation` does on a case."""
    if not isinstance(implementation, Implementation):
        implementation = Implementation(implementation, "here")
    return evaluate(case, implementation)


def outcomes(case: Case, implementation: Any, seeds: int) -> Iterator[Outcome]:
    """What it does on the case under several seeds, one after another."""
    return (outcome_of(replace(case, seed=seed), implementation) for seed in range(seeds))


def statuses(case: Case, implementation: Any, seeds: int) -> set[str]:
    return {outcome.status for outcome in outcomes(case, implementation, seeds)}


def failures(case: Case, implementation: Any, seeds: int) -> Iterator[tuple[str, str]]:
    """(output, check) of each failure; no further seed is judged when the reader stops at one."""
    for outcome in outcomes(case, implementation, seeds):
        if outcome.status == "FAIL" and outcome.finding:
            yield outcome.finding["output"], outcome.finding["check"]


def assert_accepted(
    cases: Iterable[Case], implementation: Any, *, statuses: tuple[str, ...] = JUDGED, share: float = 0.5
) -> None:
    """Every case ends in one of the statuses, and more than `share` of them pass."""
    results = {case.text: outcome_of(case, implementation) for case in cases}
    assert {text: x.finding or x.reason for text, x in results.items() if x.status not in statuses} == {}
    assert sum(x.status == "PASS" for x in results.values()) > share * len(results)


def in_turn(cases: Iterable[Case], name: str, names: Collection[str]) -> list[Case]:
    """Every third case; the next two of the names have the others, of two names each every second.

    benchmarks/honest.py judges every variant by many more cases.
    """
    step = min(3, len(names))
    return list(cases)[list(names).index(name) % step :: step]


def gate_cases(
    function: str, *, space: Space = EVERYTHING, every: int = 1, seeds: range = SEEDS, draws: int = 8
) -> list:
    """Fixed cases and shapes, one in `every` of the covering array, and each seed's drawn cases."""
    return [
        *fixed_cases(function, space),
        *covering_cases(function, space).cases[::every],
        *scope_of(function, space).always(),
        *(case for seed in seeds for case in drawn(strategy(function, space), seed, draws)),
    ]
