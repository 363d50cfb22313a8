"""The dispatchers of the reference beyond values: codes, indices that libraries differ on, sums.

`evidence.formulations.dispatch` computes what each dispatcher sends and adds by loops over ranks,
experts and tokens, for the cases that tests/evidence draws.
"""

import pytest
import torch
from torch import Tensor

import moe_ref
from moe_fast.dispatch import indices as fast
from moe_ref.config import IndexPolicy
from moe_ref.dispatch.low_latency import quantize_for_wire
from tests.common.fast import normal
from tests.permutation.test_reference import MOVED, every_code, same_bits


def fields(results: list, name: str) -> list:
    """The field of that name of each rank's result."""
    return [getattr(result, name) for result in results]


@pytest.mark.parametrize("dtype", [*MOVED, torch.uint8])
def test_every_code_arrives_bit_by_bit(dtype):
    codes = every_code(dtype)
    x = [codes[:3], codes[3:3], codes[3:]]
    maps = [torch.ones(len(result), 3) > 0 for result in x]
    indices = [torch.arange(3).expand(len(result), 3) for result in x]
    for dispatch in (moe_ref.allgather_dispatch, moe_ref.alltoall_dispatch, moe_ref.hybridep_dispatch):
        assert all(same_bits(result.rows, codes) for result in dispatch(x, maps))
    assert all(same_bits(result.rows, codes) for result in moe_ref.deepep_dispatch(x, indices, num_experts=3))
    slabs = moe_ref.deepep_low_latency_dispatch(x, indices, num_experts=3, max_tokens_per_rank=len(codes))
    assert all(same_bits(result.rows[0, : len(codes)], codes) for result in slabs)


@pytest.mark.parametrize("round_scale", [False, True])
def test_fp8_on_the_wire_is_within_half_a_step_of_its_block(round_scale):
    x = [normal(4, 256, dtype=torch.bfloat16), torch.zeros(2, 256).bfloat16()]
    indices = [torch.tensor([[0, 1]] * 4), torch.tensor([[1, -1]] * 2)]
    dispatched = moe_ref.deepep_low_latency_dispatch(
        x, indices, num_experts=2, max_tokens_per_rank=4, use_fp8=True, round_scale=round_scale
    )
    for result, expected in zip(dispatched, (x[0], torch.cat(x)), strict=True):
        count = int(result.tokens_per_expert[0])
        codes, scales = result.rows[0, :count].float().unflatten(1, (2, 128)), result.scales[0, :count, :, None]
        blocks = expected.float().unflatten(1, (2, 128))
        amax = blocks.abs().amax(2, keepdim=True).clamp(min=1e-4)
        # E4M3 has three bits behind the first, and no exponent below -6
        step = torch.maximum(codes.abs(), torch.tensor(2.0**-6)) * 2.0**-3
        assert ((codes * scales - blocks).abs() <= step * scales).all() and codes.abs().max() <= 448
        if round_scale:
            assert ((scales >= amax / 448) & (scales < amax / 224)).all()
            assert (torch.frexp(scales).mantissa == 0.5).all()
        else:
            assert torch.equal(scales, amax * (1 / 448))


def test_a_scale_that_is_a_power_of_two_stays_one():
    x = torch.zeros(1, 128)
    x[0, 0] = 448 * 2.0**-5
    codes, scales = quantize_for_wire(x, round_scale=True)
    assert scales.item() == 2.0**-5 and codes.float()[0, 0] == 448


def test_a_stale_handle_is_refused():
    tokens, maps = [torch.ones(2, 2), torch.ones(3, 2)], [torch.ones(2, 4) > 0, torch.ones(3, 4) > 0]
    old, new = (moe_ref.alltoall_dispatch(tokens, maps) for _ in range(2))
    with pytest.raises(ValueError, match="AllToAllHandle of another call"):
        moe_ref.alltoall_combine(fields(new, "rows"), [new[0].handle, old[1].handle])


# ---- experts that a token names twice, and probabilities of zero

TWICE = torch.tensor([[1, 0, 1], [-1, 0, 1]])
PROBS = torch.tensor([[1.0, 2.0, 4.0], [8.0, 0.0, 16.0]])


