"""Permutation in `moe_fast` beyond the gate: device reads, memory safety, refusals and errors."""

import pytest
import torch
from torch import Tensor

import moe_fast
import moe_ref
from tests.common.fast import interpreted, normal, record_reads

pytestmark = interpreted


def random_map(num_tokens: int, num_experts: int, share: float = 0.3) -> Tensor:
    return torch.rand(num_tokens, num_experts, generator=torch.Generator().manual_seed(0)) < share


@pytest.mark.parametrize("settings, reads", [({"num_rows": 9}, 0), ({"capacity": 2}, 0), ({}, 1)], ids=str)
def test_the_device_is_read_once_or_not_at_all_when_the_rows_are_given(settings, reads, monkeypatch):
    host_reads = record_reads(monkeypatch)
    tokens, probs = normal(4, 2).requires_grad_(), normal(4, 2).requires_grad_()
    permuted = moe_fast.permute(tokens, random_map(4, 2), probs=probs, **settings)
    merged = moe_fast.unpermute(permuted.rows, permuted.row_map, probs=probs)
    torch.autograd.grad([merged, permuted.probs], [tokens, probs], [merged.detach(), permuted.probs.detach()])
    assert len(host_reads) == reads


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.int64], ids=str)
def test_any_non_zero_integer_routes(dtype):
    numbers = torch.tensor([[2, 0, 1], [0, 0, 127], [1, 1, 0]], dtype=dtype)
    tokens = normal(3, 4)
    assert torch.equal(moe_fast.permute(tokens, numbers).rows, moe_ref.permute(tokens, numbers != 0).rows)
    padded = moe_fast.pad_routing_map(numbers, align=2).routing_map
    assert torch.equal(padded != 0, moe_ref.pad_routing_map(numbers != 0, align=2).routing_map)


def test_a_pending_minus_is_carried_out():
    negated = torch.view_as_complex(normal(4, 3, 2)).conj().imag
    assert negated.is_neg()
    permuted = moe_fast.permute(negated, torch.ones(4, 1, dtype=torch.bool), probs=negated[:, :1])
    assert torch.equal(permuted.rows, negated.clone()) and torch.equal(permuted.probs, negated[:, 0].clone())
    assert torch.equal(moe_fast.unpermute(negated, permuted.row_map), negated.clone())


def test_what_does_not_require_a_gradient_gets_none():
    tokens, probs = torch.ones(3, 2, dtype=torch.int32), normal(3, 2).requires_grad_()
    permuted = moe_fast.permute(tokens, random_map(3, 2), probs=probs)
    outputs = (permuted.rows, permuted.probs, permuted.tokens_per_expert, permuted.overflow)
    assert [value.requires_grad for value in outputs] == [False, True, False, False]
    scattered = moe_fast.indices_to_multihot(torch.zeros(3, 2, dtype=torch.int64), probs, num_experts=2)
    listed = moe_fast.multihot_to_indices(random_map(3, 2), probs, topk=2)
    assert not any(x.requires_grad for x in (scattered.routing_map, listed.indices, listed.overflow))


# Illegal values, which no kernel may use as an address


def chunks_and_gradient(sizes, order):
    rows = normal(4, 3).requires_grad_()
    result = moe_fast.sort_chunks(rows, torch.tensor(sizes), torch.tensor(order)).rows
    return result, *torch.autograd.grad(result.sum(), rows)


@pytest.mark.parametrize("sizes", [[2**40, -5, 3], [3, 3, 3], [-1, 2, 1]], ids=str)
def test_illegal_sizes_of_chunks_stay_within_memory_and_make_every_result_nan(sizes):
    assert all(x.isnan().all() for x in chunks_and_gradient(sizes, [0, 1, 2]))


def test_an_illegal_order_of_chunks_stays_within_memory():
    assert all(x.isfinite().all() for x in chunks_and_gradient([2, 2], [7, -9]))


def test_slots_outside_the_experts_are_empty():
    indices, probs = torch.tensor([[5, 2, -7], [2**40, 0, 3]]), normal(2, 3).requires_grad_()
    result = moe_fast.indices_to_multihot(indices, probs, num_experts=3)
    (dprobs,) = torch.autograd.grad(result.probs.sum(), probs)
    assert result.routing_map.tolist() == [[False, False, True], [True, False, False]]
    assert dprobs.tolist() == [[0, 1, 0], [0, 1, 0]]


# Refusals


def test_what_cannot_be_summed_is_refused_and_declared():
    permuted = moe_fast.permute(normal(3, 2), random_map(3, 2))
    rows = permuted.rows.double()
    assert "float64" in moe_fast.supports("unpermute", rows, permuted.row_map)
    with pytest.raises(ValueError, match=r"rows.*float64"):
        moe_fast.unpermute(rows, permuted.row_map)
    with pytest.raises(ValueError, match=r"tokens.*complex128"):
        moe_fast.permute(torch.zeros(3, 2, dtype=torch.complex128), random_map(3, 2))
    assert moe_fast.supports("permute", normal(3, 2), random_map(3, 2), probs=None) is None


NO_TENSORS = ("declares", "supports", "expert_capacity", "new_state", "state_tensors", "state_from", "finish_batch")


@pytest.mark.parametrize("function", [name for name in moe_fast.__all__ if name not in (*NO_TENSORS, "jitter")])
def test_every_function_declares_that_it_is_deterministic(function):
    assert moe_fast.declares(function)["deterministic"]
