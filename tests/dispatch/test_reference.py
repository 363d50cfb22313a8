"""What the dispatchers send and add: by hand, against each other and against the layer of one rank.

P1 … P30: see test_plan.py.
"""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

import moe_ref
from conformance.judge.exact import bits
from moe_ref.dispatch.low_latency import quantize_for_wire
from tests.dispatch.worlds import FIXED, World, assert_bits, cell_numbers, fields, names, noise, worlds
from tests.permutation.test_reference import MOVED, every_code, same_bits

modest = settings(max_examples=6, deadline=None, database=None, derandomize=True)
each_world = pytest.mark.parametrize("w", FIXED)


# All dispatchers are one function: the single-rank layer, with different and nonlinear experts


def expert(x_PH: Tensor, probs_P: Tensor, e: int) -> Tensor:
    """Small integers to small integers, weighted; each of the flat experts has its own function."""
    return torch.maximum(x_PH, torch.full_like(x_PH, e % 4 - 2)) * (-1) ** e * probs_P[:, None].to(x_PH.dtype)


def dense_layer(w: World, x: list[Tensor], probs: list[Tensor], shards: int) -> list[Tensor]:
    """y = Σ_e Σ_shards prob · f(x) in float64: one rank, one loop over the experts."""
    out = []
    for own, own_probs, routing_map in zip(x, probs, w.maps, strict=True):
        total = torch.zeros(own.shape, dtype=torch.float64)
        local = w.experts * shards // w.ranks
        for flat in range(w.ranks * local):
            e = flat // local // shards * local + flat % local
            total += torch.where(routing_map[:, e, None], expert(own.double(), own_probs[:, e], flat), 0.0)
        out.append(total)
    return out


def experts_of(rank: int, rows: Tensor, probs: Tensor, tokens_per_expert: Tensor) -> Tensor:
    """What the experts of one rank make of their segments."""
    outputs, start = [], 0
    for l_, count in enumerate(tokens_per_expert.tolist()):
        own = slice(start, start + count)
        outputs.append(expert(rows[own], probs[own], rank * len(tokens_per_expert) + l_))
        start += count
    return torch.cat([*outputs, rows[start:]])


def by_expert(
    w: World, x: list[Tensor], probs: list[Tensor], dispatch: Callable, combine: Callable, **how
) -> list[Tensor]:
    """A layer whose dispatcher puts rows into expert order."""
    sent = dispatch(x, w.maps, probs=probs, **how)
    rows = [experts_of(rank, own.rows, own.probs, own.tokens_per_expert) for rank, own in enumerate(sent)]
    return [own.tokens if hasattr(own, "tokens") else own for own in combine(rows, fields(sent, "handle"))]


def slot_probs(w: World, probs: list[Tensor]) -> list[Tensor]:
    return [torch.where(i >= 0, own.gather(1, i.clamp(min=0)), 0.0) for i, own in zip(w.indices, probs, strict=True)]


