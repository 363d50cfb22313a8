"""The router's reference against loops over plain numbers that share no code with it."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

import moe_ref
from conformance.families.router import FAMILY
from conformance.judge import judge
from moe_ref.config import RankGroup, RouterConfig, RouterRanks
from moe_ref.dispatch.ranks import play
from tests.permutation.test_second_oracle import answer

NONE = -math.inf
SCORES = {
    "softmax": lambda x: [math.exp(v - max(x)) / sum(math.exp(w - max(x)) for w in x) for v in x],
    "sigmoid": lambda x: [1 / (1 + math.exp(-v)) if v > NONE else 0.0 for v in x],
    "sqrtsoftplus": lambda x: [math.sqrt(math.log1p(math.exp(v))) for v in x],
}
often = settings(max_examples=150, deadline=None, database=None, derandomize=True)
GOLDEN = [(x.function, case) for x in FAMILY.contracts for case in FAMILY.golden[x.function]]


@pytest.mark.parametrize(("function", "case"), GOLDEN, ids=["-".join(x) for x in GOLDEN])
def test_golden_case_holds(function, case):
    problem, expected = FAMILY.golden[function][case]
    observed = answer(moe_ref, problem)
    assert [judge(output, right, observed[output]) for output, right in expected.items()] == [None] * len(expected)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@st.composite
def rows(draw, least: int = 1) -> list[list[float]]:
    """Rows of quarters, many of them equal, some of them -∞."""
    experts = draw(st.integers(least, 8))
    cell = st.one_of(st.integers(-20, 20).map(lambda x: x / 4), st.sampled_from([0.0, 0.25]), st.just(NONE))
    return draw(st.lists(st.lists(cell, min_size=experts, max_size=experts), max_size=4))


def tensor(table: list[list[float]], experts: int = 0) -> Tensor:
    return torch.tensor(table, dtype=torch.float64).reshape(len(table), len(table[0]) if table else experts or 1)


# ---- the choice


def best(keys: list[float], count: int) -> list[int]:
    """The largest, of equal ones the first."""
    return sorted(range(len(keys)), key=lambda e: (-keys[e], e))[:count]


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


def scores_by_loop(x: Tensor, function: str) -> list[list[float]]:
    score = [SCORES[function](row) for row in x.tolist()]
    return score if function == "softmax" else [[s / (sum(row) + 1e-20) for s in row] for row in score]


def map_by_loop(x: Tensor, topk: int, function: str) -> list[list[int]]:
    chosen = [best(SCORES[function](row), topk) for row in x.tolist()]
    return [[int(e in row) for e in range(x.shape[1])] for row in chosen]


def balance_by_loop(score, counts, tokens, topk, coeff) -> float:
    """coeff · E / (K N²) · Σ_e counts_e Σ_t score_te, over plain lists."""
    experts = len(counts)
    total = sum(counts[e] * sum(row[e] for row in score) for e in range(experts))
    return coeff * experts / (topk * tokens**2) * total if tokens else 0.0


def z_by_loop(x: Tensor, coeff: float) -> float:
    return coeff * sum(math.log(sum(math.exp(v) for v in row)) ** 2 for row in x.tolist()) / max(len(x), 1)


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


def plan_by_loop(x: np.ndarray) -> np.ndarray:
    """Row and column sums set right in turn, a thousand times."""
    plan = np.exp(x)
    for _ in range(1000):
        plan /= plan.sum(1, keepdims=True) * len(x)
        plan /= plan.sum(0, keepdims=True) * x.shape[1]
    return plan


@pytest.mark.parametrize("topk", [1, 2])
@pytest.mark.parametrize("seed", range(6))
def test_sinkhorn_chooses_by_the_balanced_plan(topk, seed):
    x = random(30, 5, seed=seed)
    plan = plan_by_loop(x.numpy())
    gap = -np.diff(np.sort(plan * 150, axis=1)[:, ::-1])[:, topk - 1]
    out = moe_ref.sinkhorn_routing(x, topk=topk)
    certain = gap > np.median(gap) / 2  # the reference stops a little before the end
    assert out.routing_map[certain].int().tolist() == [
        [int(e in best(row, topk)) for e in range(5)] for row in plan[certain].tolist()
    ]


def test_sinkhorn_evens_out_what_top_k_would_not():
    x = random(400, 4) + torch.tensor([3.0, 0, 0, -1])
    plain, even = (
        moe_ref.sinkhorn_routing(x, topk=1, training=training).routing_map.sum(0) for training in (False, True)
    )
    assert plain.max() > 300
    assert even.min() > 80 and even.max() < 120


def test_sinkhorn_weighs_by_the_activations():
    x = random(9, 4)
    for training in (False, True):
        one, two = (moe_ref.sinkhorn_routing(x, topk=k, training=training) for k in (1, 2))
        assert torch.equal(one.probs, torch.where(one.routing_map, x.sigmoid(), 0))
        assert_close(two.probs, torch.where(two.routing_map, x.softmax(1), 0))
    assert torch.equal(
        moe_ref.sinkhorn_routing(x, topk=2, training=False).routing_map.int(),
        torch.tensor(map_by_loop(x, 2, "softmax")).int(),
    )


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


def test_the_gate_keeps_its_inputs_as_they_came():
    kept = []
    x, weight = random(3, 4, dtype=torch.bfloat16).requires_grad_(), random(2, 4, dtype=torch.bfloat16).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda y: kept.append(y) or y, lambda y: y):
        moe_ref.gate(x, weight, router_dtype="fp32")
    assert [(y.dtype, y.data_ptr()) for y in kept] == [
        (torch.bfloat16, x.data_ptr()),
        (torch.bfloat16, weight.data_ptr()),
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_jitter_stays_within_eps_keeps_the_dtype_and_differs_from_call_to_call(dtype):
    torch.manual_seed(0)
    x = torch.ones(200, 20, dtype=dtype)
    first, second = moe_ref.jitter(x, eps=0.25), moe_ref.jitter(x, eps=0.25)
    assert first.dtype == dtype and not torch.equal(first, second)
    assert 0.75 <= first.min() < 0.78 and 1.22 < first.max() <= 1.25
    assert torch.equal(moe_ref.jitter(x, eps=0), x)


# ---- derivatives

DIFFERENTIABLE = {
    "topk_indices softmax": lambda x: moe_ref.topk_indices(x, topk=2).probs,
    "topk_routing pre": lambda x: moe_ref.topk_routing(x, topk=2, pre_softmax=True, scaling_factor=2.5).probs,
    "topk_routing sigmoid": lambda x: moe_ref.topk_routing(x, topk=2, score_function="sigmoid").probs,
    "topk_routing sqrtsoftplus": lambda x: (
        moe_ref.topk_routing(x, topk=2, score_function="sqrtsoftplus", scaling_factor=0.5).probs
    ),
    "topk_routing one": lambda x: moe_ref.topk_routing(x, topk=1, score_function="sigmoid").probs,
    "topk_routing groups": lambda x: (
        moe_ref.topk_routing(x, topk=2, score_function="sigmoid", num_groups=3, group_topk=1).probs
    ),
    **{
        f"aux_loss_scores {f}": lambda x, f=f: (
            moe_ref.aux_loss_scores(x, topk=2, score_function=f, padding_mask=torch.arange(4) == 1).scores
        )
        for f in SCORES
    },
    "load_balancing_loss": lambda x: moe_ref.load_balancing_loss(
        x, torch.arange(6), total_num_tokens=5, topk=2, num_experts=3, coeff=0.5
    ),
    "z_loss": lambda x: moe_ref.z_loss(x, coeff=0.5, padding_mask=torch.arange(4) == 1),
    "sinkhorn_routing": lambda x: moe_ref.sinkhorn_routing(x, topk=2, training=False).probs,
    "sinkhorn_routing one": lambda x: moe_ref.sinkhorn_routing(x, topk=1, training=False).probs,
    "drop_tokens": lambda x: moe_ref.drop_tokens(x, random(4, 6, seed=3) > 0, capacity=1, pad_to_capacity=True).probs,
}


@pytest.mark.parametrize("function", DIFFERENTIABLE.values(), ids=DIFFERENTIABLE)
def test_gradients_are_derivatives(function):
    assert torch.autograd.gradcheck(function, random(4, 6).requires_grad_())


def test_gradients_of_the_gate_are_its_derivatives():
    inputs = [y.requires_grad_() for y in (random(3, 4), random(2, 4, seed=1), random(2, seed=2))]
    assert torch.autograd.gradcheck(lambda x, weight, bias: moe_ref.gate(x, weight, bias=bias), inputs)


# ---- route

EXPERTS, TOPK = 6, 2


def config(*losses: str, coeff: float = 0.5, **settings) -> RouterConfig:
    coeffs = {f"{name}_coeff": coeff for name in losses}
    return RouterConfig(num_experts=EXPERTS, topk=TOPK, score_function="sigmoid", **coeffs, **settings)


ALL = ("aux_loss", "seq_aux_loss", "global_aux_loss")


def losses_by_loop(
    x: Tensor, batch: int = 1, counted: list[Tensor] | None = None, coeff: float = 0.5
) -> dict[str, float]:
    """Each loss of one rank; `counted` are the logits of the micro-batches before."""
    tokens = len(x)
    score, chosen = scores_by_loop(x, "sigmoid"), map_by_loop(x, TOPK, "sigmoid")

    def counts(maps):
        return [sum(row[e] for row in maps) for e in range(EXPERTS)]

    def of_sequence(table, b):
        return [table[t] for t in range(b, tokens, batch)]

    sequences = [
        balance_by_loop(of_sequence(score, b), counts(of_sequence(chosen, b)), tokens // batch, TOPK, coeff)
        for b in range(batch)
    ]
    batches = [counts(map_by_loop(y, TOPK, "sigmoid")) for y in [*(counted or []), x]]
    mean = [sum(batch[e] for batch in batches) / len(batches) for e in range(EXPERTS)]
    return {
        "z_loss": z_by_loop(x, coeff),
        "aux_loss": balance_by_loop(score, counts(chosen), tokens, TOPK, coeff),
        "seq_aux_loss": sum(sequences) / batch,
        "global_aux_loss": balance_by_loop(score, mean, tokens, TOPK, coeff),
    }


def told(out) -> dict[str, float]:
    return {name: float(loss) for name, loss in out.losses._asdict().items() if loss is not None}


def test_the_losses_of_a_route_are_those_of_a_loop():
    x, how = random(8, EXPERTS), config(*ALL, z_loss_coeff=0.5)
    out = moe_ref.route(x, how, state=moe_ref.new_state(how), batch_size=2)
    assert_close(told(out), losses_by_loop(x, batch=2))
    chosen = moe_ref.topk_routing(x, topk=TOPK, score_function="sigmoid")
    assert torch.equal(out.probs, chosen.probs) and torch.equal(out.routing_map, chosen.routing_map)
    assert out.indices is None


def test_padding_counts_in_no_loss():
    x, padding = random(9, EXPERTS), torch.tensor([0, 0, 1, 0, 1, 1, 0, 0, 0]).bool()
    for name in ALL:
        how = config(name, z_loss_coeff=0.5)
        out = moe_ref.route(x, how, state=moe_ref.new_state(how), padding_mask=padding)
        right = losses_by_loop(x[~padding])
        assert_close(told(out), {"z_loss": right["z_loss"], name: right[name]})
    how = config("seq_aux_loss")
    of_two = moe_ref.route(x[:8], how, state=moe_ref.new_state(how), batch_size=2, padding_mask=padding[:8])
    held = [x[:8][b::2][~padding[:8][b::2]] for b in range(2)]
    length = sum(len(y) for y in held) / 2  # the average
    score, chosen = [scores_by_loop(y, "sigmoid") for y in held], [map_by_loop(y, TOPK, "sigmoid") for y in held]
    right = [
        balance_by_loop(s, [sum(row[e] for row in c) for e in range(EXPERTS)], length, TOPK, 0.5)
        for s, c in zip(score, chosen, strict=True)
    ]
    assert_close(told(of_two), {"seq_aux_loss": sum(right) / 2})


class Objective(torch.autograd.Function):
    """What a router's probs and losses amount to, by loops; its gradient, by `route`."""

    @staticmethod
    def forward(ctx, x, g, how, scale, factor):
        ctx.save_for_backward(x, g)
        ctx.settings = how, scale
        probs = moe_ref.topk_routing(x, topk=TOPK, score_function="sigmoid").probs
        return (probs * g).sum() + scale * factor * sum(losses_by_loop(x, batch=2).values())

    @staticmethod
    def backward(ctx, d):
        x, g = (y.detach() for y in ctx.saved_tensors)
        how, scale = ctx.settings
        with torch.enable_grad():
            leaf = x.requires_grad_()
            out = moe_ref.route(leaf, how, state=moe_ref.new_state(how), batch_size=2, loss_scale=scale)
            return d * torch.autograd.grad(out.probs, leaf, g)[0], None, None, None, None


