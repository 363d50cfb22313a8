"""moe_fast's expert MLPs: the reference's values and gradients, and what only they have: bits that repeat, little that is kept, padding."""

from functools import partial

import pytest
import torch

import moe_fast
import moe_ref
from moe_fast.experts.padding import Padding
from moe_ref.config import Recipe
from moe_ref.experts.mlp import pad_segments, trim_segments
from tests.judge.near import near

ROUGH = {torch.float32: 2e-6, torch.bfloat16: 0.02, torch.float64: 1e-14}  # why: some roundings of each stage


def inputs(dtype=torch.float32, counts=(3, 0, 2), tail=2, hidden=6, width=5, gated=True):
    """rows, counts, weights, and settings with probs and biases; NaN behind the last segment."""
    generator = torch.Generator().manual_seed(7)

    def normal(*shape, kind=dtype):
        return torch.randn(*shape, generator=generator).to(kind)

    rows, experts = sum(counts) + tail, len(counts)
    x, probs = normal(rows, hidden), normal(rows, kind=torch.float32)
    x[sum(counts) :], probs[sum(counts) :] = torch.nan, torch.nan
    first = 2 * width if gated else width
    weights = normal(experts, first, hidden) / 2, normal(experts, hidden, width) / 2
    return (x, torch.tensor(counts), *weights), {
        "probs": probs,
        "fc1_bias": normal(experts, first),
        "fc2_bias": normal(experts, hidden),
    }


def results(function, tensors, settings):
    """The output, and the gradient of everything that is floating point."""
    x, counts, *weights = tensors
    leaves = {
        name: y.clone().requires_grad_()
        for name, y in {"x": x, **dict(enumerate(weights)), **settings}.items()
        if isinstance(y, torch.Tensor)
    }
    out = function(
        leaves["x"], counts, leaves[0], leaves[1], **{name: leaves.get(name, y) for name, y in settings.items()}
    )
    d_out = torch.linspace(-1, 1, out.numel()).reshape(out.shape).to(out.dtype)
    d_out[int(counts.sum()) :] = torch.nan
    return [out.detach(), *torch.autograd.grad(out, list(leaves.values()), d_out)]


@pytest.mark.parametrize("dtype", ROUGH)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"probs_on_input": True},
        {"kind": "gelu"},
        {"kind": "quick_geglu", "clamp": 0.5, "offset": 1.0, "interleave": 1},
        {"align": 4},
    ],
    ids=str,
)
def test_values_and_gradients_are_the_references(settings, dtype):
    tensors, more = inputs(dtype, gated=settings.get("kind") != "gelu")
    for got, right in zip(
        results(moe_fast.grouped_mlp, tensors, more | settings),
        results(moe_ref.grouped_mlp, tensors, more | settings),
        strict=True,
    ):
        assert got.dtype == right.dtype
        assert (got.double() - right.double()).abs().max() <= ROUGH[dtype] * max(1.0, float(right.abs().max()))


@pytest.mark.parametrize("recompute", ["moe_act", "moe"])
def test_what_is_computed_again_has_the_same_bits(recompute):
    tensors, settings = inputs()
    first, second = (results(moe_fast.grouped_mlp, tensors, settings | how) for how in ({}, {"recompute": recompute}))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_an_alignment_changes_no_bit_without_a_recipe():
    tensors, settings = inputs()
    first, second = (results(moe_fast.grouped_mlp, tensors, settings | how) for how in ({}, {"align": 16}))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def kept(recompute) -> int:
    """Bytes that the backward keeps apart from inputs, each storage once."""
    tensors, settings = inputs(torch.bfloat16, counts=(30, 34), tail=0, hidden=8, width=16)
    x, counts, *weights = tensors
    leaves = [y.requires_grad_() for y in (x, *weights)]
    storages = {}

    def pack(y):
        storages[y.data_ptr()] = y.numel() * y.element_size()
        return y

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda y: y):
        out = moe_fast.grouped_mlp(x, counts, *weights, probs=settings["probs"], recompute=recompute)
    own = {y.data_ptr() for y in (*leaves, settings["probs"], counts)}
    assert out.requires_grad
    return sum(size for place, size in storages.items() if place not in own)


