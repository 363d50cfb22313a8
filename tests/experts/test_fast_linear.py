"""grouped_linear in `moe_fast`: what the gate does not judge. Descriptors, tile plans, computed
gradients, refusals, errors.
"""

from dataclasses import replace
from importlib import import_module

import pytest
import torch
from torch import Tensor

import moe_fast
from moe_fast.experts.segments import plan_of
from moe_fast.launch import backend, tuning
from moe_fast.launch.tuning import GroupedTile
from moe_ref.config import Recipe
from tests.common.fast import interpreted, normal, record_reads

pytestmark = interpreted
module = import_module("moe_fast.experts.linear")
COUNTS = {
    "uneven": [1, 17, 8],
    "first empty": [0, 13, 9],
    "middle empty": [9, 0, 13],
    "last empty": [13, 9, 0],
    "all empty": [0, 0, 0],
    "one for all": [0, 30, 0],
    "one expert": [23],
    "whole tiles": [8, 16, 4],
}


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


def problem(counts: list[int], ins: int = 24, outs: int = 32, *, rows: int = 30, dtype=torch.bfloat16, tail=torch.nan):
    """x, W, b, counts and the gradient of the output; the rows past the last segment are `tail`."""
    x, d_out = normal(rows, ins, seed=1, dtype=dtype), normal(rows, outs, seed=2, dtype=dtype)
    x[sum(counts) :] = d_out[sum(counts) :] = tail
    weight, bias = normal(len(counts), outs, ins, seed=3, dtype=dtype), normal(len(counts), outs, seed=4, dtype=dtype)
    return x, weight, bias, torch.tensor(counts), d_out


def results(x, weight, bias, tokens_per_expert, d_out) -> list[Tensor]:
    """out, dx, dW and db."""
    leaves = [tensor.detach().requires_grad_() for tensor in (x, weight, bias)]
    out = moe_fast.grouped_linear(*leaves[:2], tokens_per_expert, bias=leaves[2])
    return [out.detach(), *torch.autograd.grad(out, leaves, d_out)]


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(a, b, strict=True))


# Forms of a launch


@pytest.mark.parametrize(
    "counts, dtype",
    [("uneven", torch.bfloat16), ("middle empty", torch.float16), ("all empty", torch.bfloat16)],
    ids=str,
)
def test_descriptors_give_the_bits_of_pointers(counts, dtype, small_blocks, monkeypatch):
    inputs = x, _, _, tokens_per_expert, d_out = problem(COUNTS[counts], dtype=dtype)
    into = normal(3, 32, 24, seed=5)

    def both() -> list[Tensor]:
        return [*results(*inputs), moe_fast.grouped_wgrad(d_out, x, tokens_per_expert, accumulate_into=into)]

    by_pointers = both()
    described = []
    monkeypatch.setattr(backend, "has_descriptors", lambda device: True)
    for name in ("_matmul_descriptors", "expert_slices"):
        make = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *arguments, name=name, make=make: described.append(name) or make(*arguments)
        )
    assert equal(both(), by_pointers)
    assert described == ["_matmul_descriptors", "expert_slices"] * 2 + ["expert_slices"] * 4


def test_descriptors_are_left_out_where_there_can_be_none(small_blocks, monkeypatch):
    x, weight, bias, counts, d_out = problem(COUNTS["uneven"])
    odd = (x[:, 1:], weight[..., 1:], bias, counts, d_out)  # addresses not multiples of 16 bytes
    columns = (x.t().contiguous().t(), weight.mT.contiguous().mT, bias, counts, d_out[:1].expand(30, -1))
    by_pointers = [results(*odd), results(*columns)]
    monkeypatch.setattr(backend, "has_descriptors", lambda device: True)
    assert equal(results(*odd), by_pointers[0]) and equal(results(*columns), by_pointers[1])


@pytest.mark.parametrize("wanted", ["x", "weight", "bias", "x weight", "weight bias", ""])
def test_only_the_gradients_that_are_asked_for_are_computed(wanted, monkeypatch):
    x, weight, bias, counts, d_out = problem([3, 2], rows=5, tail=0.0)
    leaves = {"x": x, "weight": weight, "bias": bias}
    for name in wanted.split():
        leaves[name].requires_grad_()
    out = moe_fast.grouped_linear(x, weight, counts, bias=bias)
    assert out.requires_grad == bool(wanted)
    computed = []
    for name, what in (("_multiply", "x"), ("_outer_products", "weight"), ("segment_sums", "bias")):
        monkeypatch.setattr(module, name, lambda *_, what=what: computed.append(what) or torch.zeros_like(leaves[what]))
    if wanted:
        torch.autograd.grad(out, [leaves[name] for name in wanted.split()], d_out)
    assert computed == wanted.split()


def test_the_device_is_never_read(monkeypatch):
    inputs = problem([3, 0, 2], rows=6)
    reads = record_reads(monkeypatch)
    results(*inputs)
    assert reads == []


