"""The router's reference beyond values: rows of NaN, roundings, and results worked out by hand.

`evidence.formulations.router` has the same functions token by token, for the cases that
tests/evidence draws.
"""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

import moe_ref
from tests.router.reference_helpers import (
    NONE,
    SCORES,
    random,
)

often = settings(max_examples=150, deadline=None, database=None, derandomize=True)


# ---- the choice


def test_a_row_of_nan_or_infinity_has_different_experts_and_others_do_not_notice():
    x = random(5, 8)
    strange = x.clone()
    strange[1], strange[3, 2], strange[4] = torch.nan, torch.inf, NONE
    for function in SCORES:
        for groups in ({}, {"num_groups": 4, "group_topk": 2}):
            out, plain = (moe_ref.topk_routing(y, topk=3, score_function=function, **groups) for y in (strange, x))
            assert out.routing_map.sum(1).tolist() == [3] * 5
            assert all(torch.equal(a[[0, 2]], b[[0, 2]]) for a, b in zip(out, plain, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("function", SCORES)
def test_weights_are_computed_wide_and_rounded_once(dtype, function):
    x = random(40, 12, dtype=dtype)
    low, wide = (moe_ref.topk_indices(y, topk=4, score_function=function, scaling_factor=2.5) for y in (x, x.float()))
    assert low.probs.dtype == dtype
    assert torch.equal(low.indices, wide.indices) and torch.equal(low.probs, wide.probs.to(dtype))


def test_the_bias_chooses_without_a_gradient_and_without_a_part_in_the_weights():
    x, bias = random(6, 5).requires_grad_(), random(5, seed=1).requires_grad_()
    out = moe_ref.topk_indices(x, topk=2, score_function="sigmoid", expert_bias=bias)
    dx, dbias = torch.autograd.grad(out.probs.sum() + out.probs.pow(2).sum(), [x, bias], allow_unused=True)
    again = moe_ref.topk_indices(x, topk=2, score_function="sigmoid", precomputed_indices=out.indices)
    assert dbias is None and dx.any()
    assert torch.equal(out.probs, again.probs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("x", [0.0, 25.0, 45.0, -30.0])
def test_the_root_of_softplus_is_accurate_on_both_sides(x, dtype):
    out = moe_ref.topk_indices(torch.tensor([[x]], dtype=dtype), topk=1, score_function="sqrtsoftplus").probs
    assert_close(
        out,
        torch.tensor([[math.sqrt(x + math.log1p(math.exp(-x)) if x > 0 else math.log1p(math.exp(x)))]], dtype=dtype),
    )


@pytest.mark.parametrize("logits", [(-104.0, -105.0, -106.0, -103.99), (-200.0, -300.0, -90.0, -104.0)])
def test_roots_of_softplus_are_kept_where_the_exponential_is_subnormal(logits):
    narrow, wide = (
        moe_ref.topk_indices(torch.tensor([logits], dtype=dtype), topk=2, score_function="sqrtsoftplus")
        for dtype in (torch.float32, torch.float64)
    )
    assert set(narrow.indices[0].tolist()) == set(wide.indices[0].tolist())
    assert_close(narrow.probs.sort().values, wide.probs.sort().values.float(), rtol=1e-4, atol=0)


# ---- capacity


@given(st.integers(0, 500), st.integers(1, 64), st.integers(1, 16), st.integers(1, 400).map(lambda n: n / 100))
@often
def test_the_capacity_is_the_share_by_exact_arithmetic(tokens, experts, topk, factor):
    exact = Fraction(tokens * topk, experts) * Fraction(round(factor * 100), 100)
    assert moe_ref.expert_capacity(tokens, num_experts=experts, topk=topk, capacity_factor=factor) == min(
        -(-exact.numerator // exact.denominator), tokens
    )


# ---- losses


def test_scores_of_the_losses_are_float32_at_least():
    for dtype, wide in (
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ):
        x = random(3, 4, dtype=dtype)
        assert moe_ref.aux_loss_scores(x, topk=2).scores.dtype == wide
        assert moe_ref.z_loss(x, coeff=1.0).dtype == wide
        assert (
            moe_ref.load_balancing_loss(x, torch.ones(4), total_num_tokens=3, topk=1, num_experts=4, coeff=1.0).dtype
            == wide
        )


def test_uniform_loads_and_scores_cost_the_coefficient():
    score, counts = torch.full((12, 4), 0.25, dtype=torch.float64), torch.full((4,), 6)
    assert_close(
        float(moe_ref.load_balancing_loss(score, counts, total_num_tokens=12, topk=2, num_experts=4, coeff=0.7)), 0.7
    )


@pytest.mark.parametrize("counts", [[1, 2, 3], [2, 2, 2], [0, 0, 7], [2**50, 2**50 + 1, 2**50 + 2], [1, 0, 0]])
def test_the_bias_moves_by_the_rate_towards_the_mean(counts):
    mean, bias = Fraction(sum(counts), 3), torch.tensor([0.5, -0.25, 0.0])
    out = moe_ref.update_expert_bias(bias, torch.tensor(counts), update_rate=0.25)
    assert out.tolist() == [b + 0.25 * ((mean > c) - (mean < c)) for b, c in zip(bias.tolist(), counts, strict=True)]


def test_an_attached_loss_has_its_scale_for_a_gradient_whatever_flows_through_the_tensor():
    x, loss = random(3, 2).requires_grad_(), torch.tensor(5.0, requires_grad=True)
    out = moe_ref.attach_loss(x, loss, scale=2.5)
    assert torch.equal(out, x)
    for cotangent in (torch.zeros(3, 2).double(), random(3, 2, seed=1)):
        dx, dloss = torch.autograd.grad(out, [x, loss], cotangent, retain_graph=True)
        assert torch.equal(dx, cotangent) and dloss == 2.5


def test_the_largest_logit_takes_no_rounding_of_the_rows_gradient():
    """Through the maximum that is taken off, the residue of the row's sum would reach it alone."""
    x = (torch.arange(384.0) * -1e-27)[None].requires_grad_()
    chosen = torch.tensor([[162, 350, 78, 135, 226, 187, 273, 294]])
    d_weights = torch.linspace(-1.9, 2.3, 8)[None]
    weights = moe_ref.topk_indices(x, topk=8, pre_softmax=True, precomputed_indices=chosen).probs
    (found,) = torch.autograd.grad(weights, x, d_weights)
    exact = -d_weights.double().sum() / 384**2  # of every expert that is not chosen
    assert float((found[0, 0] - exact).abs()) < 1e-4 * float(exact.abs())
