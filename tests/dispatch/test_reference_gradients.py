"""Where the dispatchers' sums round, of rows and of gradients: dispatch and combine are transposes
of each other, each added up in its own way.

P1 … P30: see test_plan.py.
"""

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

import moe_ref
from tests.dispatch.worlds import assert_bits, fields, noise, worlds

modest = settings(max_examples=6, deadline=None, database=None, derandomize=True)


@pytest.mark.parametrize("name", ["deepep", "hybridep"])
@modest
@given(w=worlds())
def test_what_combine_is_for_one_direction_dispatch_is_for_the_other_bit_by_bit(name, w):
    dispatch, combine, cached = (getattr(moe_ref, f"{name}_{x}") for x in ("dispatch", "combine", "cached_dispatch"))
    x = [noise(w, count, 3, salt=rank).requires_grad_() for rank, count in enumerate(w.tokens)]
    by_map = (w.maps, {"align": w.align, "num_rows": w.num_rows})
    routing, sizes = (w.indices, {"num_experts": w.experts}) if name == "deepep" else by_map
    sent = dispatch(x, routing, **sizes)
    handles = fields(sent, "handle")
    rows = [noise(w, *own.shape, salt=9 + rank).requires_grad_() for rank, own in enumerate(fields(sent, "rows"))]
    combined = fields(combine(rows, handles), "tokens")
    assert_bits(torch.autograd.grad(fields(sent, "rows"), x, rows), combined)
    d_rows = torch.autograd.grad(combined, rows, x)
    assert_bits([own + 0.0 for own in d_rows], [own + 0.0 for own in cached(x, handles)])


def test_gradients_of_shards_are_added_in_float32():
    x = torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True)
    flat = moe_ref.flatten_experts(x, expert_parallel=1, expert_tensor_parallel=9)
    (gradient,) = torch.autograd.grad(flat, x, torch.tensor([[256.0, *[1.0] * 8]]).bfloat16())
    assert gradient.item() == 264


# Where sums round


def ranks_of_one_expert(count: int) -> tuple[list[Tensor], list[Tensor]]:
    """One token, on the first rank, that every rank's only expert wants."""
    x = [torch.zeros(1 if rank == 0 else 0, 1, dtype=torch.bfloat16, requires_grad=True) for rank in range(count)]
    return x, [torch.ones(len(own), count) > 0 for own in x]


def terms(*values: float) -> list[Tensor]:
    return [torch.tensor([[value]]).bfloat16() for value in values]


LARGE = terms(256, *[1] * 8)  # 256 + 1 is 256 in bfloat16, and 264 is a bfloat16


@pytest.mark.parametrize(("dtype", "total"), [(torch.float32, 264), (torch.bfloat16, 256)])
def test_allgather_adds_ranks_in_the_dtype_of_the_probs_and_their_gradients_in_that_of_the_tokens(dtype, total):
    x, maps = ranks_of_one_expert(9)
    sent = moe_ref.allgather_dispatch(x, maps, probs=[own.to(dtype) for own in maps])
    assert moe_ref.allgather_combine(LARGE, fields(sent, "handle"))[0].item() == total
    assert torch.autograd.grad(fields(sent, "rows"), x, LARGE)[0].item() == 256


def test_allgather_adds_without_probs_in_float32_and_on_one_rank_without_a_cast():
    x, maps = ranks_of_one_expert(9)
    assert moe_ref.allgather_combine(LARGE, fields(moe_ref.allgather_dispatch(x, maps), "handle"))[0].item() == 264
    fine, probs = [torch.tensor([[1 + 2.0**-20]])], [torch.ones(1, 1).bfloat16()]
    sent = moe_ref.allgather_dispatch(fine, [torch.ones(1, 1) > 0], probs=probs)
    assert torch.equal(moe_ref.allgather_combine(fields(sent, "rows"), fields(sent, "handle"))[0], fine[0])


