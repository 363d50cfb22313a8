"""grouped_linear of `moe_fast` and its gradients: within the rounding of float32 sums of each expert's own product, for any sizes."""

from dataclasses import replace
from importlib import import_module

import pytest
import torch
from torch import Tensor

import moe_fast
from conformance.judge.bound import Bounded, sum_bound
from moe_fast.launch import backend, tuning
from moe_fast.launch.tuning import GroupedTile
from moe_ref.config import Recipe

pytestmark = pytest.mark.skipif(not backend.INTERPRETED, reason="the tensors of these tests are on the CPU")
module, reference = import_module("moe_fast.experts.linear"), import_module("moe_ref.experts.linear")
EMPTY = torch.empty
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
ROWS = 30
COUNTS = {
    "even": [10, 10, 10],
    "uneven": [1, 17, 8],
    "first empty": [0, 13, 9],
    "middle empty": [9, 0, 13],
    "last empty": [13, 9, 0],
    "all empty": [0, 0, 0],
    "one for all": [0, 30, 0],
    "one expert": [23],
    "one row each": [1] * 8,
    "whole tiles": [8, 16, 4],
}


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    """Fresh memory is full of ones: NaN in every float, -1 in every integer."""

    def poisoned(*arguments, **settings):
        fresh = EMPTY(*arguments, **settings)
        fresh.untyped_storage().fill_(0xFF)
        return fresh

    monkeypatch.setattr(torch, "empty", poisoned)


@pytest.fixture(params=["pointers", "descriptors"])
def form(request, monkeypatch):
    """How tiles are moved. The interpreter knows descriptors too."""
    monkeypatch.setattr(backend, "has_descriptors", lambda device: request.param == "descriptors")
    return request.param


@pytest.fixture
def small_blocks(monkeypatch):
    """Everything spans several tiles, steps and programs."""
    tile = GroupedTile(rows=8, columns=16, depth=16, num_warps=4, num_stages=1)
    sizes = {
        "by_rows": (tile,),
        "wide": tile,
        "wgrad": replace(tile, rows=16, depth=8),
        "wgrad_wide": replace(tile, rows=16, depth=8),
    }
    grouped = replace(tuning.INTERPRETER.grouped, **sizes, sums=tuning.Tile(4, 8, 4), plan_tiles=2)
    monkeypatch.setattr(tuning, "INTERPRETER", replace(tuning.INTERPRETER, grouped=grouped))


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def problem(
    counts: list[int],
    ins: int = 24,
    outs: int = 32,
    *,
    rows: int = ROWS,
    dtype: torch.dtype = torch.bfloat16,
    tail: float = torch.nan,
):
    """x, W, b, counts and the gradient of the output; `tail` stands in the rows behind the last segment."""
    x, d_out = normal(rows, ins, seed=1, dtype=dtype), normal(rows, outs, seed=2, dtype=dtype)
    x[sum(counts) :] = d_out[sum(counts) :] = tail
    weight, bias = normal(len(counts), outs, ins, seed=3, dtype=dtype), normal(len(counts), outs, seed=4, dtype=dtype)
    return x, weight, bias, torch.tensor(counts), d_out


def results(function, x, weight, bias, tokens_per_expert, d_out) -> list[Tensor]:
    """out, dx, dW and db."""
    leaves = [tensor.detach().requires_grad_() for tensor in (x, weight, bias)]
    out = function(*leaves[:2], tokens_per_expert, bias=leaves[2])
    return [out.detach(), *torch.autograd.grad(out, leaves, d_out)]


def products(x, weight, bias, tokens_per_expert, d_out) -> list[Tensor]:
    """The same, an expert at a time."""
    out, d_x = torch.zeros_like(d_out), torch.zeros_like(x)
    d_weight, d_bias = torch.zeros_like(weight), torch.zeros_like(bias)
    begin = 0
    for e, count in enumerate(tokens_per_expert.tolist()):
        own = slice(begin, begin + count)
        out[own] = torch.einsum("pn,mn->pm", x[own], weight[e]) + bias[e]
        d_x[own] = torch.einsum("pm,mn->pn", d_out[own], weight[e])
        d_weight[e] = torch.einsum("pm,pn->mn", d_out[own], x[own])
        d_bias[e] = d_out[own].sum(0)
        begin += count
    return [out, d_x, d_weight, d_bias]


