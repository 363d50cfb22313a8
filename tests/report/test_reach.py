"""The page of sizes has every function, and is not stale where that is cheap to say."""

from pathlib import Path

import pytest

from benchmarks import reach
from conformance.catalogue import CONTRACTS
from conformance.core.case import Case

PAGE = (Path(__file__).parents[2] / "docs" / "reach.md").read_text()


def test_the_page_has_a_row_for_every_function():
    rows = [line.split("`")[1] for line in PAGE.splitlines() if line.startswith("| `")]
    assert rows == list(CONTRACTS)
    assert PAGE.startswith(reach.INTRODUCTION)


@pytest.mark.parametrize("function", ["jitter", "flatten_experts"])
def test_a_row_is_what_the_cases_give_today(function):
    assert reach.row(function) in PAGE, "stale: python -m benchmarks.reach > docs/reach.md"


def test_rows_of_a_recipe_are_counted_in_elements():
    case = Case.family["grouped_linear"](
        function="grouped_linear", tokens=5, counts=(2, 3), experts=2, hidden=2, width=1, scaling="mxfp8"
    )
    assert reach.sizes_of(case) | {"topk": 0} == {"tokens": 160, "experts": 2, "columns": 64, "rows": 96, "topk": 0}


@pytest.mark.parametrize(("numbers", "text"), [((5, 7), "5 / 7"), ((5, 5), "5"), ((), "–")])
def test_a_cell_has_both_numbers_once(numbers, text):
    assert reach.cell([{"tokens": number} for number in numbers], "tokens") == text
