"""grouped_linear in `moe_fast` with a recipe: what the gate does not judge. Descriptors, kept
tensors, Blackwell's code.
"""

from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import Tensor

import moe_fast
from moe_fast.launch import backend
from moe_ref.config import LinearState, QuantizerState, Recipe
from moe_ref.config.quantization import OVERRIDES, SCALINGS
from tests.common.compiler import compiled
from tests.common.fast import interpreted, normal, record_reads

pytestmark = interpreted
scaled = import_module("moe_fast.experts.scaled_linear")
factors = import_module("moe_fast.experts.factors")
ROOT = Path(__file__).parents[2]
RECIPES = {
    "current": Recipe("current"),
    "delayed": Recipe("delayed", amax_history_len=3),
    "block": Recipe("block"),
    "mxfp8": Recipe("mxfp8"),
    "nvfp4": Recipe("nvfp4", hadamard=False, stochastic_rounding=False),
}


def problem(counts: list[int], ins: int = 64, outs: int = 32, *, rows: int = 100, dtype=torch.bfloat16):
    """x, W, b, counts and the gradient of the output; the rows past the last segment are NaN."""
    x, d_out = normal(rows, ins, seed=1, dtype=dtype), normal(rows, outs, seed=2, dtype=dtype)
    x[sum(counts) :] = d_out[sum(counts) :] = torch.nan
    weight, bias = normal(len(counts), outs, ins, seed=3, dtype=dtype), normal(len(counts), outs, seed=4, dtype=dtype)
    return x, weight, bias, torch.tensor(counts), d_out


def settings_of(recipe: Recipe, experts: int) -> dict:
    """The recipe, and for delayed scaling scales that differ between experts and tensors."""
    if recipe.scaling != "delayed":
        return {"recipe": recipe}
    states = [QuantizerState(torch.zeros(experts, 3), torch.linspace(3, 30, experts) * (k + 1)) for k in range(3)]
    return {"recipe": recipe, "state": LinearState(*states)}


def results(x, weight, bias, tokens_per_expert, d_out, **settings) -> list[Tensor]:
    """out, dx, dW and db."""
    leaves = [tensor.detach().requires_grad_() for tensor in (x, weight, bias)]
    out = moe_fast.grouped_linear(*leaves[:2], tokens_per_expert, bias=leaves[2], **settings)
    return [out.detach(), *torch.autograd.grad(out, leaves, d_out)]


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(a, b, strict=True))


# Forms of a launch


@pytest.mark.parametrize(
    ("family", "counts"), [*((family, [32, 0, 64]) for family in RECIPES), ("block", [0, 0])], ids=str
)
def test_descriptors_give_the_bits_of_pointers(family, counts, monkeypatch):
    inputs, settings = problem(counts), settings_of(RECIPES[family], len(counts))
    by_pointers = results(*inputs, **settings)
    monkeypatch.setattr(backend, "has_descriptors", lambda device: True)
    assert equal(results(*inputs, **settings), by_pointers)


OVERRIDDEN = [
    *RECIPES.values(),
    replace(RECIPES["block"], backward_override="high_precision"),
    replace(RECIPES["nvfp4"], backward_override="dequantized"),
]


@pytest.mark.parametrize("recipe", OVERRIDDEN, ids=lambda recipe: f"{recipe.scaling}-{recipe.backward_override}")
def test_the_device_is_never_read(recipe, monkeypatch):
    inputs, settings = problem([32, 0, 32], 32, 32, rows=64), settings_of(recipe, 3)
    reads = record_reads(monkeypatch)
    results(*inputs, **settings)
    assert reads == []


@pytest.mark.parametrize("override", [None, *OVERRIDES])
def test_counts_that_change_after_the_forward_do_not_reach_the_backward(override):
    x, weight, bias, counts, d_out = problem([32, 0, 64])
    recipe = Recipe("block", backward_override=override)
    leaves = [tensor.clone().requires_grad_() for tensor in (x, weight, bias)]
    call_counts = counts.clone()
    out = moe_fast.grouped_linear(*leaves[:2], call_counts, bias=leaves[2], recipe=recipe)
    call_counts.zero_()
    got = [out.detach(), *torch.autograd.grad(out, leaves, d_out)]
    assert equal(got, results(x, weight, bias, counts, d_out, recipe=recipe))


