"""quantize and dequantize: values worked out by hand, and special values.

`evidence.formulations.quantization` quantises number by number, for the cases that tests/evidence
draws; test_suite.py judges the reference by many more.
"""

import pytest
import torch

from moe_ref import amax, codes, dequantize, new_quantizer_state, quantize, scales, update_scales
from moe_ref.config import Recipe
from moe_ref.quantization.recipes import nearest32
from tests.quantization.reference_helpers import (
    ALL,
    INF,
    LARGEST,
    NAN,
    STATELESS,
    by_scaling,
    f32,
    quantized,
    random,
    row,
)


def test_current_scaling_by_hand():
    q = quantized(torch.tensor([[1.0, 2.0, -3.0, 7.0]]), Recipe("current"))
    assert (amax(q).tolist(), scales(q).tolist()) == ([7.0], [1 / 64])  # 448 / 7 = 64
    assert codes(q).tolist() == [[0x68, 0x70, 0xF4, 0x7E]]  # 2^6, 2^7, -1.5·2^7, 1.75·2^8
    assert dequantize(q).tolist() == [[1.0, 2.0, -3.0, 7.0]]


def test_current_scaling_of_gradients_by_hand():
    q = quantized(torch.tensor([[1.0, -1.75]]), Recipe("current"), role="grad_output")
    assert scales(q).tolist() == [2.0**-15]  # 57344 / 1.75 = 2^15
    assert codes(q).tolist() == [[0x78, 0xFB]]  # 2^15 in E5M2: exponent 30, mantissa 0; -1.75·2^15


def test_block_scaling_rounds_the_scale_down_to_a_power_of_two_by_hand():
    x = row([3.0, 1.0], 130)
    x[0, 128] = -0.25
    q = quantized(x, Recipe("block"))
    assert amax(q).tolist() == [[3.0, 0.25]]
    assert scales(q).tolist() == [[1 / 128, 1 / 1024]]  # 448/3 = 149.3 → 128; 1792 → 1024
    assert codes(q)[0, [0, 1, 128, 129]].tolist() == [0x7C, 0x70, 0xF8, 0]  # 1.5·2^8, 2^7, -2^8
    full = quantized(x, Recipe("block", power_of_two_scales=False))
    assert scales(full).tolist()[0][1] == nearest32(1 / 1792)
    assert codes(full)[0, [0, 128]].tolist() == [0x7E, 0xFE]


def test_mxfp8_by_hand():
    q = quantized(row([3.0, 1.0, -3.25], 64).repeat(32, 1), Recipe("mxfp8"))
    assert scales(q)[0].tolist() == [120, 0]  # 3.25/448 = 2^-7.1 → 2^-7; the second block is zero
    assert codes(q)[0, :4].tolist() == [0x7C, 0x70, 0xFD, 0]  # 384, 128, -416 = -1.625·2^8
    assert dequantize(q)[0, :4].tolist() == [3.0, 1.0, -3.25, 0.0]


def test_mxfp8_of_exactly_448_times_a_power_of_two_needs_no_larger_exponent():
    q = quantized(row([448.0 * 2.0**-9], 32).repeat(32, 1), Recipe("mxfp8"))
    assert (scales(q)[0].item(), codes(q)[0, 0].item()) == (127 - 9, 0x7E)


def test_nvfp4_by_hand():
    x = row([42.0, 21.0, 7.0, -1.0] + [0.0] * 12 + [3.0, -1.0, 0.1], 32).repeat(16, 1)
    q = quantized(x, Recipe("nvfp4"))
    assert amax(q).tolist() == [42.0]  # S = 2688 / 42 = 64
    assert scales(q)[0].tolist() == [0x7E, 0x60]  # 42 · 64/6 = 448; 3 · 64/6 = 32
    assert codes(q)[0, [0, 1, 2, 3]].tolist() == [7, 5, 2, 8]  # times 1/7: 6, 3, 1, -1/7
    assert codes(q)[0, [16, 17, 18]].tolist() == [7, 0xC, 0]  # times 2: 6, -2, 0.2
    assert dequantize(q)[0, 16:19].tolist() == [3.0, -1.0, 0.0]


def test_nvfp4_maps_to_4_where_that_errs_less():
    # S = 6·256/24 = 64. In the second block d₆ = E4M3(16/6·64 = 170.7) = 176 and d₄ = E4M3(256) =
    # 256. A code's unit is d·24/1536: with d₄ it is 4, and 16 and 12 are exact; with d₆ it is 2.75,
    # and they become 16.5 and 11.
    x = row([24.0] + [0.0] * 15 + [16.0, 12.0], 32).repeat(16, 1)
    recipe = Recipe("nvfp4", hadamard=False, four_over_six="activations")
    q = quantized(x, recipe)
    assert scales(q)[0].tolist() == [
        0x78,
        0x78,
    ]  # 256 twice: the first block is exact either way, 6 · 4 and 4 · 6, and 6 is taken
    assert codes(q)[0, [0, 16, 17]].tolist() == [7, 6, 5]
    assert dequantize(q)[0, [0, 16, 17]].tolist() == [24.0, 16.0, 12.0]
    plain = quantized(x, Recipe("nvfp4", hadamard=False))
    assert dequantize(plain)[0, 16].item() != 16.0