def bounds(x, weight, bias, tokens_per_expert, d_out) -> list[Bounded]:
    """What float64 finds, and how far a sum in float32 that is rounded once may be from it: a term meets the rounding of its product
    and of every addition but one. With float64 rows the expectation is rounded as well."""
    inputs = [tensor.double() for tensor in (x, weight, bias)]
    values = products(*inputs, tokens_per_expert, d_out.double())
    sizes = products(*(tensor.abs() for tensor in inputs), tokens_per_expert, d_out.double().abs())
    most = max([1, *tokens_per_expert.tolist()])
    wide, times = (torch.float64, 2) if x.dtype == torch.float64 else (torch.float32, 1)
    terms = (x.shape[1] + 1, d_out.shape[1], most, most)
    dtypes = (x.dtype, x.dtype, x.dtype, bias.dtype)
    return [
        sum_bound(value, size, times * (n + 1), dtype, wide)
        for value, size, n, dtype in zip(values, sizes, terms, dtypes, strict=True)
    ]


def outside(observed: list[Tensor], *inputs) -> list[int]:
    """Which of out, dx, dW and db are not right."""
    pairs = enumerate(zip(bounds(*inputs), observed, strict=True))
    return [
        i
        for i, (right, got) in pairs
        if got.dtype != right.dtype or got.shape != right.value.shape or right.wrong(got) is not None
    ]


def assert_right(*inputs) -> None:
    assert outside(results(moe_fast.grouped_linear, *inputs), *inputs) == []


# Values


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_output_and_gradients_are_each_experts_own_product(counts, small_blocks):
    assert_right(*problem(counts))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_right(dtype, small_blocks):
    assert_right(*problem(COUNTS["middle empty"], dtype=dtype))


@pytest.mark.parametrize(
    "counts, dtype",
    [("uneven", torch.bfloat16), ("middle empty", torch.float16), ("all empty", torch.bfloat16)],
    ids=str,
)
def test_descriptors_give_the_bits_of_pointers(counts, dtype, small_blocks, monkeypatch):
    inputs = problem(COUNTS[counts], dtype=dtype)
    by_pointers = results(moe_fast.grouped_linear, *inputs)
    described = []
    monkeypatch.setattr(backend, "has_descriptors", lambda device: True)
    for name in ("_matmul_descriptors", "_segments"):
        make = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *arguments, name=name, make=make: described.append(name) or make(*arguments)
        )
    by_descriptors = results(moe_fast.grouped_linear, *inputs)
    assert described == ["_matmul_descriptors", "_segments"] * 2 + ["_segments"] * 2
    assert all(torch.equal(a, b) for a, b in zip(by_pointers, by_descriptors, strict=True))


@pytest.mark.parametrize("ins, outs", [(1, 1), (1, 20), (17, 1), (17, 33)], ids=str)
def test_widths_that_fill_no_tile_are_right(ins, outs, small_blocks):
    assert_right(*problem(COUNTS["uneven"], ins, outs))


@pytest.mark.parametrize("counts, rows", [([0, 0], 0), ([0], 1), ([1], 1), ([0, 1, 0], 1), ([2], 20)], ids=str)
def test_few_rows_or_none_are_right(counts, rows, small_blocks, form):
    assert_right(*problem(counts, rows=rows))


@pytest.mark.parametrize("ins, outs", [(0, 3), (3, 0)], ids=str)
def test_layers_without_inputs_or_outputs_are_right(ins, outs):
    assert_right(*problem([2, 3], ins, outs))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_sizes_beyond_every_block_are_right(dtype, form):
    assert_right(*problem([3, 0, 70, 5], 136, 72, rows=90, dtype=dtype))


def test_a_deep_sum_is_right(form):
    x, weight, bias, counts, d_out = problem([2, 3], 2880, 8, rows=6)
    out = moe_fast.grouped_linear(x, weight, counts, bias=bias)
    assert bounds(x, weight, bias, counts, d_out)[0].wrong(out) is None


def test_counts_may_be_strided_and_narrow(small_blocks):
    x, weight, bias, counts, d_out = problem(COUNTS["uneven"])
    spread = torch.full((3, 2), 99, dtype=torch.int32)
    spread[:, 0] = counts
    assert_right(x, weight, bias, spread[:, 0], d_out)


