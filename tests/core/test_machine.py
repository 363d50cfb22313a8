"""The sequences that a state machine draws depend on the seed alone."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.internal.conjecture import providers

from conformance.engine.child.outcome import Outcome
from tests.common.machines import cases_of


def refused() -> None:
    raise LookupError("constants of imported code")


def test_a_seed_has_its_sequences_whatever_is_imported(monkeypatch):
    """Hypothesis's own loop also draws from the constants of imported code."""
    drawn = [case for case, _ in cases_of("route", lambda case: Outcome("PASS"), 5, 4)]
    monkeypatch.setattr(providers, "_get_local_constants", refused)
    assert drawn == [case for case, _ in cases_of("route", lambda case: Outcome("PASS"), 5, 4)]
    assert len(drawn) > 5 and len({case.text for case in drawn}) == len(drawn)
    with pytest.raises(LookupError, match="imported code"):
        settings(database=None, derandomize=True)(given(st.integers(0, 99))(lambda n: None))()
