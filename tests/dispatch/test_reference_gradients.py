"""The dispatchers' gradients, and where their sums round: dispatch and combine are each other's
transposes, each added up in its own way.

P1 … P30: see test_plan.py.
"""

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

import moe_ref
from tests.dispatch.test_reference import by_deepep, by_expert, by_slabs, dense_layer, slot_probs, whole_numbers
from tests.dispatch.worlds import FIXED, World, assert_bits, fields, noise, world, worlds

modest = settings(max_examples=6, deadline=None, database=None, derandomize=True)
U, EPS = 2.0**-8, 2.0**-24  # unit roundoff of bfloat16 and of float32


def deepep(x: Sequence[Tensor], w: World) -> list:
    return moe_ref.deepep_dispatch(x, w.indices, num_experts=w.experts)


def slabs(x: Sequence[Tensor], w: World) -> list:
    return moe_ref.deepep_low_latency_dispatch(
        x, w.indices, num_experts=w.experts, max_tokens_per_rank=max(*w.tokens, 1)
    )


def weigh(rows: Sequence[Tensor], w: World, sent: list) -> list[Tensor]:
    ones = [torch.ones(own.shape, dtype=torch.float64) for own in w.indices]
    return moe_ref.deepep_low_latency_combine(rows, w.indices, ones, fields(sent, "handle"))


DISPATCH: dict[str, Callable] = {
    "allgather": lambda x, w: moe_ref.allgather_dispatch(x, w.maps, expert_tensor_parallel=w.shards),
    "alltoall": lambda x, w: moe_ref.alltoall_dispatch(x, w.maps, expert_tensor_parallel=w.shards),
    "alltoall, drop and pad": lambda x, w: moe_ref.alltoall_dispatch(
        x, w.maps, expert_tensor_parallel=w.shards, capacity=2
    ),
    "deepep": deepep,
    "deepep, low latency": slabs,
    "hybridep": lambda x, w: moe_ref.hybridep_dispatch(x, w.maps, align=w.align, num_rows=w.num_rows),
}
COMBINE: dict[str, Callable] = {
    "allgather": lambda rows, w, sent: moe_ref.allgather_combine(rows, fields(sent, "handle")),
    "alltoall": lambda rows, w, sent: moe_ref.alltoall_combine(rows, fields(sent, "handle")),
    "alltoall, drop and pad": lambda rows, w, sent: moe_ref.alltoall_combine(rows, fields(sent, "handle")),
    "deepep": lambda rows, w, sent: fields(moe_ref.deepep_combine(rows, fields(sent, "handle")), "tokens"),
    "deepep, low latency": weigh,
    "hybridep": lambda rows, w, sent: fields(moe_ref.hybridep_combine(rows, fields(sent, "handle")), "tokens"),
}
each_dispatcher = pytest.mark.parametrize("name", DISPATCH)


