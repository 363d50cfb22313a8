"""Expert MLPs in `moe_fast` beyond the gate: bits that repeat, kept memory, refusals."""

import pytest
import torch

import moe_fast
from moe_fast.experts import factors, segments
from moe_ref.config import Recipe
from tests.common.fast import interpreted, normal

pytestmark = interpreted


def inputs(dtype=torch.float32, counts=(3, 0, 2), tail=2, hidden=6, width=5):
    """rows, counts and weights, and settings with probs and biases; NaN past the last segment."""
    rows, experts = sum(counts) + tail, len(counts)
    x, probs = normal(rows, hidden, dtype=dtype), normal(rows, seed=1)
    x[sum(counts) :], probs[sum(counts) :] = torch.nan, torch.nan
    weights = (
        normal(experts, 2 * width, hidden, seed=2, dtype=dtype),
        normal(experts, hidden, width, seed=3, dtype=dtype),
    )
    biases = normal(experts, 2 * width, seed=4, dtype=dtype), normal(experts, hidden, seed=5, dtype=dtype)
    return (x, torch.tensor(counts), *weights), {"probs": probs, "fc1_bias": biases[0], "fc2_bias": biases[1]}


def results(function, **options):
    """The output and every gradient."""
    (x, counts, *weights), settings = inputs()
    x, fc1, fc2, *settings_tensors = leaves = [y.requires_grad_() for y in (x, *weights, *settings.values())]
    out = function(x, counts, fc1, fc2, **dict(zip(settings, settings_tensors, strict=True)), **options)
    d_out = torch.linspace(-1, 1, out.numel()).reshape(out.shape)
    return [out.detach(), *torch.autograd.grad(out, leaves, d_out)]


@pytest.mark.parametrize(("function", "settings"), [
    ("grouped_mlp", {"recompute": "moe_act"}),
    ("grouped_mlp", {"recompute": "moe"}),
    ("grouped_mlp", {"align": 16}),
    ("sequential_mlp", {}),
], ids=str)  # fmt: skip
def test_recomputation_alignment_and_one_expert_at_a_time_change_no_bit(function, settings):
    first, second = results(moe_fast.grouped_mlp), results(getattr(moe_fast, function), **settings)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("recipe", [None, Recipe("block")], ids=["bf16", "block"])
def test_both_products_have_one_plan(recipe, monkeypatch):
    plans, make = [], segments._make_plan
    monkeypatch.setattr(segments, "_make_plan", lambda *of: plans.append(of[1:]) or make(*of))
    first = recipe_results(recipe=recipe)
    assert len(plans) == 1
    assert all(torch.equal(a, b) for a, b in zip(recipe_results(recipe=recipe), first, strict=True))
    assert len(plans) == 2  # nothing is shared between calls


RECIPES = [Recipe("block"), Recipe("current"), Recipe("mxfp8"), Recipe("block", backward_override="high_precision")]


def recipe_results(**options):
    (x, counts, *weights), settings = inputs(torch.bfloat16, (32, 0, 64), tail=0, hidden=64, width=32)
    leaves = [y.requires_grad_() for y in (x, *weights, settings["probs"])]
    out = moe_fast.grouped_mlp(x, counts, *weights, probs=settings["probs"], **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: f"{recipe.scaling}-{recipe.backward_override}")
def test_an_activation_that_is_computed_again_is_quantised_to_the_same_codes(recipe):
    expected = recipe_results(recipe=recipe)
    for recompute in ("moe_act", "moe"):
        got = recipe_results(recipe=recipe, recompute=recompute)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_columns_of_an_activation_that_is_computed_again_are_quantised_in_the_backward(monkeypatch):
    calls, original = [], factors.quantize_for_products
    monkeypatch.setattr(
        factors,
        "quantize_for_products",
        lambda *tensors, **form: (
            calls.append((form["role"], form["rowwise"], form["columnwise"])) or original(*tensors, **form)
        ),
    )
    recipe_results(recipe=Recipe("block"), recompute="moe_act")
    both, weight, gradient = ("input", True, True), ("weight", True, True), ("grad_output", True, True)
    rows, columns = ("input", True, False), ("input", False, True)
    assert calls == [both, weight, rows, weight, gradient, columns, gradient]


def kept(recompute) -> int:
    """Bytes kept for the backward besides the inputs, each storage once."""
    tensors, settings = inputs(torch.bfloat16, counts=(30, 34), tail=0, hidden=8, width=16)
    x, counts, *weights = tensors
    leaves = [y.requires_grad_() for y in (x, *weights)]
    storages = {}

    def pack(y):
        storages[y.data_ptr()] = y.numel() * y.element_size()
        return y

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda y: y):
        out = moe_fast.grouped_mlp(x, counts, *weights, probs=settings["probs"], recompute=recompute)
    addresses = {y.data_ptr() for y in (*leaves, settings["probs"], counts)}
    assert out.requires_grad
    return sum(size for address, size in storages.items() if address not in addresses)


def plan_bytes() -> int:
    """Of the plan of a product, some integers per expert and tile."""
    plan = segments.plan_of(torch.tensor([30, 34]), torch.zeros(64, 1, dtype=torch.bfloat16))
    return sum(tensor.nbytes for tensor in plan.tensors)


@pytest.mark.parametrize(
    ("recompute", "size", "plans"), [(None, 64 * (32 + 16) * 2, 1), ("moe_act", 64 * 32 * 2, 1), ("moe", 0, 0)]
)
def test_no_more_is_kept_than_h_the_activation_and_plans_and_less_with_recomputation(recompute, size, plans):
    assert kept(recompute) == size + plans * plan_bytes()
    assert plan_bytes() < 256


@pytest.mark.parametrize("name", ["state", "noise"])
def test_sequential_experts_refuse_what_holds_for_all_experts_together(name):
    tensors, settings = inputs()
    with pytest.raises(ValueError, match=name):
        moe_fast.sequential_mlp(*tensors, **settings, **{name: (None, None)})


def test_probs_and_recipes_of_another_type_are_refused():
    tensors, settings = inputs()
    with pytest.raises(ValueError, match="probs"):
        moe_fast.grouped_mlp(*tensors, **settings | {"probs": settings["probs"].to(torch.float8_e5m2)})
    with pytest.raises(ValueError, match="recipe"):
        moe_fast.grouped_mlp(*tensors, **settings, recipe="mxfp8")


def test_support_is_declared_before_the_call():
    tensors, _ = inputs()
    assert moe_fast.supports("grouped_mlp", *tensors) is None
    assert "float8" in str(moe_fast.supports("grouped_mlp", *tensors, probs=torch.zeros(1, dtype=torch.float8_e5m2)))
    assert moe_fast.supports("shared_experts", x=tensors[0], recipe=None) is None
