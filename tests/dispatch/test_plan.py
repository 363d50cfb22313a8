"""The plan of a dispatch, in integers: its worked examples, its limits and what it refuses.

Where each dispatcher puts its rows is compared with loops over ranks, experts and tokens in
`evidence.formulations.dispatch`, for the cases that tests/evidence draws.
"""

import pytest
import torch

from moe_ref.config import check_expert_split
from moe_ref.dispatch.plan import Layout, plan_of_indices, plan_of_maps


def test_an_expert_named_twice_gets_two_copies_and_the_rank_one_token():
    plan = plan_of_indices([torch.tensor([[1, 3, 1]])], 4)
    assert plan.kept_WL.tolist() == [[0, 2, 0, 1]] and plan.distinct_tokens(0).tolist() == [0]
    assert plan.slot_R.tolist() == [0, 1, 2] and plan.row_R.tolist() == [0, 2, 1]


def test_rows_are_numbered_beyond_32_bits():
    plan = plan_of_indices([torch.tensor([[0, 3], [3, 1]]), torch.tensor([[2, 3]])], 4, Layout(segment=2**32))
    assert plan.row_R.tolist() == [0, 2**32, 2**32 + 1, 2**32, 0, 2**32 + 2]
    assert plan.num_rows == (2**33, 2**33)


ILLEGAL = {
    "experts that do not divide": lambda: plan_of_maps([torch.ones(2, 3) > 0] * 2),
    "an index that is no expert": lambda: plan_of_indices([torch.tensor([[4]])], 4),
    "an index below -1": lambda: plan_of_indices([torch.tensor([[-2]])], 4),
    "a source that is missing": lambda: plan_of_maps([torch.ones(2, 4) > 0] * 2, Layout(sources=(0, 0))),
    "a slab that is too small": lambda: plan_of_indices([torch.zeros(3, 1, dtype=torch.int64)], 1, Layout(segment=2)),
    "shards that do not divide": lambda: check_expert_split(4, 4, 3),
}


@pytest.mark.parametrize("call", ILLEGAL.values(), ids=ILLEGAL)
def test_what_has_no_plan_is_refused(call):
    with pytest.raises(ValueError, match="it must be"):
        call()


# ---- the worked examples of the docstrings


def test_the_example_of_a_layout_holds():
    maps = [torch.tensor([[1, 0], [1, 0]]), torch.tensor([[1, 0], [0, 0]])]
    buffers = {
        (): [0, 1, 2],
        (("sources", (1, 0)),): [2, 0, 1],
        (("chunk", 2),): [0, 1, 2, 3],
        (("chunk", 1),): [0, 2],
        (("align", 4),): [0, 1, 2, -1],
        (("segment", 5),): [0, 1, 2, -1, -1],
        (("num_rows", 2),): [0, 1],
    }
    token_rows = {settings: plan_of_maps(maps, Layout(**dict(settings))).row_tokens(0).tolist() for settings in buffers}
    assert token_rows == buffers


def test_the_example_of_a_plan_holds():
    routed = torch.zeros(4, 4)
    for token, experts in enumerate(([0, 2], [0], [0, 3], [2])):
        routed[token, experts] = 1
    plan = plan_of_maps(routed.bool().split(2), Layout(align=2))
    assert {name: x.tolist() for name, x in vars(plan).items() if isinstance(x, torch.Tensor)} == {
        "token_R": [0, 0, 1, 2, 2, 3],
        "slot_R": [0, 1, 0, 0, 1, 0],
        "expert_R": [0, 2, 0, 0, 3, 2],
        "routed_R": [True] * 6,
        "row_R": [0, 0, 1, 2, 2, 1],
        "count_WE": [[2, 0, 1, 0], [1, 0, 1, 1]],
        "start_WL": [[0, 4], [0, 2]],
        "kept_WL": [[3, 0], [2, 1]],
        "length_WL": [[4, 0], [2, 2]],
        "overflow_W": [False, False],
    }
    assert plan.num_rows == (4, 4)
    assert [plan.row_tokens(rank).tolist() for rank in range(2)] == [[0, 1, 2, -1], [0, 3, 2, -1]]