@pytest.mark.parametrize(
    ("policy", "indices", "probs"),
    [
        ({"duplicates": "count each"}, TWICE.tolist(), [[1, 2, 4], [0, 0, 16]]),
        ({"duplicates": "last slot"}, [[-1, 0, 1], [-1, 0, 1]], [[0, 2, 4], [0, 0, 16]]),
        ({"duplicates": "count each", "zero_prob": "drop"}, [[1, 0, 1], [-1, -1, 1]], [[1, 2, 4], [0, 0, 16]]),
    ],
)
def test_slots_that_libraries_differ_on_are_kept_or_emptied_as_the_policy_says(policy, indices, probs):
    got = moe_ref.apply_index_policy(TWICE, PROBS, num_experts=2, policy=IndexPolicy(**policy))
    assert got[0].tolist() == indices and got[1].tolist() == probs


@pytest.mark.parametrize("applied", (moe_ref.apply_index_policy, fast.apply_index_policy), ids=("moe_ref", "moe_fast"))
def test_the_last_expert_that_uint8_names_is_no_empty_slot(applied):
    indices = torch.tensor([[255, 0]], dtype=torch.uint8)
    indices_left, _ = applied(indices, None, num_experts=256, policy=IndexPolicy())
    assert indices_left.tolist() == [[255, 0]]


def test_deepep_counts_both_slots_of_an_expert_and_sends_its_token_once():
    (dispatched,) = moe_ref.deepep_dispatch(
        [torch.ones(2, 1)], [TWICE], num_experts=2, probs=[PROBS], policy=IndexPolicy(duplicates="count each")
    )
    assert (
        len(dispatched.rows) == 2
        and dispatched.tokens_per_expert.tolist() == [2, 3]
        and dispatched.indices.tolist() == TWICE.tolist()
    )
    assert moe_ref.deepep_layout(TWICE, num_experts=2, ranks=1).num_tokens_per_expert.tolist() == [2, 3]


def test_in_low_latency_both_slots_of_an_expert_read_its_later_row():
    x, policy = [torch.tensor([[1.0]])], IndexPolicy(duplicates="count each")
    (dispatched,) = moe_ref.deepep_low_latency_dispatch(
        x, [TWICE[:1]], num_experts=2, max_tokens_per_rank=2, policy=policy
    )
    assert dispatched.tokens_per_expert.tolist() == [1, 2]
    rows = torch.tensor([[[10.0], [torch.nan]], [[torch.nan], [100.0]]])
    assert (
        moe_ref.deepep_low_latency_combine([rows], [TWICE[:1]], [PROBS[:1]], [dispatched.handle])[0].item()
        == 2 * 10 + (1 + 4) * 100
    )


# ---- where sums of rows and of gradients round


def test_gradients_of_shards_are_added_in_float32():
    x = torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True)
    flat = moe_ref.flatten_experts(x, expert_parallel=1, expert_tensor_parallel=9)
    (gradient,) = torch.autograd.grad(flat, x, torch.tensor([[256.0, *[1.0] * 8]]).bfloat16())
    assert gradient.item() == 264


def ranks_of_one_expert(count: int) -> tuple[list[Tensor], list[Tensor]]:
    """One token, on the first rank, that every rank's only expert wants."""
    x = [torch.zeros(1 if rank == 0 else 0, 1, dtype=torch.bfloat16, requires_grad=True) for rank in range(count)]
    return x, [torch.ones(len(local), count) > 0 for local in x]


def terms(*values: float) -> list[Tensor]:
    return [torch.tensor([[value]]).bfloat16() for value in values]


LARGE = terms(256, *[1] * 8)  # 256 + 1 is 256 in bfloat16, and 264 is a bfloat16


@pytest.mark.parametrize(("dtype", "total"), [(torch.float32, 264), (torch.bfloat16, 256)])
def test_allgather_adds_ranks_in_the_dtype_of_the_probs_and_their_gradients_in_that_of_the_tokens(dtype, total):
    x, maps = ranks_of_one_expert(9)
    dispatched = moe_ref.allgather_dispatch(x, maps, probs=[local.to(dtype) for local in maps])
    assert moe_ref.allgather_combine(LARGE, fields(dispatched, "handle"))[0].item() == total
    assert torch.autograd.grad(fields(dispatched, "rows"), x, LARGE)[0].item() == 256


def test_allgather_adds_without_probs_in_float32_and_on_one_rank_without_a_cast():
    x, maps = ranks_of_one_expert(9)
    assert moe_ref.allgather_combine(LARGE, fields(moe_ref.allgather_dispatch(x, maps), "handle"))[0].item() == 264
    fine, probs = [torch.tensor([[1 + 2.0**-20]])], [torch.ones(1, 1).bfloat16()]
    dispatched = moe_ref.allgather_dispatch(fine, [torch.ones(1, 1) > 0], probs=probs)
    assert torch.equal(moe_ref.allgather_combine(fields(dispatched, "rows"), fields(dispatched, "handle"))[0], fine[0])