def test_delayed_scaling_uses_the_scale_of_earlier_steps_and_records_the_amax_by_hand():
    recipe = Recipe("delayed", amax_history_len=2)
    state = new_quantizer_state(recipe)
    x = torch.tensor([[7.0, -1000.0]])
    q, state = quantize(x, recipe, state=state)
    assert (codes(q).tolist(), scales(q).tolist(), amax(q).tolist()) == (
        [[0x4E, 0xFE]],
        [1.0],
        [1000.0],
    )  # scale 1: 7 = 1.75·2², -1000 saturates
    q, state = quantize(x / 100, recipe, state=state)
    assert state.amax_history.tolist() == [[1000.0, 0.0]]  # the largest of the step
    q, state = quantize(x, recipe, state=update_scales(state, recipe))
    assert scales(q).item() == f32(1) / (f32(448) / f32(1000))
    assert codes(q)[0, 1] == 0xFE


def test_each_group_has_its_own_scale_of_earlier_steps():
    recipe = Recipe("delayed", amax_history_len=2)
    state = new_quantizer_state(recipe, num_groups=3)
    x, splits = torch.tensor([[7.0], [3.5], [14.0]]), torch.tensor([1, 0, 2])
    _, state = quantize(x, recipe, splits=splits, state=state)
    assert state.amax_history.tolist() == [[7.0, 0.0], [0.0, 0.0], [14.0, 0.0]]
    q, state = quantize(x, recipe, splits=splits, state=update_scales(state, recipe))
    assert scales(q).tolist() == [1 / 64, 1.0, 1 / 32]  # the empty group has seen nothing
    assert codes(q).flatten().tolist() == [0x7E, 0x6E, 0x7E]  # 448, 112 = 1.75·2^6, 448


def test_the_largest_finite_of_the_input_dtype_bounds_a_block_scale_and_that_of_float32_the_others():
    tiny = torch.tensor([[2.0**-130]], dtype=torch.bfloat16)
    assert scales(quantized(tiny, Recipe("block", power_of_two_scales=False))).item() == f32(1) / f32(
        torch.finfo(torch.bfloat16).max
    )
    assert scales(quantized(tiny, Recipe("current"))).item() == f32(1) / LARGEST


# ---- special values


@pytest.mark.parametrize("recipe", STATELESS, **by_scaling)
def test_a_lone_nan_becomes_a_nan_and_reaches_no_scale(recipe):
    x = random(32, 128)
    with_nan, with_zero = x.clone(), x.clone()
    with_nan[3, 5], with_zero[3, 5] = NAN, 0.0
    a, b = (quantized(v, recipe) for v in (with_nan, with_zero))
    assert torch.equal(scales(a), scales(b))
    elsewhere = torch.ones(32, 128, dtype=torch.bool)
    elsewhere[3, 5] = False
    assert torch.equal(codes(a)[elsewhere], codes(b)[elsewhere])
    assert codes(a)[3, 5] == (7 if recipe.scaling == "nvfp4" else 0x7F)


def test_a_block_of_nothing_but_nan_has_amax_0():
    q = quantized(torch.full((32, 32), NAN), Recipe("mxfp8"))
    assert (amax(q).unique().tolist(), scales(q).unique().tolist(), codes(q).unique().tolist()) == ([0.0], [0], [0x7F])


def test_a_block_of_zeros_has_the_scale_of_its_rule_and_keeps_signs():
    x = torch.zeros(32, 32)
    x[0, 0] = -0.0
    scale = {recipe.scaling: scales(quantized(x, recipe)).unique().tolist() for recipe in ALL}
    assert scale == {"current": [1.0], "block": [1.0], "mxfp8": [0], "nvfp4": [0], "delayed": [1.0]}
    assert all(torch.equal(dequantize(quantized(x, recipe)), x) for recipe in ALL)
    assert all(torch.signbit(dequantize(quantized(x, recipe)))[0, 0] for recipe in ALL)


def test_an_infinity_saturates_and_what_becomes_of_its_block():
    x = row([INF, -INF, 2.0], 32).repeat(32, 1)
    first = {recipe.scaling: codes(quantized(x, recipe))[0, :3].tolist() for recipe in ALL}
    assert first["current"] == first["block"] == first["delayed"] == [0x7E, 0xFE, 0x40]  # s = 1
    assert first["mxfp8"] == [0x7E, 0xFE, 0]  # e = 254: 2 · 2^-127 is nothing
    assert first["nvfp4"] == [7, 15, 0]  # d = 448, S = 1: 2/448 is nothing
    assert scales(quantized(x, Recipe("mxfp8")))[0, 0] == 254
    assert scales(quantized(x, Recipe("block")))[0, 0] == 1.0


def test_nvfp4_decodes_beside_an_infinity_as_its_kernel_does():
    value = dequantize(quantized(row([INF, 2.0], 16).repeat(16, 1), Recipe("nvfp4")))[0]
    assert value[0] == INF
    assert value[1].isnan()  # 0 · (448 · ∞)


def test_subnormal_blocks_of_mxfp8_use_the_smallest_exponent():
    x = torch.full((32, 32), 448 * 2.0**-127)
    q = quantized(x, Recipe("mxfp8"))
    assert (scales(q)[0, 0].item(), codes(q)[0, 0].item()) == (0, 0x7E)
    assert torch.equal(dequantize(q), x)
    tiny = quantized(torch.full((32, 32), 2.0**-149), Recipe("mxfp8"))
    assert (scales(tiny)[0, 0].item(), codes(tiny)[0, 0].item()) == (0, 0)  # 2^-22 < half min code


# ---- directions