@pytest.mark.parametrize("scale", [1.0, 0.25])
@pytest.mark.parametrize("a_token", [False, True])
def test_the_gradient_of_a_route_is_that_of_its_probs_and_of_its_losses(scale, a_token):
    how = config(*ALL, z_loss_coeff=0.5, loss_per_token=a_token)
    factor = 8 if a_token else 1
    assert torch.autograd.gradcheck(
        lambda x: Objective.apply(x, random(8, EXPERTS, seed=5), how, scale, factor),
        random(8, EXPERTS).requires_grad_(),
    )


def test_a_repeated_layer_shares_its_losses():
    x, how = random(8, EXPERTS), config(*ALL, z_loss_coeff=0.5, loss_divisor=4)
    out = moe_ref.route(x, how, state=moe_ref.new_state(how))
    assert_close(told(out), {name: loss / 4 for name, loss in losses_by_loop(x).items()})


def test_capacity_drops_what_drop_tokens_drops_and_fills_up():
    x, how = (
        random(12, EXPERTS),
        config(capacity_factor=0.75, pad_to_capacity=True),
    )
    out = moe_ref.route(x, how, state=moe_ref.new_state(how))
    chosen = moe_ref.topk_routing(x, topk=TOPK, score_function="sigmoid")
    right = moe_ref.drop_tokens(*chosen, capacity=3, pad_to_capacity=True)
    assert torch.equal(out.probs, right.probs) and torch.equal(out.routing_map, right.routing_map)
    assert out.routing_map.sum(0).tolist() == [3] * EXPERTS


