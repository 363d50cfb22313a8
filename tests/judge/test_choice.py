"""The judge of choices accepts every set that is best under some rounding of the keys, no other."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import moe_ref
from conformance.catalogue import CONTRACTS
from conformance.engine.child.evaluate import evaluate
from conformance.families.router.cases import LogitsCase
from conformance.interface import Implementation
from conformance.judge import Chosen, Exact, Given, controls, judge
from conformance.judge import choice as selection
from conformance.judge.controls import BlindJudge

NONE = -torch.inf
DELTA = 2.0**-10


def as_row(experts: int, chosen) -> Tensor:
    return torch.zeros(1, experts, dtype=torch.bool).index_fill(1, torch.tensor(list(chosen), dtype=torch.int64), True)


def choice(keys, count: int, error: float = 0.0, **settings) -> Chosen:
    """One row of keys; the reference breaks ties by the lower index."""
    row = torch.tensor([keys], dtype=torch.float64)
    best = min(best_in_groups(keys, count, settings.get("groups", 1), settings.get("group_topk", 1)))
    inputs = settings.pop("inputs", (row,))
    return Chosen(
        as_row(len(keys), best),
        row,
        torch.full_like(row, error).where(row.isfinite(), 0.0),
        torch.tensor([count]),
        inputs,
        **settings,
    )


def taken(expected: Chosen) -> set[tuple[int, ...]]:
    """All column sets of the expected size that the judge accepts."""
    experts = expected.keys.shape[1]
    subsets = itertools.combinations(range(experts), int(expected.counts[0]))
    return {subset for subset in subsets if judge("routing_map", expected, as_row(experts, subset)) is None}


def best_sets(keys, count: int, allowed=None) -> set[tuple[int, ...]]:
    """All sets of `count` largest keys, under any tie rule."""
    columns = range(len(keys)) if allowed is None else allowed
    return {
        subset
        for subset in itertools.combinations(columns, count)
        if min(keys[e] for e in subset) >= max((keys[e] for e in columns if e not in subset), default=NONE)
    }


def best_in_groups(keys, count: int, groups: int, group_topk: int) -> set[tuple[int, ...]]:
    """The same in the `group_topk` groups with the largest sums of their best keys."""
    size = len(keys) // groups
    members = [list(range(g * size, (g + 1) * size)) for g in range(groups)]
    score = [sum(sorted((keys[e] for e in member), reverse=True)[: count // group_topk]) for member in members]
    return set().union(
        *(best_sets(keys, count, [e for g in held for e in members[g]]) for held in best_sets(score, group_topk))
    )


def roundings(keys, error: float):
    """The keys, each rounded up, down or not at all."""
    return (
        tuple(k + s * error if k != NONE else k for k, s in zip(keys, signs, strict=True))
        for signs in itertools.product((-1, 0, 1), repeat=len(keys))
    )


ROWS = [
    (3, 1, 2, 0),
    (1, 1, 2, 0),
    (1, 1, 1, 1),
    (2, 2, 1, 1),
    (5, 5, 5, 0),
    (0, 3, NONE, 1),
    (NONE, NONE, NONE, 2),
    (-1, -2, -3, -4),
]
NEAR = [
    (0, DELTA, 2 * DELTA, 3 * DELTA),
    (1, 1 + DELTA / 2, 1 - DELTA, 0),
    (1, 1 + 2 * DELTA, 1 + 4.5 * DELTA, 2),
    (NONE, 1, 1 + DELTA, NONE),
]


@pytest.mark.parametrize("error", [0.0, DELTA])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("keys", [*NEAR, *ROWS])
def test_every_set_that_some_rounding_of_the_keys_makes_best_is_taken_and_no_other(keys, count, error):
    expected = set().union(*(best_sets(rounded, count) for rounded in roundings(keys, error)))
    assert taken(choice(keys, count, error)) == expected


GROUPED = [
    (3, 1, 2, 0, 5, 4),
    (1, 1, 1, 1, 1, 1),
    (9, 0, 5, 4, 6, 1),
    (4, 0, 2, 2, 3, 1),  # three groups of equal sums
    (2, 2, 2, 2, 0, 4),
    (0, NONE, 1, NONE, NONE, NONE),
    (NONE, NONE, NONE, NONE, NONE, 3),
]
LIMITS = [
    (groups, group_topk, count)
    for groups in (2, 3)
    for group_topk in range(1, groups + 1)
    for count in range(group_topk, group_topk * 6 // groups + 1)
]


@pytest.mark.parametrize(("groups", "group_topk", "count"), LIMITS)
@pytest.mark.parametrize("keys", GROUPED)
def test_of_exact_keys_in_groups_the_best_sets_are_taken_and_no_others(keys, groups, group_topk, count):
    assert taken(choice(keys, count, groups=groups, group_topk=group_topk)) == best_in_groups(
        keys, count, groups, group_topk
    )


@pytest.mark.parametrize(("groups", "group_topk", "count"), LIMITS)
@pytest.mark.parametrize("keys", [(1, 0, 1 + DELTA, 0, 1 + 2 * DELTA, 0), (1, DELTA, 1, 0, 0, 1), GROUPED[3]])
def test_of_near_keys_in_groups_every_set_that_some_rounding_makes_best_is_taken(keys, groups, group_topk, count):
    def best_within(error: float) -> set[tuple[int, ...]]:
        return set().union(*(best_in_groups(rounded, count, groups, group_topk) for rounded in roundings(keys, error)))

    accepted, honest = taken(choice(keys, count, DELTA, groups=groups, group_topk=group_topk)), best_within(DELTA)
    assert honest <= accepted
    assert accepted == honest or accepted <= best_within(4 * DELTA)


def test_more_near_equal_groups_than_are_tried_are_taken_for_admissible(monkeypatch):
    expected = choice((2, 2, 3, 1, 3, 1, 4, 0), 4, groups=4, group_topk=2)
    of_three_groups = (0, 1, 2, 4)
    assert of_three_groups not in taken(expected)
    tricky = choice((2, 2, 1.5, 2.5, 1.5, 2.5, 2, 2), 2, groups=4, group_topk=2)
    admissible = taken(tricky)
    monkeypatch.setattr(selection, "GROUP_SETS", 0)
    assert admissible <= taken(tricky)


# ---- equal keys


def test_any_of_equal_keys_is_right_unless_the_lowest_is_declared():
    assert taken(choice((1, 2, 1, 1), 2)) == {(0, 1), (1, 2), (1, 3)}
    assert taken(choice((1, 2, 1, 1), 2, lowest=True)) == {(0, 1)}


def test_the_lowest_of_keys_that_are_only_near_need_not_be_taken():
    assert taken(choice((1, 2, 1 + DELTA, 0), 2, DELTA, lowest=True)) == {(0, 1), (1, 2)}


def test_keys_of_different_inputs_are_not_equal_by_declaration():
    """Two experts with equal keys, rounded by the oracle, but different logits or biases."""
    row, biases = torch.tensor([[1.0, 2, 1, 1]]).double(), torch.tensor([[0.0, 0, 1, 0]]).double()
    assert taken(choice((1, 2, 1, 1), 2, DELTA, lowest=True, inputs=(row, biases))) == {
        (0, 1),
        (1, 2),
    }  # 2 has another bias, 3 the same as 0


@pytest.mark.parametrize(("groups", "group_topk", "count"), LIMITS)
@pytest.mark.parametrize("keys", GROUPED)
def test_in_groups_no_expert_is_left_out_for_a_later_one_of_the_same_key(keys, groups, group_topk, count):
    """Nor for one at its place in a later group of the same keys."""
    size = len(keys) // groups

    def after(a: int, b: int) -> bool:
        first, second = (keys[e // size * size : (e // size + 1) * size] for e in (a, b))
        return a < b and keys[a] == keys[b] and (a // size == b // size or (first == second and a % size == b % size))

    jumps = {
        subset
        for subset in best_in_groups(keys, count, groups, group_topk)
        if any(after(a, b) and a not in subset for b in subset for a in range(len(keys)))
    }
    expected = choice(keys, count, groups=groups, group_topk=group_topk, lowest=True)
    assert taken(expected) == best_in_groups(keys, count, groups, group_topk) - jumps


# ---- forms


INDEXED = replace(choice((3, 1, 2, 0), 2), value=torch.tensor([[0, 2]]), indices=True)


@pytest.mark.parametrize("observed", [[0, 2], [2, 0]])
def test_indices_may_come_in_any_order_and_width(observed):
    for dtype in (torch.int64, torch.int32, torch.int16, torch.uint8):
        assert judge("indices", INDEXED, torch.tensor([observed], dtype=dtype)) is None


@pytest.mark.parametrize("observed", [[0, 0], [2, 2], [0, 4], [0, -1], [-1, -1], [0, 1], [1, 3], [2**31, 0]])
def test_indices_that_repeat_lie_outside_or_are_not_the_best_are_wrong(observed):
    finding = judge("indices", INDEXED, torch.tensor([observed]))
    assert (finding.check, finding.index) == ("choice", (0,))


@pytest.mark.parametrize("observed", [[0, 0], [0, 4], [0, -1]])
def test_even_an_unspecified_row_has_different_experts(observed):
    unspecified = replace(INDEXED, unspecified=torch.tensor([True]))
    assert judge("indices", unspecified, torch.tensor([[1, 3]])) is None
    assert judge("indices", unspecified, torch.tensor([observed])).check == "choice"


def test_a_row_that_is_unspecified_frees_no_other():
    keys = torch.tensor([[3.0, 1, 2], [3.0, 1, 2]]).double()
    value = torch.tensor([[True, False, False]] * 2)
    expected = Chosen(
        value, keys, torch.zeros_like(keys), torch.tensor([1, 1]), (keys,), unspecified=torch.tensor([True, False])
    )
    assert judge("routing_map", expected, torch.tensor([[False, True, False], [True, False, False]])) is None
    assert judge("routing_map", expected, torch.tensor([[True, False, False], [False, True, False]])).index == (1,)


def test_too_few_or_too_many_are_wrong():
    for size in (0, 1, 3, 4):
        for subset in itertools.combinations(range(4), size):
            assert judge("routing_map", choice((3, 1, 2, 0), 2, 5.0), as_row(4, subset)).check == "choice"


def test_floats_and_other_shapes_are_no_choice():
    assert judge("routing_map", choice((3, 1), 1), torch.tensor([[1.0, 0.0]])).check == "dtype"
    assert judge("routing_map", choice((3, 1), 1), torch.tensor([[1, 0, 0]])).check == "shape"
    assert judge("indices", INDEXED, torch.tensor([[0, 2, 1]])).check == "shape"


def test_columns_may_choose_rows():
    keys = torch.tensor([[3.0, 1, 2], [1, 1, 1]]).double()  # one row per expert
    value = torch.tensor([[1, 1], [0, 0], [0, 0]])  # one row per token
    expected = Chosen(value.bool(), keys, torch.zeros_like(keys), torch.tensor([1, 1]), (keys,), dim=0)
    assert judge("routing_map", expected, torch.tensor([[1, 0], [0, 0], [0, 1]])) is None
    finding = judge("routing_map", expected, torch.tensor([[0, 1], [1, 0], [0, 0]]))
    assert finding.index == (0,)
    assert "column 0 chooses [1]; the reference chooses [0]" in finding.message


def test_the_message_says_what_was_chosen_and_what_is_right():
    assert (
        "row 0 chooses [1, 2]; the reference chooses [0, 2] (keys 0: 3, 1: 1, 2: 2; 1 of 1 wrong)"
        in judge("indices", INDEXED, torch.tensor([[1, 2]])).message
    )


# ---- controls


@pytest.mark.parametrize("expected", [INDEXED, choice((3, 1, 2, 0), 2)], ids=["indices", "map"])
def test_corrupted_choices_are_shown_and_rejected(expected):
    assert controls.check("chosen", expected) > 0


def test_a_judge_that_takes_any_choice_is_noticed(monkeypatch):
    monkeypatch.setattr(controls, "rejection", lambda *_: None)
    with pytest.raises(BlindJudge):
        controls.check("chosen", choice((3, 1, 2, 0), 2))


# ---- given


def test_what_depends_on_another_output_is_judged_by_the_one_observed():
    dependent = Given(torch.tensor([1.0]), lambda out: Exact(out["indices"].float(), "values"))
    assert judge("probs", dependent.resolve({"indices": torch.tensor([5])}), torch.tensor([5.0])) is None
    assert judge("probs", dependent.resolve({"indices": torch.tensor([5])}), torch.tensor([1.0])).check == "exact"


def test_an_expectation_that_depends_on_nothing_resolves_to_itself():
    assert INDEXED.resolve({}) is INDEXED


TIED = LogitsCase(
    function="topk_routing", tokens=1, experts=3, topk=2, logits=(8, 16, 8), score="sigmoid", grads="logits"
)


def weights_of(chosen: list[int]):
    expected = CONTRACTS["topk_routing"].expected(TIED, CONTRACTS["topk_routing"].problem(TIED), {})
    return {name: x.resolve({"routing_map": as_row(3, chosen)}) for name, x in expected.items()}


def test_weights_and_gradients_are_those_of_the_candidates_own_choice():
    first, last = weights_of([0, 1]), weights_of([1, 2])
    assert torch.equal(first["probs"].value.flip(1), last["probs"].value)
    assert first["probs"].value[0, 2] == last["probs"].value[0, 0] == 0
    assert (first["d_logits"].value != 0).tolist() == [[True, True, False]]
    assert (last["d_logits"].value != 0).tolist() == [[False, True, True]]


def chooses(index: list[int], weigh: list[int]):
    """A router that always chooses `index` and gives the weights of `weigh`."""

    def topk_routing(logits, *, topk, score_function):
        routed = moe_ref.topk_routing(
            logits, topk=topk, score_function=score_function, precomputed_indices=torch.tensor([weigh])
        )
        return routed._replace(routing_map=as_row(3, index))

    return Implementation(type("Fixed", (), {"topk_routing": staticmethod(topk_routing)}), "fixed")


def test_another_choice_among_equals_passes_with_its_own_weights_only():
    assert evaluate(TIED, chooses([1, 2], [1, 2])).status == "PASS"
    assert evaluate(TIED, chooses([1, 2], [0, 1])).finding["output"] == "probs"
    assert evaluate(TIED, chooses([0, 2], [0, 2])).finding["output"] == "routing_map"
