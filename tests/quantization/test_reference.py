"""quantize and dequantize, against values worked by hand and against loops over single numbers that share nothing with them."""

import math
from bisect import bisect_left
from functools import cache
from itertools import pairwise
from random import Random

import numpy as np
import pytest
import torch
from torch import Tensor

import moe_ref
from moe_ref import amax, codes, dequantize, new_quantizer_state, quantize, scales, update_scales
from moe_ref.config import Recipe
from moe_ref.quantization.formats import E2M1, E4M3, E5M2, E8M0, decode
from moe_ref.quantization.quantize import HADAMARD_SIGNS, hadamard
from moe_ref.quantization.recipes import nearest32, scheme

STATELESS = [
    Recipe("current"),
    Recipe("block"),
    Recipe("mxfp8"),
    Recipe("nvfp4", hadamard=False, stochastic_rounding=False),
]
ALL = [*STATELESS, Recipe("delayed")]
by_scaling = {"ids": lambda recipe: recipe.scaling}
NAN, INF = math.nan, math.inf
f32 = np.float32
LARGEST = np.finfo(np.float32).max


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def quantized(x: Tensor, recipe: Recipe, **options):
    """The quantised tensor; a fresh state where one is needed."""
    splits = options.get("splits")
    options.setdefault("state", new_quantizer_state(recipe, num_groups=1 if splits is None else len(splits)))
    return quantize(x, recipe, **options)[0]


def parts(q, columnwise: bool) -> list[Tensor]:
    return [read(q, columnwise=columnwise) for read in (codes, scales, amax, dequantize)]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    """Bit by bit; a NaN equals a NaN."""
    return all(
        x.shape == y.shape and x.dtype == y.dtype and bool(((x == y) | (x.isnan() & y.isnan())).all())
        for x, y in zip(a, b, strict=True)
    )


