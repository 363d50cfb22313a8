"""The router through every release of Transformer Engine: right but for what no host can see."""

import pytest
import torch

import moe_ref
from conformance.peers.te import Adapter
from tests.te.judging import NOTHING_WRONG, Checked, judged
from tests.te.standin import standin
from tests.te.standin.router import best

FUNCTIONS = ("topk_routing", "topk_indices", "aux_loss_scores", "load_balancing_loss")
LOGITS = torch.tensor([[0.5, 1.0, 2.0, -1.0], [4.0, 3.0, -2.0, 0.0]])


def is_known(case):
    """Keys that are not finite are chosen twice; a bias is added to the weights and removed."""
    return getattr(case, "spread", "") in ("minus_inf", "nan", "plus_inf") or bool(getattr(case, "bias", ""))


@pytest.mark.parametrize("bucket", ["2.6", "2.12", "2.20"])
def test_a_release_completed_by_the_reference_is_wrong_in_known_cases_alone(bucket):
    te = standin(bucket)
    outcomes = judged(Checked(te, Adapter(te, ours=moe_ref)), FUNCTIONS, most=10)
    assert not [f"{case.text} {x}" for case, x in outcomes if x.status not in NOTHING_WRONG and not is_known(case)]
    assert {case.function for case, x in outcomes if x.status == "PASS"} == {*FUNCTIONS}
    assert sum(x.status == "PASS" for _, x in outcomes) > 60


def test_the_suite_finds_the_expert_that_is_chosen_twice_and_the_bias_that_destroys_weights():
    te = standin("2.20")
    wrong_outputs = {"spread": set(), "bias": set()}
    for case, outcome in judged(Checked(te, Adapter(te)), ["topk_routing"]):
        if outcome.status == "FAIL":
            wrong_outputs["bias" if case.bias else "spread"].add(outcome.finding["output"])
    assert wrong_outputs == {"spread": {"routing_map"}, "bias": {"probs"}}


@pytest.mark.parametrize(
    ("keys", "topk", "radix", "expected"),
    [
        ([1.0] * 8, 4, False, [0, 4, 2, 6]),
        ([1.0] * 8, 4, True, [0, 1, 2, 3]),
        ([-torch.inf] * 4 + [1.0] + [-torch.inf] * 3, 3, False, [4, 0, 0]),
        ([0.0, torch.nan, 1.0], 2, False, [2, 0]),
        ([0.0] * 40, 3, False, [0, 32, 16]),
    ],
)
def test_the_stand_in_chooses_in_the_order_of_a_warps_lanes(keys, topk, radix, expected):
    assert best(torch.tensor([keys]), topk, radix)[0].tolist() == expected


def test_experts_are_lists_where_a_release_writes_them():
    for bucket, path in {"2.12": "ours: Transformer Engine lacks fused_topk_indices", "2.15": TOPK}.items():
        adapter = Adapter(standin(bucket), ours=moe_ref)
        chosen, expected = adapter.topk_indices(LOGITS, topk=2), moe_ref.topk_indices(LOGITS, topk=2)
        assert adapter.path["topk_indices"] == path
        assert chosen.indices.tolist() == expected.indices.tolist() and torch.equal(chosen.probs, expected.probs)


def test_a_release_without_a_router_is_ours():
    adapter = Adapter(standin("2.1"), ours=moe_ref)
    routed = adapter.topk_routing(LOGITS, topk=2)
    assert adapter.path["topk_routing"] == "ours: Transformer Engine lacks fused_topk"
    assert torch.equal(routed.probs, moe_ref.topk_routing(LOGITS, topk=2).probs)
    assert "topk_routing" not in Adapter(standin("2.1")).offered


ONE_SIGMOID, ONE_SQUARE_ROOT = ({"topk": 1, "score_function": name} for name in ("sigmoid", "sqrtsoftplus"))
GROUPED, MASKED = (
    {"topk": 3, "num_groups": 2, "group_topk": 2},
    {"topk": 1, "padding_mask": torch.tensor([True, False])},
)
TOPK, SCORES = "fused_topk_with_score_function", "fused_compute_score_for_moe_aux_loss"
PATHS = [
    ("2.6", "topk_routing", {"topk": 2}, f"logits in float32, then {TOPK}"),
    ("2.20", "topk_routing", {"topk": 2}, TOPK),
    ("2.6", "topk_routing", ONE_SQUARE_ROOT, "ours: topk_routing by sqrtsoftplus"),
    ("2.20", "topk_routing", ONE_SQUARE_ROOT, TOPK),
    ("2.20", "topk_routing", GROUPED, "ours: topk_routing of topk 3 in 2 groups of 2 experts"),
    ("2.6", "aux_loss_scores", ONE_SIGMOID, "ours: scores of topk 1 are not normalised"),
    ("2.15", "aux_loss_scores", ONE_SIGMOID, SCORES),
    ("2.20", "aux_loss_scores", MASKED, "ours: it has no padding_mask"),
]


@pytest.mark.parametrize(("bucket", "function", "settings", "path"), PATHS)
def test_what_a_release_lacks_is_ours_and_the_path_says_so(bucket, function, settings, path):
    adapter = Adapter(standin(bucket), ours=moe_ref)
    logits = LOGITS.bfloat16()
    result = getattr(adapter, function)(logits, **settings)
    assert adapter.path[function] == path
    expected = getattr(moe_ref, function)(logits, **settings)
    assert all(x.dtype == y.dtype and torch.allclose(x, y) for x, y in zip(result, expected, strict=True))


def test_an_environment_variable_that_changes_the_kernels_is_in_the_path(monkeypatch):
    adapter = Adapter(standin("2.20"))
    logits = torch.zeros(1, 8)
    chosen = {}
    for threshold in ("", "4"):
        if threshold:
            monkeypatch.setenv("NVTE_RADIX_TOPK_THRESHOLD", threshold)
        routed = adapter.topk_routing(logits, topk=4)
        chosen[adapter.path["topk_routing"]] = routed.routing_map[0].nonzero().flatten().tolist()
    assert chosen == {
        "fused_topk_with_score_function": [0, 2, 4, 6],
        "fused_topk_with_score_function [NVTE_RADIX_TOPK_THRESHOLD=4]": [0, 1, 2, 3],
    }


@pytest.mark.parametrize("total", [0, 2**31, torch.tensor(4)])
def test_a_loss_of_tokens_that_are_no_positive_c_int_is_ours(total):
    adapter = Adapter(standin("2.20"), ours=moe_ref)
    settings = {"total_num_tokens": total, "topk": 1, "num_experts": 4, "coeff": 1.0}
    loss = adapter.load_balancing_loss(LOGITS.softmax(1), torch.tensor([1, 0, 2, 1]), **settings)
    assert adapter.path["load_balancing_loss"].startswith("ours: ")
    assert torch.equal(loss, moe_ref.load_balancing_loss(LOGITS.softmax(1), torch.tensor([1, 0, 2, 1]), **settings))