# ---- what is remembered


def test_the_global_loss_sees_the_mean_of_the_batches_until_the_batch_is_finished():
    how = config("global_aux_loss")
    state, seen = moe_ref.new_state(how), []
    for step in range(3):
        x = random(8, EXPERTS, seed=step)
        out = moe_ref.route(x, how, state=state)
        assert_close(told(out)["global_aux_loss"], losses_by_loop(x, counted=seen)["global_aux_loss"])
        state, seen = out.state, [*seen, x]
    x = random(8, EXPERTS, seed=9)
    fresh = moe_ref.route(x, how, state=moe_ref.finish_batch(state, how))
    assert_close(told(fresh)["global_aux_loss"], losses_by_loop(x)["global_aux_loss"])


BIASED = config(expert_bias=True, bias_update_rate=0.25)


def test_the_bias_is_updated_by_what_was_counted_without_padding():
    x, padding = random(8, EXPERTS), torch.arange(8) > 5
    state = moe_ref.new_state(BIASED)
    for _ in range(2):
        state = moe_ref.route(x, BIASED, state=state, padding_mask=padding).state
    counts = [2 * sum(row[e] for row in map_by_loop(x[:6], TOPK, "sigmoid")) for e in range(EXPERTS)]
    assert state.tokens_per_expert.tolist() == counts
    after = moe_ref.finish_batch(state, BIASED)
    assert after.expert_bias.tolist() == [0.25 * ((c < 4) - (c > 4)) for c in counts]  # 2 · 6 · 2 rows of 6 experts
    assert not after.tokens_per_expert.any()
    frozen = moe_ref.finish_batch(state, BIASED, frozen=True)
    assert not frozen.expert_bias.any() and not frozen.tokens_per_expert.any()
    moved = moe_ref.route(x, BIASED, state=after).routing_map
    assert torch.equal(
        moved, moe_ref.topk_routing(x, topk=TOPK, score_function="sigmoid", expert_bias=after.expert_bias).routing_map
    )