def row(values: list[float], length: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """One row, zeros behind the values."""
    return torch.tensor([values + [0.0] * (length - len(values))], dtype=dtype)


# ---- golden cases, worked by hand


def test_current_scaling_by_hand():
    q = quantized(torch.tensor([[1.0, 2.0, -3.0, 7.0]]), Recipe("current"))
    assert (amax(q).tolist(), scales(q).tolist()) == ([7.0], [1 / 64])  # 448 / 7 = 64
    assert codes(q).tolist() == [[0x68, 0x70, 0xF4, 0x7E]]  # 2^6, 2^7, -1.5·2^7, 1.75·2^8
    assert dequantize(q).tolist() == [[1.0, 2.0, -3.0, 7.0]]


def test_current_scaling_of_gradients_by_hand():
    q = quantized(torch.tensor([[1.0, -1.75]]), Recipe("current"), role="grad_output")
    assert scales(q).tolist() == [2.0**-15]  # 57344 / 1.75 = 2^15
    assert codes(q).tolist() == [[0x78, 0xFB]]  # 2^15 in E5M2: exponent field 30, mantissa 0; -1.75·2^15


def test_block_scaling_rounds_the_scale_down_to_a_power_of_two_by_hand():
    x = row([3.0, 1.0], 130)
    x[0, 128] = -0.25
    q = quantized(x, Recipe("block"))
    assert amax(q).tolist() == [[3.0, 0.25]]
    assert scales(q).tolist() == [[1 / 128, 1 / 1024]]  # 448/3 = 149.3 → 128; 448/0.25 = 1792 → 1024
    assert codes(q)[0, [0, 1, 128, 129]].tolist() == [0x7C, 0x70, 0xF8, 0]  # 384 = 1.5·2^8, 128, -256
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
    # S = 6·256/24 = 64. In the second block d₆ = E4M3(16/6·64 = 170.7) = 176 and d₄ = E4M3(256) = 256. A code's unit is d·24/1536: with d₄
    # it is 4, and 16 and 12 are exact; with d₆ it is 2.75, and they become 16.5 and 11.
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
    place = bisect_left(middles, abs(v))
    if place < len(middles) and middles[place] == abs(v) and place % 2 == 1:
        place += 1
    return place + (0 if math.copysign(1, v) > 0 else {"e2m1": 8}.get(name, 0x80))


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
    """(codes, what to decode each block with, values) of one group, from the formulas, element by element."""
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


SHAPES = {
    "current": [(1, 1), (7, 5), (3, 9)],
    "block": [(3, 130), (1, 257), (140, 3), (257, 1), (129, 2)],
    "mxfp8": [(32, 32), (64, 32), (32, 64)],
    "nvfp4": [(16, 16), (48, 32), (16, 64)],
}
SPECIAL = [0.0, -0.0, 1.0, 448.0, 449.0, 3.5, 1e-3, -1e-8, 1e-38, 1e-45, 3e38, -65504.0]


def drawn(dice: Random, scaling: str, dtype: torch.dtype) -> Tensor:
    """Rows and columns of different size, anywhere in the range of float32; now and then a special value in it."""
    x = random(*dice.choice(SHAPES[scaling]), seed=dice.randrange(2**30), dtype=torch.float64) * 2.0 ** dice.choice(
        [0, 0, dice.randint(-135, 110)]
    )
    x = x * torch.logspace(0, dice.choice([0, 4]), len(x), base=2.0, dtype=torch.float64)[:, None]
    for _ in range(dice.choice([0, 0, 3])):
        x[dice.randrange(x.shape[0]), dice.randrange(x.shape[1])] = dice.choice([*SPECIAL, NAN, INF, -INF])
    return x.to(dtype)


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
    assert first["current"] == first["block"] == first["delayed"] == [0x7E, 0xFE, 0x40]  # s = 1: 2 stays 2
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
    assert (scales(tiny)[0, 0].item(), codes(tiny)[0, 0].item()) == (0, 0)  # 2^-22 is below half of the smallest code


# ---- directions


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


def sylvester(size: int) -> Tensor:
    h = torch.ones(1, 1)
    while len(h) < size:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return h


def test_the_signs_are_those_that_are_written_down():
    assert "".join("+" if sign > 0 else "-" for sign in HADAMARD_SIGNS) == "+++-+------+-+--"


def test_the_hadamard_transform_is_that_of_sylvesters_matrix_and_the_signs():
    x = torch.arange(-24, 24).reshape(1, 48).float().bfloat16()
    expected = (x.float().reshape(3, 16) * torch.tensor(HADAMARD_SIGNS)) @ sylvester(16) / 4  # exact: small integers
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
    sixes = torch.eye(16).repeat(32, 1) == 1  # in every block of both directions, so that scales are 1
    x, recipe = torch.where(sixes, 6.0, 1.25), Recipe("nvfp4", hadamard=False)
    first, second = (quantized(x, recipe, role="grad_output", columnwise=True) for _ in range(2))
    draws = [dequantize(q, columnwise=turned)[~sixes] for q in (first, second) for turned in (False, True)]
    for drawn in draws:
        assert set(drawn.tolist()) == {1.0, 1.5}
        assert 0.47 < float((drawn == 1.5).float().mean()) < 0.53  # why: 5 standard errors of 7680 draws
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
    "state is with amax_history of shape (1, 1024)": (
        torch.zeros(2, 2),
        Recipe("delayed"),
        {"splits": torch.tensor([1, 1]), "state": new_quantizer_state(Recipe("delayed"))},
    ),
    "columnwise is True for a row-scaled input with four_over_six": (
        torch.zeros(16, 16),
        Recipe("nvfp4", hadamard=False, row_scaled_activation=True, four_over_six="all"),
        {"columnwise": True},
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_illegal_calls_are_refused_by_name_and_value(message):
    x, recipe, options = REFUSED[message]
    with pytest.raises(ValueError) as refusal:
        quantized(x, recipe, **options) if "state" not in options else quantize(x, recipe, **options)
    assert str(refusal.value).startswith(message)


def test_the_functions_are_public():
    names = ["quantize", "codes", "scales", "amax", "dequantize", "new_quantizer_state", "update_scales", "operands"]
    assert all(getattr(moe_ref, name).__name__ == name for name in names)
