"""NVFP4, wrong rules that the checks must tell apart, and refusals."""

import numpy as np
import pytest
import torch
from torch import Tensor

import moe_ref
from moe_ref import amax, codes, dequantize, new_quantizer_state, quantize, scales, update_scales
from moe_ref.config import Recipe
from moe_ref.quantization.formats import E2M1, E4M3, E5M2, E8M0, decode
from moe_ref.quantization.quantize import HADAMARD_SIGNS, hadamard
from tests.quantization.reference_helpers import LARGEST, code_of, f32, quantized, random, row, table


def sylvester(size: int) -> Tensor:
    h = torch.ones(1, 1)
    while len(h) < size:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return h


def test_the_signs_are_those_that_are_written_down():
    assert "".join("+" if sign > 0 else "-" for sign in HADAMARD_SIGNS) == "+++-+------+-+--"


def test_the_hadamard_transform_is_that_of_sylvesters_matrix_and_the_signs():
    x = torch.arange(-24, 24).reshape(1, 48).float().bfloat16()
    # exact: small integers
    expected = (x.float().reshape(3, 16) * torch.tensor(HADAMARD_SIGNS)) @ sylvester(16) / 4
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


def test_a_row_scaled_activation_has_a_global_amax_for_each_row():
    recipe = Recipe("nvfp4", hadamard=False, row_scaled_activation=True)
    x = random(32, 48) * torch.logspace(-3, 3, 32)[:, None]
    q = quantized(x, recipe, columnwise=True)
    assert torch.equal(amax(q), x.abs().amax(1))
    assert torch.equal(amax(q, columnwise=True), x.abs().amax(0, keepdim=True))
    alone = [quantized(x[i : i + 1].repeat(16, 1), Recipe("nvfp4", hadamard=False)) for i in range(32)]
    assert torch.equal(codes(q), torch.stack([codes(a)[0] for a in alone]))
    assert torch.equal(dequantize(q), torch.stack([dequantize(a)[0] for a in alone]))
    assert amax(quantized(x, recipe, role="weight")).shape == (1,)


@pytest.mark.parametrize("error", ["mae", "mse"])
@pytest.mark.parametrize(("bound", "top"), [("all", 256), ("none", 448)])
@pytest.mark.parametrize("role", ["input", "weight"])
def test_4over6_takes_the_better_of_two_encodings(error, bound, top, role):
    recipe = Recipe(
        "nvfp4",
        hadamard=False,
        four_over_six="all",
        four_over_six_bound_256=bound,
        four_over_six_error=error,
        two_dimensional_weights=False,
    )
    x = random(16, 64, seed=5)
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
def better_of_two(block: np.ndarray, whole: np.float32, top: int, error: str) -> tuple[list[int], int, bool]:
    """(codes, scale, whether 6 was taken) of one block, number by number."""
    s, best = min(f32(6 * top) / whole, LARGEST), None
    base = max(abs(block)) / f32(6) * s
    for six, wanted in ((True, base), (False, base * f32(1.5))):
        scale = code_of(float(wanted), "e4m3")
        d = f32(table("e4m3")[0][scale])
        m = min(f32(1) / (d * (f32(1) / s)), LARGEST)
        chosen, total = [code_of(float(v * m), "e2m1") for v in block], f32(0)
        for v, code in zip(block, chosen, strict=True):
            q = f32(table("e2m1")[0][code % 8]) * (-1 if code > 7 else 1)
            difference = q * d * whole / f32(6 * top) - v
            total = total + (difference * difference if error == "mse" else abs(difference))
        if best is None or total < best[0]:
            best = (total, chosen, scale, six)
    return best[1:]


def test_4over6_divides_by_6_before_it_multiplies():
    recipe = Recipe("nvfp4", hadamard=False, four_over_six="all")
    pairs = [(160, 105), (160, 145), (224, 175), (224, 203)]  # amax · (S · (1/6)) has another code
    for whole, largest in pairs:
        x = row([float(whole)] + [0.0] * 15 + [float(largest), 3.0, -7.0], 32).repeat(16, 1)
        _, scale, _ = better_of_two(x[0, 16:].numpy(), f32(whole), 256, "mae")
        s = f32(1536) / f32(whole)
        assert code_of(float(f32(largest) * (s * f32(1 / 6))), "e4m3") != code_of(
            float(f32(largest) / f32(6) * s), "e4m3"
        )
        assert scales(quantized(x, recipe))[0, 1] == scale


def test_4over6_decides_once_for_a_square_block():
    recipe = Recipe("nvfp4", four_over_six="weights")
    q = quantized(random(64, 64, seed=2), recipe, role="weight")
    by_block = scales(q).reshape(4, 16, 4)
    assert (by_block == by_block[:, :1]).all()
    assert not torch.equal(scales(q), scales(quantized(random(64, 64, seed=2), Recipe("nvfp4"), role="weight")))


