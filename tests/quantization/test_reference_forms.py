"""Directions, groups, scaling, layouts of matrix products and gradients of quantised tensors."""

import numpy as np
import pytest
import torch
from torch import Tensor

from moe_ref import amax, codes, dequantize, new_quantizer_state, quantize, scales
from moe_ref.config import Recipe
from moe_ref.quantization.quantize import HADAMARD_SIGNS
from tests.quantization.reference_helpers import ALL, NAN, STATELESS, by_scaling, quantized, random, same


def parts(q, columnwise: bool) -> list[Tensor]:
    return [read(q, columnwise=columnwise) for read in (codes, scales, amax, dequantize)]


@pytest.mark.parametrize("recipe", [*ALL, Recipe("mxfp8", two_dimensional_weights=True)], **by_scaling)
def test_the_columnwise_form_is_the_rowwise_form_of_the_transpose(recipe):
    x = random(64, 96)
    for role in ("input", "weight", "grad_output"):
        a, b = quantized(x, recipe, role=role, columnwise=True), quantized(x.T.contiguous(), recipe, role=role)
        assert torch.equal(codes(a, columnwise=True), codes(b).T)
        assert torch.equal(dequantize(a, columnwise=True), dequantize(b).T)
        assert all(
            torch.equal(s, t)
            for s, t in zip(scales(a, columnwise=True, layout="gemm"), scales(b, layout="gemm"), strict=True)
        )


@pytest.mark.parametrize(
    ("recipe", "role"),
    [
        (Recipe("current"), "input"),
        (Recipe("delayed"), "grad_output"),
        (Recipe("block"), "weight"),
        (Recipe("mxfp8", two_dimensional_weights=True), "weight"),
        (Recipe("nvfp4"), "weight"),
    ],
)
def test_one_scale_for_both_directions_means_the_same_codes(recipe, role):
    q = quantized(random(160, 160), recipe, role=role, columnwise=True)
    assert torch.equal(codes(q), codes(q, columnwise=True))


@pytest.mark.parametrize("recipe", [Recipe("block"), Recipe("mxfp8")], **by_scaling)
def test_the_other_direction_is_not_made_from_codes(recipe):
    x = random(128, 128, seed=3) * torch.logspace(-3, 3, 128)
    once, twice = (quantized(v, recipe, columnwise=True) for v in (x, dequantize(quantized(x, recipe))))
    assert not torch.equal(codes(once, columnwise=True), codes(twice, columnwise=True))


def test_a_direction_that_was_not_asked_for_is_refused():
    q = quantized(random(2, 4), Recipe("current"))
    for read in (codes, scales, amax, dequantize):
        with pytest.raises(ValueError, match="columnwise is True; it must be a direction that quantize was asked for"):
            read(q, columnwise=True)
    with pytest.raises(ValueError, match="layout is 'swizzled'"):
        scales(q, layout="swizzled")


# ---- groups


SPLITS = torch.tensor([32, 0, 64, 32, 0])


@pytest.mark.parametrize("columnwise", [False, True])
@pytest.mark.parametrize("recipe", ALL, **by_scaling)
def test_a_group_is_quantised_as_if_it_were_alone(recipe, columnwise):
    x = random(128, 64) * torch.logspace(-2, 2, 128)[:, None]
    whole = quantized(x, recipe, splits=SPLITS, columnwise=columnwise)
    alone = [quantized(group, recipe, columnwise=columnwise) for group in x.split(SPLITS.tolist())]
    for read in (codes, scales, amax, dequantize):
        assert torch.equal(
            read(whole, columnwise=columnwise), torch.cat([read(q, columnwise=columnwise) for q in alone])
        )
    for made, q in zip(scales(whole, columnwise=columnwise, layout="gemm"), alone, strict=True):
        assert torch.equal(made, scales(q, columnwise=columnwise, layout="gemm")[0])


def test_groups_that_are_no_multiples_of_the_block_are_not_what_their_concatenation_is():
    x = random(200, 4) * torch.logspace(-3, 3, 200)[:, None]
    grouped, together = (
        quantized(x, Recipe("block"), splits=torch.tensor([72, 128]), columnwise=True),
        quantized(x, Recipe("block"), columnwise=True),
    )
    assert not torch.equal(codes(grouped, columnwise=True), codes(together, columnwise=True))
    assert torch.equal(codes(grouped), codes(together))  # along a row nothing changes


@pytest.mark.parametrize("recipe", ALL, **by_scaling)
def test_rows_behind_the_last_group_are_never_read(recipe):
    x = random(96, 64)
    garbage = torch.cat([x[:64], torch.full((32, 64), NAN)])
    splits = torch.tensor([32, 32])
    for columnwise in (False, True):
        a, b = (quantized(v, recipe, splits=splits, columnwise=True) for v in (x, garbage))
        assert same(parts(a, columnwise), parts(b, columnwise))
        assert (codes(a, columnwise=columnwise)[64:] == 0).all()
        assert (dequantize(a, columnwise=columnwise)[64:] == 0).all()
        assert len(scales(a)) in (2, 64)


