"""quantize and dequantize beyond values: special numbers, NVFP4's options, layouts, refusals.

`evidence.formulations.quantization` quantises number by number, for the cases that tests/evidence
draws; test_suite.py judges the reference by many more. Results that were worked out by hand are
golden cases of the suite.
"""

import math
from bisect import bisect_left
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import moe_ref
from moe_ref import amax, codes, dequantize, new_quantizer_state, quantize, scales
from moe_ref.config import Recipe
from moe_ref.quantization.quantize import HADAMARD_SIGNS, hadamard
from tests.common.fast import normal

f32 = np.float32
LARGEST = np.finfo(np.float32).max
RECIPES = [
    Recipe("current"), Recipe("block"), Recipe("mxfp8"), Recipe("delayed"),
    Recipe("nvfp4", hadamard=False, stochastic_rounding=False),
]  # fmt: skip


def quantized(x: Tensor, recipe: Recipe, **options: Any) -> Any:
    """The quantised tensor; a fresh state where one is needed."""
    splits = options.get("splits")
    options.setdefault("state", new_quantizer_state(recipe, num_groups=1 if splits is None else len(splits)))
    return quantize(x, recipe, **options)[0]


def test_the_largest_finite_of_the_input_dtype_bounds_a_block_scale_and_that_of_float32_the_others():
    tiny = torch.tensor([[2.0**-130]], dtype=torch.bfloat16)
    block = scales(quantized(tiny, Recipe("block", power_of_two_scales=False)))
    assert block.item() == f32(1) / f32(torch.finfo(torch.bfloat16).max)
    assert scales(quantized(tiny, Recipe("current"))).item() == f32(1) / LARGEST


def test_nvfp4_decodes_beside_an_infinity_as_its_kernel_does():
    x = torch.zeros(16, 16)
    x[:, 0], x[:, 1] = math.inf, 2.0
    value = dequantize(quantized(x, Recipe("nvfp4")))[0]
    assert value[0] == math.inf and value[1].isnan()  # 0 · (448 · ∞)


def test_subnormal_blocks_of_mxfp8_use_the_smallest_exponent():
    x = torch.full((32, 32), 448 * 2.0**-127)
    q = quantized(x, Recipe("mxfp8"))
    assert (scales(q)[0, 0].item(), codes(q)[0, 0].item()) == (0, 0x7E)
    assert torch.equal(dequantize(q), x)
    tiny = quantized(torch.full((32, 32), 2.0**-149), Recipe("mxfp8"))
    assert (scales(tiny)[0, 0].item(), codes(tiny)[0, 0].item()) == (0, 0)  # 2^-22 < half min code


def test_float64_is_quantised_as_float32():
    x = normal(32, 32, dtype=torch.float64)
    for recipe in RECIPES:
        assert torch.equal(codes(quantized(x, recipe)), codes(quantized(x.float(), recipe)))
        assert torch.equal(dequantize(quantized(x, recipe)), dequantize(quantized(x.float(), recipe)).double())


# ---- the layouts of matrix products


