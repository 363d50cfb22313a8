"""The plan, in integers: what it counts, where it puts each copy, what it drops.

P1 … P30 are the properties of every dispatcher. Integers are here; values are in
test_dispatch_reference.py and test_dispatch_reference_gradients.py; P21, P27 and P28 concern
launches and streams, which a reference does not have.
"""

import pytest
import torch
from hypothesis import given, settings

from moe_ref.config import check_expert_split
from moe_ref.dispatch.plan import Layout, exclusive_sum, plan_of_indices, plan_of_maps, round_up
from moe_ref.permutation.rows import PADDING
from tests.dispatch import oracle
from tests.dispatch.worlds import World, world, worlds

modest = settings(max_examples=8, deadline=None, database=None, derandomize=True)


def rows_of(plan, rank: int) -> list[oracle.Cell | None]:
    return [None if row[0] == PADDING else tuple(row) for row in plan.provenance(rank).tolist()]


def cells(segments: oracle.Segments, num_rows: int | None = None) -> list[oracle.Cell | None]:
    return oracle.joined(segments, num_rows)


def budgeted(w: World):
    return plan_of_maps(w.maps, Layout(align=w.align, num_rows=w.num_rows))


@modest
@given(worlds())
def test_p1_every_copy_that_is_sent_arrives(w):
    plan = plan_of_maps(w.maps)
    asked = torch.stack([own.sum(0) for own in w.maps])
    assert torch.equal(plan.count_WE, asked)
    assert torch.equal(plan.sends().sum(0), plan.kept_WL.sum(1)) and plan.sends().sum() == len(plan.token_R)
    assert torch.equal(plan.kept_WL.flatten(), asked.sum(0)) and list(plan.num_rows) == plan.kept_WL.sum(1).tolist()


@modest
@given(worlds())
def test_p2_a_token_reaches_a_rank_once_however_many_of_its_experts_want_it(w):
    rows, _ = oracle.deepep(oracle.nested(w.indices), w.experts)
    for plan in (plan_of_maps(w.maps), plan_of_indices(w.indices, w.experts)):
        start = exclusive_sum(torch.tensor(w.tokens)).tolist()
        assert [plan.distinct_tokens(rank).tolist() for rank in range(w.ranks)] == [
            [start[s] + t for s, t in own] for own in rows
        ]


@modest
@given(worlds())
def test_p3_rows_stand_by_expert_then_source_then_token(w):
    plan = plan_of_maps(w.maps)
    for rank, segments in enumerate(oracle.allgather(oracle.nested(w.maps), w.experts)):
        assert rows_of(plan, rank) == cells(segments)
        assert rows_of(plan, rank) == sorted(rows_of(plan, rank), key=lambda cell: (cell[2], cell[0], cell[1]))


@modest
@given(worlds())
def test_p3_sources_stand_in_the_order_that_the_layout_asks_for(w):
    order = tuple(reversed(range(w.ranks)))
    plan, plain = plan_of_maps(w.maps, Layout(sources=order)), plan_of_maps(w.maps)
    for rank in range(w.ranks):
        assert rows_of(plan, rank) == sorted(rows_of(plain, rank), key=lambda cell: (cell[2], -cell[0], cell[1]))


@modest
@given(worlds())
def test_p6_segments_are_rounded_up_to_the_alignment(w):
    plan = plan_of_maps(w.maps, Layout(align=w.align))
    assert (plan.length_WL % w.align == 0).all()
    assert ((plan.length_WL - plan.kept_WL >= 0) & (plan.length_WL - plan.kept_WL < w.align)).all()
    assert torch.equal(plan.length_WL, round_up(plan.kept_WL, w.align)) and torch.equal(
        plan.start_WL, exclusive_sum(plan.length_WL)
    )


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
def test_p8_what_a_budget_leaves_stands_where_it_would_stand_without_one(w):
    plan, whole = budgeted(w), plan_of_maps(w.maps, Layout(align=w.align))
    for rank, limit in enumerate(plan.num_rows):
        assert rows_of(plan, rank) == (rows_of(whole, rank) + [None] * limit)[:limit]


@modest
@given(worlds())
def test_p8_the_flag_says_exactly_that_something_was_dropped(w):
    plan = budgeted(w)
    count_WL = torch.cat(w.maps).sum(0).reshape(w.ranks, -1)
    limit_W = torch.tensor(plan.num_rows)
    assert torch.equal(plan.overflow_W, plan.kept_WL.sum(1) < count_WL.sum(1))
    assert torch.equal(plan.overflow_W, plan.start_WL[:, -1] + count_WL[:, -1] > limit_W)
    assert torch.equal(plan.kept_WL, torch.minimum((limit_W[:, None] - plan.start_WL).clamp(min=0), count_WL))
    _, lost = oracle.hybridep(oracle.nested(w.maps), w.experts, w.align, w.num_rows)
    assert plan.overflow_W.tolist() == lost


@pytest.mark.parametrize("tokens", [[0], [0, 0, 0], [0, 3], [3, 0], [1]])
@pytest.mark.parametrize("density", [0.0, 1.0, 2.0])
def test_p19_ranks_and_experts_without_tokens_have_empty_places(tokens, density):
    w = world(tokens, 2, density, 0, align=4)
    plan = plan_of_maps(w.maps, Layout(align=4))
    assert [rows_of(plan, rank) for rank in range(len(tokens))] == [
        cells(own) for own in oracle.hybridep(oracle.nested(w.maps), w.experts, 4)[0]
    ]
    assert plan.overflow_W.tolist() == [False] * len(tokens)