def test_stochastic_rounding_is_a_function_of_its_noise():
    recipe = Recipe("nvfp4", hadamard=False)
    x = row([6.0, 1.125, -1.125], 16).repeat(
        16, 1
    )  # S = 448, d = 448, multiplier 1: 1.125 is a quarter of the way from 1 to 1.5
    noise = torch.zeros(2, 16, 16)
    noise[:, :, :] = 0.25
    q = quantized(x, recipe, role="grad_output", noise=noise)
    assert dequantize(q)[0, :3].tolist() == [6.0, 1.0, -1.0]
    noise[0, 0] = 0.2
    q = quantized(x, recipe, role="grad_output", noise=noise, columnwise=True)
    assert dequantize(q)[:2, :3].tolist() == [[6.0, 1.5, -1.5], [6.0, 1.0, -1.0]]
    assert torch.equal(scales(q), scales(quantized(x, recipe)))


def test_each_direction_has_its_own_noise():
    x, recipe = row([6.0, 1.125], 16).repeat(16, 1), Recipe("nvfp4", hadamard=False)
    noise = torch.stack([torch.zeros(16, 16), torch.full((16, 16), 0.9)])
    q = quantized(x, recipe, role="grad_output", noise=noise, columnwise=True)
    turned = quantized(x.T, recipe, role="grad_output", noise=noise.mT.flip(0))
    assert dequantize(q)[0, 1] == 1.5
    assert torch.equal(codes(q, columnwise=True), codes(turned).T)
    assert not torch.equal(codes(quantized(x.T, recipe, role="grad_output", noise=noise.mT)).T, codes(turned).T)


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


def test_stochastic_rounding_has_the_right_mean():
    recipe = Recipe("nvfp4", hadamard=False)
    x = row([6.0, 1.1, -0.3, 2.7, 4.9], 16).repeat(1024, 1)
    steps = ((torch.arange(1024) + 0.5) / 1024)[:, None].expand(1024, 16)
    mean = dequantize(quantized(x, recipe, role="grad_output", noise=torch.stack([steps, steps]))).double().mean(0)
    grid = torch.tensor([0.0, 0.5, 0.5, 1.0, 2.0] + [0.0] * 11)
    assert (
        (mean - x[0]).abs() <= grid / 1024
    ).all()  # why: equally spaced noise counts the rest to one part in 1024 of a code's step
    nearest = dequantize(quantized(x, recipe)).double().mean(0)
    assert ((nearest - x[0]).abs() > grid / 1024).any()


def test_noise_is_for_gradients_that_are_rounded_stochastically():
    x, noise = torch.zeros(16, 16, dtype=torch.bfloat16), torch.zeros(2, 16, 16)
    with pytest.raises(ValueError, match=r"noise is of shape \(16, 16\)"):
        quantized(x, Recipe("nvfp4"), role="grad_output", noise=noise[0])
    with pytest.raises(ValueError, match="noise is given; it must be None"):
        quantized(x, Recipe("nvfp4"), role="input", noise=noise)


# ---- twins: wrong rules that the checks above must tell apart


def test_truncation_is_seen():
    x = random(32, 64)
    q = quantized(x, Recipe("mxfp8"))
    scaled = x * decode((254 - scales(q)), E8M0).repeat_interleave(32, 1)
    values = torch.tensor(table("e4m3")[0])
    truncated = torch.searchsorted(values, scaled.abs(), right=True) - 1 + 128 * (scaled < 0)
    differs = truncated != codes(q)
    assert 0.3 < differs.float().mean() < 0.7


def test_the_floor_of_an_exponent_is_seen():
    x = random(32, 64)
    q = quantized(x, Recipe("mxfp8"))
    floor = ((amax(q) / 448).view(torch.int32) >> 23).to(torch.uint8)
    assert (floor != scales(q)).all()
    assert (floor + 1 == scales(q)).all()


def test_a_stale_scale_is_seen():
    recipe = Recipe("delayed", amax_history_len=4)
    x = random(8, 8)
    _, state = quantize(4 * x, recipe, state=new_quantizer_state(recipe))
    fresh, stale = (quantize(x, recipe, state=s)[0] for s in (update_scales(state, recipe), state))
    assert not torch.equal(scales(fresh), scales(stale))
    assert not torch.equal(codes(fresh), codes(stale))
    assert not torch.equal(codes(fresh), codes(quantized(x, Recipe("current"))))


def test_the_other_format_is_seen():
    x = random(8, 8)
    assert not torch.equal(
        codes(quantized(x, Recipe("current"))), codes(quantized(x, Recipe("current"), role="grad_output"))
    )
    assert {f.name for f in (E4M3, E5M2, E2M1)} == {"e4m3", "e5m2", "e2m1"}


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


def test_the_functions_are_public():
    names = ["quantize", "codes", "scales", "amax", "dequantize", "new_quantizer_state", "update_scales", "operands"]
    assert all(getattr(moe_ref, name).__name__ == name for name in names)
