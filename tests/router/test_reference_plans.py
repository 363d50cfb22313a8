"""Sinkhorn plans, gate, jitter and derivatives against formulas written out."""

import numpy as np
import pytest
import torch
from torch.testing import assert_close

import moe_ref
from tests.router.reference_helpers import SCORES, best, map_by_loop, random


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
