"""quantize and dequantize, against values worked by hand and against loops over single numbers that
share nothing with them.
"""

import math
from random import Random

import numpy as np
import pytest
import torch
from torch import Tensor

from moe_ref import amax, codes, dequantize, new_quantizer_state, quantize, scales, update_scales
from moe_ref.config import Recipe
from moe_ref.quantization.recipes import nearest32, scheme
from tests.quantization.reference_helpers import (
    ALL,
    INF,
    LARGEST,
    NAN,
    STATELESS,
    by_scaling,
    code_of,
    drawn,
    f32,
    quantized,
    random,
    row,
    same,
    table,
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


# ---- the same by loops over numbers


def value_of(code: int, name: str) -> np.float32:
    """What a code that `code_of` gives stands for."""
    minus, values = (8 if name == "e2m1" else 0x80), table(name)[0]
    magnitude = values[code % minus] if code % minus < len(values) else NAN
    return f32(-magnitude if code >= minus else magnitude)


def encode_scale(a: np.float32, top: float, infinity: float, power: bool) -> np.float32:
    if a == 0 or np.isinf(a):
        return f32(1)
    s = f32(top) / a
    s = f32(infinity) if np.isinf(s) else s
    return f32(math.ldexp(0.5, math.frexp(s)[1])) if power else s


def exponent_code(v: np.float32) -> int:
    if v == 0 or np.isinf(v):
        return 0 if v == 0 else 254
    fraction, exponent = math.frexp(v)
    return min(max(exponent - (fraction == 0.5) + 127, 0), 254)


def block_of(i: int, j: int, how, columnwise: bool) -> tuple[int, int]:
    """Which block of its group an element is in, in logical orientation."""
    sizes = tuple(reversed(how.block)) if columnwise else how.block
    return tuple(0 if size is None else place // size for place, size in zip((i, j), sizes, strict=True))


@np.errstate(all="ignore")
def by_loop(
    x: Tensor, recipe: Recipe, role: str, columnwise: bool
) -> tuple[list[list[int]], dict[tuple[int, int], float], Tensor]:
    """(codes, decode scale per block, values) of one group, by the formulas, per element."""
    how, data = scheme(recipe, role, columnwise=columnwise), x.float().numpy()
    members: dict[tuple[int, int], list[np.float32]] = {}
    for i, j in np.ndindex(*data.shape):
        members.setdefault(block_of(i, j, how, columnwise), []).append(abs(data[i, j]))
    largest = {key: max([f32(0), *(v for v in values if not np.isnan(v))]) for key, values in members.items()}
    whole = max([f32(0), *largest.values()])
    top, infinity = how.format.max, torch.finfo(x.dtype).max if recipe.scaling == "block" else LARGEST
    multiplier, decoder, factor = {}, {}, {}
    for key, a in largest.items():
        if recipe.scaling in ("current", "block"):
            multiplier[key] = encode_scale(a, top, infinity, recipe.power_of_two_scales)
            factor[key] = decoder[key] = f32(1) / multiplier[key]
        elif recipe.scaling == "mxfp8":
            decoder[key] = exponent_code(a * f32(1 / top))
            multiplier[key], factor[key] = f32(2.0 ** (127 - decoder[key])), f32(2.0 ** (decoder[key] - 127))
        else:
            s = min(f32(2688) / whole, LARGEST)
            s = f32(1) if whole == 0 or s == 0 else s
            decoder[key] = code_of(float(min(a * (s * f32(1 / 6)), LARGEST)), "e4m3")
            d = f32(table("e4m3")[0][decoder[key]])
            multiplier[key], factor[key] = min(f32(1) / (d * (f32(1) / s)), LARGEST), d * whole * f32(1 / 2688)
    chosen, decoded = np.zeros(data.shape, int), np.zeros(data.shape, f32)
    for i, j in np.ndindex(*data.shape):
        key = block_of(i, j, how, columnwise)
        chosen[i, j] = code_of(float(data[i, j] * multiplier[key]), how.format.name)
        decoded[i, j] = value_of(chosen[i, j], how.format.name) * factor[key]
    return chosen.tolist(), {key: float(value) for key, value in decoder.items()}, torch.from_numpy(decoded)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("scaling", ["current", "block", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("seed", range(12))
def test_codes_and_scales_are_those_of_the_formulas(scaling, dtype, seed):
    dice = Random(f"{scaling} {seed}")
    role, columnwise, other = dice.choice(["input", "weight", "grad_output"]), dice.random() < 0.5, dice.random() < 0.5
    options = {
        "current": {"power_of_two_scales": other},
        "block": {"power_of_two_scales": other, "fp8_format": "hybrid"},
        "mxfp8": {"two_dimensional_weights": other, "fp8_format": "hybrid"},
        "nvfp4": {"two_dimensional_weights": other, "hadamard": False, "stochastic_rounding": False},
    }
    recipe = Recipe(scaling, **options[scaling])
    x = drawn(dice, scaling, dtype)
    q = quantized(x, recipe, role=role, rowwise=not columnwise, columnwise=columnwise)
    expected_codes, expected_scales, expected_values = by_loop(x, recipe, role, columnwise)
    assert codes(q, columnwise=columnwise).tolist() == expected_codes
    assert same([dequantize(q, columnwise=columnwise)], [expected_values.to(dtype)])
    how, compact = scheme(recipe, role, columnwise=columnwise), scales(q, columnwise=columnwise)
    stored_by_row = scaling in ("mxfp8", "nvfp4")
    for i, j in np.ndindex(*x.shape):
        block = block_of(i, j, how, columnwise)
        place = (block[0], j) if stored_by_row and columnwise else (i, block[1]) if stored_by_row else block
        assert (compact.reshape(1, 1) if scaling == "current" else compact)[place].item() == expected_scales[block]


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