@pytest.mark.parametrize(
    "rows_dtype, dtype",
    [(torch.bfloat16, torch.float32), (torch.float16, torch.float64), (torch.float64, torch.bfloat16)],
    ids=str,
)
def test_a_bias_of_any_dtype_is_right(rows_dtype, dtype, small_blocks):
    x, weight, bias, counts, d_out = problem(COUNTS["uneven"], dtype=rows_dtype)
    assert_right(x, weight, bias.to(dtype), counts, d_out)


def test_the_bias_is_added_before_the_rounding():
    x, weight = torch.tensor([[256.0, 1.0]]).bfloat16(), torch.ones(1, 1, 2).bfloat16()  # 257 is 256 in bfloat16
    assert moe_fast.grouped_linear(x, weight, torch.tensor([1]), bias=torch.ones(1, 1)).item() == 258


def test_the_comparison_sees_what_may_go_wrong():
    inputs = problem([9, 0, 13], 200, 40)
    x, weight, bias, counts, d_out = (tensor.double().nan_to_num() for tensor in inputs)
    counts = inputs[3]
    right = [value.to(torch.bfloat16) for value in products(x, weight, bias, counts, d_out)]
    assert outside(right, *inputs) == []

    def wrong(*changed) -> list[int]:
        return outside([value.to(torch.bfloat16) for value in products(*changed)], *inputs)

    assert wrong(x, weight.roll(1, 0), bias, counts, d_out) == [0, 1]
    assert wrong(x, weight, bias * 0, counts, d_out) == [0]
    assert wrong(x, weight, bias, counts + torch.tensor([1, 0, -1]), d_out) == [0, 1, 2, 3]
    assert wrong(x, weight, bias, counts - torch.tensor([0, 0, 1]), d_out) == [0, 1, 2, 3]
    assert wrong(x[:, 1:], weight[..., 1:], bias, counts, d_out) == [0, 1, 2]
    assert outside([value.float() for value in right], *inputs) == [0, 1, 2, 3]
    tail = [value.clone() for value in right]
    tail[0][-1], tail[1][-1] = torch.nan, 2.0**-130
    assert outside(tail, *inputs) == [0, 1]
    low = torch.zeros(9, 40, dtype=torch.bfloat16)
    for n in range(200):
        low += inputs[0][:9, n, None] * inputs[1][0, :, n]  # rounded at each step
    assert outside([torch.cat([low + inputs[2][0], right[0][9:]]), *right[1:]], *inputs) == [0]


# What does not belong to an expert


@pytest.mark.parametrize("odd", [torch.nan, torch.inf], ids=str)
def test_a_nan_in_an_experts_rows_stays_with_it(odd, small_blocks, form):
    x, weight, bias, counts, d_out = problem([5, 6, 7])
    clean = results(moe_fast.grouped_linear, x, weight, bias, counts, d_out)
    x[5:11] = d_out[5:11] = odd
    out, d_x, d_weight, d_bias = results(moe_fast.grouped_linear, x, weight, bias, counts, d_out)
    for got, right in zip((out, d_x), clean[:2], strict=True):
        assert torch.equal(got[:5], right[:5]) and torch.equal(got[11:], right[11:]) and not got[5:11].isfinite().any()
    for got, right in zip((d_weight, d_bias), clean[2:], strict=True):
        assert torch.equal(got[[0, 2]], right[[0, 2]]) and not got[1].isfinite().any()


def test_a_nan_in_an_experts_weight_stays_with_it(small_blocks, form):
    x, weight, bias, counts, d_out = problem([5, 6, 7])
    clean = results(moe_fast.grouped_linear, x, weight, bias, counts, d_out)[:2]
    weight[1] = torch.nan
    for got, right in zip(results(moe_fast.grouped_linear, x, weight, bias, counts, d_out)[:2], clean, strict=True):
        assert torch.equal(got[:5], right[:5]) and torch.equal(got[11:], right[11:]) and got[5:11].isnan().all()