def by_deepep(w: World, x: list[Tensor], probs: list[Tensor]) -> list[Tensor]:
    """A layer with Megatron's flex dispatcher: dispatch, multihot, permute; experts; inverses."""
    sent = moe_ref.deepep_dispatch(x, w.indices, num_experts=w.experts, probs=slot_probs(w, probs))
    partial_sums = []
    for rank, own in enumerate(sent):
        hot = moe_ref.indices_to_multihot(own.indices, own.probs, num_experts=w.experts // w.ranks)
        permuted = moe_ref.permute(own.rows, hot.routing_map, probs=hot.probs, align=w.align)
        y = experts_of(rank, permuted.rows, permuted.probs, permuted.tokens_per_expert)
        partial_sums.append(moe_ref.unpermute(y, permuted.row_map))
    return fields(moe_ref.deepep_combine(partial_sums, fields(sent, "handle")), "tokens")


def by_slabs(w: World, x: list[Tensor], probs: list[Tensor]) -> list[Tensor]:
    """A layer in low latency: the experts see no probability, combine weights."""
    sent = moe_ref.deepep_low_latency_dispatch(
        x, w.indices, num_experts=w.experts, max_tokens_per_rank=max(*w.tokens, 1)
    )
    rows = []
    for rank, own in enumerate(sent):
        slabs = [expert(slab, torch.ones(len(slab)), rank * len(own.rows) + l_) for l_, slab in enumerate(own.rows)]
        rows.append(torch.stack(slabs))
    return moe_ref.deepep_low_latency_combine(rows, w.indices, slot_probs(w, probs), fields(sent, "handle"))


def whole_numbers(w: World, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Payloads and probabilities for which every sum of every tree is exact."""
    source = torch.Generator().manual_seed(w.seed)
    x = [torch.randint(-2, 3, (count, 3), generator=source).to(dtype) for count in w.tokens]
    weights = torch.tensor([0.0, 0.5, 1.0, 2.0])
    return x, [weights[torch.randint(4, (count, w.experts), generator=source)] for count in w.tokens]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@modest
@given(w=worlds())
def test_p16_all_dispatchers_make_the_layer_of_one_rank_bit_by_bit(dtype, w):
    w = w._replace(num_rows=None)
    x, probs = whole_numbers(w, dtype)
    right = [own.to(dtype) for own in dense_layer(w, x, probs, 1)]
    for got in (
        by_expert(w, x, probs, moe_ref.allgather_dispatch, moe_ref.allgather_combine),
        by_expert(w, x, probs, moe_ref.alltoall_dispatch, moe_ref.alltoall_combine),
        by_expert(w, x, probs, moe_ref.hybridep_dispatch, moe_ref.hybridep_combine, align=w.align),
        by_deepep(w, x, probs),
        by_slabs(w, x, probs),
    ):
        assert all(torch.equal(*pair) for pair in zip(got, right, strict=True))


@modest
@given(w=worlds())
def test_p16_shards_of_experts_add_up_to_the_same_layer(w):
    x, probs = whole_numbers(w, torch.float32)
    right = [own.float() for own in dense_layer(w, x, probs, w.shards)]
    flat_map, flat_probs = (
        [
            moe_ref.flatten_experts(own, expert_parallel=w.ranks // w.shards, expert_tensor_parallel=w.shards)
            for own in each
        ]
        for each in (w.maps, probs)
    )
    indices = [moe_ref.multihot_to_indices(own, own.float(), topk=own.shape[1]).indices for own in flat_map]
    flat = World(flat_map, indices, 1, w.align, None, w.seed)
    for got in (
        by_expert(w, x, probs, moe_ref.allgather_dispatch, moe_ref.allgather_combine, expert_tensor_parallel=w.shards),
        by_expert(w, x, probs, moe_ref.alltoall_dispatch, moe_ref.alltoall_combine, expert_tensor_parallel=w.shards),
        by_expert(flat, x, flat_probs, moe_ref.hybridep_dispatch, moe_ref.hybridep_combine, align=w.align),
        by_deepep(flat, x, flat_probs),
    ):
        assert all(torch.equal(*pair) for pair in zip(got, right, strict=True))


@modest
@given(w=worlds())
def test_capacity_without_padding_is_a_matter_of_the_map(w):
    x, probs = whole_numbers(w, torch.float32)
    dropped = [own & (own.cumsum(0) <= 2) for own in w.maps]
    fewer = w._replace(
        maps=dropped, indices=[moe_ref.multihot_to_indices(own, own.float(), topk=w.experts).indices for own in dropped]
    )
    silent = [torch.where(own, p, 0.0) for own, p in zip(dropped, probs, strict=True)]
    right = [own.float() for own in dense_layer(fewer, x, probs, 1)]
    padded = by_expert(w, x, silent, moe_ref.alltoall_dispatch, moe_ref.alltoall_combine, capacity=2)
    ragged = by_expert(fewer, x, probs, moe_ref.alltoall_dispatch, moe_ref.alltoall_combine)
    assert all(torch.equal(a, c) and torch.equal(b, c) for a, b, c in zip(padded, ragged, right, strict=True))


@modest
@given(w=worlds())
def test_p22_hybridep_is_deepep_and_a_permutation_behind_it_overflow_included(w):
    x, probs = whole_numbers(w, torch.float32)
    sent = moe_ref.deepep_dispatch(x, w.indices, num_experts=w.experts, probs=slot_probs(w, probs))
    fused = moe_ref.hybridep_dispatch(x, w.maps, probs=probs, align=w.align, num_rows=w.num_rows)
    for one, other in zip(sent, fused, strict=True):
        hot = moe_ref.indices_to_multihot(one.indices, one.probs, num_experts=w.experts // w.ranks)
        permuted = moe_ref.permute(one.rows, hot.routing_map, probs=hot.probs, align=w.align, num_rows=w.num_rows)
        names_ = ("rows", "probs", "tokens_per_expert", "overflow")
        assert all(torch.equal(getattr(permuted, name), getattr(other, name)) for name in names_)


# What is moved is moved bit by bit


@pytest.mark.parametrize("dtype", [*MOVED, torch.uint8])
def test_p11_every_code_arrives_bit_by_bit(dtype):
    codes = every_code(dtype)
    x = [codes[:3], codes[3:3], codes[3:]]
    maps = [torch.ones(len(own), 3) > 0 for own in x]
    indices = [torch.arange(3).expand(len(own), 3) for own in x]
    for dispatch in (moe_ref.allgather_dispatch, moe_ref.alltoall_dispatch, moe_ref.hybridep_dispatch):
        assert all(same_bits(own.rows, codes) for own in dispatch(x, maps))
    assert all(same_bits(own.rows, codes) for own in moe_ref.deepep_dispatch(x, indices, num_experts=3))
    slabs = moe_ref.deepep_low_latency_dispatch(x, indices, num_experts=3, max_tokens_per_rank=len(codes))
    assert all(same_bits(own.rows[0, : len(codes)], codes) for own in slabs)


def test_p9_padding_is_zero_and_has_no_probability():
    sent = moe_ref.hybridep_dispatch(
        [torch.ones(1, 2)], [torch.tensor([[1, 0, 1]])], probs=[torch.ones(1, 3)], align=2, num_rows=6
    )
    assert sent[0].rows[:, 0].tolist() == sent[0].probs.tolist() == [1, 0, 1, 0, 0, 0]
    assert sent[0].tokens_per_expert.tolist() == [2, 0, 2] and not sent[0].overflow


def test_p4_p5_slots_keep_their_columns_and_those_of_other_ranks_are_silent():
    indices = [torch.tensor([[3, 0, -1], [2, 3, 1]]), torch.tensor([[-1, -1, 1]])]
    probs = [torch.tensor([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]]), torch.tensor([[0.7, 0.8, 0.9]])]
    first, second = moe_ref.deepep_dispatch(
        [torch.tensor([[1], [2]]), torch.tensor([[3]])], indices, num_experts=4, probs=probs, expert_alignment=2
    )
    assert first.rows.tolist() == [[1], [2], [3]] and second.rows.tolist() == [[1], [2]]
    assert first.indices.tolist() == [[-1, 0, -1], [-1, -1, 1], [-1, -1, 1]] and second.indices.tolist() == [
        [1, -1, -1],
        [0, 1, -1],
    ]
    assert torch.equal(first.probs, torch.tensor([[0, 0.2, 0], [0, 0, 0.6], [0, 0, 0.9]]))
    assert first.tokens_per_expert.tolist() == [2, 2] and second.tokens_per_expert.tolist() == [2, 2]


def test_p10_rows_say_where_they_come_from():
    maps = [torch.tensor([[1, 0, 1, 1], [0, 0, 1, 0]]), torch.tensor([[1, 1, 1, 0]])]
    x = [torch.tensor([[0, 0], [0, 1]]), torch.tensor([[1, 0]])]
    right = [[[0, 0], [1, 0], [1, 0]], [[0, 0], [0, 1], [1, 0], [0, 0]]]
    for dispatch in (moe_ref.allgather_dispatch, moe_ref.alltoall_dispatch, moe_ref.hybridep_dispatch):
        sent = dispatch(x, maps)
        assert [own.rows.tolist() for own in sent] == right
        assert [own.tokens_per_expert.tolist() for own in sent] == [[2, 1], [3, 1]]
    shards = moe_ref.alltoall_dispatch(
        [*x, x[1][:0], x[1] + 1], [*maps, maps[1][:0], maps[1]], expert_tensor_parallel=2
    )
    assert (
        shards[0].rows.tolist() == shards[1].rows.tolist() == [[0, 0], [1, 0], [2, 1], [1, 0], [2, 1]]
    )  # rank 2 sends nothing


@modest
@given(w=worlds())
def test_tokens_that_nobody_wants_change_no_row(w):
    longer = [torch.cat([own, torch.full((8 - len(own), 2), -9)]) for own in names(w)]
    maps = [torch.cat([own, own.new_zeros((8 - len(own), w.experts))]) for own in w.maps]
    for dispatch in (moe_ref.allgather_dispatch, moe_ref.alltoall_dispatch, moe_ref.hybridep_dispatch):
        assert_bits(fields(dispatch(longer, maps), "rows"), fields(dispatch(names(w), w.maps), "rows"))


@pytest.mark.parametrize("round_scale", [False, True])
def test_p12_fp8_on_the_wire_is_within_half_a_step_of_its_block(round_scale):
    x = [noise(FIXED[2], 4, 256, dtype=torch.bfloat16), torch.zeros(2, 256).bfloat16()]
    indices = [torch.tensor([[0, 1]] * 4), torch.tensor([[1, -1]] * 2)]
    sent = moe_ref.deepep_low_latency_dispatch(
        x, indices, num_experts=2, max_tokens_per_rank=4, use_fp8=True, round_scale=round_scale
    )
    for own, right in zip(sent, (x[0], torch.cat(x)), strict=True):
        count = int(own.tokens_per_expert[0])
        codes, scales = own.rows[0, :count].float().unflatten(1, (2, 128)), own.scales[0, :count, :, None]
        blocks = right.float().unflatten(1, (2, 128))
        amax = blocks.abs().amax(2, keepdim=True).clamp(min=1e-4)
        step = (
            torch.maximum(codes.abs(), torch.tensor(2.0**-6)) * 2.0**-3
        )  # E4M3 has three bits behind the first, and no exponent below -6
        assert ((codes * scales - blocks).abs() <= step * scales).all() and codes.abs().max() <= 448
        assert (
            torch.equal(scales, amax * (1 / 448))
            if not round_scale
            else ((scales >= amax / 448) & (scales < amax / 224)).all()
        )
        assert not round_scale or (torch.frexp(scales).mantissa == 0.5).all()


def test_p12_a_scale_that_is_a_power_of_two_stays_one():
    x = torch.zeros(1, 128)
    x[0, 0] = 448 * 2.0**-5
    codes, scales = quantize_for_wire(x, round_scale=True)
    assert scales.item() == 2.0**-5 and codes.float()[0, 0] == 448


# Round trips


@modest
@given(w=worlds())
def test_p13_a_round_trip_multiplies_each_token_by_the_ranks_it_reached(w):
    x, _ = whole_numbers(w, torch.bfloat16)
    sent = moe_ref.deepep_dispatch(x, w.indices, num_experts=w.experts)
    back = moe_ref.deepep_combine(fields(sent, "rows"), fields(sent, "handle"))
    for own, indices, combined in zip(x, w.indices, back, strict=True):
        layout = moe_ref.deepep_layout(indices, num_experts=w.experts, ranks=w.ranks)
        assert torch.equal(combined.tokens, own * layout.is_token_in_rank.sum(1, keepdim=True).to(own.dtype))


@pytest.mark.parametrize("name", ["allgather", "alltoall", "hybridep"])
@modest
@given(w=worlds())
def test_p13_a_round_trip_multiplies_each_token_by_its_experts(name, w):
    x, _ = whole_numbers(w, torch.bfloat16)
    sent = getattr(moe_ref, f"{name}_dispatch")(x, w.maps)
    back = getattr(moe_ref, f"{name}_combine")(fields(sent, "rows"), fields(sent, "handle"))
    for own, routing_map, combined in zip(x, w.maps, back, strict=True):
        tokens = combined if name != "hybridep" else combined.tokens
        assert torch.equal(tokens, own * routing_map.sum(1, keepdim=True).to(own.dtype))


@modest
@given(w=worlds())
def test_p2_the_layout_of_each_rank_tells_what_will_be_sent(w):
    sent = moe_ref.deepep_dispatch(names(w), w.indices, num_experts=w.experts)
    layouts = [moe_ref.deepep_layout(own, num_experts=w.experts, ranks=w.ranks) for own in w.indices]
    assert sum(own.num_tokens_per_rank for own in layouts).tolist() == [len(own.rows) for own in sent]
    assert torch.equal(sum(own.num_tokens_per_expert for own in layouts), torch.cat(fields(sent, "tokens_per_expert")))
    assert all(torch.equal(own.is_token_in_rank.any(1), m.any(1)) for own, m in zip(layouts, w.maps, strict=True))


@each_world
def test_p23_a_handle_serves_other_tokens_as_a_fresh_dispatch_would(w):
    other = [noise(w, count, 4, salt=9) for count in w.tokens]
    sent = moe_ref.deepep_dispatch(names(w), w.indices, num_experts=w.experts)
    assert_bits(
        moe_ref.deepep_cached_dispatch(other, fields(sent, "handle")),
        fields(moe_ref.deepep_dispatch(other, w.indices, num_experts=w.experts), "rows"),
    )
    sent, fresh = (moe_ref.hybridep_dispatch(x, w.maps, align=w.align, num_rows=w.num_rows) for x in (names(w), other))
    assert_bits(moe_ref.hybridep_cached_dispatch(other, fields(sent, "handle")), fields(fresh, "rows"))


# Tokens, ranks and worlds that have nothing


def test_p18_a_token_that_goes_nowhere_is_its_biases_or_positive_zero():
    x, empty = [torch.full((2, 1), torch.nan), torch.ones(0, 1)], [torch.full((2, 2), -1), torch.zeros(0, 2).long()]
    sent = moe_ref.deepep_dispatch(x, empty, num_experts=2)
    handles = fields(sent, "handle")
    rows = fields(sent, "rows")
    assert not bits(moe_ref.deepep_combine(rows, handles)[0].tokens).any()
    bias = [torch.tensor([[3.0], [-0.0]]), torch.ones(0, 1)]
    assert moe_ref.deepep_combine(rows, handles, biases=[bias, bias])[0].tokens.tolist() == [[6], [0]]
    maps = [own >= 0 for own in empty]
    for name in ("allgather", "alltoall", "hybridep"):
        sent = getattr(moe_ref, f"{name}_dispatch")(x, maps)
        back = getattr(moe_ref, f"{name}_combine")(fields(sent, "rows"), fields(sent, "handle"))
        assert not bits(back[0] if name != "hybridep" else back[0].tokens).any()
    slabs = moe_ref.deepep_low_latency_dispatch(x, empty, num_experts=2, max_tokens_per_rank=2)
    poisoned = [torch.full_like(own.rows, torch.nan) for own in slabs]
    assert not bits(
        moe_ref.deepep_low_latency_combine(
            poisoned, empty, [torch.full((2, 2), torch.nan), torch.ones(0, 2)], fields(slabs, "handle")
        )[0]
    ).any()


def test_a_token_all_of_whose_copies_were_dropped_is_zero():
    x = [torch.ones(2, 1)]
    sent = moe_ref.hybridep_dispatch(x, [torch.tensor([[1, 0], [0, 1]])], num_rows=1)
    assert moe_ref.hybridep_combine(fields(sent, "rows"), fields(sent, "handle"))[0].tokens.tolist() == [[1], [0]]


def test_the_callers_inputs_are_never_changed_nor_shared():
    w = FIXED[0]
    inputs = [*names(w), *(own.clone() for own in w.maps), *cell_numbers(w)]
    before, memory = [x.clone() for x in inputs], {x.untyped_storage().data_ptr() for x in inputs if x.numel()}
    for name in ("allgather", "alltoall", "hybridep"):
        sent = getattr(moe_ref, f"{name}_dispatch")(inputs[:4], inputs[4:8], probs=inputs[8:])
        assert not memory & {own.rows.untyped_storage().data_ptr() for own in sent if own.rows.numel()}
    assert all(torch.equal(*pair) for pair in zip(inputs, before, strict=True))


def test_a_stale_handle_is_refused():
    w = FIXED[0]
    old, new = (moe_ref.alltoall_dispatch(names(w), w.maps) for _ in range(2))
    with pytest.raises(ValueError, match="AllToAllHandle of another call"):
        moe_ref.alltoall_combine([own.rows.float() for own in new], [new[0].handle, *fields(old, "handle")[1:]])