def swizzled(scale: Tensor) -> Tensor:
    """Scales in tiles of 128×4, element by element."""
    rows, columns = -(-scale.shape[0] // 128) * 128, -(-scale.shape[1] // 4) * 4
    out = torch.zeros(rows * columns, dtype=scale.dtype)
    for r, c in np.ndindex(*scale.shape):
        tile = r // 128 * (columns // 4) + c // 4
        out[tile * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4] = scale[r, c]
    return out


@pytest.mark.parametrize("scaling", ["mxfp8", "nvfp4"])
def test_scales_of_small_blocks_are_swizzled_in_tiles(scaling):
    x = (normal(160, 192) * torch.logspace(-3, 3, 192)).bfloat16()
    q = quantized(x, Recipe(scaling), role="weight", columnwise=True)
    assert torch.equal(scales(q, layout="gemm")[0], swizzled(scales(q)))
    assert torch.equal(scales(q, columnwise=True, layout="gemm")[0], swizzled(scales(q, columnwise=True).T))


def test_block_scales_are_transposed_and_padded():
    x = normal(5, 300) * torch.logspace(-3, 3, 300)
    q = quantized(x, Recipe("block"), columnwise=True)
    (rowwise,), (columnwise,) = scales(q, layout="gemm"), scales(q, columnwise=True, layout="gemm")
    assert (rowwise.shape, columnwise.shape) == ((3, 8), (1, 300))
    assert torch.equal(rowwise[:, :5], scales(q).T)
    assert (rowwise[:, 5:] == 0).all()
    assert torch.equal(columnwise, scales(q, columnwise=True))
    w = quantized(x, Recipe("block"), role="weight", columnwise=True)
    (rowwise,), (columnwise,) = scales(w, layout="gemm"), scales(w, columnwise=True, layout="gemm")
    assert (rowwise.shape, columnwise.shape) == ((1, 4), (3, 4))
    assert torch.equal(rowwise[:, :3], columnwise[:, :1].T)


# ---- the Hadamard transform


def test_the_signs_are_those_that_are_written_down():
    assert "".join("+" if sign > 0 else "-" for sign in HADAMARD_SIGNS) == "+++-+------+-+--"


def test_the_hadamard_transform_is_that_of_sylvesters_matrix_and_the_signs():
    sylvester = torch.ones(1, 1)
    while len(sylvester) < 16:
        upper, lower = torch.cat([sylvester, sylvester], 1), torch.cat([sylvester, -sylvester], 1)
        sylvester = torch.cat([upper, lower])
    x = torch.arange(-24, 24).reshape(1, 48).float().bfloat16()
    # exact: small integers
    expected = (x.float().reshape(3, 16) * torch.tensor(HADAMARD_SIGNS)) @ sylvester / 4
    assert torch.equal(hadamard(x), expected.reshape(1, 48).bfloat16())


def test_the_hadamard_transform_cancels_in_a_product():
    x, dy = (torch.randint(-4, 5, (32, 8), generator=torch.Generator().manual_seed(seed)).float() for seed in (0, 1))
    assert torch.equal(hadamard(dy.T) @ hadamard(x.T).T, dy.T @ x)
    assert not torch.equal(hadamard(dy.T), dy.T)


def test_a_transformed_form_has_the_amax_of_the_transform():
    x = torch.zeros(16, 16, dtype=torch.bfloat16)
    x[:, 0] = torch.tensor(HADAMARD_SIGNS)
    q = quantized(x, Recipe("nvfp4"), columnwise=True)
    assert (amax(q).item(), amax(q, columnwise=True).item()) == (1.0, 4.0)
    assert (dequantize(q, columnwise=True)[:, 0] == torch.tensor([4.0] + [0.0] * 15)).all()
    with pytest.raises(ValueError, match=r"x is of dtype torch\.float32; it must be bfloat16 where the Hadamard"):
        quantized(x.float(), Recipe("nvfp4"), columnwise=True)


def test_the_gradient_of_a_transformed_form_is_the_transform_back():
    x = normal(32, 16, dtype=torch.bfloat16).requires_grad_()
    out = dequantize(quantized(x, Recipe("nvfp4"), columnwise=True), columnwise=True)
    dout = torch.zeros(32, 16, dtype=torch.bfloat16)
    dout[17, 3] = 1  # the second output of the second 16 tokens of column 3
    (dx,) = torch.autograd.grad(out, x, dout)
    expected = torch.zeros_like(dx)
    expected[16:, 3] = torch.tensor([sign * (-1) ** i / 4 for i, sign in enumerate(HADAMARD_SIGNS)])
    assert torch.equal(dx, expected)


# ---- four over six: of two encodings of a block, the one that errs less


@cache
def table(name: str) -> tuple[list[float], list[float]]:
    """(values, midpoints) of the codes without a sign."""
    mantissa, bias, count = {"e4m3": (3, 7, 0x7F), "e5m2": (2, 15, 0x7C), "e2m1": (1, 1, 8)}[name]
    values = [
        (c % 2**mantissa + (2**mantissa if c >> mantissa else 0)) * 2.0 ** (max(c >> mantissa, 1) - bias - mantissa)
        for c in range(count)
    ]
    return values, [(a + b) / 2 for a, b in pairwise(values)]


def code_of(v: float, name: str) -> int:
    """Nearest, ties to even, saturated."""
    middles = table(name)[1]
    if math.isnan(v):
        return 7 if name == "e2m1" else 0x7F
    code = bisect_left(middles, abs(v))
    if code < len(middles) and middles[code] == abs(v) and code % 2 == 1:
        code += 1
    return code + (0 if math.copysign(1, v) > 0 else {"e2m1": 8}.get(name, 0x80))


@pytest.mark.parametrize("error", ["mae", "mse"])
@pytest.mark.parametrize(("bound", "top"), [("all", 256), ("none", 448)])
@pytest.mark.parametrize("role", ["input", "weight"])
def test_4over6_takes_the_better_of_two_encodings(error, bound, top, role):
    options = {"four_over_six_bound_256": bound, "four_over_six_error": error, "two_dimensional_weights": False}
    recipe = Recipe("nvfp4", hadamard=False, four_over_six="all", **options)
    x = normal(16, 64, seed=5)
    q = quantized(x, recipe, role=role)
    picked = []
    for i, b in np.ndindex(16, 4):
        block = x[i, 16 * b : 16 * b + 16].numpy()
        chosen, scale, six = better_of_two(block, f32(x.abs().max()), top, error)
        picked.append(six)
        assert codes(q)[i, 16 * b : 16 * b + 16].tolist() == chosen
        assert scales(q)[i, b] == scale
    assert {True, False} == set(picked)


@np.errstate(all="ignore")
def better_of_two(block: np.ndarray, tensor_amax: np.float32, top: int, error: str) -> tuple[list[int], int, bool]:
    """(codes, scale, whether 6 was taken) of one block, number by number."""
    s, best = min(f32(6 * top) / tensor_amax, LARGEST), None
    base = max(abs(block)) / f32(6) * s
    for six, wanted in ((True, base), (False, base * f32(1.5))):
        scale = code_of(float(wanted), "e4m3")
        d = f32(table("e4m3")[0][scale])
        m = min(f32(1) / (d * (f32(1) / s)), LARGEST)
        chosen, total = [code_of(float(v * m), "e2m1") for v in block], f32(0)
        for v, code in zip(block, chosen, strict=True):
            q = f32(table("e2m1")[0][code % 8]) * (-1 if code > 7 else 1)
            difference = q * d * tensor_amax / f32(6 * top) - v
            total = total + (difference * difference if error == "mse" else abs(difference))
        if best is None or total < best[0]:
            best = (total, chosen, scale, six)
    return best[1:]


# ---- noise


def test_noise_that_is_not_given_is_drawn_anew_for_each_element_direction_and_call():
    sixes = torch.eye(16).repeat(32, 1) == 1  # in each block of both directions: all scales are 1
    x, recipe = torch.where(sixes, 6.0, 1.25), Recipe("nvfp4", hadamard=False)
    first, second = (quantized(x, recipe, role="grad_output", columnwise=True) for _ in range(2))
    draws = [dequantize(q, columnwise=turned)[~sixes] for q in (first, second) for turned in (False, True)]
    for drawn in draws:
        assert set(drawn.tolist()) == {1.0, 1.5}
        assert 0.47 < float((drawn == 1.5).float().mean()) < 0.53  # why: 5 standard errors of 7680
    assert all(not torch.equal(a, b) for i, a in enumerate(draws) for b in draws[:i])
    torch.manual_seed(5)
    third = codes(quantized(x, recipe, role="grad_output"))
    torch.manual_seed(5)
    assert torch.equal(third, codes(quantized(x, recipe, role="grad_output")))


def test_noise_is_for_gradients_that_are_rounded_stochastically():
    x, noise = torch.zeros(16, 16, dtype=torch.bfloat16), torch.zeros(2, 16, 16)
    with pytest.raises(ValueError, match=r"noise is of shape \(16, 16\)"):
        quantized(x, Recipe("nvfp4"), role="grad_output", noise=noise[0])
    with pytest.raises(ValueError, match="noise is given; it must be None"):
        quantized(x, Recipe("nvfp4"), role="input", noise=noise)


# ---- refusals


REFUSED = {
    "x is of shape (2, 3, 4)": (torch.zeros(2, 3, 4), Recipe("current"), {}),
    "x is of dtype torch.int32": (torch.zeros(2, 2, dtype=torch.int32), Recipe("current"), {}),
    "role is 'bias'": (torch.zeros(2, 2), Recipe("current"), {"role": "bias"}),
    "recipe is 'current'": (torch.zeros(2, 2), "current", {"state": None}),
    "rowwise is False with columnwise False": (torch.zeros(2, 2), Recipe("current"), {"rowwise": False}),
    "splits is of shape (1, 1)": (torch.zeros(2, 2), Recipe("current"), {"splits": torch.tensor([[2]])}),
    "splits is of dtype torch.float32": (torch.zeros(2, 2), Recipe("current"), {"splits": torch.tensor([2.0])}),
    "splits is [3], together 3": (torch.zeros(2, 2), Recipe("current"), {"splits": torch.tensor([3])}),
    "splits is [3, -1]": (torch.zeros(2, 2), Recipe("current"), {"splits": torch.tensor([3, -1])}),
    "x is of shape (32, 33)": (torch.zeros(32, 33), Recipe("mxfp8"), {}),
    "splits is [33]": (torch.zeros(33, 32), Recipe("mxfp8"), {}),
    "splits is [16, 16]": (torch.zeros(32, 32), Recipe("mxfp8"), {"splits": torch.tensor([16, 16])}),
    "splits is [8, 8]": (torch.zeros(16, 16), Recipe("nvfp4"), {"splits": torch.tensor([8, 8])}),
    "state is None": (torch.zeros(2, 2), Recipe("delayed"), {"state": None}),
    "state is given": (torch.zeros(2, 2), Recipe("current"), {"state": new_quantizer_state(Recipe("delayed"))}),
    "state is with amax_history of shape (1, 1024)": (torch.zeros(2, 2), Recipe("delayed"),
     {"splits": torch.tensor([1, 1]), "state": new_quantizer_state(Recipe("delayed"))}),
    "columnwise is True for a row-scaled input with four_over_six": (torch.zeros(16, 16),
     Recipe("nvfp4", hadamard=False, row_scaled_activation=True, four_over_six="all"), {"columnwise": True}),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_illegal_calls_are_refused_by_name_and_value(message):
    x, recipe, options = REFUSED[message]
    with pytest.raises(ValueError) as refusal:
        quantized(x, recipe, **options) if "state" not in options else quantize(x, recipe, **options)
    assert str(refusal.value).startswith(message)


def test_a_direction_that_was_not_asked_for_is_refused():
    q = quantized(normal(2, 4), Recipe("current"))
    for read in (codes, scales, amax, dequantize):
        with pytest.raises(ValueError, match="columnwise is True; it must be a direction that quantize was asked for"):
            read(q, columnwise=True)
    with pytest.raises(ValueError, match="layout is 'swizzled'"):
        scales(q, layout="swizzled")


def test_the_functions_are_public():
    names = ["quantize", "codes", "scales", "amax", "dequantize", "new_quantizer_state", "update_scales", "operands"]
    assert all(getattr(moe_ref, name).__name__ == name for name in names)
