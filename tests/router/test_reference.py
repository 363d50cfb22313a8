"""The router's reference against loops over plain numbers that share no code with it."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

import moe_ref
from tests.router.reference_helpers import (
    NONE,
    SCORES,
    balance_by_loop,
    best,
    map_by_loop,
    random,
    scores_by_loop,
    z_by_loop,
)

often = settings(max_examples=150, deadline=None, database=None, derandomize=True)


@st.composite
def rows(draw, least: int = 1) -> list[list[float]]:
    """Rows of quarters, many of them equal, some of them -∞."""
    experts = draw(st.integers(least, 8))
    cell = st.one_of(st.integers(-20, 20).map(lambda x: x / 4), st.sampled_from([0.0, 0.25]), st.just(NONE))
    return draw(st.lists(st.lists(cell, min_size=experts, max_size=experts), max_size=4))


def tensor(table: list[list[float]], experts: int = 0) -> Tensor:
    return torch.tensor(table, dtype=torch.float64).reshape(len(table), len(table[0]) if table else experts or 1)


# ---- the choice


def chosen_by_loop(
    x: list[float], topk: int, function: str, pre: bool, groups: int, kept: int, bias: list[float] | None
) -> list[int]:
    keys = x if function == "softmax" and not pre else SCORES[function](x)
    keys = [key + b for key, b in zip(keys, bias, strict=True)] if bias else keys
    if not groups:
        return best(keys, topk)
    size = len(x) // groups
    score = [sum(sorted(keys[g * size : (g + 1) * size], reverse=True)[: topk // kept]) for g in range(groups)]
    held = best(score, kept)
    return [e for e in best(keys, len(x)) if e // size in held][:topk]


def weights_by_loop(x: list[float], chosen: list[int], function: str, pre: bool, scale: float) -> list[float] | None:
    """None where they are not specified."""
    held = [x[e] for e in chosen]
    if function == "softmax":
        if max(x if pre else held) == NONE:
            return None
        return [scale * (SCORES[function](x)[e] if pre else SCORES[function](held)[i]) for i, e in enumerate(chosen)]
    score = SCORES[function](held)
    return [scale * (s / (sum(score) + 1e-20) if len(chosen) > 1 else s) for s in score]


@st.composite
def selections(draw):
    table = draw(rows().filter(bool))
    experts, function = len(table[0]), draw(st.sampled_from(sorted(SCORES)))
    how = {"topk": draw(st.integers(1, experts)), "score_function": function, "pre_softmax": draw(st.booleans())}
    limits = [
        (g, k)
        for g in range(1, experts + 1)
        if experts % g == 0
        for k in range(1, min(g, how["topk"]) + 1)
        if k * (experts // g) >= how["topk"]
    ]
    groups = draw(st.sampled_from([(0, 0), *limits]))
    bias = (
        draw(st.lists(st.integers(-8, 8).map(lambda b: b / 4), min_size=experts, max_size=experts))
        if function != "softmax" and draw(st.booleans())
        else None
    )
    return table, how, groups, bias, draw(st.sampled_from([None, 2.5, 0.125]))


@often
@given(selections())
def test_the_choice_and_its_weights_are_those_of_a_loop(selection):
    table, how, (groups, kept), bias, scale = selection
    assume(how["score_function"] != "softmax" or not how["pre_softmax"] or all(max(x) > NONE for x in table))
    more = {"num_groups": groups, "group_topk": kept} if groups else {}
    given_bias = None if bias is None else torch.tensor(bias, dtype=torch.float64)
    out = moe_ref.topk_indices(tensor(table), **how, **more, scaling_factor=scale, expert_bias=given_bias)
    dense = moe_ref.topk_routing(tensor(table), **how, **more, scaling_factor=scale, expert_bias=given_bias)
    for t, x in enumerate(table):
        chosen = chosen_by_loop(x, how["topk"], how["score_function"], how["pre_softmax"], groups, kept, bias)
        weights = weights_by_loop(x, chosen, how["score_function"], how["pre_softmax"], scale or 1.0)
        assert out.indices[t].tolist() == chosen
        assert dense.routing_map[t].nonzero().flatten().tolist() == sorted(chosen)
        if weights is not None:
            right = torch.tensor(weights, dtype=torch.float64)
            assert_close(out.probs[t], right)
            assert_close(dense.probs[t], torch.zeros_like(dense.probs[t]).index_put((torch.tensor(chosen),), right))


@often
@given(rows(2).filter(bool), st.data())
def test_given_indices_are_taken_whatever_the_logits_say(table, data):
    index = [data.draw(st.permutations(range(len(x)))) for x in table]
    topk = data.draw(st.integers(1, len(table[0])))
    function = data.draw(st.sampled_from(["sigmoid", "sqrtsoftplus"]))
    precomputed = torch.tensor(index)[:, :topk]
    out = moe_ref.topk_indices(tensor(table), topk=topk, score_function=function, precomputed_indices=precomputed)
    assert torch.equal(out.indices, precomputed)
    for x, chosen, weights in zip(table, precomputed.tolist(), out.probs, strict=True):
        assert_close(weights, torch.tensor(weights_by_loop(x, chosen, function, False, 1.0), dtype=torch.float64))


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


# ---- capacity


@given(st.integers(0, 500), st.integers(1, 64), st.integers(1, 16), st.integers(1, 400).map(lambda n: n / 100))
@often
def test_the_capacity_is_the_share_by_exact_arithmetic(tokens, experts, topk, factor):
    exact = Fraction(tokens * topk, experts) * Fraction(round(factor * 100), 100)
    assert moe_ref.expert_capacity(tokens, num_experts=experts, topk=topk, capacity_factor=factor) == min(
        -(-exact.numerator // exact.denominator), tokens
    )


@given(
    st.integers(0, 6),
    st.integers(1, 4),
    st.integers(0, 8),
    st.sampled_from(["probs", "position"]),
    st.booleans(),
    st.data(),
)
@often
def test_who_is_dropped_and_who_fills_up_is_what_a_loop_says(tokens, experts, capacity, policy, pad, data):
    cells = st.lists(st.sampled_from([0.0, 0.25, 0.5, -0.5]), min_size=tokens * experts, max_size=tokens * experts)
    routed = data.draw(st.lists(st.booleans(), min_size=tokens * experts, max_size=tokens * experts))
    probs = torch.tensor(data.draw(cells), dtype=torch.float32).reshape(tokens, experts)
    routing_map = torch.tensor(routed, dtype=torch.bool).reshape(tokens, experts)
    out = moe_ref.drop_tokens(
        torch.where(routing_map, probs, torch.nan),
        routing_map,
        capacity=capacity,
        drop_policy=policy,
        pad_to_capacity=pad,
    )
    for e in range(experts):
        inside = [t for t in range(tokens) if routing_map[t, e]]
        order = sorted(inside, key=lambda t: (-float(probs[t, e]), t)) if policy == "probs" else inside
        stays = order[:capacity]
        fillers = [t for t in range(tokens) if t not in inside][: capacity - len(stays)] if pad else []
        assert out.routing_map[:, e].nonzero().flatten().tolist() == sorted(stays + fillers)
        assert out.probs[:, e].tolist() == [float(probs[t, e]) if t in stays else 0.0 for t in range(tokens)]


# ---- losses


@pytest.mark.parametrize("function", SCORES)
@pytest.mark.parametrize("topk", [1, 2, 5])
def test_the_scores_of_the_losses_are_those_of_a_loop(function, topk):
    x, padding = random(7, 5), torch.tensor([0, 1, 0, 0, 0, 1, 1]).bool()
    x[1] = torch.nan
    out = moe_ref.aux_loss_scores(x, topk=topk, score_function=function, padding_mask=padding)
    held = x[~padding]
    assert_close(out.scores[~padding], tensor(scores_by_loop(held, function)))
    assert out.routing_map[~padding].int().tolist() == map_by_loop(held, topk, function)
    assert not out.scores[padding].any() and not out.routing_map[padding].any()


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


@pytest.mark.parametrize("total", [0, 7, torch.tensor(7), torch.tensor([7.0]), torch.tensor(0)])
def test_the_balancing_loss_is_that_of_a_loop(total):
    score, counts = random(7, 6), torch.tensor([3, 0, 2, 5, 1, 1])
    loss = moe_ref.load_balancing_loss(score, counts, total_num_tokens=total, topk=2, num_experts=6, coeff=0.3)
    assert_close(float(loss), balance_by_loop(score.tolist(), counts.tolist(), float(total), 2, 0.3))


def test_uniform_loads_and_scores_cost_the_coefficient():
    score, counts = torch.full((12, 4), 0.25, dtype=torch.float64), torch.full((4,), 6)
    assert_close(
        float(moe_ref.load_balancing_loss(score, counts, total_num_tokens=12, topk=2, num_experts=4, coeff=0.7)), 0.7
    )


def test_the_z_loss_is_that_of_a_loop():
    x, padding = random(7, 5), torch.tensor([0, 1, 0, 0, 0, 1, 1]).bool()
    assert_close(float(moe_ref.z_loss(x, coeff=0.3)), z_by_loop(x, 0.3))
    assert_close(float(moe_ref.z_loss(x, coeff=0.3, padding_mask=padding)), z_by_loop(x[~padding], 0.3))
    assert float(moe_ref.z_loss(x, coeff=0.3, padding_mask=torch.ones(7) > 0)) == 0


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


# ---- plans


def test_the_largest_logit_takes_no_rounding_of_the_rows_gradient():
    """Through the maximum that is taken off, the residue of the row's sum would reach it alone."""
    x = (torch.arange(384.0) * -1e-27)[None].requires_grad_()
    chosen = torch.tensor([[162, 350, 78, 135, 226, 187, 273, 294]])
    d_weights = torch.linspace(-1.9, 2.3, 8)[None]
    weights = moe_ref.topk_indices(x, topk=8, pre_softmax=True, precomputed_indices=chosen).probs
    (found,) = torch.autograd.grad(weights, x, d_weights)
    exact = -d_weights.double().sum() / 384**2  # of every expert that is not chosen
    assert float((found[0, 0] - exact).abs()) < 1e-4 * float(exact.abs())
