"""Where the experts of `moe_ref` round, and how their layers follow a recipe."""

from functools import partial

import pytest
import torch
from torch import Tensor

from moe_ref.config import LinearState, Recipe
from moe_ref.config.state import new_quantizer_state
from moe_ref.experts.activations import glu
from moe_ref.experts.linear import grouped_linear, linear
from moe_ref.experts.mlp import grouped_mlp, latent_projection, sequential_mlp
from moe_ref.experts.shared import shared_experts
from tests.experts.test_mlp import numbers
from tests.judge.near import near

# Rounding: 515 is half way between 514 and 516; bfloat16 has 512, 516, 520


def one(value: float, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.tensor([[value]], dtype=dtype)


def plain_mlp(x: float, w1: float, w2: float, **call) -> float:
    """relu experts of width 1 in bfloat16."""
    return grouped_mlp(one(x), torch.tensor([1]), one(w1)[None], one(w2)[None], kind="relu", **call).item()


def test_fc1_rounds_before_the_activation_is_weighted():
    assert plain_mlp(5, 103, 1, probs=torch.tensor([1.5])) == 776  # 516·1.5 = 774 → 776, not 772


def test_first_bias_is_added_before_fc1_rounds():
    assert plain_mlp(5, 103, 1, fc1_bias=one(-1)) == 512  # 514 → 512; 516 - 1 would be 516


def test_second_bias_is_added_after_fc2_rounds():
    assert plain_mlp(5, 1, 103, fc2_bias=one(-1)) == 516  # 515 → 516, - 1 = 515 → 516; not 512


def test_second_bias_meets_the_prob_in_float32():
    assert (
        plain_mlp(0, 0, 0, fc2_bias=one(129), probs=torch.tensor([1 + 2**-8])) == 130
    )  # 129.504; in bfloat16 the prob is 1


def test_weighted_input_is_rounded():
    assert (
        plain_mlp(129, 3, 1, probs=torch.tensor([1 + 2**-8]), probs_on_input=True) == 390
    )  # 129.504 → 130; 388.5 would be 388


def test_gradient_of_the_probs_adds_activation_and_bias_before_it_is_rounded():
    probs, counts = torch.ones(1).bfloat16().requires_grad_(), torch.tensor([1])
    w1, w2 = torch.tensor([[[256.0], [1.0]]]).bfloat16(), torch.ones(1, 1, 2).bfloat16()
    out = grouped_mlp(one(1), counts, w1, w2, kind="relu", probs=probs, fc2_bias=one(261, torch.float32))
    (d_probs,) = torch.autograd.grad(out, probs, one(1))
    assert d_probs.item() == 520  # 257 + 261 = 518 → 520; 256 + 260 = 516


def test_gradient_of_the_second_bias_is_summed_before_it_is_rounded():
    bias, probs = one(0).requires_grad_(), torch.full((3,), 1 + 2**-8)
    out = grouped_mlp(
        torch.zeros(3, 1).bfloat16(),
        torch.tensor([3]),
        one(0)[None],
        one(0)[None],
        kind="relu",
        probs=probs,
        fc2_bias=bias,
    )
    (d_bias,) = torch.autograd.grad(out, bias, torch.full((3, 1), 129.0).bfloat16())
    assert d_bias.item() == 388  # 3 · 129.504 = 388.51; each rounded, 3 · 130 = 390


def test_shared_gate_is_in_the_dtype_of_x():
    x, w1, w2 = (
        torch.tensor([[1.0, 134.0]]).bfloat16(),
        torch.tensor([[0.0, 1.0]]).bfloat16(),
        torch.tensor([[0.0], [3.0]]).bfloat16(),
    )
    out = shared_experts(x, w1, w2, kind="relu", gate_weight=torch.tensor([[3.0, 0.0]]).bfloat16())
    assert out[0, 1].item() == 384  # σ(3) → 0.953125, · 402 = 383.16 → 384; else 382.93 → 382


# Recipes


def low_precision(recipe: Recipe, counts: list[int], **call):
    """Experts of 32 columns; out, and the gradients of rows, weights and probs."""
    shapes = ((sum(counts), 32), (len(counts), 64, 32), (len(counts), 32, 32), (sum(counts),))
    rows, w1, w2, probs = (numbers(*shape, seed=seed, dtype=torch.bfloat16) for seed, shape in enumerate(shapes))
    out = call.pop("function", grouped_mlp)(rows, torch.tensor(counts), w1, w2, probs=probs, recipe=recipe, **call)
    return [out, *torch.autograd.grad(out, [rows, w1, w2, probs], numbers(*out.shape, seed=9, dtype=torch.bfloat16))]


def by_parts(rows, counts, w1, w2, *, probs, recipe) -> Tensor:
    h = grouped_linear(rows, w1, counts, recipe=recipe)
    return grouped_linear(glu(h, probs=probs), w2, counts, recipe=recipe)


@pytest.mark.parametrize(
    "recipe", [Recipe("current"), Recipe("block"), Recipe("mxfp8")], ids=lambda recipe: recipe.scaling
)
def test_both_linear_layers_follow_the_recipe(recipe):
    right, plain = (low_precision(r, [32, 0, 64], function=by_parts) for r in (recipe, None))
    for x, y, z in zip(right, low_precision(recipe, [32, 0, 64]), plain, strict=True):
        assert torch.equal(x, y) and not torch.equal(x, z)


@pytest.mark.parametrize(
    "how",
    [{"recompute": "moe"}, {"recompute": "moe_act"}, {"align": 32}, {"function": sequential_mlp}],
    ids=["recomputed", "activation recomputed", "aligned", "sequential"],
)
def test_low_precision_does_not_depend_on_how_it_is_run(how):
    for x, y in zip(
        low_precision(Recipe("mxfp8"), [32, 0, 32]), low_precision(Recipe("mxfp8"), [32, 0, 32], **how), strict=True
    ):
        assert torch.equal(x, y)


def test_padding_makes_uneven_experts_legal_for_blocks_along_tokens():
    recipe, counts = Recipe("mxfp8"), [5, 0, 33]
    with pytest.raises(ValueError, match=r"^splits is "):
        low_precision(recipe, counts)
    assert [x.shape for x in low_precision(recipe, counts, align=recipe.alignment)] == [
        x.shape for x in low_precision(None, counts)
    ]


def test_each_layer_has_its_own_state():
    recipe = Recipe("delayed")
    unit = new_quantizer_state(recipe)
    plain, tight = (
        LinearState(unit, unit, unit),
        LinearState(unit._replace(scale=torch.tensor([448.0])), unit, unit),
    )  # tight: 1 is the largest input
    mlp = partial(
        grouped_mlp,
        torch.tensor([[0.5]]),
        torch.tensor([1]),
        torch.full((1, 1, 1), 4.0),
        torch.ones(1, 1, 1),
        kind="relu",
        recipe=recipe,
    )
    assert mlp(state=(plain, plain)).item() == mlp(state=(tight, plain)).item() == 2  # 0.5 fits
    assert mlp(state=(plain, tight)).item() == 1  # 2 does not
    shared = partial(
        shared_experts, torch.tensor([[0.5]]), torch.full((1, 1), 4.0), torch.ones(1, 1), kind="relu", recipe=recipe
    )
    assert shared(state=(tight, plain)).item() == 2 and shared(state=(plain, tight)).item() == 1


def test_each_layer_has_its_own_noise():
    x, w1, w2, d_out = (numbers(16, 16, seed=seed, dtype=torch.bfloat16) for seed in range(4))
    up, down, spare = torch.full((2, 16, 16), 0.999), torch.zeros(2, 16, 16), torch.zeros(2, 3, 16)

    def gradients(first: Tensor, second: Tensor) -> tuple[Tensor, ...]:
        noise = (torch.cat([first, spare], dim=1), second)  # rows past the last segment: never read
        out = grouped_mlp(x, torch.tensor([16]), w1[None], w2[None], kind="relu", recipe=Recipe("nvfp4"), noise=noise)
        return torch.autograd.grad(out, [w1, w2], d_out)

    d_w1, d_w2 = gradients(up, up)
    other_d_w1, same_d_w2 = gradients(down, up)
    assert not torch.equal(d_w1, other_d_w1) and torch.equal(d_w2, same_d_w2)
    assert not torch.equal(d_w2, gradients(up, down)[1])


def test_shared_experts_follow_the_recipe():
    x, w1, w2 = numbers(5, 32, seed=0), numbers(64, 32, seed=1), numbers(32, 32, seed=2)
    g, recipe = numbers(1, 32, seed=3), Recipe("current")
    right = linear(glu(linear(x, w1, recipe=recipe)), w2, recipe=recipe) * torch.sigmoid(x @ g.T)
    assert near(shared_experts(x, w1, w2, gate_weight=g, recipe=recipe), right)
    assert torch.equal(latent_projection(x, w1, recipe=recipe), linear(x, w1, recipe=recipe))
    assert not torch.equal(latent_projection(x, w1, recipe=recipe), linear(x, w1))