@pytest.mark.parametrize("tail", [torch.nan, torch.inf], ids=str)
def test_rows_behind_the_last_segment_are_zero_and_reach_nothing(tail, small_blocks, form):
    inputs = problem([5, 0, 7], tail=tail)
    got, right = (
        results(moe_fast.grouped_linear, *inputs),
        results(moe_fast.grouped_linear, *problem([5, 0, 7], tail=0.0)),
    )
    assert all(torch.equal(a, b) for a, b in zip(got, right, strict=True))
    assert not got[0][12:].any() and not got[1][12:].any()


@pytest.mark.parametrize(
    "counts", [[2**40, -5, 3], [2**62, 2**62, 2**62], [-1, -1, -1], [20, 20, 20], [-7, 40, 2]], ids=str
)
def test_illegal_counts_stay_within_memory(counts, small_blocks):
    x, weight, bias, _, d_out = problem([30], tail=0.0)
    weight, bias = weight.expand(3, -1, -1), bias.expand(3, -1)
    assert all(
        value.isfinite().all()
        for value in results(moe_fast.grouped_linear, x, weight, bias, torch.tensor(counts), d_out)
    )


# The gradients as functions


def test_the_gradients_alone_are_those_of_the_backward(small_blocks):
    inputs = x, weight, _, counts, d_out = problem(COUNTS["uneven"])
    _, d_x, d_weight, _ = results(moe_fast.grouped_linear, *inputs)
    assert torch.equal(moe_fast.grouped_dgrad(d_out, weight, counts), d_x)
    assert torch.equal(moe_fast.grouped_wgrad(d_out, x, counts), d_weight)