def same(a, b) -> bool:
    return all(
        torch.equal(x, y)
        for x, y in zip(moe_ref.state_tensors(a).values(), moe_ref.state_tensors(b).values(), strict=True)
    )


def test_neither_evaluation_nor_a_pass_without_gradients_leaves_a_trace():
    how = config(*ALL, expert_bias=True, z_loss_coeff=0.5)
    x, state = random(8, EXPERTS), moe_ref.new_state(how)
    evaluated = moe_ref.route(x, how, state=state, training=False)
    with torch.no_grad():
        first_pass = moe_ref.route(x, how, state=state)
    for out in (evaluated, first_pass):
        assert same(out.state, state) and told(out) == {}
    recomputed = moe_ref.route(x, how, state=first_pass.state)
    assert recomputed.state.tokens_per_expert.sum() == 8 * TOPK
    assert recomputed.state.global_steps == 1
    assert torch.equal(recomputed.probs, first_pass.probs)


REPLAYED = config()


def test_what_is_recorded_can_be_replayed_forward_and_then_backward_in_order():
    state, recorded = moe_ref.new_state(REPLAYED), []
    for seed in range(3):
        out = moe_ref.route(random(4, EXPERTS, seed=seed), REPLAYED, state=state, replay="record")
        recorded.append(out.indices)
        assert torch.equal(out.indices.sort(dim=1).values, out.routing_map.nonzero()[:, 1].reshape(4, TOPK))
    other = random(4, EXPERTS, seed=9)
    for target in recorded:
        out = moe_ref.route(other, REPLAYED, state=state, replay="forward", replay_target=target)
        state = out.state
        right = moe_ref.topk_routing(other, topk=TOPK, score_function="sigmoid", precomputed_indices=target)
        assert torch.equal(out.routing_map, right.routing_map) and torch.equal(out.probs, right.probs)
    for target in recorded:
        out = moe_ref.route(other, REPLAYED, state=state, replay="backward")
        state = out.state
        assert torch.equal(
            out.routing_map,
            moe_ref.topk_routing(other, topk=TOPK, score_function="sigmoid", precomputed_indices=target).routing_map,
        )
    assert state.replay_queue == ()
    with pytest.raises(ValueError, match="empty queue"):
        moe_ref.route(other, REPLAYED, state=state, replay="backward")


