"""The plan, in integers: what it counts, where it puts each copy, what it drops.

P1 … P30 are the properties of every dispatcher. Where each dispatcher puts its rows is compared
with loops over ranks, experts and tokens in `evidence.formulations.dispatch`, for the cases that
tests/evidence draws; this module has the plan's own numbers. Values are in test_reference.py and
test_reference_gradients.py.
"""

import pytest
import torch
from hypothesis import given, settings

from moe_ref.config import check_expert_split
from moe_ref.dispatch.plan import Layout, exclusive_sum, plan_of_indices, plan_of_maps, round_up
from moe_ref.permutation.rows import PADDING
from tests.dispatch.worlds import World, worlds

modest = settings(max_examples=8, deadline=None, database=None, derandomize=True)


def budgeted(w: World):
    return plan_of_maps(w.maps, Layout(align=w.align, num_rows=w.num_rows))


@modest
@given(worlds())
def test_p1_every_copy_that_is_sent_arrives(w):
    plan = plan_of_maps(w.maps)
    asked = torch.stack([own.sum(0) for own in w.maps])
    assert torch.equal(plan.count_WE, asked)
    assert int(asked.sum()) == len(plan.token_R)
    assert torch.equal(plan.kept_WL.flatten(), asked.sum(0)) and list(plan.num_rows) == plan.kept_WL.sum(1).tolist()


@modest
@given(worlds())
def test_p7_a_slot_is_the_experts_start_and_the_tokens_before(w):
    plan, routed_GE = budgeted(w), torch.cat(w.maps)
    start_E = exclusive_sum(round_up(routed_GE.sum(0).reshape(w.ranks, -1), w.align)).flatten()
    assert torch.equal(plan.start_WL.flatten(), start_E)
    for g, e, row in zip(plan.token_R.tolist(), plan.expert_R.tolist(), plan.row_R.tolist(), strict=True):
        slot = int(start_E[e] + routed_GE[:g, e].sum())
        assert row == (slot if slot < plan.num_rows[e // plan.local_experts] else PADDING)


@modest
@given(worlds())
def test_p8_the_flag_says_exactly_that_something_was_dropped(w):
    plan = budgeted(w)
    count_WL = torch.cat(w.maps).sum(0).reshape(w.ranks, -1)
    limit_W = torch.tensor(plan.num_rows)
    assert torch.equal(plan.overflow_W, plan.kept_WL.sum(1) < count_WL.sum(1))
    assert torch.equal(plan.overflow_W, plan.start_WL[:, -1] + count_WL[:, -1] > limit_W)
    assert torch.equal(plan.kept_WL, torch.minimum((limit_W[:, None] - plan.start_WL).clamp(min=0), count_WL))


def test_p20_an_expert_named_twice_gets_two_copies_and_the_rank_one_token():
    plan = plan_of_indices([torch.tensor([[1, 3, 1]])], 4)
    assert plan.kept_WL.tolist() == [[0, 2, 0, 1]] and plan.distinct_tokens(0).tolist() == [0]
    assert plan.slot_R.tolist() == [0, 1, 2] and plan.row_R.tolist() == [0, 2, 1]


def test_p29_rows_are_numbered_beyond_32_bits():
    plan = plan_of_indices([torch.tensor([[0, 3], [3, 1]]), torch.tensor([[2, 3]])], 4, Layout(segment=2**32))
    assert plan.row_R.tolist() == [0, 2**32, 2**32 + 1, 2**32, 0, 2**32 + 2]
    assert plan.num_rows == (2**33, 2**33)


@modest
@given(worlds())
def test_a_map_and_its_index_form_have_one_plan(w):
    by_map, by_index = plan_of_maps(w.maps), plan_of_indices(w.indices, w.experts)
    assert all(torch.equal(by_map.provenance(rank), by_index.provenance(rank)) for rank in range(w.ranks))


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
    made = {settings: plan_of_maps(maps, Layout(**dict(settings))).row_tokens(0).tolist() for settings in buffers}
    assert made == buffers


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