@pytest.mark.parametrize(("dtype", "total"), [(torch.float32, 264), (torch.bfloat16, 256)])
def test_alltoall_adds_experts_in_float32_and_shards_in_the_dtype_of_the_probs(dtype, total):
    x, maps = ranks_of_one_expert(9)
    probs = [own.to(dtype) for own in maps]
    sent = moe_ref.alltoall_dispatch(x, maps, probs=probs)
    assert moe_ref.alltoall_combine(LARGE, fields(sent, "handle"))[0].item() == 264
    assert torch.autograd.grad(fields(sent, "rows"), x, LARGE)[0].item() == 264
    sent = moe_ref.alltoall_dispatch(
        x, [own[:, :1] for own in maps], probs=[own[:, :1] for own in probs], expert_tensor_parallel=9
    )
    assert moe_ref.alltoall_combine(LARGE, fields(sent, "handle"))[0].item() == total
    assert torch.autograd.grad(fields(sent, "rows"), x, LARGE)[0].item() == 256


def test_deepep_adds_ranks_in_float32_behind_the_biases():
    x, _ = ranks_of_one_expert(9)
    indices = [torch.arange(9).expand(len(own), 9) for own in x]
    sent = moe_ref.deepep_dispatch(x, indices, num_experts=9)
    bias = [torch.full((len(own), 1), 2.0**-7).bfloat16() for own in x]
    assert moe_ref.deepep_combine(LARGE, fields(sent, "handle"))[0].tokens.item() == 264
    half = terms(256, *[1] * 7, 0)  # 263 is half way between 262 and 264; the bias is what lifts it
    assert moe_ref.deepep_combine(half, fields(sent, "handle"))[0].tokens.item() == 264
    low = terms(256, *[1] * 5, 0, 0, 0)  # 261 would be rounded down, to 260
    assert moe_ref.deepep_combine(low, fields(sent, "handle"))[0].tokens.item() == 260
    assert moe_ref.deepep_combine(low, fields(sent, "handle"), biases=[bias])[0].tokens.item() == 262


def test_deepep_begins_with_the_biases_and_adds_row_after_row():
    x = [torch.zeros(1, 1), torch.zeros(0, 1)]
    sent = moe_ref.deepep_dispatch(x, [torch.tensor([[0, 1]]), torch.zeros(0, 2).long()], num_experts=2)
    biases, rows = [torch.full((len(own), 1), 2.0**24) for own in x], [torch.ones(1, 1)] * 2
    combined = moe_ref.deepep_combine(rows, fields(sent, "handle"), biases=[biases])
    assert combined[0].tokens.item() == 2**24  # to which float32 cannot add 1; the rows together are 2


def test_low_latency_adds_slot_after_slot():
    indices, probs = [torch.tensor([[0, 1, 2]])], [torch.tensor([[2.0**24, 1.0, 1.0]])]
    (sent,) = moe_ref.deepep_low_latency_dispatch([torch.ones(1, 1)], indices, num_experts=3, max_tokens_per_rank=1)
    (combined,) = moe_ref.deepep_low_latency_combine([sent.rows], indices, probs, [sent.handle])
    assert combined.item() == 2**24  # as above: the last two slots together are 2


def test_hybridep_rounds_once_on_each_rank_and_once_at_home():
    x = [
        torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True),
        torch.zeros(0, 1, dtype=torch.bfloat16, requires_grad=True),
    ]
    sent = moe_ref.hybridep_dispatch(x, [torch.ones(len(own), 6) > 0 for own in x])
    rows = [torch.tensor([[256.0], [0.5], [0.5]]).bfloat16(), torch.tensor([[1.0], [0.25], [0.25]]).bfloat16()]
    combined = moe_ref.hybridep_combine(rows, fields(sent, "handle"))
    assert (
        combined[0].tokens.item() == 258
    )  # 257 → 256, and 256 + 1.5 → 258; at one go 258.5 → 258, in bfloat16 all the way 256
    rows[1] = torch.tensor([[0.5], [0.25], [0.25]]).bfloat16()
    # added at one go: 258
    assert moe_ref.hybridep_combine(rows, fields(sent, "handle"))[0].tokens.item() == 256
    assert torch.autograd.grad(fields(sent, "rows"), x, rows)[0].item() == 256