@pytest.mark.parametrize("family", ["delayed", "block", "nvfp4"])
def test_illegal_counts_stay_within_memory(family):
    x, weight, bias, _, d_out = problem([32], 32, 32, rows=32)
    weight, bias = weight.expand(3, -1, -1), bias.expand(3, -1)
    for counts in ([2**40, -5, 3], [2**62, 2**62, 2**62], [-7, 20, 20]):
        inputs = (x, weight, bias, torch.tensor(counts), d_out)
        copies = [tensor.clone() for tensor in inputs]
        got = results(*inputs, **settings_of(RECIPES[family], 3))
        assert [tensor.shape for tensor in got] == [d_out.shape, x.shape, weight.shape, bias.shape]
        assert equal(list(inputs), copies)


def test_rows_without_a_form_for_the_weights_gradient_have_an_output():
    x, weight, _, counts, d_out = problem([32], 32, 32, rows=32, dtype=torch.float32)
    recipe = Recipe("nvfp4", stochastic_rounding=False)  # transforms bfloat16 only
    out = moe_fast.grouped_linear(x, weight.requires_grad_(), counts, recipe=recipe)
    with pytest.raises(ValueError, match="bfloat16"):
        out.backward(d_out)


@pytest.mark.parametrize("override", OVERRIDES)
def test_an_overridden_backward_quantises_nothing_and_keeps_codes_or_what_was_given(override, monkeypatch):
    x, weight, _, counts, d_out = problem([32, 0, 64], 64, 32, rows=100)
    leaves, calls, saved = [x.requires_grad_(), weight.requires_grad_()], [], []
    original = factors.quantize_for_products
    monkeypatch.setattr(
        factors,
        "quantize_for_products",
        lambda *tensors, **form: calls.append((form["role"], form["columnwise"])) or original(*tensors, **form),
    )
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        out = moe_fast.grouped_linear(*leaves, counts, recipe=Recipe("block", backward_override=override))
    torch.autograd.grad(out, leaves, d_out)
    assert calls == [("input", False), ("weight", False)]
    large = {(tensor.dtype, tensor.numel()) for tensor in saved if tensor.numel() >= weight.numel()}
    narrow = torch.uint8 if override == "dequantized" else torch.bfloat16
    assert large == {(narrow, x.numel()), (narrow, weight.numel())}


def test_products_take_what_is_quantised_already():
    recipe = RECIPES["block"]
    x, weight, bias, counts, d_out = problem([32, 0, 64], 160, 96, rows=96)
    precision, plan = factors.Precision(recipe, None, None), scaled.scaled_plan(counts, 96, recipe)
    x8, d8 = (
        factors.quantized_rows(tensor, role, counts, precision, True, True)
        for tensor, role in ((x, "input"), (d_out, "grad_output"))
    )
    weight8 = factors.quantized_weight(weight, precision, True, True)
    got = [
        scaled.scaled_fprop(x8, weight8, plan, bias=bias),
        scaled.scaled_dgrad(d8, weight8, plan),
        scaled.scaled_wgrad(d8, x8, plan),
    ]
    expected = results(x, weight, bias, counts, d_out, recipe=recipe)
    assert equal(got, expected[:3])


# Weights that are quantised once


def quantised_weights(monkeypatch) -> list[bool]:
    """Fills with an entry for each weight that is quantised from now on."""
    weights_quantised, original = [], factors.quantize_for_products
    monkeypatch.setattr(
        factors,
        "quantize_for_products",
        lambda *tensors, **form: (
            (weights_quantised.append(True) if form["role"] == "weight" else None) or original(*tensors, **form)
        ),
    )
    return weights_quantised


