"""The router in `moe_fast` beyond the gate: NaN rows, inputs without gradient, refusals, errors."""

import pytest
import torch

import moe_fast
import moe_ref
from tests.common.fast import assert_same_error, interpreted, normal

pytestmark = interpreted
SCORES = [("softmax", False), ("softmax", True), ("sigmoid", False), ("sqrtsoftplus", False)]


@pytest.mark.parametrize(("score", "pre_softmax"), SCORES)
@pytest.mark.parametrize("groups", [{}, {"num_groups": 3, "group_topk": 2}], ids=["no groups", "groups"])
def test_a_row_of_nan_or_infinity_chooses_different_experts_and_no_other_row_changes(score, pre_softmax, groups):
    logits = normal(6, 12)
    settings = {"topk": 6, "score_function": score, "pre_softmax": pre_softmax, **groups}
    clean = moe_fast.topk_indices(logits, **settings)
    logits[0], logits[1, 2:9], logits[3, :8] = torch.nan, -torch.tensor(torch.nan), torch.inf
    logits[2] = torch.full((12,), -1, dtype=torch.int32).view(torch.float32)  # NaN of all bits
    got = moe_fast.topk_indices(logits, **settings)
    assert all(len(set(row)) == 6 and set(row) <= set(range(12)) for row in got.indices.tolist())
    assert torch.equal(got.indices[4:], clean.indices[4:]) and torch.equal(got.probs[4:], clean.probs[4:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_routed_tokens_are_kept_before_unrouted_ones_whatever_their_probs(dtype):
    probs = torch.tensor([[0.0], [torch.nan], [-torch.inf], [-2.0]], dtype=dtype)
    routed = torch.tensor([[0], [1], [1], [1]])
    routing_map = moe_fast.drop_tokens(probs, routed, capacity=3, pad_to_capacity=True).routing_map
    assert routing_map.T.tolist() == [[False, True, True, True]]


@pytest.mark.parametrize("module", [moe_ref, moe_fast], ids=lambda module: module.__name__)
@pytest.mark.parametrize("width", [31, 33, 40, 65])
def test_an_infinity_in_one_row_of_the_gate_leaves_the_others(module, width):
    x, weight = normal(6, width).bfloat16(), normal(5, width).bfloat16()
    x[2, 0], x[4, 0] = torch.inf, torch.nan
    finite_rows = [0, 1, 3, 5]
    assert torch.isfinite(module.gate(x, weight)[finite_rows]).all()


@pytest.mark.parametrize("module", [moe_ref, moe_fast], ids=lambda module: module.__name__)
@pytest.mark.parametrize(("num_tokens", "num_experts"), [(12, 31), (17, 5), (100, 47)])
def test_sinkhorn_gives_equal_columns_to_the_lowest_experts(module, num_experts, num_tokens):
    logits = normal(num_tokens, 1).expand(num_tokens, num_experts).contiguous()
    chosen = module.sinkhorn_routing(logits, topk=2).routing_map
    assert chosen[:, :2].all() and not chosen[:, 2:].any()


def test_what_needs_no_gradient_at_the_gate_gets_none():
    x, weight = normal(5, 16).requires_grad_(), normal(8, 16)
    moe_fast.gate(x, weight, bias=normal(8)).sum().backward()
    assert x.grad is not None and weight.grad is None


# Refusals


ILLEGAL = [
    ("expert_capacity", (-1,), {"num_experts": 4, "topk": 1, "capacity_factor": 1.0}),
    ("expert_capacity", (1,), {"num_experts": 0, "topk": 1, "capacity_factor": 1.0}),
    ("expert_capacity", (1,), {"num_experts": 4, "topk": 0, "capacity_factor": 1.0}),
    ("expert_capacity", (1,), {"num_experts": 4, "topk": 1, "capacity_factor": 0}),
]


@pytest.mark.parametrize(("function", "arguments", "settings"), ILLEGAL)
def test_an_illegal_call_raises_what_the_reference_raises(function, arguments, settings):
    assert_same_error(function, *arguments, **settings)


def test_what_is_not_fused_is_not_supported_and_raises():
    for logits, settings, word in [
        (torch.ones(1, 2049), {"topk": 1}, "2048"),
        (torch.ones(1, 64), {"topk": 33}, "32"),
        (torch.ones(1, 4).to(torch.float8_e5m2), {"topk": 1}, "float8"),
        (
            torch.ones(1, 4),
            {"topk": 1, "score_function": "sigmoid", "expert_bias": torch.ones(4).to(torch.float8_e5m2)},
            "expert_bias",
        ),
    ]:
        assert word in moe_fast.supports("topk_indices", logits_TE=logits.to("meta"), **settings)
        for function in (moe_fast.topk_indices, moe_fast.topk_routing):
            with pytest.raises(ValueError, match=word):
                function(logits, **settings)
    assert moe_fast.supports("topk_routing", torch.ones(1, 2048), topk=32) is None
    assert (
        moe_fast.supports("load_balancing_loss", torch.ones(1, 4096), torch.ones(4096), topk=40, num_experts=4096)
        is None
    )
    for function, options in ((moe_fast.aux_loss_scores, {"topk": 1}), (moe_fast.z_loss, {"coeff": 1.0})):
        with pytest.raises(ValueError, match="2048"):
            function(torch.ones(1, 2049), **options)
    assert "float8" in moe_fast.supports("load_balancing_loss", torch.ones(1, 4).to(torch.float8_e5m2))
