"""NVFP4 of `moe_fast` makes the reference's codes, scales and amax bit by bit: transformed, at random, row-scaled and with four over six."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import moe_fast
import moe_ref
from conformance.core.covering import covering
from moe_fast.launch import tuning
from moe_fast.launch.backend import tl, triton
from moe_fast.quantization import _formats as kernels
from moe_fast.quantization import _four_over_six as four_over_six
from moe_fast.quantization import _hadamard as hadamard
from moe_ref.config import Recipe
from moe_ref.quantization import formats
from moe_ref.quantization.quantize import HADAMARD_SIGNS
from moe_ref.quantization.quantize import hadamard as transform
from tests.quantization.quantization_cases import (
    BF16,
    DTYPES,
    FP32,
    FP64,
    RECIPES,
    SIZES,
    SPLITS,
    agrees,
    poisoned,
    problem_of,
    same,
)

pytestmark = pytest.mark.skipif(
    not moe_fast.launch.backend.INTERPRETED, reason="the tensors of these tests are on the CPU"
)
FP4 = tuple(name for name in RECIPES if name.startswith("nvfp4"))
AXES = {
    "recipe": FP4,
    "role": ("input", "weight", "grad_output"),
    "dtype": DTYPES,
    "splits": tuple(SPLITS),
    "columns": (16, 80),
    "directions": ((True, False), (False, True), (True, True)),
    "values": ("spread", "boundaries", "specials"),
    "layout": ("contiguous", "transposed", "strided", "shifted", "expanded"),
    "blocks": tuple(SIZES),
}


def legal(row: dict[str, Any]) -> bool:
    """Whether there is such a form."""
    recipe, columnwise = RECIPES[row["recipe"]], row["directions"][1]
    if recipe.hadamard and row["role"] != "weight" and columnwise and row["dtype"] != BF16:
        return False
    return not (row["recipe"] == "nvfp4, 4/6 row-scaled" and row["role"] == "input" and columnwise)


CASES = covering(AXES, legal)[0]


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    monkeypatch.setattr(torch, "empty", poisoned)


@pytest.mark.parametrize("row", CASES, ids=lambda row: "-".join(str(value) for value in row.values()))
def test_everything_that_is_made_equals_the_reference(row, monkeypatch):
    monkeypatch.setattr(tuning, "INTERPRETER", replace(tuning.INTERPRETER, quantize=SIZES[row["blocks"]]))
    assert agrees(moe_fast, problem_of(**row))


@pytest.mark.parametrize("name", ["groups", "rows", "columns", "transformed"])
def test_row_scaling_does_with_the_tiles_of_a_gpu(name, monkeypatch):
    """Some are lower than a block of the transform, which row scaling does without."""
    sizes = replace(tuning.INTERPRETER.quantize, **{name: getattr(tuning.GPU.quantize, name)})
    monkeypatch.setattr(tuning, "INTERPRETER", replace(tuning.INTERPRETER, quantize=sizes))
    recipe = Recipe("nvfp4", row_scaled_activation=True, hadamard=False, stochastic_rounding=False)
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    got, right = (namespace.quantize(x, recipe, columnwise=True).quantized for namespace in (moe_fast, moe_ref))
    for columnwise in (False, True):
        for read in ("codes", "scales", "amax"):
            assert torch.equal(
                getattr(moe_fast, read)(got, columnwise=columnwise),
                getattr(moe_ref, read)(right, columnwise=columnwise),
            )


def test_the_transform_adds_in_the_order_of_the_reference():
    """Of numbers that differ by 2^±12 and cancel, other orders of additions give other sums."""
    problem = problem_of("nvfp4", dtype=BF16, splits="none", directions=(False, True))
    signs = torch.tensor(HADAMARD_SIGNS)[:, None]
    terms = problem.x.float().reshape(4, 16, -1)
    terms[:, 9:] = -terms[:, :7]  # of the first sum, which has no other signs
    problem.x = (terms * signs).reshape(64, -1).to(BF16)
    assert agrees(moe_fast, problem)
    late = sum((terms[:, i] / 4 for i in reversed(range(16))), start=torch.zeros(4, 160))
    assert not torch.equal(late.to(BF16), transform(problem.x.T).T[::16])


@triton.jit
def random_kernel(x_ptr, noise_ptr, out_ptr, BLOCK: tl.constexpr):
    """Codes of a block of numbers, rounded by noise."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + i, kernels.encoded_randomly(tl.load(x_ptr + i), tl.load(noise_ptr + i)))