@pytest.mark.parametrize(("dtype", "total"), [(torch.float32, 264), (torch.bfloat16, 256)])
def test_alltoall_adds_experts_in_float32_and_shards_in_the_dtype_of_the_probs(dtype, total):
    x, maps = ranks_of_one_expert(9)
    probs = [local.to(dtype) for local in maps]
    dispatched = moe_ref.alltoall_dispatch(x, maps, probs=probs)
    assert moe_ref.alltoall_combine(LARGE, fields(dispatched, "handle"))[0].item() == 264
    assert torch.autograd.grad(fields(dispatched, "rows"), x, LARGE)[0].item() == 264
    dispatched = moe_ref.alltoall_dispatch(
        x, [local[:, :1] for local in maps], probs=[local[:, :1] for local in probs], expert_tensor_parallel=9
    )
    assert moe_ref.alltoall_combine(LARGE, fields(dispatched, "handle"))[0].item() == total
    assert torch.autograd.grad(fields(dispatched, "rows"), x, LARGE)[0].item() == 256


def test_deepep_adds_ranks_in_float32_behind_the_biases():
    x, _ = ranks_of_one_expert(9)
    indices = [torch.arange(9).expand(len(local), 9) for local in x]
    dispatched = moe_ref.deepep_dispatch(x, indices, num_experts=9)
    bias = [torch.full((len(local), 1), 2.0**-7).bfloat16() for local in x]
    assert moe_ref.deepep_combine(LARGE, fields(dispatched, "handle"))[0].tokens.item() == 264
    half = terms(256, *[1] * 7, 0)  # 263 is half way between 262 and 264; the bias is what lifts it
    assert moe_ref.deepep_combine(half, fields(dispatched, "handle"))[0].tokens.item() == 264
    low = terms(256, *[1] * 5, 0, 0, 0)  # 261 would be rounded down, to 260
    assert moe_ref.deepep_combine(low, fields(dispatched, "handle"))[0].tokens.item() == 260
    assert moe_ref.deepep_combine(low, fields(dispatched, "handle"), biases=[bias])[0].tokens.item() == 262


def test_deepep_begins_with_the_biases_and_adds_row_after_row():
    x = [torch.zeros(1, 1), torch.zeros(0, 1)]
    dispatched = moe_ref.deepep_dispatch(x, [torch.tensor([[0, 1]]), torch.zeros(0, 2).long()], num_experts=2)
    biases, rows = [torch.full((len(local), 1), 2.0**24) for local in x], [torch.ones(1, 1)] * 2
    combined = moe_ref.deepep_combine(rows, fields(dispatched, "handle"), biases=[biases])
    assert combined[0].tokens.item() == 2**24  # to which float32 cannot add 1; the rows together are 2


def test_low_latency_adds_slot_after_slot():
    indices, probs = [torch.tensor([[0, 1, 2]])], [torch.tensor([[2.0**24, 1.0, 1.0]])]
    (dispatched,) = moe_ref.deepep_low_latency_dispatch(
        [torch.ones(1, 1)], indices, num_experts=3, max_tokens_per_rank=1
    )
    (combined,) = moe_ref.deepep_low_latency_combine([dispatched.rows], indices, probs, [dispatched.handle])
    assert combined.item() == 2**24  # as above: the last two slots together are 2


def test_hybridep_rounds_once_on_each_rank_and_once_at_home():
    x = [
        torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True),
        torch.zeros(0, 1, dtype=torch.bfloat16, requires_grad=True),
    ]
    dispatched = moe_ref.hybridep_dispatch(x, [torch.ones(len(local), 6) > 0 for local in x])
    rows = [torch.tensor([[256.0], [0.5], [0.5]]).bfloat16(), torch.tensor([[1.0], [0.25], [0.25]]).bfloat16()]
    combined = moe_ref.hybridep_combine(rows, fields(dispatched, "handle"))
    assert (
        combined[0].tokens.item() == 258
    )  # 257 → 256, and 256 + 1.5 → 258; at one go 258.5 → 258, in bfloat16 all the way 256
    rows[1] = torch.tensor([[0.5], [0.25], [0.25]]).bfloat16()
    # added at one go: 258
    assert moe_ref.hybridep_combine(rows, fields(dispatched, "handle"))[0].tokens.item() == 256
    assert torch.autograd.grad(fields(dispatched, "rows"), x, rows)[0].item() == 256
