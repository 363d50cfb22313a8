"""grouped_linear and its gradients by recipe: operand quantized, direction, scale and noise."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import moe_ref.experts.linear as grouped_linear_module
from moe_ref.config import LinearState, QuantizerState, Recipe
from moe_ref.config.state import new_quantizer_state
from moe_ref.experts.linear import grouped_dgrad, grouped_linear, grouped_wgrad
from moe_ref.quantization.quantize import HADAMARD_SIGNS, dequantize, quantize

RECIPES = {
    "current": Recipe("current"),
    "current, powers of two": Recipe("current", power_of_two_scales=True, fp8_format="e4m3"),
    "block": Recipe("block"),
    "block, scales as they come": Recipe("block", power_of_two_scales=False, two_dimensional_weights=False),
    "mxfp8": Recipe("mxfp8"),
    "mxfp8, square weights": Recipe("mxfp8", two_dimensional_weights=True, fp8_format="hybrid"),
    "nvfp4": Recipe("nvfp4", hadamard=False, stochastic_rounding=False),
    "delayed": Recipe("delayed", amax_history_len=2),
}
each_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
GROUPS = [32, 0, 64]


def uneven(*shape: int, seed: int) -> Tensor:
    """float32 whose magnitudes change from row to row, from column to column and from expert to
    expert, so that every block has its own scale.
    """
    row, column = torch.arange(shape[-2])[:, None], torch.arange(shape[-1])
    magnitude = 2.0 ** (column % 7) * 2.0 ** (row % 5) * 3.0 ** -(row // 32)
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * magnitude).requires_grad_()


def delayed_state(recipe: Recipe) -> LinearState | None:
    """Scales of which some saturate."""
    if recipe.scaling != "delayed":
        return None
    history = torch.zeros(len(GROUPS), 2)
    return LinearState(*(QuantizerState(history, torch.tensor([2.0**k, 8.0, 3.0])) for k in range(3)))


def alone(x: Tensor, recipe: Recipe, role: str, columnwise: bool, state: LinearState | None, e: int) -> Tensor:
    """One expert's tensor, quantised by itself and read back."""
    own = None if state is None else QuantizerState(*(field[e : e + 1] for field in getattr(state, role)))
    made = quantize(x.detach(), recipe, role=role, rowwise=not columnwise, columnwise=columnwise, state=own)
    return dequantize(made.quantized, columnwise=columnwise).double()


def one_expert_at_a_time(x, weight, d_out, recipe, state) -> list[Tensor]:
    """out, dx and dW: products along in, out and tokens, of factors quantised along the same."""
    out, d_x, d_weight = [], [], []
    for e, own in enumerate([slice(0, 32), slice(32, 32), slice(32, 96)]):

        def q(tensor, role, columnwise, e=e):
            return alone(tensor, recipe, role, columnwise, state, e)

        out.append(q(x[own], "input", False) @ q(weight[e], "weight", False).T)
        d_x.append(q(d_out[own], "grad_output", False) @ q(weight[e], "weight", True))
        d_weight.append(q(d_out[own], "grad_output", True).T @ q(x[own], "input", True))
    tail = torch.zeros(8, 32, dtype=torch.float64)
    return [torch.cat([*out, tail]).float(), torch.cat([*d_x, tail]).float(), torch.stack(d_weight).float()]


def recipe_agrees(recipe: Recipe, *, function=grouped_linear) -> bool:
    x, weight, d_out, state = (
        uneven(104, 32, seed=1),
        uneven(3, 32, 32, seed=2),
        uneven(104, 32, seed=3).detach(),
        delayed_state(recipe),
    )
    out = function(x, weight, torch.tensor(GROUPS), recipe=recipe, state=state, accumulator="float64")
    got = [out, *torch.autograd.grad(out, [x, weight], d_out)]
    right = one_expert_at_a_time(x, weight, d_out, recipe, state)
    neighbours = torch.finfo(torch.float32).eps  # why: both are sums in float64, rounded once
    return all(torch.allclose(a, b, rtol=neighbours, atol=0) for a, b in zip(got, right, strict=True))


@each_recipe
def test_factors_are_quantised_along_the_contraction_expert_by_expert(recipe):
    assert recipe_agrees(recipe)


@each_recipe
def test_high_precision_is_not_taken_for_a_recipe(recipe):
    assert not recipe_agrees(recipe, function=lambda *inputs, recipe, state, **call: grouped_linear(*inputs, **call))


# backward_override

OVERRIDES = ("high_precision", "dequantized")
OVERRIDABLE = {name: recipe for name, recipe in RECIPES.items() if name != "delayed"}


def kept_for_backward(
    x: Tensor, recipe: Recipe, role: str, *, columnwise: bool = False, rounded: bool = True
) -> Tensor:
    """One expert's rows or weight, as a gradient reads them, in float64."""
    if recipe.backward_override == "high_precision":
        return x.detach().double()
    made = quantize(
        x.detach() if rounded else x.detach().float(), recipe, role=role, rowwise=not columnwise, columnwise=columnwise
    )
    return dequantize(made.quantized, columnwise=columnwise).double()