def test_a_state_is_saved_and_restored_with_its_queue():
    how = config("global_aux_loss", expert_bias=True)
    state = moe_ref.new_state(how)
    target = torch.arange(TOPK).expand(4, TOPK)
    for _ in range(2):
        state = moe_ref.route(random(4, EXPERTS), how, state=state, replay="forward", replay_target=target).state
    tensors = moe_ref.state_tensors(state)
    back = moe_ref.state_from({name: x.clone() for name, x in reversed(tensors.items())})
    assert same(back, state) and len(back.replay_queue) == 2
    assert all(
        tensors[name].dtype == torch.int64 for name in ("tokens_per_expert", "global_tokens_per_expert", "global_steps")
    )
    assert tensors["expert_bias"].dtype == torch.float32


def test_the_state_that_was_given_is_not_changed():
    state = moe_ref.new_state(BIASED)
    before = {name: x.clone() for name, x in moe_ref.state_tensors(state).items()}
    later = moe_ref.route(random(8, EXPERTS), BIASED, state=state).state
    moe_ref.finish_batch(later, BIASED)
    assert all(torch.equal(x, before[name]) for name, x in moe_ref.state_tensors(state).items())
    assert later.tokens_per_expert.any()


def test_the_example_of_a_state_holds():
    how = RouterConfig(
        num_experts=3,
        topk=1,
        score_function="sigmoid",
        expert_bias=True,
        bias_update_rate=0.25,
        global_aux_loss_coeff=1.0,
    )
    logits = torch.tensor([[1.0, 0, 0], [1, 0, 0], [1, 0, 0], [0, 1, 0]])
    both = RankGroup(2, lambda x: 2 * x)  # two ranks with the same tokens
    state = moe_ref.new_state(how)
    for _ in range(2):
        state = moe_ref.route(logits, how, state=state, ranks=RouterRanks(tp_dp_cp=both)).state
    assert state.tokens_per_expert.tolist() == [6, 2, 0]
    assert (state.global_tokens_per_expert.tolist(), int(state.global_steps)) == ([12, 4, 0], 2)
    after = moe_ref.finish_batch(state, how, ranks=RouterRanks(tp_dp_cp=both))
    assert after.expert_bias.tolist() == [-0.25, 0.25, 0.25]


