"""Each tactic of a tuning table is judged alone, whatever the size of the problem."""

from dataclasses import replace

import pytest
import torch

from conformance.engine.options import ChildOptions
from conformance.engine.run.pool import Pool
from conformance.families.experts.cases import GroupedCase
from moe_fast.launch import tuning
from moe_fast.launch.tuning import GPU, INTERPRETER
from tests.common.fast import interpreted
from tests.common.suite import outcome_of
from tests.honest import TACTICS
from tests.honest.retuned import PRODUCTS, every_way
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
def test_a_single_tactic_of_each_table_is_accepted(implementation):
    with Pool(ChildOptions(implementation, "cpu")) as pool:
        outcomes = [outcome for _, outcome in pool.run([LINEAR, replace(LINEAR, tokens=3)])]
    assert [outcome.status for outcome in outcomes] == ["PASS", "PASS"]


@interpreted
@pytest.mark.parametrize("function", ["grouped_linear", "grouped_dgrad"])
def test_a_call_with_each_tactic_has_one_result(function):
    assert outcome_of(replace(LINEAR, function=function, hidden=130, width=70), PRODUCTS).status == "PASS"


def test_a_result_that_depends_on_the_tactic_is_an_error():
    def rows_of_a_tile(x):
        return x + tuning.for_device(x.device).grouped.by_rows[0].rows

    sizes = [with_one_tactic(INTERPRETER, index) for index in (0, 1)]
    x = torch.zeros(2)
    with pytest.raises(AssertionError, match="tokens of f depends on the block sizes"):
        every_way("f", rows_of_a_tile, sizes)(x)
    assert every_way("f", rows_of_a_tile, sizes[:1])(x).tolist() == [sizes[0].grouped.by_rows[0].rows] * 2