def overridden_agrees(recipe: Recipe, dtype: torch.dtype = torch.bfloat16, *, function=grouped_linear, **kept) -> bool:
    """Sums in float64 of what is kept, beside the gradients that the reference has."""
    x, weight, d_out = (
        uneven(*shape, seed=seed).detach().to(dtype) for seed, shape in enumerate([(104, 32), (3, 32, 32), (104, 32)])
    )
    leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    out = function(*leaves, torch.tensor(GROUPS), recipe=recipe, accumulator="float64")
    d_x, d_weight = torch.autograd.grad(out, leaves, d_out)
    forward = grouped_linear(
        x, weight, torch.tensor(GROUPS), recipe=replace(recipe, backward_override=None), accumulator="float64"
    )
    right = []
    for e, own in enumerate([slice(0, 32), slice(32, 32), slice(32, 96)]):
        d = d_out[own].double()
        right += [(d @ kept_for_backward(weight[e], recipe, "weight", **kept), d_x[own])]
        right += [(d.T @ kept_for_backward(x[own], recipe, "input", **kept), d_weight[e])]
    rounded = torch.finfo(dtype).eps  # why: both are sums in float64, rounded once
    return (
        torch.equal(out, forward)
        and bool((d_x[96:] == 0).all())
        and all(torch.allclose(a, b.double(), rtol=rounded, atol=0) for a, b in right)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("override", OVERRIDES)
@pytest.mark.parametrize("name", OVERRIDABLE)
def test_an_overridden_gradient_is_a_product_of_what_is_kept(name, override, dtype):
    assert overridden_agrees(replace(RECIPES[name], backward_override=override), dtype)


def ignored(*tensors, recipe, **settings):
    return grouped_linear(*tensors, recipe=replace(recipe, backward_override=None), **settings)


@pytest.mark.parametrize("override", OVERRIDES)
@pytest.mark.parametrize("name", OVERRIDABLE)
def test_an_override_that_is_ignored_is_noticed(name, override):
    assert not overridden_agrees(replace(RECIPES[name], backward_override=override), function=ignored)


@pytest.mark.parametrize("name", ["nvfp4", "block, scales as they come"])
def test_columns_that_are_dequantised_and_values_that_are_not_rounded_are_noticed(name):
    recipe = replace(RECIPES[name], backward_override="dequantized")
    assert not overridden_agrees(recipe, columnwise=True)
    assert not overridden_agrees(recipe, rounded=False)


@pytest.mark.parametrize("override", OVERRIDES)
def test_an_overridden_backward_needs_no_noise_and_no_dtype_and_refuses_noise(override):
    recipe = Recipe("nvfp4", backward_override=override)  # transforms bf16 only; gradients by noise
    x, weight, counts = uneven(32, 32, seed=1), uneven(1, 32, 32, seed=2), torch.tensor([32])
    grouped_linear(x, weight, counts, recipe=recipe).sum().backward()
    assert grouped_dgrad(x.detach(), weight.detach(), counts, recipe=recipe).isfinite().all()
    for function, factors in ((grouped_linear, (x, weight)), (grouped_dgrad, (x, weight)), (grouped_wgrad, (x, x))):
        with pytest.raises(ValueError, match=f"^noise is given with backward_override '{override}'"):
            function(*factors, counts, recipe=recipe, noise=torch.zeros(2, 32, 32))


def test_whole_blocks_of_rows_are_asked_for_by_what_is_quantised_alone():
    x, weight, counts = uneven(40, 32, seed=1).detach(), uneven(1, 32, 32, seed=2).detach(), torch.tensor([40])
    for override in OVERRIDES:
        grouped_dgrad(x, weight, counts, recipe=Recipe("mxfp8", backward_override=override))
    grouped_wgrad(x, x, counts, recipe=Recipe("mxfp8", backward_override="high_precision"))
    with pytest.raises(ValueError, match="multiples of 32"):
        grouped_wgrad(x, x, counts, recipe=Recipe("mxfp8", backward_override="dequantized"))


@pytest.mark.parametrize("gemm", ["fprop", "dgrad", "wgrad"])
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "block, scales as they come"])
def test_factors_quantised_across_the_contraction_are_noticed(monkeypatch, gemm, name):
    right = grouped_linear_module.operands

    def turned(of: str, recipe: Recipe):
        return tuple(operand._replace(columnwise=operand.columnwise ^ (of == gemm)) for operand in right(of, recipe))

    monkeypatch.setattr(grouped_linear_module, "operands", turned)
    assert not recipe_agrees(RECIPES[name])


@pytest.mark.parametrize("role", ["input", "weight", "grad_output"])
@pytest.mark.parametrize("name", ["current", "mxfp8", "block"])
def test_a_role_in_high_precision_is_noticed(monkeypatch, role, name):
    right = grouped_linear_module._from_codes

    def some(x, splits, of, gemm, how):
        return (
            [part.double() for part in x[: int(splits.sum())].split(splits.tolist())]
            if of == role
            else right(x, splits, of, gemm, how)
        )

    monkeypatch.setattr(grouped_linear_module, "_from_codes", some)
    assert not recipe_agrees(RECIPES[name])