@pytest.mark.parametrize("columnwise", [False, True])
@pytest.mark.parametrize("recipe", ALL, **by_scaling)
def test_rows_of_zeros_are_neutral(recipe, columnwise):
    x = random(64, 64) + 1
    a = quantized(x, recipe, columnwise=columnwise)
    b = quantized(torch.cat([x, torch.zeros(64, 64)]), recipe, columnwise=columnwise)
    assert torch.equal(codes(b, columnwise=columnwise)[:64], codes(a, columnwise=columnwise))
    assert torch.equal(dequantize(b, columnwise=columnwise)[:64], dequantize(a, columnwise=columnwise))
    assert (codes(b, columnwise=columnwise)[64:] == 0).all()
    assert not same(
        [dequantize(quantized(torch.cat([x[:40], 100 * x[:24]]), Recipe("current")))],
        [dequantize(quantized(x, Recipe("current")))],
    )


@pytest.mark.parametrize("recipe", ALL, **by_scaling)
@pytest.mark.parametrize("shape", [(0, 32), (32, 0), (0, 0)])
def test_nothing_at_all_is_quantised_without_complaint(recipe, shape):
    q = quantized(torch.zeros(shape), recipe, columnwise=True, splits=torch.tensor([0, shape[0], 0]))
    assert codes(q).shape == codes(q, columnwise=True).shape == dequantize(q).shape == shape
    assert len(scales(q, layout="gemm")) == 3


# ---- scaling by powers of two


@pytest.mark.parametrize("recipe", STATELESS, **by_scaling)
def test_a_power_of_two_moves_the_scale_and_no_code(recipe):
    x = random(64, 128)
    a, b = quantized(x, recipe, columnwise=True), quantized(x * 2.0**20, recipe, columnwise=True)
    for columnwise in (False, True):
        assert torch.equal(codes(a, columnwise=columnwise), codes(b, columnwise=columnwise))
        assert torch.equal(dequantize(a, columnwise=columnwise) * 2.0**20, dequantize(b, columnwise=columnwise))
    moved = {"current": 2.0**20, "block": 2.0**20}.get(recipe.scaling, 1) * scales(a).double() + (
        20 if recipe.scaling == "mxfp8" else 0
    )
    assert torch.equal(scales(b).double(), moved)


@pytest.mark.parametrize("recipe", STATELESS, **by_scaling)
def test_what_was_quantised_once_does_not_change_any_more(recipe):
    x = random(64, 128)
    once = dequantize(quantized(x, recipe))
    if recipe.scaling in ("block", "mxfp8"):
        assert torch.equal(dequantize(quantized(once, recipe)), once)
    assert not torch.equal(once, x)


# ---- the layouts of matrix products


def swizzled(scale: Tensor) -> Tensor:
    """Scales in tiles of 128×4, element by element."""
    rows, columns = -(-scale.shape[0] // 128) * 128, -(-scale.shape[1] // 4) * 4
    out = torch.zeros(rows * columns, dtype=scale.dtype)
    for r, c in np.ndindex(*scale.shape):
        tile = r // 128 * (columns // 4) + c // 4
        out[tile * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4] = scale[r, c]
    return out


@pytest.mark.parametrize("recipe", [Recipe("mxfp8"), Recipe("nvfp4")], **by_scaling)
def test_scales_of_small_blocks_are_swizzled_in_tiles(recipe):
    x = (random(160, 192) * torch.logspace(-3, 3, 192)).bfloat16()
    q = quantized(x, recipe, role="weight", columnwise=True)
    assert torch.equal(scales(q, layout="gemm")[0], swizzled(scales(q)))
    assert torch.equal(scales(q, columnwise=True, layout="gemm")[0], swizzled(scales(q, columnwise=True).T))


def test_block_scales_are_transposed_and_padded():
    x = random(5, 300) * torch.logspace(-3, 3, 300)
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


# ---- gradients


@pytest.mark.parametrize("recipe", ALL, **by_scaling)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_gradient_is_straight_through_and_nothing_behind_the_last_group(recipe, dtype):
    x, dout = random(96, 32, dtype=dtype).requires_grad_(), random(96, 32, seed=1, dtype=dtype)
    for columnwise in (False, True):
        out = dequantize(quantized(x, recipe, splits=torch.tensor([32, 32]), columnwise=True), columnwise=columnwise)
        (dx,) = torch.autograd.grad(out, x, dout)
        assert out.dtype == dtype
        assert torch.equal(dx[:64], dout[:64])
        assert (dx[64:] == 0).all()


def test_the_gradient_of_a_transformed_form_is_the_transform_back():
    x = random(32, 16, dtype=torch.bfloat16).requires_grad_()
    out = dequantize(quantized(x, Recipe("nvfp4"), columnwise=True), columnwise=True)
    dout = torch.zeros(32, 16, dtype=torch.bfloat16)
    dout[17, 3] = 1  # the second output of the second 16 tokens of column 3
    (dx,) = torch.autograd.grad(out, x, dout)
    expected = torch.zeros_like(dx)
    expected[16:, 3] = torch.tensor([sign * (-1) ** i / 4 for i, sign in enumerate(HADAMARD_SIGNS)])
    assert torch.equal(dx, expected)


def test_quantize_leaves_its_arguments_alone():
    x = random(32, 32)
    state = new_quantizer_state(Recipe("delayed", amax_history_len=2))
    before = [x.clone(), *(t.clone() for t in state)]
    quantize(x, Recipe("delayed", amax_history_len=2), state=state)
    assert all(torch.equal(a, b) for a, b in zip([x, *state], before, strict=True))


def test_float64_is_float32_here():
    x = random(32, 32, dtype=torch.float64)
    for recipe in ALL:
        assert torch.equal(codes(quantized(x, recipe)), codes(quantized(x.float(), recipe)))
        assert torch.equal(dequantize(quantized(x, recipe)), dequantize(quantized(x.float(), recipe)).double())


# ---- NVFP4