@pytest.mark.parametrize("dtype", [BF16, FP32, FP64])
def test_noise_decides_to_the_last_bit(dtype):
    """Rests of numbers, and the noise that equals them, and its neighbours."""
    every = (torch.arange(2**16) << 16).to(torch.int32).view(FP32)
    size = every.abs().double().clamp(max=6).nan_to_num(0)
    spacing = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    rest = (size / spacing - (size / spacing).floor()).to(dtype)
    for noise in (
        rest,
        torch.nextafter(rest, torch.zeros_like(rest)),
        torch.nextafter(rest, torch.ones_like(rest)),
        torch.zeros_like(rest),
    ):
        out = torch.empty(2**16, dtype=torch.uint8)
        random_kernel[(64,)](every, noise, out, BLOCK=1024)
        assert torch.equal(out, formats.encode(every, formats.E2M1, noise=noise))


def test_the_gradient_of_the_transform_is_its_adjoint():
    problem = problem_of("nvfp4", dtype=BF16, directions=(False, True))
    x = problem.x.clone().requires_grad_()
    value = moe_fast.dequantize(moe_fast.quantize(x, problem.recipe, **problem.call).quantized, columnwise=True)
    whole = partial(
        torch.randint, -2, 3, generator=torch.Generator().manual_seed(0)
    )  # quarters of their sums have no rounding
    cotangent = whole(value.shape).to(BF16)
    value.backward(cotangent)
    end = int(problem.splits.sum())
    z = whole((end, x.shape[1])).float()
    assert (x.grad[:end].double() * z).sum() == (transform(z.T).T.double() * cotangent[:end]).sum()
    assert x.grad[:end].any()
    assert not x.grad[end:].any()


# Twins: what must not agree


def recalled(**other: Any) -> SimpleNamespace:
    """moe_fast whose calls have other settings, each a function of what was to be."""

    def quantize(x: Tensor, recipe: Any, **call: Any) -> Any:
        given = {"recipe": recipe, **call}
        return moe_fast.quantize(x, **{**given, **{name: of(given[name]) for name, of in other.items()}})

    return SimpleNamespace(
        **{name: getattr(moe_fast, name) for name in ("codes", "scales", "amax", "dequantize")}, quantize=quantize
    )


TWINS: dict[str, Any] = {
    "no transform": ("nvfp4", "input", lambda r: replace(r, hadamard=False)),
    "the error of another norm": ("nvfp4, 4/6", "input", lambda r: replace(r, four_over_six_error="mse")),
    "scales up to 448": ("nvfp4, 4/6", "weight", lambda r: replace(r, four_over_six_bound_256="none")),
    "no choice": ("nvfp4, 4/6", "input", lambda r: replace(r, four_over_six="none")),
    "one amax for all rows": ("nvfp4, row-scaled", "input", lambda r: replace(r, row_scaled_activation=False)),
    "vectors for squares": ("nvfp4, 4/6", "weight", lambda r: replace(r, two_dimensional_weights=False)),
}


@pytest.mark.parametrize("name", TWINS)
def test_another_recipe_is_noticed(name):
    recipe, role, change = TWINS[name]
    problem = problem_of(recipe, role=role, dtype=BF16, columns=32)
    assert agrees(moe_fast, problem) and not agrees(recalled(recipe=change), problem)


def test_the_noise_of_the_other_direction_is_noticed():
    problem = problem_of("nvfp4", role="grad_output", dtype=BF16, columns=32)
    assert agrees(moe_fast, problem) and not agrees(recalled(noise=lambda noise: noise.flip(0)), problem)


def test_a_wrong_sign_and_a_wrong_tree_are_noticed(monkeypatch):
    signed, squares = problem_of("nvfp4", dtype=BF16, columns=32), problem_of("nvfp4, 4/6", role="weight", columns=48)
    assert agrees(moe_fast, signed) and agrees(moe_fast, squares)
    monkeypatch.setattr(hadamard, "NEGATIVE", tl.constexpr(0xD7E0))
    assert not agrees(moe_fast, signed)

    @triton.jit
    def largest_of_sixteen(total, AXIS: tl.constexpr):
        return tl.max(total, axis=AXIS)

    monkeypatch.setattr(four_over_six, "sum_of_sixteen", largest_of_sixteen)
    assert not agrees(moe_fast, squares)


def test_both_directions_of_a_square_share_their_codes_unless_errors_decide():
    weights = problem_of("nvfp4", role="weight", columns=32)
    quantized = moe_fast.quantize(weights.x, weights.recipe, **weights.call).quantized
    assert quantized.rowwise is quantized.columnwise
    assert same(
        moe_fast.codes(quantized),
        moe_ref.codes(moe_ref.quantize(weights.x, weights.recipe, **weights.call).quantized, columnwise=True),
    )