@pytest.mark.parametrize("recipe", OVERRIDDEN, ids=lambda recipe: f"{recipe.scaling}-{recipe.backward_override}")
def test_kept_codes_give_the_bits_of_new_ones(recipe, monkeypatch):
    inputs, settings = problem([32, 0, 64], 160, 96, rows=96), settings_of(recipe, 3)
    expected, weights_quantised = results(*inputs, **settings), quantised_weights(monkeypatch)
    with moe_fast.weights_quantized_once():
        repeated = [results(*inputs, **settings) for _ in range(2)]
    assert len(weights_quantised) == (2 if recipe.scaling == "delayed" else 1)  # whose scales the state gives
    assert all(equal(got, expected) for got in repeated)
    assert equal(results(*inputs, **settings), expected)


def test_each_weight_and_recipe_has_codes_of_its_own():
    x, weight, bias, counts, d_out = problem([32, 0, 64], 160, 96, rows=96)
    second_weight = (weight + 1).contiguous()
    for scaling in ("block", "mxfp8"):
        for one_weight in (weight, second_weight):
            expected = results(x, one_weight, bias, counts, d_out, recipe=RECIPES[scaling])
            with moe_fast.weights_quantized_once():
                results(x, weight, bias, counts, d_out, recipe=RECIPES["block"])
                assert equal(results(x, one_weight, bias, counts, d_out, recipe=RECIPES[scaling]), expected)


def test_a_weight_that_changes_meanwhile_is_found_and_afterwards_it_may_change():
    x, weight, bias, counts, d_out = problem([32, 0, 64], 160, 96, rows=96)
    recipe = RECIPES["block"]
    with moe_fast.weights_quantized_once():
        results(x, weight, bias, counts, d_out, recipe=recipe)
        weight.mul_(2)
        with pytest.raises(RuntimeError, match="changed within"):
            results(x, weight, bias, counts, d_out, recipe=recipe)
    changed = results(x, weight, bias, counts, d_out, recipe=recipe)
    with moe_fast.weights_quantized_once():
        assert equal(results(x, weight, bias, counts, d_out, recipe=recipe), changed)
        with moe_fast.weights_quantized_once():
            weight.mul_(2)
            assert not equal(results(x, weight, bias, counts, d_out, recipe=recipe), changed)


def test_a_change_that_torch_does_not_count_is_the_callers():
    x, weight, bias, counts, d_out = problem([32, 0, 64], 160, 96, rows=96)
    expected = results(x, weight, bias, counts, d_out, recipe=RECIPES["block"])
    with moe_fast.weights_quantized_once():
        results(x, weight, bias, counts, d_out, recipe=RECIPES["block"])
        weight.data.mul_(2)
        assert equal(results(x, weight, bias, counts, d_out, recipe=RECIPES["block"]), expected)
    assert not equal(results(x, weight, bias, counts, d_out, recipe=RECIPES["block"]), expected)


# Codes that are transposed as they are made


