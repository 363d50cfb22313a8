"""The cases of a function on an implementation, and lists of cases drawn from a seed."""

import random
import zlib
from collections.abc import Callable

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conformance.catalogue import CONTRACTS
from conformance.core.case import Case
from conformance.core.covering import Covered
from conformance.core.scope import Scope
from conformance.core.space import Space

BYTES_PER_CASE = 4096  # bytes for a draw: more than the longest case consumes


def scope_of(function: str, space: Space) -> Scope:
    """The scope from which all cases of the function are chosen."""
    return Scope(CONTRACTS[function], space)


def strategy(function: str, space: Space) -> st.SearchStrategy[Case]:
    """The strategy that draws cases of `function`."""
    return scope_of(function, space).drawn()


def covering_cases(function: str, space: Space) -> Covered:
    """The covering array of the function's axes."""
    return scope_of(function, space).covering()


def run_seed(*components: object) -> int:
    """A seed from its parts alone, independent of the directory, the worker and the test's name."""
    return zlib.crc32("/".join(map(str, components)).encode())


def drawn(
    cases: st.SearchStrategy[Case],
    seed: int,
    count: int,
    accept: Callable[[Case], Case | None] = lambda case: case,
    most: int = 4,
) -> list[Case]:
    """`count` distinct cases, drawn by hypothesis from independent random bytes.

    Args:
        accept: gives the case to keep for a drawn one; None: another is drawn.
        most: draws per wanted case.

    Hypothesis's search loop is not used: it mutates every fresh example several times, so most of
    a batch would be near-copies.
    """
    cases_by_text: dict[str, Case] = {}

    @settings(database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(cases)
    def collect(case: Case) -> None:
        chosen = accept(case)
        if chosen is not None:
            cases_by_text.setdefault(chosen.text, chosen)

    source = random.Random(seed)
    for _ in range(most * count):
        if len(cases_by_text) == count:
            break
        collect.hypothesis.fuzz_one_input(source.randbytes(BYTES_PER_CASE))  # type: ignore[attr-defined]
    return list(cases_by_text.values())