def test_experts_that_share_a_scale_are_noticed():
    def together(x, weight, counts, *, recipe, state, accumulator):
        low = dequantize(quantize(x.detach(), recipe).quantized)
        return grouped_linear(
            low + (x - x.detach()), weight, counts, recipe=recipe, state=state, accumulator=accumulator
        )

    assert not recipe_agrees(Recipe("current"), function=together)


def test_gradients_alone_are_in_e5m2_under_hybrid():
    """Scales are 2^8 and 2^15: 1.75 is exact. E4M3 has 1.125; E5M2 has 1 and 1.25, 1 is even."""
    values, one, recipe = (
        torch.tensor([[1.125], [1.75]]),
        torch.ones(1, 1, 1),
        Recipe("current", power_of_two_scales=True),
    )
    counts = torch.tensor([2])
    assert grouped_linear(values, one, counts, recipe=recipe).flatten().tolist() == [1.125, 1.75]
    assert grouped_dgrad(values, one, counts, recipe=recipe).flatten().tolist() == [1.0, 1.75]
    assert grouped_wgrad(values, values, counts, recipe=recipe).item() == 1.0 * 1.125 + 1.75 * 1.75


def test_delayed_scales_come_from_the_state():
    recipe, counts = Recipe("delayed"), torch.tensor([1, 1])
    unit = new_quantizer_state(recipe, num_groups=2)
    state = LinearState(unit._replace(scale=torch.tensor([448.0, 1.0])), unit, unit)
    x, weight = torch.tensor([[2.0], [2.0]]), torch.ones(2, 1, 1)
    assert grouped_linear(x, weight, counts, recipe=recipe, state=state).flatten().tolist() == [
        1,
        2,
    ]  # 2 · 448 saturates at 448
    assert all(torch.equal(a, b) for a, b in zip(state.weight, new_quantizer_state(recipe, num_groups=2), strict=True))


def test_codes_are_not_rounded_to_the_dtype_of_the_rows():
    x, weight = torch.tensor([[3.0, 1.0]]).bfloat16(), torch.tensor([[[0.0, 240.0]]]).bfloat16()
    out = grouped_linear(x, weight, torch.tensor([1]), recipe=Recipe("current"))
    assert out.item() == 231  # 1 · 448/3 → 144 = 0.96429, · 240 = 231.43; 0.96484 gives 231.56


def test_hadamard_transforms_cancel_in_the_weight_gradient():
    """Walsh functions with the transform's signs: each column becomes a single 4, exact in E2M1."""
    signs = torch.tensor(HADAMARD_SIGNS)
    walsh = torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(16)] for i in range(16)])
    x = (signs[:, None] * walsh).bfloat16()
    noise = torch.rand(2, 16, 16, generator=torch.Generator().manual_seed(0))
    d_weight = grouped_wgrad(x, x, torch.tensor([16]), recipe=Recipe("nvfp4"), noise=noise)
    assert torch.equal(d_weight, 16 * torch.eye(16).bfloat16()[None])


def test_noise_rounds_the_gradient_and_nothing_else():
    x, weight = (
        uneven(16, 16, seed=1).detach().bfloat16().requires_grad_(),
        uneven(1, 16, 16, seed=2).detach().bfloat16().requires_grad_(),
    )
    found = []
    for value in (0.0, 0.999):
        out = grouped_linear(
            x, weight, torch.tensor([16]), recipe=Recipe("nvfp4"), noise=torch.full((2, 16, 16), value)
        )
        found.append([out, *torch.autograd.grad(out, [x, weight], uneven(16, 16, seed=3).detach().bfloat16())])
    assert torch.equal(found[0][0], found[1][0])
    assert not torch.equal(found[0][1], found[1][1]) and not torch.equal(found[0][2], found[1][2])


@each_recipe
def test_rows_behind_the_last_segment_reach_no_scale(recipe):
    x, weight, d_out, state = (
        uneven(104, 32, seed=1).detach(),
        uneven(3, 32, 32, seed=2).detach(),
        uneven(104, 32, seed=3).detach(),
        delayed_state(recipe),
    )
    counts, how = torch.tensor(GROUPS), {"recipe": recipe, "state": state}
    for function, tensors in (
        (grouped_linear, (x, weight)),
        (grouped_dgrad, (d_out, weight)),
        (grouped_wgrad, (d_out, x)),
    ):
        spoilt = [torch.cat([y[:96], torch.full_like(y[96:], math.nan)]) if len(y) == 104 else y for y in tensors]
        assert torch.equal(function(*tensors, counts, **how), function(*spoilt, counts, **how))


def test_an_empty_expert_has_a_zero_gradient_in_low_precision():
    x, d_out = uneven(104, 32, seed=1).detach(), uneven(104, 32, seed=3).detach()
    for counts in (GROUPS, [0, 0, 0]):
        d_weight = grouped_wgrad(d_out, x, torch.tensor(counts), recipe=Recipe("mxfp8"))
        assert [bool((d != 0).any()) for d in d_weight] == [count > 0 for count in counts]
