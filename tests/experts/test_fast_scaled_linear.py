"""grouped_linear of `moe_fast` with a recipe: within the rounding of float32 sums of the products that the reference takes of its own codes."""

import os
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import Tensor

import moe_fast
import moe_ref
from conformance.judge.bound import sum_bound
from moe_fast.launch import backend
from moe_ref.config import LinearState, QuantizerState, Recipe
from moe_ref.config.quantization import OVERRIDES, SCALINGS

pytestmark = pytest.mark.skipif(not backend.INTERPRETED, reason="the tensors of these tests are on the CPU")
scaled = import_module("moe_fast.experts.scaled_linear")
EMPTY = torch.empty
ROOT = Path(__file__).parents[2]
PLAIN_FP4 = {"hadamard": False, "stochastic_rounding": False}
RECIPES = {
    "current": Recipe("current"),
    "current, powers": Recipe("current", power_of_two_scales=True, fp8_format="e4m3"),
    "delayed": Recipe("delayed", amax_history_len=3),
    "block": Recipe("block"),
    "block, any scale": Recipe("block", power_of_two_scales=False, two_dimensional_weights=False, fp8_format="hybrid"),
    "mxfp8": Recipe("mxfp8"),
    "mxfp8, squares, hybrid": Recipe("mxfp8", two_dimensional_weights=True, fp8_format="hybrid"),
    "nvfp4": Recipe("nvfp4", **PLAIN_FP4),
    "nvfp4, vectors": Recipe("nvfp4", two_dimensional_weights=False, **PLAIN_FP4),
}
FAMILIES = ("current", "delayed", "block", "mxfp8", "nvfp4")
COUNTS = {"uneven": [32, 0, 160], "nobody": [0, 0]}
PRODUCTS = ("out", "d_x", "d_weight", "d_bias")


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


