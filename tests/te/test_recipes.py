"""Grouped linear layers under every recipe of every release of Transformer Engine."""

import inspect
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import moe_ref
from conformance.peers.te import Adapter, recipes
from moe_ref.config import LinearState, QuantizerState, Recipe
from tests.common.fast import normal
from tests.te.judging import Checked, judged, wrong
from tests.te.standin import standin

SCALINGS = {"delayed", "current", "block", "mxfp8", "nvfp4"}
THERE = {"1.11": {"delayed"}, "2.1": SCALINGS - {"nvfp4"}, "2.20": SCALINGS, "rocm": SCALINGS}
COUNTS = torch.tensor([2, 0, 3])


def quantised(case, scalings=SCALINGS):
    return case.scaling in scalings


def outcomes_of(bucket, scalings, ours=moe_ref, most=12):
    te = standin(bucket)
    return judged(Checked(te, Adapter(te, ours)), ["grouped_linear"], most, partial(quantised, scalings=scalings))


@pytest.mark.parametrize("bucket", THERE)
def test_every_recipe_of_a_release_is_conformant(bucket):
    outcomes = outcomes_of(bucket, THERE[bucket])
    assert not wrong(outcomes)
    assert {case.scaling for case, outcome in outcomes if outcome.status == "PASS"} == THERE[bucket]


def test_alone_only_rows_past_the_last_segment_and_the_bias_are_lost_and_strided_rows_misread():
    outcomes = outcomes_of("2.20", SCALINGS, ours=None, most=20)
    failed = [case for case, x in outcomes if x.status == "FAIL"]
    assert all(case.tail or case.law == "padding_independence" or case.layout_of == "rows" for case in failed)
    assert {case.scaling for case, outcome in outcomes if outcome.status == "PASS"} >= {"current", "block", "nvfp4"}


def _turned(module, state):
    set_scales(module, LinearState(state.weight, state.input, state.grad_output))


def _of_the_first(module, state):
    states = [QuantizerState(x.amax_history, x.scale[:1].expand_as(x.scale)) for x in state]
    set_scales(module, LinearState(*states))


def _changed(**options):
    return lambda features, trace, recipe: theirs(features, trace, replace(recipe, **options))


set_scales, theirs = recipes.set_scales, recipes.theirs
RECIPES = {
    "delayed": Recipe("delayed", amax_history_len=2),
    "current": Recipe("current", power_of_two_scales=True, amax_epsilon=9.0),
    "block": Recipe("block"),
    "overridden": Recipe("block", power_of_two_scales=False, backward_override="high_precision"),
    "mxfp8": Recipe("mxfp8", fp8_format="hybrid", two_dimensional_weights=True),
    "nvfp4": Recipe("nvfp4", stochastic_rounding=False),
    "four_over_six": Recipe("nvfp4", hadamard=False, stochastic_rounding=False, four_over_six="all"),
}
TWINS = {
    "no_scale_is_set": ("delayed", "set_scales", lambda module, state: None),
    "scales_of_input_and_weight_exchanged": ("delayed", "set_scales", _turned),
    "one_scale_for_all_experts": ("delayed", "set_scales", _of_the_first),
    "another_format": ("current", "theirs", _changed(fp8_format="e4m3")),
    "no_power_of_two": ("current", "theirs", _changed(power_of_two_scales=False)),
    "no_least_amax": ("current", "theirs", _changed(amax_epsilon=0.0)),
    "rows_of_blocks_for_weights": ("block", "theirs", _changed(two_dimensional_weights=False)),
    "rows_of_small_blocks_for_weights": ("mxfp8", "theirs", _changed(two_dimensional_weights=False)),
    "no_transform": ("nvfp4", "theirs", _changed(hadamard=False)),
    "no_four_over_six": ("four_over_six", "theirs", _changed(four_over_six="none")),
    "no_override": ("overridden", "theirs", _changed(backward_override=None)),
}


def results(implementation, recipe):
    """The output and both gradients; no side needs padding."""
    rows = normal(96, 64, seed=1, dtype=torch.bfloat16).requires_grad_()
    weight = normal(3, 32, 64, seed=2) * 2.0 ** -(torch.arange(32) % 16)[:, None]  # square blocks lose small rows
    weight = weight.bfloat16().requires_grad_()
    state = None
    if recipe.scaling == "delayed":
        scales = [2.0 ** torch.tensor([1.0, 0.0, 2.0]) * factor for factor in (3, 50, 7)]
        state = LinearState(*(QuantizerState(torch.zeros(3, 2), scale) for scale in scales))
    out = implementation.grouped_linear(rows, weight, torch.tensor([32, 0, 64]), recipe=recipe, state=state)
    return [out, *torch.autograd.grad(out, [rows, weight], normal(96, 32, seed=3, dtype=torch.bfloat16))]


def equal(a, b):
    return all(map(torch.equal, a, b))


@pytest.mark.parametrize("name", RECIPES)
def test_each_recipe_is_the_reference_s_in_the_forward_and_in_the_backward(name):
    adapter = Adapter(standin("2.20"))
    assert equal(results(adapter, RECIPES[name]), results(moe_ref, RECIPES[name]))


