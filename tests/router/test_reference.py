"""The router's reference beyond values: rows of NaN, roundings, states, and sums over ranks.

`evidence.formulations.router` has the same functions token by token, for the cases that
tests/evidence draws. The golden cases of the suite have results that were worked out by hand.
"""

import math
from dataclasses import replace
from fractions import Fraction
from functools import partial

import pytest
import torch
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st
from torch.testing import assert_close

import moe_ref
from moe_ref.config import SCORE_FUNCTIONS, RankGroup, RouterConfig, RouterRanks
from moe_ref.dispatch.ranks import play
from tests.common.fast import normal

often = settings(max_examples=150, deadline=None, database=None, derandomize=True)
random = partial(normal, dtype=torch.float64)
EXPERTS, TOPK = 6, 2
BIASED = RouterConfig(
    num_experts=EXPERTS, topk=TOPK, score_function="sigmoid", expert_bias=True, bias_update_rate=0.25
)  # fmt: skip


# ---- the choice


def test_a_row_of_nan_or_infinity_has_different_experts_and_others_do_not_notice():
    x = random(5, 8)
    strange = x.clone()
    strange[1], strange[3, 2], strange[4] = torch.nan, torch.inf, -math.inf
    for function in SCORE_FUNCTIONS:
        for groups in ({}, {"num_groups": 4, "group_topk": 2}):
            out, finite = (moe_ref.topk_routing(y, topk=3, score_function=function, **groups) for y in (strange, x))
            assert out.routing_map.sum(1).tolist() == [3] * 5
            assert all(torch.equal(a[[0, 2]], b[[0, 2]]) for a, b in zip(out, finite, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("function", SCORE_FUNCTIONS)
def test_weights_are_computed_wide_and_rounded_once(dtype, function):
    x = random(40, 12, dtype=dtype)
    low, high = (moe_ref.topk_indices(y, topk=4, score_function=function, scaling_factor=2.5) for y in (x, x.float()))
    assert low.probs.dtype == dtype
    assert torch.equal(low.indices, high.indices) and torch.equal(low.probs, high.probs.to(dtype))


@pytest.mark.parametrize("logits", [(-104.0, -105.0, -106.0, -103.99), (-200.0, -300.0, -90.0, -104.0)])
def test_roots_of_softplus_are_kept_where_the_exponential_is_subnormal(logits):
    low, high = (
        moe_ref.topk_indices(torch.tensor([logits], dtype=dtype), topk=2, score_function="sqrtsoftplus")
        for dtype in (torch.float32, torch.float64)
    )
    assert set(low.indices[0].tolist()) == set(high.indices[0].tolist())
    assert_close(low.probs.sort().values, high.probs.sort().values.float(), rtol=1e-4, atol=0)


def test_the_largest_logit_takes_no_rounding_of_the_rows_gradient():
    """Through the maximum that is taken off, the residue of the row's sum would reach it alone."""
    x = (torch.arange(384.0) * -1e-27)[None].requires_grad_()
    chosen = torch.tensor([[162, 350, 78, 135, 226, 187, 273, 294]])
    d_weights = torch.linspace(-1.9, 2.3, 8)[None]
    weights = moe_ref.topk_indices(x, topk=8, pre_softmax=True, precomputed_indices=chosen).probs
    (d_x,) = torch.autograd.grad(weights, x, d_weights)
    exact = -d_weights.double().sum() / 384**2  # of every expert that is not chosen
    assert float((d_x[0, 0] - exact).abs()) < 1e-4 * float(exact.abs())


@drawn(st.integers(0, 500), st.integers(1, 64), st.integers(1, 16), st.integers(1, 400).map(lambda n: n / 100))
@often
def test_the_capacity_is_the_share_by_exact_arithmetic(tokens, experts, topk, factor):
    exact = Fraction(tokens * topk, experts) * Fraction(round(factor * 100), 100)
    assert moe_ref.expert_capacity(tokens, num_experts=experts, topk=topk, capacity_factor=factor) == min(
        -(-exact.numerator // exact.denominator), tokens
    )


@pytest.mark.parametrize(("dtype", "out"), [
    (torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64),
])  # fmt: skip
def test_scores_of_the_losses_are_float32_at_least(dtype, out):
    x, sizes = random(3, 4, dtype=dtype), {"total_num_tokens": 3, "topk": 1, "num_experts": 4}
    assert moe_ref.aux_loss_scores(x, topk=2).scores.dtype == out
    assert moe_ref.z_loss(x, coeff=1.0).dtype == out
    assert moe_ref.load_balancing_loss(x, torch.ones(4), coeff=1.0, **sizes).dtype == out


# ---- gate and jitter


@pytest.mark.parametrize(
    ("router_dtype", "out"), [(None, torch.bfloat16), ("fp32", torch.float32), ("fp64", torch.float64)]
)
def test_logits_have_the_router_dtype_and_gradients_that_of_their_inputs(router_dtype, out):
    x, weight, bias = torch.tensor([[256.0, 1]]).bfloat16(), torch.ones(2, 2), torch.zeros(2).half()
    inputs = [y.requires_grad_() for y in (x, weight, bias)]
    logits = moe_ref.gate(x, weight, bias=bias, router_dtype=router_dtype)
    assert logits.dtype == out
    assert logits.tolist() == [[256.0 if router_dtype is None else 257.0] * 2]
    gradients = torch.autograd.grad(logits, inputs, torch.tensor([[256.0, 1]]).to(out))
    assert [g.dtype for g in gradients] == [torch.bfloat16, torch.float32, torch.float16]
    assert gradients[0].tolist() == [[256.0, 256.0]]  # 257 has no bfloat16
    assert gradients[1].tolist() == [[65536.0, 256.0], [256.0, 1.0]]


def test_the_gate_saves_its_inputs_in_their_dtype():
    saved = []
    x, weight = (random(rows, 4, dtype=torch.bfloat16).requires_grad_() for rows in (3, 2))
    with torch.autograd.graph.saved_tensors_hooks(lambda y: saved.append(y) or y, lambda y: y):
        moe_ref.gate(x, weight, router_dtype="fp32")
    assert [(y.dtype, y.data_ptr()) for y in saved] == [(torch.bfloat16, y.data_ptr()) for y in (x, weight)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_jitter_stays_within_eps_keeps_the_dtype_and_differs_from_call_to_call(dtype):
    torch.manual_seed(0)
    x = torch.ones(200, 20, dtype=dtype)
    first, second = moe_ref.jitter(x, eps=0.25), moe_ref.jitter(x, eps=0.25)
    assert first.dtype == dtype and not torch.equal(first, second)
    assert 0.75 <= first.min() < 0.78 and 1.22 < first.max() <= 1.25
    assert torch.equal(moe_ref.jitter(x, eps=0), x)


# ---- the state of a route


def test_the_bias_is_updated_by_the_counts_without_padding():
    x, padding = random(8, EXPERTS), torch.arange(8) > 5
    state = moe_ref.new_state(BIASED)
    for _ in range(2):
        state = moe_ref.route(x, BIASED, state=state, padding_mask=padding).state
    choice = {"topk": TOPK, "score_function": "sigmoid"}
    counts = (2 * moe_ref.topk_routing(x[:6], **choice).routing_map.sum(0)).tolist()
    assert state.tokens_per_expert.tolist() == counts
    updated = moe_ref.finish_batch(state, BIASED)
    # 2 · 6 · 2 rows of 6 experts: 4 of each on average
    assert updated.expert_bias.tolist() == [0.25 * ((count < 4) - (count > 4)) for count in counts]
    assert not updated.tokens_per_expert.any()
    frozen = moe_ref.finish_batch(state, BIASED, frozen=True)
    assert not frozen.expert_bias.any() and not frozen.tokens_per_expert.any()
    routing_map = moe_ref.route(x, BIASED, state=updated).routing_map
    expected = moe_ref.topk_routing(x, **choice, expert_bias=updated.expert_bias).routing_map
    assert torch.equal(routing_map, expected)


def test_a_state_is_saved_and_restored_with_its_queue():
    config = replace(BIASED, global_aux_loss_coeff=0.5)
    state, target = moe_ref.new_state(config), torch.arange(TOPK).expand(4, TOPK)
    for _ in range(2):
        state = moe_ref.route(random(4, EXPERTS), config, state=state, replay="forward", replay_target=target).state
    tensors = moe_ref.state_tensors(state)
    restored = moe_ref.state_from({name: x.clone() for name, x in reversed(tensors.items())})
    assert all(map(torch.equal, moe_ref.state_tensors(restored).values(), tensors.values()))
    assert len(restored.replay_queue) == 2
    counters = ("tokens_per_expert", "global_tokens_per_expert", "global_steps")
    assert {tensors[name].dtype for name in counters} == {torch.int64}
    assert tensors["expert_bias"].dtype == torch.float32


def test_a_route_does_not_change_the_state_that_it_is_called_with():
    state = moe_ref.new_state(BIASED)
    copies = {name: x.clone() for name, x in moe_ref.state_tensors(state).items()}
    next_state = moe_ref.route(random(8, EXPERTS), BIASED, state=state).state
    moe_ref.finish_batch(next_state, BIASED)
    assert all(torch.equal(x, copies[name]) for name, x in moe_ref.state_tensors(state).items())
    assert next_state.tokens_per_expert.any()


def test_the_example_of_a_state_holds():
    config = RouterConfig(
        num_experts=3, topk=1, score_function="sigmoid", expert_bias=True, bias_update_rate=0.25,
        global_aux_loss_coeff=1.0,
    )  # fmt: skip
    logits = torch.tensor([[1.0, 0, 0], [1, 0, 0], [1, 0, 0], [0, 1, 0]])
    both = RankGroup(2, lambda x: 2 * x)  # two ranks with the same tokens
    state = moe_ref.new_state(config)
    for _ in range(2):
        state = moe_ref.route(logits, config, state=state, ranks=RouterRanks(tp_dp_cp=both)).state
    assert state.tokens_per_expert.tolist() == [6, 2, 0]
    assert (state.global_tokens_per_expert.tolist(), int(state.global_steps)) == ([12, 4, 0], 2)
    updated = moe_ref.finish_batch(state, config, ranks=RouterRanks(tp_dp_cp=both))
    assert updated.expert_bias.tolist() == [-0.25, 0.25, 0.25]


# ---- sums over ranks, which threads of one process stand for


def test_ranks_add_up_over_the_groups_that_they_are_in():
    def run(rank, sum_over):
        x = torch.tensor(2**rank)
        pair = range(rank // 2 * 2, rank // 2 * 2 + 2)
        return [
            int(sum_over(range(4))(x)),
            int(sum_over(pair)(x)),
            int(sum_over([rank])(x)),
            int(sum_over(range(4))(-x)),
        ]

    assert play(4, run) == [[15, 3, 1, -15], [15, 3, 2, -15], [15, 12, 4, -15], [15, 12, 8, -15]]


def test_the_order_of_a_sum_is_that_of_the_ranks():
    terms = random(8, dtype=torch.float32)
    expected = terms[0]
    for term in terms[1:]:
        expected = expected + term
    totals = play(8, lambda rank, sum_over: sum_over(range(8))(terms[rank]))
    assert all(torch.equal(total, expected) for total in totals)


def test_a_rank_that_fails_does_not_leave_the_others_waiting():
    def run(rank, sum_over):
        if rank == 2:
            raise KeyError("lost")
        return sum_over(range(4))(torch.ones(()))

    with pytest.raises(KeyError, match="lost"):
        play(4, run)