def normal(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    """Rows that differ in size, so that each block's scale matters."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.exp2(torch.randint(-4, 5, (*shape[:-1], 1), generator=generator).double())
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * size).to(dtype)


def problem(
    counts: list[int],
    ins: int = 160,
    outs: int = 96,
    *,
    rows: int = 200,
    dtype: torch.dtype = torch.bfloat16,
    tail: float = torch.nan,
):
    """x, W, b, counts and the gradient of the output; `tail` stands in the rows behind the last segment."""
    x, d_out = normal(rows, ins, seed=1, dtype=dtype), normal(rows, outs, seed=2, dtype=dtype)
    x[sum(counts) :] = d_out[sum(counts) :] = tail
    weight, bias = normal(len(counts), outs, ins, seed=3, dtype=dtype), normal(len(counts), outs, seed=4, dtype=dtype)
    return x, weight, bias, torch.tensor(counts), d_out


def settings_of(recipe: Recipe, experts: int) -> dict:
    """The recipe, and for delayed scaling scales that differ between experts and tensors."""
    if recipe.scaling != "delayed":
        return {"recipe": recipe}
    states = [QuantizerState(torch.zeros(experts, 3), torch.linspace(3, 30, experts) * (k + 1)) for k in range(3)]
    return {"recipe": recipe, "state": LinearState(*states)}


def results(function, x, weight, bias, tokens_per_expert, d_out, **settings) -> list[Tensor]:
    """out, dx, dW and db."""
    leaves = [tensor.detach().requires_grad_() for tensor in (x, weight, bias)]
    out = function(*leaves[:2], tokens_per_expert, bias=leaves[2], **settings)
    return [out.detach(), *torch.autograd.grad(out, leaves, d_out)]


def magnitudes(x, weight, bias, tokens_per_expert, d_out) -> list[Tensor]:
    """Σ|terms|, an expert at a time. A code may stand for a little more than the value that it was made from."""
    x, weight, d_out = (1.5 * tensor.abs().nan_to_num(0, 0, 0) for tensor in (x, weight, d_out))
    out, d_x, d_weight, d_bias = (
        torch.zeros_like(d_out),
        torch.zeros_like(x),
        torch.zeros_like(weight),
        torch.zeros_like(bias),
    )
    begin = 0
    for e, count in enumerate(tokens_per_expert.tolist()):
        own = slice(begin, begin + count)
        out[own], d_x[own] = x[own] @ weight[e].T + bias[e].abs(), d_out[own] @ weight[e]
        d_weight[e], d_bias[e] = d_out[own].T @ x[own], d_out[own].sum(0)
        begin += count
    return [out, d_x, d_weight, d_bias]


def outside(observed: list[Tensor], *inputs, **settings) -> list[str]:
    """Which of the results are not as near to the reference's in float64 as sums in float32 are."""
    doubles = [tensor.double() for tensor in inputs[:3]]
    x, _, _, counts, d_out = inputs
    right = exact(*inputs, **settings)
    sizes = magnitudes(*doubles, counts, d_out.double())
    terms = (x.shape[1], d_out.shape[1], len(x), len(x))
    wrong = []
    for name, value, size, n, got in zip(PRODUCTS, right, sizes, terms, observed, strict=True):
        bound = sum_bound(
            value, size, n + 8, got.dtype, torch.float32
        )  # eight: of codes times scales, and of scales times one another
        if got.dtype != x.dtype or got.shape != value.shape or bound.wrong(got) is not None:
            wrong.append(name)
    return wrong


def exact(x, weight, bias, tokens_per_expert, d_out, **settings) -> list[Tensor]:
    """The reference's results, before the last rounding: factors are quantised as they are, and go on in float64."""
    module = import_module("moe_ref.experts.linear")
    quantized = module._from_codes
    module._from_codes = lambda x, splits, role, gemm, how: [
        value.double() for value in quantized(x.to(dtype), splits, role, gemm, how)
    ]
    dtype = x.dtype
    try:
        return results(
            moe_ref.grouped_linear,
            x.double(),
            weight.double(),
            bias.double(),
            tokens_per_expert,
            d_out.double(),
            **settings,
        )
    finally:
        module._from_codes = quantized


def assert_right(recipe: Recipe, *inputs) -> None:
    settings = settings_of(recipe, len(inputs[3]))
    assert outside(results(moe_fast.grouped_linear, *inputs, **settings), *inputs, **settings) == []


# Values


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_output_and_gradients_are_products_of_the_references_codes(recipe, counts):
    assert_right(recipe, *problem(counts))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_dtype_is_right(family, dtype):
    assert_right(RECIPES[family], *problem([32, 0, 64], 96, 64, rows=100, dtype=dtype))


RAGGED = (
    ([1, 0, 17], 20, 24, 200),
    ([1], 1, 145, 17),
    ([0], 1, 24, 17),
    ([0, 0], 0, 1, 1),
    ([129, 3], 132, 1, 1),
)  # counts, rows, inputs, outputs


@pytest.mark.parametrize("family", ["current", "delayed", "block"])
@pytest.mark.parametrize("counts, rows, ins, outs", RAGGED, ids=str)
def test_segments_and_widths_that_fill_nothing_are_right(family, counts, rows, ins, outs, form):
    assert_right(RECIPES[family], *problem(counts, ins, outs, rows=rows))


@pytest.mark.parametrize("family", ["mxfp8", "nvfp4"])
def test_a_depth_that_fills_no_step_is_right(family, form):
    assert_right(RECIPES[family], *problem([96, 32], 32, 96, rows=128))


@pytest.mark.parametrize(
    "recipe", [RECIPES[name] for name in ("current", "block", "mxfp8")], ids=lambda recipe: recipe.scaling
)
def test_a_deep_sum_is_right(recipe):
    x, weight, _, counts, _ = problem([32, 64], 2880, 32, rows=96)
    inputs = (x, weight, torch.zeros(2, 32).bfloat16(), counts, torch.zeros(96, 32).bfloat16())
    out = moe_fast.grouped_linear(*inputs[:2], counts, recipe=recipe)
    others = [torch.zeros_like(tensor) for tensor in inputs[:3]]
    assert "out" not in outside([out, *others], *inputs, recipe=recipe)


OPTIONS = {
    "hadamard": {"hadamard": True, "stochastic_rounding": False},
    "stochastic": {"hadamard": False, "stochastic_rounding": True},
    "row-scaled": {**PLAIN_FP4, "row_scaled_activation": True},
    "four over six": {**PLAIN_FP4, "four_over_six": "all"},
    "four over six, 448": {**PLAIN_FP4, "four_over_six": "weights", "four_over_six_bound_256": "none"},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_option_of_nvfp4_is_right(options):
    inputs = problem([32, 0, 64], 96, 64, rows=112)
    settings = {"recipe": Recipe("nvfp4", **options)}
    if options["stochastic_rounding"]:
        settings["noise"] = torch.rand(2, 112, 64, generator=torch.Generator().manual_seed(5))
    assert outside(results(moe_fast.grouped_linear, *inputs, **settings), *inputs, **settings) == []


def test_the_comparison_sees_what_may_go_wrong():
    recipe = RECIPES["block"]
    inputs = x, weight, bias, counts, d_out = problem([9, 0, 13], 200, 40, rows=22)
    right = results(moe_ref.grouped_linear, *inputs, recipe=recipe)
    assert outside(right, *inputs, recipe=recipe) == []

    def wrong(*changed, recipe=recipe) -> list[str]:
        return outside(results(moe_ref.grouped_linear, *changed, recipe=recipe), *inputs, recipe=RECIPES["block"])

    assert wrong(*inputs, recipe=None) == list(PRODUCTS[:3])
    assert wrong(*inputs, recipe=RECIPES["block, any scale"]) == list(PRODUCTS[:3])
    assert wrong(*inputs, recipe=RECIPES["current"]) == list(PRODUCTS[:3])
    assert wrong(x, weight.roll(1, 0), bias, counts, d_out) == ["out", "d_x"]
    assert wrong(x, weight, bias, counts + torch.tensor([1, 0, -1]), d_out) == list(PRODUCTS)
    assert outside([right[0].float(), *right[1:]], *inputs, recipe=recipe) == ["out"]


# What does not belong to an expert


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_behind_the_last_segment_are_zero_and_reach_nothing(family, form):
    settings = settings_of(RECIPES[family], 3)
    got, right = (
        results(moe_fast.grouped_linear, *problem([32, 0, 64], 96, 64, rows=150, tail=tail), **settings)
        for tail in (torch.nan, 0.0)
    )
    assert all(torch.equal(a, b) for a, b in zip(got, right, strict=True))
    assert not got[0][96:].any() and not got[1][96:].any()


@pytest.mark.parametrize("family", FAMILIES[:4])  # E2M1 has no NaN
def test_a_nan_in_an_experts_rows_stays_with_it(family, form):
    settings = settings_of(RECIPES[family], 3)
    inputs = x, _, _, _, d_out = problem([32, 64, 32], 96, 64, rows=128)
    clean = results(moe_fast.grouped_linear, *inputs, **settings)
    x[32:96] = d_out[32:96] = torch.nan
    out, d_x, d_weight, d_bias = results(moe_fast.grouped_linear, *inputs, **settings)
    for got, right in zip((out, d_x), clean[:2], strict=True):
        assert (
            torch.equal(got[:32], right[:32]) and torch.equal(got[96:], right[96:]) and not got[32:96].isfinite().any()
        )
    for got, right in zip((d_weight, d_bias), clean[2:], strict=True):
        assert torch.equal(got[[0, 2]], right[[0, 2]]) and not got[1].isfinite().any()


@pytest.mark.parametrize("family", FAMILIES)
def test_an_infinity_gives_what_the_reference_gives(family):
    settings = settings_of(RECIPES[family], 2)
    x, weight, bias, counts, d_out = problem([32, 64], 160, 64, rows=96)
    x[3, 5] = d_out[40, 1] = weight[1, 2, 3] = torch.inf
    x[4] = 0
    inputs = (x, weight, bias, counts, d_out)
    right, got = (results(package.grouped_linear, *inputs, **settings) for package in (moe_ref, moe_fast))
    for expected, value in zip(right, got, strict=True):
        odd = ~expected.isfinite()
        assert torch.equal(odd, ~value.isfinite()) and torch.equal(expected[odd].isnan(), value[odd].isnan())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("counts", [[2**40, -5, 3], [2**62, 2**62, 2**62], [-7, 20, 20]], ids=str)
def test_illegal_counts_stay_within_memory(family, counts):
    x, weight, bias, _, d_out = problem([32], 32, 32, rows=32)
    weight, bias = weight.expand(3, -1, -1), bias.expand(3, -1)
    inputs = (x, weight, bias, torch.tensor(counts), d_out)
    before = [tensor.clone() for tensor in inputs]
    got = results(moe_fast.grouped_linear, *inputs, **settings_of(RECIPES[family], 3))
    assert [tensor.shape for tensor in got] == [d_out.shape, x.shape, weight.shape, bias.shape]
    assert all(torch.equal(tensor, kept) for tensor, kept in zip(inputs, before, strict=True))


@pytest.mark.parametrize("family", ["current", "delayed"])
def test_scales_far_from_one_meet_no_overflow(family):
    x, weight = (torch.full((2, 16), 2.0**-100), torch.full((1, 4, 16), 2.0**90))
    settings = settings_of(RECIPES[family], 1)
    if family == "delayed":
        states = [QuantizerState(torch.zeros(1, 3), torch.tensor([scale])) for scale in (2.0**105, 2.0**-85, 1.0)]
        settings["state"] = LinearState(*states)
    for power in (1.0, 2.0**-40, 2.0**30):
        out = moe_fast.grouped_linear(x * power, weight / power, torch.tensor([2]), **settings)
        right = moe_ref.grouped_linear(x * power, weight / power, torch.tensor([2]), **settings)
        assert torch.allclose(out, right, rtol=1e-6, atol=0)


def test_counts_that_change_after_the_forward_do_not_reach_the_backward():
    settings = {"recipe": RECIPES["block"]}
    x, weight, bias, counts, d_out = problem([32, 0, 64], 64, 32, rows=100)
    leaves = [tensor.clone().requires_grad_() for tensor in (x, weight, bias)]
    given = counts.clone()
    out = moe_fast.grouped_linear(*leaves[:2], given, bias=leaves[2], **settings)
    given.zero_()
    got = [out.detach(), *torch.autograd.grad(out, leaves, d_out)]
    assert outside(got, x, weight, bias, counts, d_out, **settings) == []


def test_rows_without_a_form_for_the_weights_gradient_have_an_output():
    x, weight, _, counts, d_out = problem([32], 32, 32, rows=32, dtype=torch.float32)
    settings = {"recipe": Recipe("nvfp4", stochastic_rounding=False)}  # transforms nothing but bfloat16
    out = moe_fast.grouped_linear(x, weight.requires_grad_(), counts, **settings)
    assert torch.allclose(out, moe_ref.grouped_linear(x, weight, counts, **settings), rtol=1e-5, atol=1e-4)
    with pytest.raises(ValueError, match="bfloat16"):
        out.backward(d_out)


READS = ("item", "tolist", "nonzero", "__int__", "__index__", "__bool__", "__float__", "cpu", "numpy")


OVERRIDDEN = [
    (family, override)
    for family in FAMILIES
    for override in (None, *OVERRIDES)
    if family != "delayed" or override is None
]


@pytest.mark.parametrize(("family", "override"), OVERRIDDEN)
def test_the_device_is_never_read(family, override, monkeypatch):
    inputs = problem([32, 0, 32], 32, 32, rows=64)
    settings = settings_of(replace(RECIPES[family], backward_override=override), 3)
    seen = []
    for name in READS:
        original = getattr(Tensor, name)
        monkeypatch.setattr(
            Tensor, name, lambda self, *rest, original=original: seen.append(self) or original(self, *rest)
        )
    results(moe_fast.grouped_linear, *inputs, **settings)
    assert seen == []


# A backward_override

OVERRIDDEN = {
    f"{name}, {override}": replace(recipe, backward_override=override)
    for name, recipe in RECIPES.items()
    if name != "delayed"
    for override in OVERRIDES
}
TRANSFORMED = Recipe(
    "nvfp4", backward_override="dequantized"
)  # forward, where nothing is transformed and nothing is random


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("recipe", [*OVERRIDDEN.values(), TRANSFORMED], ids=[*OVERRIDDEN, "nvfp4, all of it"])
def test_overridden_gradients_are_products_of_what_the_reference_keeps(recipe, dtype):
    assert_right(recipe, *problem(COUNTS["uneven"], dtype=dtype))


@pytest.mark.parametrize("recipe", OVERRIDDEN.values(), ids=OVERRIDDEN)
def test_overridden_gradients_alone_are_those_of_the_backward(recipe):
    inputs = x, weight, _, counts, d_out = problem(COUNTS["uneven"])
    _, d_x, d_weight, _ = results(moe_fast.grouped_linear, *inputs, recipe=recipe)
    assert torch.equal(moe_fast.grouped_dgrad(d_out, weight, counts, recipe=recipe), d_x)
    assert torch.equal(moe_fast.grouped_wgrad(d_out, x, counts, recipe=recipe), d_weight)


@pytest.mark.parametrize("override", OVERRIDES)
def test_the_comparison_sees_an_override_that_is_ignored_or_taken_for_the_other(override):
    inputs = problem([32, 0, 64], 64, 32, rows=100, dtype=torch.float32)
    for other in {None, *OVERRIDES} - {override}:
        wrong = results(moe_fast.grouped_linear, *inputs, recipe=Recipe("current", backward_override=other))
        assert outside(wrong, *inputs, recipe=Recipe("current", backward_override=override)) == ["d_x", "d_weight"]


@pytest.mark.parametrize("override", OVERRIDES)
def test_an_overridden_backward_quantises_nothing_and_keeps_codes_or_what_was_given(override, monkeypatch):
    x, weight, _, counts, d_out = problem([32, 0, 64], 64, 32, rows=100)
    leaves, asked, kept = [x.requires_grad_(), weight.requires_grad_()], [], []
    made = scaled.quantize
    monkeypatch.setattr(
        scaled,
        "quantize",
        lambda *tensors, **how: asked.append((how["role"], how["columnwise"])) or made(*tensors, **how),
    )
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        out = moe_fast.grouped_linear(*leaves, counts, recipe=Recipe("block", backward_override=override))
    torch.autograd.grad(out, leaves, d_out)
    assert asked == [("input", False), ("weight", False)]
    large = {(tensor.dtype, tensor.numel()) for tensor in kept if tensor.numel() >= weight.numel()}
    narrow = torch.uint8 if override == "dequantized" else torch.bfloat16
    assert large == {(narrow, x.numel()), (narrow, weight.numel())}


def test_counts_that_change_after_the_forward_do_not_reach_an_overridden_backward():
    settings = {"recipe": OVERRIDDEN["block, dequantized"]}
    x, weight, bias, counts, d_out = problem([32, 0, 64], 64, 32, rows=100)
    leaves = [tensor.clone().requires_grad_() for tensor in (x, weight, bias)]
    given = counts.clone()
    out = moe_fast.grouped_linear(*leaves[:2], given, bias=leaves[2], **settings)
    given.zero_()
    got = [out.detach(), *torch.autograd.grad(out, leaves, d_out)]
    assert outside(got, x, weight, bias, counts, d_out, **settings) == []


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,)], ids=["rows", "weight", "bias"])
@pytest.mark.parametrize("override", OVERRIDES)
def test_one_overridden_gradient_is_what_it_is_beside_the_others(override, wanted):
    inputs = x, weight, bias, counts, d_out = problem([32, 0, 64], 64, 32, rows=100)
    recipe = Recipe("mxfp8", backward_override=override)
    leaves = [tensor.clone().requires_grad_(place in wanted) for place, tensor in enumerate((x, weight, bias))]
    out = moe_fast.grouped_linear(*leaves[:2], counts, bias=leaves[2], recipe=recipe)
    (got,) = torch.autograd.grad(out, leaves[wanted[0]], d_out)
    assert torch.equal(got, results(moe_fast.grouped_linear, *inputs, recipe=recipe)[1 + wanted[0]])


