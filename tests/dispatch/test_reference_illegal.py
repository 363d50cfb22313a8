"""Calls that the reference's dispatchers refuse."""

import pytest
import torch

import moe_ref
from moe_ref.config import IndexPolicy
from tests.dispatch.test_reference import fields


def sent_by(name: str) -> list:
    return fields(getattr(moe_ref, f"{name}_dispatch")([torch.ones(2, 1)] * 2, [torch.ones(2, 2) > 0] * 2), "handle")


def sent_by_deepep() -> list:
    return fields(moe_ref.deepep_dispatch(X, I2, num_experts=2), "handle")


def slab_call(tokens: int = 2, slots: int = 2) -> tuple:
    """A call of combine that is legal but for the numbers."""
    indices = [torch.tensor([[0, 1], [-1, 1]])]
    (dispatched,) = moe_ref.deepep_low_latency_dispatch(X[:1], indices, num_experts=2, max_tokens_per_rank=2)
    return [dispatched.rows], [indices[0][:tokens, :slots]], [torch.ones(tokens, slots)], [dispatched.handle]


X, M, I2 = [torch.ones(2, 1)] * 2, [torch.ones(2, 2) > 0] * 2, [torch.tensor([[0], [1]])] * 2
HANDLES = sent_by("allgather")
ILLEGAL = {
    "no ranks": lambda: moe_ref.allgather_dispatch([], []),
    "a map too few": lambda: moe_ref.allgather_dispatch(X, M[:1]),
    "a map of fewer tokens": lambda: moe_ref.alltoall_dispatch(X, [M[0], M[1][:1]]),
    "ranks of different width": lambda: moe_ref.alltoall_dispatch([X[0], torch.ones(2, 2)], M),
    "maps of different experts": lambda: moe_ref.hybridep_dispatch(X, [M[0], torch.ones(2, 4) > 0]),
    "experts that do not divide": lambda: moe_ref.hybridep_dispatch(X, [torch.ones(2, 3) > 0] * 2),
    "shards that do not divide": lambda: moe_ref.allgather_dispatch(X, M, expert_tensor_parallel=3),
    "no shards": lambda: moe_ref.alltoall_dispatch(X, M, expert_tensor_parallel=0),
    "a capacity of nothing": lambda: moe_ref.alltoall_dispatch(X, M, capacity=0),
    "probs of another shape": lambda: moe_ref.alltoall_dispatch(X, M, probs=[torch.ones(2, 1)] * 2),
    "a budget that is no multiple": lambda: moe_ref.hybridep_dispatch(X, M, align=4, num_rows=6),
    "a negative budget": lambda: moe_ref.hybridep_dispatch(X, M, num_rows=-1),
    "an alignment of nothing": lambda: moe_ref.hybridep_dispatch(X, M, align=0),
    "an expert too high": lambda: moe_ref.deepep_dispatch(X, [torch.tensor([[2], [0]])] * 2, num_experts=2),
    "an expert named twice": lambda: moe_ref.deepep_dispatch(X, [torch.tensor([[0, 0], [0, 1]])] * 2, num_experts=2),
    "an empty slot": lambda: moe_ref.deepep_dispatch(
        X, [torch.tensor([[-1], [1]])] * 2, num_experts=2, policy=IndexPolicy(empty="reject")
    ),
    "indices that are numbers": lambda: moe_ref.deepep_dispatch(X, [torch.ones(2, 1)] * 2, num_experts=2),
    "too little room": lambda: moe_ref.deepep_dispatch(X, I2, num_experts=2, num_worst_tokens=1),
    "scales for other tokens": lambda: moe_ref.deepep_dispatch(X, I2, num_experts=2, scales=[torch.ones(1, 1)] * 2),
    "slabs too short": lambda: moe_ref.deepep_low_latency_dispatch(X, I2, num_experts=2, max_tokens_per_rank=1),
    "blocks that are cut": lambda: moe_ref.deepep_low_latency_dispatch(
        X, I2, num_experts=2, max_tokens_per_rank=2, use_fp8=True
    ),
    "slots that combine does not know": lambda: moe_ref.deepep_low_latency_combine(*slab_call(slots=1)),
    "indices of fewer tokens": lambda: moe_ref.deepep_low_latency_combine(*slab_call(tokens=1)),
    "tokens that the handle does not know": lambda: moe_ref.deepep_cached_dispatch([X[0][:1], X[1]], sent_by_deepep()),
    "three biases": lambda: moe_ref.deepep_combine([torch.ones(2, 1)] * 2, sent_by_deepep(), biases=[X] * 3),
    "a bias of another shape": lambda: moe_ref.deepep_combine(
        [torch.ones(2, 1)] * 2, sent_by_deepep(), biases=[[X[0], X[1][:1]]]
    ),
    "a policy nobody has": lambda: IndexPolicy(duplicates="first slot"),
    "a handle of another dispatcher": lambda: moe_ref.alltoall_combine([torch.ones(4, 1)] * 2, HANDLES),
    "handles in another order": lambda: moe_ref.allgather_combine([torch.ones(4, 1)] * 2, HANDLES[::-1]),
    "handles of two calls": lambda: moe_ref.allgather_combine(
        [torch.ones(4, 1)] * 2, [HANDLES[0], sent_by("allgather")[1]]
    ),
    "a handle too few": lambda: moe_ref.allgather_combine([torch.ones(4, 1)], HANDLES[:1]),
    "a row too few": lambda: moe_ref.allgather_combine([torch.ones(4, 1), torch.ones(3, 1)], HANDLES),
    "rows of whole numbers": lambda: moe_ref.allgather_combine([torch.ones(4, 1).long()] * 2, HANDLES),
}


@pytest.mark.parametrize("call", ILLEGAL.values(), ids=ILLEGAL)
def test_what_is_illegal_is_refused_with_its_reason(call):
    with pytest.raises(ValueError, match="it must be"):
        call()