def test_a_pending_minus_is_carried_out():
    x, weight, bias, counts, d_out = problem([3, 2], rows=5, dtype=torch.float32)
    negated = [torch.complex(tensor, -tensor).conj().imag for tensor in (x, weight, bias, d_out)]
    assert all(tensor.is_neg() for tensor in negated)
    assert equal(results(*negated[:3], counts, negated[3]), results(x, weight, bias, counts, d_out))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_an_expert_without_rows_keeps_every_bit_of_its_gradient(dtype):
    x, _, _, counts, d_out = problem(COUNTS["last empty"])
    into = normal(3, 32, 24, seed=5, dtype=dtype)
    into[2, 0, 0], into[2, 0, 1] = -0.0, torch.nan
    got = moe_fast.grouped_wgrad(d_out, x, counts, accumulate_into=into)
    assert torch.equal(got[2].view(torch.uint8), into[2].view(torch.uint8))


def test_counts_that_change_after_the_forward_do_not_reach_the_backward(small_blocks):
    x, weight, bias, counts, d_out = problem(COUNTS["uneven"])
    leaves = [tensor.clone().requires_grad_() for tensor in (x, weight, bias)]
    call_counts = counts.clone()
    out = moe_fast.grouped_linear(*leaves[:2], call_counts, bias=leaves[2])
    call_counts.zero_()
    assert equal([out.detach(), *torch.autograd.grad(out, leaves, d_out)], results(x, weight, bias, counts, d_out))


@pytest.mark.parametrize("counts", [*COUNTS.values(), [3] * 40, [0, 1] * 20, [97, 1, 1, 21]], ids=str)
def test_the_plan_lists_every_tile_of_every_expert(counts, small_blocks):
    rows = sum(counts) + 3
    plan = plan_of(torch.tensor(counts), torch.zeros(rows, 1, dtype=torch.bfloat16))
    ends = [sum(counts[: e + 1]) for e in range(len(counts))]
    tiles, firsts = [], []
    for e, (count, end) in enumerate(zip(counts, ends, strict=True)):
        firsts.append(len(tiles))
        tiles += [[e, firsts[e], end - count, end]] * -(-count // 8)
    assert plan.total_2.tolist() == [len(tiles), sum(counts)] and len(tiles) <= plan.capacity
    assert plan.tile_4C[:, : len(tiles)].t().tolist() == tiles
    segments = [[end - count, end, first] for count, end, first in zip(counts, ends, firsts, strict=True)]
    assert plan.segment_3L.t().tolist() == segments


def test_a_plan_gets_back_the_tensors_that_autograd_saves():
    counts = torch.tensor([5, 0, 9])
    plan = plan_of(counts, torch.zeros(14, 1))
    cuts = [plan.cut(rows, counts) for rows in (2, 4)]
    bare = plan.without_tensors()
    assert not any(tensor.numel() for tensor in bare.tensors) and len(plan.tensors) == 9
    assert plan.tensors[3:] == (*cuts[0].tensors, *cuts[1].tensors)
    restored = bare.with_tensors(plan.tensors)
    assert all(a is b for a, b in zip(restored.tensors, plan.tensors, strict=True))
    assert restored.cut(4, counts).total_2 is cuts[1].total_2 and restored.cut(4, counts).tile.rows == 4


def test_experts_with_few_rows_have_small_tiles():
    sizes = tuning.GPU.grouped
    assert [sizes.tile(rows, 8, 2).rows for rows in (0, 128, 129, 512, 513, 10**6)] == [16, 16, 64, 64, 128, 128]
    assert sizes.tile(10**6, 8, 4) == sizes.tile(0, 8, 8) == sizes.wide
    assert (sizes.wgrad_tile(2), sizes.wgrad_tile(4)) == (sizes.wgrad, sizes.wgrad_wide)


# Illegal values and refusals


@pytest.mark.parametrize(
    "counts", [[2**40, -5, 3], [2**62, 2**62, 2**62], [-1, -1, -1], [20, 20, 20], [-7, 40, 2]], ids=str
)
def test_illegal_counts_stay_within_memory_and_make_every_result_nan(counts, small_blocks):
    x, weight, bias, _, d_out = problem([30], tail=0.0)
    weight, bias = weight.expand(3, -1, -1), bias.expand(3, -1)
    assert all(value.isnan().all() for value in results(x, weight, bias, torch.tensor(counts), d_out))


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


def test_the_gradient_of_a_transposed_weight_has_the_weights_layout():
    x, weight, bias, counts, d_out = problem(COUNTS["uneven"], tail=0.0)
    transposed = weight.mT.contiguous().mT
    expected, gradients = (results(x, w, bias, counts, d_out) for w in (weight, transposed))
    assert gradients[2].stride() == transposed.stride()
    assert all(torch.equal(a, b) for a, b in zip(expected, gradients, strict=True))