# What Blackwell would run


def compile_for_blackwell(scaling: str) -> str:
    """The machine's words for the product whose scales the matrix unit takes. In a process where kernels are compiled."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from moe_fast.experts._scaled_linear import scaled_matmul_kernel as kernel

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
    constants |= dict.fromkeys(("bias_ptr", "x_desc", "weight_desc", "out_desc"))
    if scaling == "mxfp8":
        constants |= dict.fromkeys(("x_outer_ptr", "weight_outer_ptr"))
    types = {
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
def test_blackwells_matrix_unit_takes_the_scales(scaling, word, tmp_path):
    code = f"from tests.experts.test_fast_scaled_linear import compile_for_blackwell; print({word!r} in compile_for_blackwell({scaling!r}))"
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=280
    )
    assert done.stdout.strip() == "True", done.stderr[-2000:]


# The gradients as functions


@pytest.mark.parametrize("family", FAMILIES)
def test_the_gradients_alone_are_those_of_the_backward(family):
    settings = settings_of(RECIPES[family], 3)
    inputs = x, weight, _, counts, d_out = problem(COUNTS["uneven"])
    _, d_x, d_weight, _ = results(moe_fast.grouped_linear, *inputs, **settings)
    assert torch.equal(moe_fast.grouped_dgrad(d_out, weight, counts, **settings), d_x)
    assert torch.equal(moe_fast.grouped_wgrad(d_out, x, counts, **settings), d_weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_weights_gradient_is_added_to_what_there_is(family, dtype):
    settings = settings_of(RECIPES[family], 3)
    x, _, _, counts, d_out = problem([32, 64, 0], rows=100, dtype=torch.float32)
    product = moe_fast.grouped_wgrad(d_out, x, counts, **settings)  # in float32, and so not rounded yet
    before = normal(3, 96, 160, seed=5, dtype=dtype)
    before[2, 0, 0], before[2, 0, 1] = -0.0, torch.nan
    given = before.mT.contiguous().mT
    got = moe_fast.grouped_wgrad(d_out, x, counts, accumulate_into=given, **settings)
    assert got.dtype == dtype and torch.equal(got[:2], (before + product)[:2])
    assert torch.equal(got[2].view(torch.uint8), before[2].view(torch.uint8)) and torch.equal(given[:2], before[:2])


def test_products_take_what_is_quantised_already():
    recipe = RECIPES["block"]
    x, weight, bias, counts, d_out = problem([32, 0, 64], rows=96)
    how, plan = scaled.Precision(recipe, None, None), scaled.scaled_plan(counts, 96)
    x8, d8 = (
        scaled.quantized_rows(tensor, role, counts, how, True, True)
        for tensor, role in ((x, "input"), (d_out, "grad_output"))
    )
    weight8 = scaled.quantized_weight(weight, how, True, True)
    got = [
        scaled.scaled_fprop(x8, weight8, plan, bias=bias),
        scaled.scaled_dgrad(d8, weight8, plan),
        scaled.scaled_wgrad(d8, x8, plan),
    ]
    right = results(moe_fast.grouped_linear, x, weight, bias, counts, d_out, recipe=recipe)
    assert all(torch.equal(a, b) for a, b in zip(got, right[:3], strict=True))


# ---- what is declared of the machine


@pytest.mark.parametrize(
    ("capability", "accumulator", "emulated"),
    [
        ((8, 0), "float32", ("delayed", "current", "block", "mxfp8", "nvfp4")),
        ((8, 9), "float32", ("mxfp8", "nvfp4")),
        ((9, 0), "hopper_fp8", ("mxfp8", "nvfp4")),
        ((10, 0), "float32", ()),
    ],
    ids=str,
)
def test_the_accumulator_and_what_is_emulated_are_those_of_the_gpu(monkeypatch, capability, accumulator, emulated):
    monkeypatch.setattr(backend, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    for module, function in ((backend, "casts_in_hardware"), (moe_fast.experts, "scales_in_hardware")):
        monkeypatch.setattr(module, function, getattr(module, function).__wrapped__)  # each GPU is asked once
    for function in ("grouped_linear", "grouped_mlp", "shared_experts"):
        known = moe_fast.declares(function)
        assert (known["accumulator"], known.get("emulated", ())) == (accumulator, emulated)
    assert "emulated" not in moe_fast.declares("quantize")


def test_without_a_gpu_all_products_of_codes_are_emulated():
    assert moe_fast.declares("grouped_linear")["emulated"] == SCALINGS
    assert moe_fast.declares("grouped_linear")["accumulator"] == "float32"