def test_no_more_is_kept_than_h_and_the_activation():
    hidden, activation = 64 * 32 * 2, 64 * 16 * 2
    assert kept(None) == hidden + activation


def test_sequential_experts_are_the_grouped_ones():
    tensors, settings = inputs()
    first, second = (
        results(function, tensors, settings) for function in (moe_fast.grouped_mlp, moe_fast.sequential_mlp)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("name", ["state", "noise"])
def test_sequential_experts_take_nothing_that_is_for_all_together(name):
    tensors, settings = inputs()
    with pytest.raises(ValueError, match=name):
        moe_fast.sequential_mlp(*tensors, **settings, **{name: (None, None)})


def test_a_projection_is_one_linear_layer():
    (x, _, fc1, _), _ = inputs(tail=0)
    bias = torch.arange(10.0)
    assert near(moe_fast.latent_projection(x, fc1[0], bias=bias), moe_ref.latent_projection(x, fc1[0], bias=bias))
    with pytest.raises(ValueError, match="weight"):
        moe_fast.latent_projection(x, fc1)


@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_shared_experts_are_the_references(gate, recompute):
    (x, _, fc1, fc2), _ = inputs(tail=0)
    leaves = [y.clone().requires_grad_() for y in (x, fc1[0], fc2[0], *([fc1[0, :1]] if gate else []))]
    both = []
    for function in (moe_fast.shared_experts, moe_ref.shared_experts):
        out = function(*leaves[:3], gate_weight=leaves[3] if gate else None, recompute=recompute)
        both.append([out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))])
    assert all((a - b).abs().max() <= 2e-6 * max(1.0, float(b.abs().max())) for a, b in zip(*both, strict=True))


# ---- padding


@pytest.mark.parametrize("counts", [(3, 0, 5), (4, 8, 0), (0, 0, 0), (1,)], ids=str)
@pytest.mark.parametrize("align", [1, 4])
def test_padding_puts_zeros_behind_each_segment_and_trims_them(counts, align):
    total, tail = sum(counts), 2
    x, probs = torch.randn(total + tail, 3), torch.rand(total + tail)
    counts_L = torch.tensor(counts)
    padding = Padding.of(counts_L, len(x), align)
    rows, row_probs = padding.pad(x, probs)
    right = pad_segments(x[:total], counts_L, align)
    assert padding.counts_L.tolist() == [-(-count // align) * align for count in counts]
    assert torch.equal(rows[: len(right)], right) and torch.equal(
        row_probs[: len(right)], pad_segments(probs[:total], counts_L, align)
    )
    assert len(rows) == len(x) + len(counts) * (align - 1)
    assert torch.equal(padding.trim(rows), x)
    assert torch.equal(trim_segments(right, counts_L, align), x[:total])


def test_gradients_pass_through_padding():
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    padding = Padding.of(torch.tensor([2, 1]), 5, 4)
    both = partial(lambda rows: padding.trim(padding.pad(rows, None)[0] * 2))
    assert torch.equal(torch.autograd.grad(both(x).sum(), x)[0], torch.full((5, 3), 2.0, dtype=torch.float64))


# ---- refused


def test_what_products_refuse_is_refused():
    tensors, settings = inputs()
    with pytest.raises(ValueError, match="probs"):
        moe_fast.grouped_mlp(*tensors, **settings | {"probs": settings["probs"].to(torch.float8_e5m2)})
    with pytest.raises(ValueError, match="recipe"):
        moe_fast.grouped_mlp(*tensors, **settings, recipe="mxfp8")


def test_what_is_supported_is_said_before():
    tensors, _ = inputs()
    assert moe_fast.supports("grouped_mlp", *tensors) is None
    assert "float8" in str(moe_fast.supports("grouped_mlp", *tensors, probs=torch.zeros(1, dtype=torch.float8_e5m2)))
    assert moe_fast.supports("shared_experts", x=tensors[0], recipe=None) is None
    refused = moe_fast.supports("grouped_mlp", *tensors, recipe=Recipe("current"))
    assert refused is None or "recipe" in refused
