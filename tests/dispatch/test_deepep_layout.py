"""The layout that a rank counts alone: every case of the suite, what slots that name nobody do, and
a defect that shows.
"""

import pytest
import torch

import moe_fast
import moe_ref
from conformance.core.case import CaseError
from conformance.core.space import Space
from conformance.engine.child.evaluate import evaluate
from conformance.engine.choose.draw import scope_of
from conformance.engine.choose.plan import Section, cases_of
from conformance.engine.choose.profiles import PROFILES
from conformance.engine.run.corpus import checked
from conformance.families.dispatch.deepep_layout import DeepEPLayout
from conformance.families.permutation.cases import IndicesCase, indices
from conformance.interface import Implementation
from conformance.mutants import planted

CASES = [
    case
    for kind in ("fixed", "drawn")
    for case in cases_of(Section(kind, "deepep_layout"), PROFILES["smoke"], Space(), 0)
]
THREE = IndicesCase(
    function="deepep_layout", tokens=3, topk=3, experts=6, ranks=3, slots=(0, 1, 5, -1, 2, 2, -1, -1, -1)
)


@pytest.mark.parametrize("namespace", [moe_ref, moe_fast], ids=lambda x: x.__name__)
def test_every_case_passes(namespace):
    bad = {
        case.text: outcome
        for case in CASES
        if (outcome := evaluate(case, Implementation(namespace))).status in ("FAIL", "ERROR")
    }
    assert bad == {}
    assert evaluate(THREE, Implementation(namespace)).status == "PASS"


@pytest.mark.parametrize("base", ["moe_ref", "moe_fast"])
def test_a_token_that_counts_once_for_each_expert_of_a_rank_is_found(base):
    outcome = evaluate(THREE, Implementation(getattr(planted.L18, base)))
    assert (outcome.status, outcome.finding["output"], outcome.finding["check"]) == (
        "FAIL",
        "num_tokens_per_rank",
        "exact",
    )
    apart = IndicesCase(
        function="deepep_layout", tokens=2, topk=2, experts=6, ranks=3, slots=(0, 2, 5, 5)
    )  # no token has two experts of a rank
    assert evaluate(apart, Implementation(getattr(planted.L18, base))).status == "PASS"


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64])
def test_slots_that_name_nobody_are_empty_whatever_they_hold(dtype):
    slots = torch.tensor([[0, -1, 5], [-1, -1, -1], [4, 4, 3]], dtype=dtype)
    expected = moe_ref.deepep_layout(slots, num_experts=6, ranks=2)
    got = moe_fast.deepep_layout(
        torch.where(slots < 0, torch.tensor([-7, 6, 100], dtype=dtype), slots), num_experts=6, ranks=2
    )
    assert all(torch.equal(x, y) and x.dtype == y.dtype for x, y in zip(got, expected, strict=True))


def test_a_dtype_may_be_too_narrow_for_the_number_of_experts():
    slots = torch.tensor([[5, -1], [127, 100]], dtype=torch.int8)
    expected = moe_ref.deepep_layout(slots.long(), num_experts=400, ranks=4)
    for namespace in (moe_ref, moe_fast):
        got = namespace.deepep_layout(slots, num_experts=400, ranks=4)
        assert all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))


@pytest.mark.parametrize("shape", [(0, 2), (3, 0), (0, 0)])
def test_without_tokens_or_slots_nobody_gets_anything(shape):
    for namespace in (moe_ref, moe_fast):
        got = namespace.deepep_layout(torch.zeros(shape, dtype=torch.int64), num_experts=4, ranks=2)
        assert [x.tolist() for x in got] == [[0, 0], [0, 0, 0, 0], [[False, False]] * shape[0]]


@pytest.mark.parametrize(("num_experts", "ranks"), [(0, 1), (5, 2)])
def test_experts_that_do_not_divide_are_refused(num_experts, ranks):
    for namespace in (moe_ref, moe_fast):
        with pytest.raises(ValueError, match="num_experts"):
            namespace.deepep_layout(torch.zeros((1, 1), dtype=torch.int64), num_experts=num_experts, ranks=ranks)


@pytest.mark.parametrize("namespace", [moe_ref, moe_fast])
@pytest.mark.parametrize("ranks", [0, -1, 1.0])
def test_a_number_of_ranks_that_is_none_is_refused(namespace, ranks):
    with pytest.raises(ValueError, match="ranks"):
        namespace.deepep_layout(torch.zeros((1, 1), dtype=torch.int64), num_experts=4, ranks=ranks)


def test_a_case_whose_ranks_do_not_divide_the_experts_cannot_be_written():
    with pytest.raises(CaseError, match="ranks is 4; it must divide experts"):
        checked(IndicesCase(function="deepep_layout", tokens=1, experts=6, ranks=4))


@pytest.mark.parametrize(
    "case",
    [
        THREE,
        IndicesCase(function="deepep_layout", tokens=9, topk=2, experts=12, ranks=4, empty=1, law="history", seed=4),
    ],
)
def test_simpler_cases_are_legal_and_end_at_the_smallest(case):
    texts, waiting = set(), [case]
    while waiting:
        smaller = next(iter(scope_of("deepep_layout", Space()).smaller(waiting.pop())), None)
        if smaller:
            assert smaller.text not in texts and indices(smaller).numel() >= 0
            DeepEPLayout().legal(smaller)
            texts.add(smaller.text)
            waiting.append(smaller)
    assert texts