@pytest.mark.parametrize("counts", [[32, 0, 100], [128, 4], [0, 0]], ids=str)
def test_transposed_codes_are_those_of_quantize_and_end_with_zeros(counts):
    x, recipe = normal(160, 96, seed=1, dtype=torch.bfloat16), RECIPES["block"]
    splits = torch.tensor(counts)
    expected = moe_fast.quantize(x, recipe, splits=splits, columnwise=True).quantized
    got = factors.quantize_for_products(x, recipe, splits=splits, columnwise=True)
    assert torch.equal(got.rowwise.codes_MN[: sum(counts)], expected.rowwise.codes_MN[: sum(counts)])
    assert got.columnwise.codes_MN.numel() == got.columnwise.amax.numel() == 0  # nothing that no product reads
    row = tile = 0
    for count in counts:
        tiles = -(-count // 128)
        codes = got.columnwise.turned_NT[:, tile * 128 : (tile + tiles) * 128]
        assert torch.equal(codes[:, :count], expected.columnwise.codes_MN[row : row + count].T)
        assert not codes[:, count:].any()
        assert torch.equal(got.columnwise.scale[tile : tile + tiles], expected.columnwise.scale[tile : tile + tiles])
        row, tile = row + count, tile + tiles


@pytest.mark.parametrize("rowwise", [False, True])
def test_squares_are_transposed_too(rowwise):
    x, recipe = normal(256, 96, seed=1, dtype=torch.bfloat16), RECIPES["block"]
    expected = moe_fast.quantize(x, recipe, role="weight").quantized
    got = factors.quantize_for_products(x, recipe, role="weight", rowwise=rowwise, columnwise=True)
    assert torch.equal(got.columnwise.turned_NT, expected.rowwise.codes_MN.T)
    assert torch.equal(got.columnwise.scale, expected.rowwise.scale)
    assert (got.rowwise is not None and torch.equal(got.rowwise.codes_MN, expected.rowwise.codes_MN)) == rowwise


# What Blackwell would run


def compile_for_blackwell(scaling: str) -> str:
    """The machine's words for the product whose scales the matrix unit takes."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from moe_fast.experts._scaled_linear import scaled_matmul_kernel

    kernel = scaled_matmul_kernel.fn

    block, format = {"mxfp8": (32, "e4m3"), "nvfp4": (16, "e2m1")}[scaling]
    constants = {
        "RULE": scaling,
        "X_FORMAT": format,
        "WEIGHT_FORMAT": format,
        "FACTOR": None,
        "SCALED_BY_HARDWARE": True,
        "BIAS_AS": triton.language.float32,
    }
    constants |= {"SHARED_C": 1, "SHARED_D": block, "BLOCK_P": 128, "BLOCK_C": 64, "BLOCK_D": 128}
    constants |= dict.fromkeys(("x_desc", "weight_desc", "out_desc"))
    if scaling == "mxfp8":
        constants |= dict.fromkeys(("x_outer_ptr", "weight_outer_ptr"))
    types = {
        "bias_ptr": "*fp32",
        "out_ptr": "*bf16",
        "tile_ptr": "*i64",
        "total_ptr": "*i64",
        "x_outer_ptr": "*fp32",
        "weight_outer_ptr": "*fp32",
    }
    types |= {"x_share": "fp32", "weight_share": "fp32"}
    names = [parameter.name for parameter in kernel.params]
    signature = {
        name: "constexpr" if name in constants else types.get(name, "*u8" if name.endswith("_ptr") else "i32")
        for name in names
    }
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()})
    return triton.compile(source, target=GPUTarget("cuda", 100, 32), options={"num_warps": 8, "num_stages": 2}).asm[
        "ptx"
    ]


@pytest.mark.parametrize("scaling, word", [("mxfp8", "mxf8f6f4.block_scale"), ("nvfp4", "mxf4nvf4.block_scale")])
def test_blackwells_matrix_unit_takes_the_scales(scaling, word):
    assert word in compiled(compile_for_blackwell, scaling)


# Declarations per machine


@pytest.mark.parametrize(("capability", "accumulator", "emulated"), [
    ((8, 0), "float32", ("delayed", "current", "block", "mxfp8", "nvfp4")),
    ((8, 9), "float32", ("mxfp8", "nvfp4")),
    ((9, 0), "hopper_fp8", ("mxfp8", "nvfp4")),
    ((10, 0), "float32", ()),
], ids=str)  # fmt: skip
def test_the_accumulator_and_what_is_emulated_are_those_of_the_gpu(monkeypatch, capability, accumulator, emulated):
    monkeypatch.setattr(backend, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    for module, function in ((backend, "casts_in_hardware"), (moe_fast.experts, "scales_in_hardware")):
        monkeypatch.setattr(module, function, getattr(module, function).__wrapped__)  # uncached
    for function in ("grouped_linear", "grouped_mlp", "shared_experts"):
        declared = moe_fast.declares(function)
        assert (declared["accumulator"], declared.get("emulated", ())) == (accumulator, emulated)
    assert "emulated" not in moe_fast.declares("quantize")


def test_without_a_gpu_all_products_of_codes_are_emulated():
    assert moe_fast.declares("grouped_linear")["emulated"] == SCALINGS
    assert moe_fast.declares("grouped_linear")["accumulator"] == "float32"