def test_p20_an_expert_named_twice_gets_two_copies_and_the_rank_one_token():
    plan = plan_of_indices([torch.tensor([[1, 3, 1]])], 4)
    assert plan.kept_WL.tolist() == [[0, 2, 0, 1]] and plan.distinct_tokens(0).tolist() == [0]
    assert plan.slot_R.tolist() == [0, 1, 2] and plan.row_R.tolist() == [0, 2, 1]


@modest
@given(worlds())
def test_p24_relabelled_experts_carry_their_rows_along(w):
    relabel = torch.arange(w.experts).reshape(w.ranks, -1).flip(1).flatten()  # reversed per rank
    plan, other = plan_of_maps(w.maps), plan_of_maps([own[:, relabel] for own in w.maps])
    for rank in range(w.ranks):
        here, there = rows_of(plan, rank), rows_of(other, rank)
        for e in range(w.experts):
            assert [cell[:2] for cell in here if cell[2] == relabel[e]] == [cell[:2] for cell in there if cell[2] == e]


@modest
@given(worlds())
def test_p24_turned_ranks_turn_everything(w):
    turned = [own.roll(-plan_of_maps(w.maps).local_experts, 1) for own in w.maps[1:] + w.maps[:1]]
    plan, other = plan_of_maps(w.maps), plan_of_maps(turned)
    assert torch.equal(other.sends(), plan.sends().roll((-1, -1), (0, 1)))
    for rank in range(w.ranks):
        moved = {
            ((s - 1) % w.ranks, t, (e - plan.local_experts) % w.experts)
            for s, t, e in rows_of(plan, (rank + 1) % w.ranks)
        }
        assert set(rows_of(other, rank)) == moved


@modest
@given(worlds())
def test_p24_turned_tokens_stay_with_their_experts(w):
    plan, other = plan_of_maps(w.maps), plan_of_maps([own.flip(0) for own in w.maps])
    for rank in range(w.ranks):
        here, there = rows_of(plan, rank), rows_of(other, rank)
        assert {(s, w.tokens[s] - 1 - t, e) for s, t, e in here} == set(there)
        assert [cell[2] for cell in here] == [cell[2] for cell in there]


@modest
@given(worlds())
def test_p25_one_dispatch_is_two_whose_chunks_lie_behind_one_another(w):
    cut = [own[: len(own) // 2] for own in w.maps], [own[len(own) // 2 :] for own in w.maps]
    first, second, whole = (plan_of_maps(maps) for maps in (*cut, w.maps))
    for rank in range(w.ranks):
        later = [(s, t + w.tokens[s] // 2, e) for s, t, e in rows_of(second, rank)]
        assert sorted(rows_of(first, rank) + later, key=lambda cell: (cell[2], cell[0], cell[1])) == rows_of(
            whole, rank
        )
    assert torch.equal(first.count_WE + second.count_WE, whole.count_WE)


@modest
@given(worlds())
def test_p26_the_number_of_ranks_is_not_seen_in_what_all_experts_hold_together(w):
    alone, plan = plan_of_maps([torch.cat(w.maps)]), plan_of_maps(w.maps)
    assert torch.equal(torch.cat([plan.row_tokens(rank) for rank in range(w.ranks)]), alone.row_tokens(0))
    assert [cell[2] for rank in range(w.ranks) for cell in rows_of(plan, rank)] == [
        cell[2] for cell in rows_of(alone, 0)
    ]


def test_p29_rows_are_numbered_beyond_32_bits():
    plan = plan_of_indices([torch.tensor([[0, 3], [3, 1]]), torch.tensor([[2, 3]])], 4, Layout(segment=2**32))
    assert plan.row_R.tolist() == [0, 2**32, 2**32 + 1, 2**32, 0, 2**32 + 2]
    assert plan.num_rows == (2**33, 2**33)


@modest
@given(worlds())
def test_p30_slabs_are_filled_from_the_front_source_after_source(w):
    slab = max(sum(w.tokens), 1)
    plan = plan_of_indices(w.indices, w.experts, Layout(segment=slab))
    for rank, experts in enumerate(oracle.low_latency(oracle.nested(w.indices), w.experts)):
        copies = [[copy for source in sources for copy in source] for sources in experts]
        right = [
            cell
            for e, slab_copies in enumerate(copies)
            for cell in [
                *[(s, t, rank * len(copies) + e) for s, t, _ in slab_copies],
                *[None] * (slab - len(slab_copies)),
            ]
        ]
        assert rows_of(plan, rank) == right
        assert plan.kept_WL[rank].tolist() == [len(own) for own in copies]


@modest
@given(worlds())
def test_drop_and_pad_fills_each_chunk_with_unrouted_tokens_and_then_with_nothing(w):
    plan = plan_of_maps(w.maps, Layout(chunk=2))
    for rank, segments in enumerate(oracle.alltoall(oracle.nested(w.maps), w.experts, 1, 2)):
        assert rows_of(plan, rank) == cells(segments)
    assert plan.length_WL.tolist() == [[2 * w.ranks] * plan.local_experts] * w.ranks


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