# ---- several ranks


def split(x: Tensor, ranks: int) -> tuple[Tensor, ...]:
    return x.chunk(ranks)


def routed_by_ranks(x: Tensor, how: RouterConfig, tp: int, dp: int = 1, padding: Tensor | None = None, **settings):
    """Each rank's route of its part: data-parallel parts of the rows, each split over its tensor-parallel ranks."""
    parts, masks = (
        [part for shard in split(y, dp) for part in split(shard, tp)]
        for y in (x, torch.zeros(len(x)) if padding is None else padding)
    )

    def run(rank, over):
        own = range(rank // tp * tp, rank // tp * tp + tp)
        leaf = parts[rank].detach().clone().requires_grad_()
        mask = {} if padding is None else {"padding_mask": masks[rank]}
        out = moe_ref.route(
            leaf,
            how,
            state=moe_ref.new_state(how),
            ranks=RouterRanks(RankGroup(tp, over(own)), RankGroup(tp * dp, over(range(tp * dp)))),
            **mask,
            **settings,
        )
        return out, torch.autograd.grad(out.probs, leaf, torch.zeros_like(out.probs))[0]

    return play(tp * dp, run)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("padding", [None, torch.arange(16) > 10], ids=["whole", "padded"])
def test_the_shares_of_ranks_that_split_the_sequences_add_up(ranks, padding):
    x, how = random(16, EXPERTS), config(*ALL, **({"z_loss_coeff": 0.5} if padding is None else {}))
    ((alone, gradient),) = routed_by_ranks(x, how, 1, batch_size=2, padding=padding)
    shares = routed_by_ranks(x, how, ranks, batch_size=2, padding=padding)
    total = {name: sum(told(out)[name] for out, _ in shares) for name in told(alone)}
    assert_close(total, told(alone))
    assert_close(torch.cat([d for _, d in shares]), gradient)


def test_the_aux_loss_is_of_a_data_parallel_rank_and_the_global_one_of_all():
    x, how = random(16, EXPERTS), config(*ALL)
    shares = [told(out) for out, _ in routed_by_ranks(x, how, 2, 2)]
    for shard, pair in zip(split(x, 2), (shares[:2], shares[2:]), strict=True):
        assert_close(sum(loss["aux_loss"] for loss in pair), losses_by_loop(shard)["aux_loss"])
    assert_close(sum(loss["global_aux_loss"] for loss in shares), losses_by_loop(x)["global_aux_loss"])


def gradient_of_weight(hidden: Tensor, weight: Tensor, how: RouterConfig, ranks: int) -> Tensor:
    """The gradient of the router's weight by its losses, added up over the ranks; divided by all tokens where losses are of a token."""
    parts = split(hidden, ranks)

    def run(rank, over):
        leaf = weight.clone().requires_grad_()
        every = RankGroup(ranks, over(range(ranks)))
        out = moe_ref.route(
            moe_ref.gate(parts[rank], leaf),
            how,
            state=moe_ref.new_state(how),
            batch_size=2,
            ranks=RouterRanks(every, every),
        )
        return torch.autograd.grad(out.probs, leaf, torch.zeros_like(out.probs))[0]

    total = sum(play(ranks, run))
    return total / len(hidden) if how.loss_per_token else total


@pytest.mark.parametrize("a_token", [False, True])
@pytest.mark.parametrize("loss", [*ALL, "z"])
def test_the_gradient_of_the_weight_does_not_depend_on_the_number_of_ranks(loss, a_token):
    how = config(
        *(() if loss == "z" else (loss,)),
        loss_per_token=a_token,
        **({"z_loss_coeff": 0.5} if loss == "z" else {}),
    )
    hidden, weight = random(16, 3), random(EXPERTS, 3, seed=1)
    alone = gradient_of_weight(hidden, weight, how, 1)
    assert alone.any()
    for ranks in (2, 4):
        assert_close(gradient_of_weight(hidden, weight, how, ranks), alone)


def test_losses_of_a_token_and_of_a_batch_have_the_same_gradient_in_the_end():
    hidden, weight = random(16, 3), random(EXPERTS, 3, seed=1)
    of_batch, of_token = (
        gradient_of_weight(hidden, weight, config(*ALL, loss_per_token=a_token), 2) for a_token in (False, True)
    )
    assert_close(of_batch, of_token)


@pytest.mark.parametrize("a_token", [False, True])
def test_the_sequence_loss_does_not_depend_on_the_size_of_the_micro_batches(a_token):
    how, x = config("seq_aux_loss", loss_per_token=a_token), random(16, EXPERTS)

    def gradient(batches: list[Tensor], batch_size: int) -> list[Tensor]:
        found = []
        for part in batches:
            leaf = part.clone().requires_grad_()
            scale = 1.0 if a_token else 1 / len(batches)
            out = moe_ref.route(leaf, how, state=moe_ref.new_state(how), batch_size=batch_size, loss_scale=scale)
            found.append(torch.autograd.grad(out.probs, leaf, torch.zeros_like(out.probs))[0])
        return found

    (together,) = gradient([x], 2)
    for b, apart in enumerate(gradient([x[0::2], x[1::2]], 1)):
        assert_close(together[b::2], apart)


def test_the_bias_is_updated_by_the_counts_of_all_ranks():
    x = random(16, EXPERTS)
    alone = moe_ref.finish_batch(moe_ref.route(x, BIASED, state=moe_ref.new_state(BIASED)).state, BIASED)

    def run(rank, over):
        state = moe_ref.route(split(x, 4)[rank], BIASED, state=moe_ref.new_state(BIASED)).state
        return moe_ref.finish_batch(state, BIASED, ranks=RouterRanks(tp_dp_cp=RankGroup(4, over(range(4)))))

    assert all(torch.equal(state.expert_bias, alone.expert_bias) for state in play(4, run))


# ---- the ranks themselves


def test_ranks_add_up_over_the_groups_that_they_are_in():
    def run(rank, over):
        x = torch.tensor(2**rank)
        pair = range(rank // 2 * 2, rank // 2 * 2 + 2)
        return [int(over(range(4))(x)), int(over(pair)(x)), int(over([rank])(x)), int(over(range(4))(-x))]

    assert play(4, run) == [[15, 3, 1, -15], [15, 3, 2, -15], [15, 12, 4, -15], [15, 12, 8, -15]]


def test_the_order_of_a_sum_is_that_of_the_ranks():
    parts = random(8, dtype=torch.float32)
    right = parts[0]
    for part in parts[1:]:
        right = right + part
    assert all(torch.equal(total, right) for total in play(8, lambda rank, over: over(range(8))(parts[rank])))


def test_a_rank_that_fails_does_not_leave_the_others_waiting():
    def run(rank, over):
        if rank == 2:
            raise KeyError("lost")
        return over(range(4))(torch.ones(()))

    with pytest.raises(KeyError, match="lost"):
        play(4, run)
