"""Illegal counts must raise an error, or give NaN, even where padding would make them legal."""

from typing import Any

import pytest

import moe_ref
from conformance.families.experts.cases_mlp import MlpCase
from tests.common.suite import outcome_of, wrapped


def made_legal(mlp: Any, rows: Any, counts: Any, *arguments: Any, align: Any = None, **settings: Any) -> Any:
    """Where they are padded: none is negative, and the last has no more rows than there are."""
    if align is not None:
        counts = counts.clamp(min=0)
        counts = counts - (counts.cumsum(0) - len(rows)).clamp(min=0).diff(prepend=counts.new_zeros(1))
    return mlp(rows, counts, *arguments, align=align, **settings)


@pytest.mark.parametrize("function", ["grouped_mlp", "sequential_mlp"])
@pytest.mark.parametrize("rule", ["count_negative_padded", "counts_beyond_the_rows_padded"])
def test_illegal_counts_show_although_they_are_padded(function, rule):
    case = MlpCase(function=function, illegal=rule, tokens=2, experts=2)
    assert outcome_of(case, moe_ref).status == "PASS"
    assert outcome_of(case, wrapped(function, made_legal)).status == "FAIL"