@pytest.mark.parametrize("twin", TWINS)
def test_an_adapter_that_maps_a_recipe_wrongly_differs(monkeypatch, twin):
    recipe, name, wrongly = TWINS[twin]
    monkeypatch.setattr(recipes, name, wrongly)
    assert not equal(results(Adapter(standin("2.20")), RECIPES[recipe]), results(moe_ref, RECIPES[recipe]))


def test_sides_as_they_are_and_scales_of_one_tensor_are_found_by_the_suite(monkeypatch):
    for scaling, name, wrongly in (("current", "in_sides", lambda x, *axes: x), TWINS["no_scale_is_set"]):
        monkeypatch.setattr(recipes, name, wrongly)
        assert "FAIL" in {outcome.status for _, outcome in outcomes_of("2.20", {scaling})}
        monkeypatch.undo()


@pytest.mark.parametrize("bucket", ["1.11", "2.6", "2.20"])
def test_the_path_names_recipe_context_and_padding(bucket):
    adapter = Adapter(standin(bucket))
    recipe, ones = Recipe("delayed", amax_history_len=2), QuantizerState(torch.zeros(3, 2), torch.ones(3))
    adapter.grouped_linear(normal(5, 4), normal(3, 6, 4), COUNTS, recipe=recipe, state=LinearState(*[ones] * 3))
    path = adapter.path["grouped_linear"].split(", then ")
    context = "autocast" if bucket in ("2.20", "2.6") else "fp8_autocast"
    pads = ("Fp8Padding", "Fp8Unpadding") if bucket != "1.11" else ("pad by an index", "unpad by an index")
    layer = path[3]
    assert path == ["DelayedScaling", pads[0], context, layer, pads[1]] and layer.startswith("GroupedLinear with")


@pytest.mark.parametrize(
    ("bucket", "recipe", "feature"),
    [
        ("1.11", Recipe("block"), "block"),
        ("2.1", Recipe("nvfp4"), "nvfp4"),
        ("2.12", Recipe("current", backward_override="dequantized"), "backward_override"),
        ("2.15", Recipe("mxfp8", two_dimensional_weights=True), "mxfp8_square"),
        ("2.12", Recipe("nvfp4", hadamard=False, row_scaled_activation=True), "nvfp4_row_scaled"),
        ("2.12", Recipe("nvfp4", four_over_six="weights"), "nvfp4_four_over_six"),
    ],
)
def test_a_recipe_that_a_release_lacks_is_named_and_computed_by_ours(bucket, recipe, feature):
    rows, weight, counts = normal(128, 32, dtype=torch.bfloat16), normal(1, 32, 32, dtype=torch.bfloat16), [128]
    arguments = {"rows": rows, "weight": weight, "tokens_per_expert": torch.tensor(counts)}
    uncompleted, completed = Adapter(standin(bucket)), Adapter(standin(bucket), moe_ref)
    reason = f"grouped_linear under {recipe.scaling}: Transformer Engine lacks {feature}"
    assert uncompleted.supports("grouped_linear", **arguments, recipe=recipe) == reason
    assert torch.equal(
        completed.grouped_linear(*arguments.values(), recipe=recipe),
        moe_ref.grouped_linear(*arguments.values(), recipe=recipe),
    )
    assert completed.path["grouped_linear"] == f"ours: {reason}"


@pytest.mark.parametrize("module", ["quantization", "fp8"])
def test_a_device_without_the_units_is_asked_by_the_release_s_own_checks(module):
    te, reason = standin("2.20"), "Device compute capability 10.0 or higher required"
    there = {"is_fp8_available": (True, ""), "is_fp8_block_scaling_available": (True, "")}
    checks = there | {"is_mxfp8_available": (False, reason), "is_nvfp4_available": (False, reason)}
    manager = SimpleNamespace(**{name: lambda answer=answer: answer for name, answer in checks.items()})
    setattr(te.pytorch, module, SimpleNamespace(FP8GlobalStateManager=manager))
    adapter = Adapter(te)
    refused = {x: f"{x} is refused: {reason}" for x in ("mxfp8", "nvfp4")}
    assert adapter.probes.refused == refused
    assert "autocast" not in te.calls
    arguments = {"rows": normal(32, 32), "weight": normal(1, 32, 32), "tokens_per_expert": torch.tensor([32])}
    assert adapter.supports("grouped_linear", **arguments, recipe=Recipe("mxfp8")) == refused["mxfp8"]
    assert adapter.supports("grouped_linear", **arguments, recipe=Recipe("current")) is None


def test_a_rounded_bias_is_declared_and_noise_is_not_offered():
    adapter = Adapter(standin("2.20"))
    arguments = {"rows": normal(32, 32), "weight": normal(1, 32, 32), "tokens_per_expert": torch.tensor([32])}
    biased = adapter.supports("grouped_linear", **arguments, recipe=Recipe("current"), bias=normal(1, 32))
    assert biased == "grouped_linear of float32 with a bias under current: it rounds the bias to bfloat16"
    assert "noise" not in inspect.signature(adapter.grouped_linear).parameters  # its kernels draw their own
    out = [
        adapter.grouped_linear(*arguments.values(), recipe=Recipe("current"), bias=bias)
        for bias in (normal(1, 32), normal(1, 32).bfloat16().float())
    ]
    assert torch.equal(*out)
