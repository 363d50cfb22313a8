"""Each tactic of a tuning table is judged alone, whatever the size of the problem."""

from dataclasses import replace

import pytest

from conformance.engine.options import ChildOptions
from conformance.engine.run.pool import Pool
from conformance.families.experts.cases import GroupedCase
from moe_fast.launch.tuning import GPU, INTERPRETER
from tests.honest import TACTICS
from tests.honest.sizes import with_one_tactic

LINEAR = GroupedCase(function="grouped_linear", tokens=70, experts=2, hidden=5, width=3, dtype="bfloat16", seed=1)


@pytest.mark.parametrize("sizes", [GPU, INTERPRETER])
@pytest.mark.parametrize("rows", [1, 10**6])
def test_every_problem_takes_the_only_tactic(sizes, rows):
    tiles = sizes.grouped.by_rows
    assert len(tiles) > 1
    for index, tile in enumerate(tiles):
        assert with_one_tactic(sizes, index).grouped.tile(rows, 1, 2) == tile
    assert sizes.grouped.tile(1, 1, 2) != sizes.grouped.tile(10**6, 1, 2)


@pytest.mark.parametrize("implementation", TACTICS)
def test_it_is_accepted(implementation):
    with Pool(ChildOptions(implementation, "cpu")) as pool:
        outcomes = [outcome for _, outcome in pool.run([LINEAR, replace(LINEAR, tokens=3)])]
    assert [outcome.status for outcome in outcomes] == ["PASS", "PASS"]
