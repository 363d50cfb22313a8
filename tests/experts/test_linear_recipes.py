"""grouped_linear and its gradients by recipe: formats, scales, noise and overrides, by hand.

Which operand is quantised in which direction is judged by the suite, on the reference as on honest
variants: test_precision.py.
"""

import math

import pytest
import torch
from torch import Tensor

from moe_ref.config import LinearState, QuantizerState, Recipe
from moe_ref.config.state import new_quantizer_state
from moe_ref.experts.linear import grouped_dgrad, grouped_linear, grouped_wgrad
from moe_ref.quantization.quantize import HADAMARD_SIGNS

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


# backward_override

OVERRIDES = ("high_precision", "dequantized")


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