def inner(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    return sum(float((a.double() * b.double()).sum()) for a, b in zip(one, other, strict=True))


def whole(seed: int, like: Sequence[Tensor]) -> list[Tensor]:
    source = torch.Generator().manual_seed(seed)
    return [torch.randint(-8, 9, own.shape, generator=source).to(own.dtype) for own in like]


@each_dispatcher
@modest
@given(w=worlds())
def test_p14_dispatch_and_combine_are_adjoint_to_their_gradients_and_to_each_other(name, w):
    x = [torch.zeros(count, 3).requires_grad_() for count in w.tokens]
    values = whole(w.seed, x)
    sent = DISPATCH[name](x, w)
    moved = fields(DISPATCH[name](values, w), "rows")
    y = whole(w.seed + 1, moved)
    gradient = torch.autograd.grad(fields(sent, "rows"), x, y)
    assert inner(moved, y) == inner(values, gradient)
    rows = [torch.zeros_like(own).requires_grad_() for own in moved]
    combined = COMBINE[name](rows, w, sent)
    back = torch.autograd.grad(combined, rows, values)
    assert inner(COMBINE[name](y, w, sent), values) == inner(y, back)
    assert all(torch.equal(*pair) for pair in zip(COMBINE[name](y, w, sent), gradient, strict=True))


@each_dispatcher
def test_gradients_are_derivatives(name):
    w = world([2, 0, 1, 1], 1, 0.7, 1, shards=2, align=2, blocks=1)
    x = [noise(w, count, 2, dtype=torch.float64, salt=rank).requires_grad_() for rank, count in enumerate(w.tokens)]
    sent = DISPATCH[name](x, w)
    assert torch.autograd.gradcheck(lambda *x: tuple(fields(DISPATCH[name](x, w), "rows")), x)
    rows = [
        noise(w, *own.shape, dtype=torch.float64, salt=9 + rank).requires_grad_()
        for rank, own in enumerate(fields(sent, "rows"))
    ]
    assert torch.autograd.gradcheck(lambda *rows: tuple(COMBINE[name](rows, w, sent)), rows)


@each_dispatcher
@modest
@given(w=worlds())
def test_the_written_backward_is_that_of_plain_indexing(name, w):
    x = [noise(w, count, 2, dtype=torch.float64, salt=rank).requires_grad_() for rank, count in enumerate(w.tokens)]
    sent = DISPATCH[name](x, w)
    rows = [own.flatten(0, -2) for own in fields(sent, "rows")]
    cotangents = whole(w.seed, rows)
    padded = torch.cat([*x, torch.zeros(1, 2, dtype=torch.float64)])  # PADDING is the last row
    plain = [padded[own] for own in sent[0].handle.row_tokens]
    assert all(torch.equal(*pair) for pair in zip(rows, plain, strict=True))
    written, autograd = (torch.autograd.grad(outputs, x, cotangents) for outputs in (rows, plain))
    assert all(torch.equal(*pair) for pair in zip(written, autograd, strict=True))


@modest
@given(w=worlds())
def test_what_combine_is_for_one_direction_dispatch_is_for_the_other_bit_by_bit(w):
    for name, cached in (("deepep", moe_ref.deepep_cached_dispatch), ("hybridep", moe_ref.hybridep_cached_dispatch)):
        x = [noise(w, count, 3, salt=rank).requires_grad_() for rank, count in enumerate(w.tokens)]
        sent = DISPATCH[name](x, w)
        rows = [noise(w, *own.shape, salt=9 + rank).requires_grad_() for rank, own in enumerate(fields(sent, "rows"))]
        combined = COMBINE[name](rows, w, sent)
        assert_bits(torch.autograd.grad(fields(sent, "rows"), x, rows), combined)
        assert_bits(
            [own + 0.0 for own in torch.autograd.grad(combined, rows, x)],
            [own + 0.0 for own in cached(x, fields(sent, "handle"))],
        )


@modest
@given(w=worlds())
def test_p17_gradients_of_the_layer_are_those_of_one_rank(w):
    w = w._replace(num_rows=None)
    x, probs = ([own.double().requires_grad_() for own in each] for each in whole_numbers(w, torch.float64))
    cotangents = whole(w.seed, x)
    right = torch.autograd.grad(dense_layer(w, x, probs, 1), [*x, *probs], cotangents)
    layers = (
        by_expert(w, x, probs, moe_ref.allgather_dispatch, moe_ref.allgather_combine),
        by_expert(w, x, probs, moe_ref.alltoall_dispatch, moe_ref.alltoall_combine),
        by_expert(w, x, probs, moe_ref.hybridep_dispatch, moe_ref.hybridep_combine, align=w.align),
        by_deepep(w, x, probs),
        by_slabs(w, x, probs),
    )
    for layer in layers:
        got = torch.autograd.grad(layer, [*x, *probs], cotangents)
        assert all(torch.equal(*pair) for pair in zip(got, right, strict=True))


@modest
@given(w=worlds())
def test_p17_gradients_of_probs_go_to_the_cells_that_have_rows_and_shards_add(w):
    for dispatch in (moe_ref.allgather_dispatch, moe_ref.alltoall_dispatch):
        probs = [torch.zeros(own.shape, requires_grad=True) for own in w.maps]
        sent = dispatch(
            [torch.zeros(count, 1) for count in w.tokens], w.maps, probs=probs, expert_tensor_parallel=w.shards
        )
        got = torch.autograd.grad(fields(sent, "probs"), probs, [torch.ones_like(own) for own in fields(sent, "probs")])
        assert all(torch.equal(d, own * float(w.shards)) for d, own in zip(got, w.maps, strict=True))
    probs = [own.requires_grad_() for own in slot_probs(w, [torch.ones(own.shape) for own in w.maps])]
    sent = moe_ref.deepep_dispatch(
        [torch.zeros(count, 1) for count in w.tokens], w.indices, num_experts=w.experts, probs=probs
    )
    got = torch.autograd.grad(fields(sent, "probs"), probs, [torch.ones_like(own) for own in fields(sent, "probs")])
    assert all(torch.equal(d, (own >= 0).float()) for d, own in zip(got, w.indices, strict=True))


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


@pytest.mark.parametrize("w", FIXED[:3])
@each_dispatcher
def test_p15_every_tree_is_within_its_bound_of_the_exact_sum(name, w):
    sent = DISPATCH[name]([torch.zeros(count, 5, dtype=torch.bfloat16) for count in w.tokens], w)
    rows = [noise(w, *own.shape, salt=rank) for rank, own in enumerate(fields(sent, "rows"))]
    got = torch.cat(COMBINE[name](rows, w, sent)).double()
    exact = torch.cat(COMBINE[name]([own.double() for own in rows], w, sent))
    size = torch.cat(COMBINE[name]([own.double().abs() for own in rows], w, sent))
    between = U * (1 + U) * size  # rounded on the way too; Σ|partial sums| ≤ size
    flat = name.startswith("deepep") or (name.startswith("alltoall") and w.shards == 1)
    count = w.experts * w.shards + w.ranks
    bound = U * exact.abs() + (0 if flat else between) + EPS * (1 + U) * count * size
    assert ((got - exact).abs() <= bound).all()
    assert not torch.equal(got, exact)
