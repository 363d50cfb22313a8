"""The record of sizes has every function, and is not stale where that is cheap to say."""

import json
from pathlib import Path

import pytest

from benchmarks import reach
from conformance.catalogue import CONTRACTS
from conformance.core.case import Case

RECORD = json.loads((Path(__file__).parents[2] / "docs" / "results" / "reach.json").read_text())
(TABLE,) = RECORD["tables"]


def test_the_record_has_a_row_for_every_function():
    assert [row[0].strip("`") for row in TABLE["rows"]] == list(CONTRACTS)
    assert (RECORD["meaning"], TABLE["columns"]) == (reach.MEANING, reach.HEADS)


@pytest.mark.parametrize("function", ["jitter", "flatten_experts"])
def test_a_row_is_what_the_cases_give(function):
    assert reach.row(function) in TABLE["rows"], "stale: python -m benchmarks.reach"


def test_rows_of_a_recipe_are_counted_in_elements():
    case = Case.family["grouped_linear"](
        function="grouped_linear", tokens=5, counts=(2, 3), experts=2, hidden=2, width=1, scaling="mxfp8"
    )
    assert reach.sizes_of(case) | {"topk": 0} == {"tokens": 160, "experts": 2, "columns": 64, "rows": 96, "topk": 0}


@pytest.mark.parametrize(("numbers", "text"), [((5, 7), "5 / 7"), ((5, 5), "5"), ((), "–")])
def test_a_cell_has_both_numbers_once(numbers, text):
    assert reach.cell([{"tokens": number} for number in numbers], "tokens") == text