def keeping(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Values among which are -0 and a NaN with a payload, in the last expert."""
    before = normal(*shape, seed=5, dtype=dtype)
    bits = before.view(torch.int32 if dtype == torch.float32 else torch.int64)
    bits[-1, 0, 0], bits[-1, 0, 1] = (
        torch.iinfo(bits.dtype).min,
        torch.tensor(torch.nan, dtype=dtype).view(bits.dtype) + 5,
    )
    return before


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    "rows_dtype, strided", [(torch.bfloat16, False), (torch.float32, True), (torch.float64, False)], ids=str
)
def test_the_weights_gradient_is_added_to_what_there_is(rows_dtype, strided, dtype, small_blocks, form):
    inputs = x, _, _, counts, d_out = problem(COUNTS["last empty"], dtype=rows_dtype)
    before = keeping(dtype, (3, 32, 24))
    given = before.clone().mT.contiguous().mT if strided else before.clone()
    got = moe_fast.grouped_wgrad(d_out, x, counts, accumulate_into=given)
    product = bounds(*inputs)[2]
    wide = torch.float64 if torch.float64 in (rows_dtype, dtype) else torch.float32
    size = (
        before.double().abs()
        + products(*(tensor.double().abs() for tensor in inputs[:3]), counts, d_out.double().abs())[2]
    )
    sums = torch.float64 if rows_dtype == torch.float64 else torch.float32
    right = sum_bound(
        before.double() + product.value, size, 2 * 14 if wide == sums == torch.float64 else 15, dtype, sums
    )
    kept = before[2].view(torch.uint8)
    assert (
        got.dtype == dtype
        and torch.equal(got[2].view(torch.uint8), kept)
        and torch.equal(given[2].contiguous().view(torch.uint8), kept)
    )
    assert right.first(2).wrong(got[:2]) is None
    assert right.first(2).wrong(moe_fast.grouped_wgrad(d_out, x, counts)[:2]) is not None
    assert torch.equal(given[:2], before[:2])


# Memory


def test_inputs_may_have_any_strides(small_blocks):
    x, weight, bias, counts, d_out = problem(COUNTS["uneven"])
    assert_right(
        x.t().contiguous().t(), weight.mT.contiguous().mT, bias.t().contiguous().t(), counts, d_out.t().contiguous().t()
    )
    assert_right(
        x.repeat(1, 2)[:, ::2],
        weight.repeat(1, 2, 2)[:, ::2, ::2],
        bias[:, :1].expand(-1, 32),
        counts,
        d_out.repeat(2, 1)[::2],
    )
    assert_right(x, weight[:1].expand(3, -1, -1), bias, counts, torch.ones((), dtype=x.dtype).expand(ROWS, 32))


def test_descriptors_are_left_out_where_there_can_be_none(small_blocks, monkeypatch):
    monkeypatch.setattr(backend, "has_descriptors", lambda device: True)
    x, weight, bias, counts, d_out = problem(COUNTS["uneven"])
    assert_right(x[:, 1:], weight[..., 1:], bias, counts, d_out)  # addresses that are no multiples of 16 bytes
    assert_right(
        x.t().contiguous().t(),
        weight.mT.contiguous().mT,
        bias,
        counts,
        d_out[:1].expand(counts.sum(), -1).repeat(2, 1)[:ROWS],
    )


def test_a_pending_minus_is_carried_out():
    x, weight, bias, counts, d_out = problem([3, 2], rows=5, dtype=torch.float32)
    x, weight, bias, d_out = (torch.complex(tensor, -tensor).conj().imag for tensor in (x, weight, bias, d_out))
    assert all(tensor.is_neg() for tensor in (x, weight, bias, d_out))
    assert_right(x, weight, bias, counts, d_out)


def wide(values: Tensor) -> Tensor:
    """The same values, first dimension 2³⁰ elements apart, in memory that is never touched between them."""
    inner = values[0].numel()
    far = EMPTY((len(values) - 1) * 2**30 + inner, dtype=values.dtype).as_strided(
        values.shape, (2**30, *values[0].stride())
    )
    return far.copy_(values)


@pytest.mark.parametrize("turned", [False, True], ids=["far rows", "far columns"])
@pytest.mark.parametrize("which", ["x", "d_out", "weight"])
def test_what_lies_far_apart_is_read(which, turned):
    inputs = list(problem([2, 1, 1], 4, 4, rows=4))
    i = {"x": 0, "weight": 1, "d_out": 4}[which]
    inputs[i] = wide(inputs[i].transpose(0, -1).contiguous()).transpose(0, -1) if turned else wide(inputs[i])
    assert_right(*inputs)


def test_inputs_are_not_changed(small_blocks):
    inputs = problem(COUNTS["uneven"], tail=0.0)
    copies = [tensor.clone() for tensor in inputs]
    results(moe_fast.grouped_linear, *inputs)
    assert all(torch.equal(a, b) for a, b in zip(inputs, copies, strict=True))


def test_counts_that_change_after_the_forward_do_not_reach_the_backward(small_blocks):
    x, weight, bias, counts, d_out = problem(COUNTS["uneven"])
    leaves = [tensor.requires_grad_() for tensor in (x, weight, bias)]
    given = counts.clone()
    out = moe_fast.grouped_linear(*leaves[:2], given, bias=bias)
    given.zero_()
    got = [out.detach(), *torch.autograd.grad(out, leaves, d_out)]
    assert outside(got, *(tensor.detach() for tensor in (x, weight, bias, counts, d_out))) == []


def test_two_runs_give_the_same_bits(small_blocks):
    inputs = problem(COUNTS["uneven"])
    first, second = (results(moe_fast.grouped_linear, *inputs) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# What is computed


@pytest.mark.parametrize("wanted", ["x", "weight", "bias", "x weight", "weight bias", ""])
def test_only_the_gradients_that_are_asked_for_are_computed(wanted, monkeypatch):
    x, weight, bias, counts, d_out = problem([3, 2], rows=5, tail=0.0)
    leaves = {"x": x, "weight": weight, "bias": bias}
    for name in wanted.split():
        leaves[name].requires_grad_()
    out = moe_fast.grouped_linear(x, weight, counts, bias=bias)
    assert out.requires_grad == bool(wanted)
    computed = []
    for name, what in (("_multiply", "x"), ("_outer_products", "weight"), ("_segment_sums", "bias")):
        monkeypatch.setattr(module, name, lambda *_, what=what: computed.append(what) or torch.zeros_like(leaves[what]))
    if wanted:
        torch.autograd.grad(out, [leaves[name] for name in wanted.split()], d_out)
    assert computed == wanted.split()


READS = ("item", "tolist", "nonzero", "__int__", "__index__", "__bool__", "__float__", "cpu", "numpy")


def test_the_device_is_never_read(monkeypatch):
    inputs = problem([3, 0, 2], rows=6)
    seen = []
    for name in READS:
        original = getattr(Tensor, name)
        monkeypatch.setattr(
            Tensor, name, lambda self, *rest, original=original: seen.append(self) or original(self, *rest)
        )
    results(moe_fast.grouped_linear, *inputs)
    assert seen == []
    results(reference.grouped_linear, *inputs)  # which does read it
    assert seen


@pytest.mark.parametrize("counts", [*COUNTS.values(), [3] * 40, [0, 1] * 20, [97, 1, 1, 21]], ids=str)
def test_the_plan_lists_every_tile_of_every_expert(counts, small_blocks):
    rows = sum(counts) + 3
    plan = module._plan(torch.tensor(counts), torch.zeros(rows, 1, dtype=torch.bfloat16))
    ends = [sum(counts[: e + 1]) for e in range(len(counts))]
    tiles, firsts = [], []
    for e, (count, end) in enumerate(zip(counts, ends, strict=True)):
        firsts.append(len(tiles))
        tiles += [[e, firsts[e], end - count, end]] * -(-count // 8)
    assert plan.total_2.tolist() == [len(tiles), sum(counts)] and len(tiles) <= plan.capacity
    assert plan.tile_4C[:, : len(tiles)].t().tolist() == tiles
    assert (plan.tile_4C[:, len(tiles) :] == -1).all()  # what nobody reads nobody wrote
    assert plan.segment_2L.t().tolist() == [[end - count, end] for count, end in zip(counts, ends, strict=True)]


def test_experts_with_few_rows_have_small_tiles():
    sizes = tuning.GPU.grouped
    assert [sizes.tile(rows, 8, 2).rows for rows in (0, 128, 129, 512, 513, 10**6)] == [16, 16, 64, 64, 128, 128]
    assert sizes.tile(10**6, 8, 4) == sizes.tile(0, 8, 8) == sizes.wide
    assert (sizes.wgrad_tile(2), sizes.wgrad_tile(4)) == (sizes.wgrad, sizes.wgrad_wide)


# What is refused


@pytest.mark.parametrize("function", ["grouped_linear", "grouped_dgrad", "grouped_wgrad"])
def test_what_is_not_computed_is_refused_and_declared(function):
    x, weight, _, counts, d_out = problem([3, 2], rows=5, tail=0.0)
    arguments = {"grouped_linear": (x, weight), "grouped_dgrad": (d_out, weight), "grouped_wgrad": (d_out, x)}[function]
    for settings, argument in (
        ({"accumulator": "float64"}, "accumulator"),
        ({"recipe": Recipe("current"), "accumulator": "float64"}, "accumulator"),
    ):
        assert moe_fast.supports(function, *arguments, counts, **settings).startswith(argument)
        with pytest.raises(ValueError, match=argument):
            getattr(moe_fast, function)(*arguments, counts, **settings)
    assert moe_fast.supports(function, *arguments, counts) is None
    doubles = [tensor.double() for tensor in arguments]
    assert moe_fast.supports(function, *doubles, counts, accumulator="float64") is None
    assert moe_fast.supports(function, *doubles, counts, recipe=Recipe("current")).startswith("rows")


ILLEGAL = {
    "weight of another width": lambda x, w, b, c: ((x, w[..., 1:], c), {}),
    "weight of another dtype": lambda x, w, b, c: ((x, w.float(), c), {}),
    "too few counts": lambda x, w, b, c: ((x, w, c[1:]), {}),
    "counts that are no integers": lambda x, w, b, c: ((x, w, c.float()), {}),
    "bias of another width": lambda x, w, b, c: ((x, w, c), {"bias": b[:, 1:]}),
    "rows of integers": lambda x, w, b, c: ((x.int(), w.int(), c), {}),
    "an accumulator there is none of": lambda x, w, b, c: ((x, w, c), {"accumulator": "bfloat16"}),
    "noise without a recipe": lambda x, w, b, c: ((x, w, c), {"noise": x}),
}


@pytest.mark.parametrize("illegal", ILLEGAL.values(), ids=ILLEGAL)
def test_illegal_calls_raise_as_the_reference_does(illegal):
    arguments, settings = illegal(*problem([3, 2], rows=5, tail=0.0)[:4])
    messages = []
    for namespace in (moe_fast, reference):
        with pytest.raises(ValueError) as caught:
            namespace.grouped_linear(*arguments, **settings)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
