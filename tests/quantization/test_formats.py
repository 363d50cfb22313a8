"""The formats against torch's casts, and against a search among exact fractions, which share
nothing with the bit arithmetic.
"""

import math
from bisect import bisect_left
from fractions import Fraction
from functools import cache
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from moe_ref.quantization.formats import E2M1, E4M3, E5M2, E8M0, Format, decode, encode

TORCH = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "e8m0": torch.float8_e8m0fnu}
SIGNED = [E4M3, E5M2, E2M1]
named = {"ids": lambda value: getattr(value, "name", None)}


def all_codes(format: Format) -> Tensor:
    return torch.arange(2 * format.sign_bit or 256).to(torch.uint8)


def every_bf16() -> Tensor:
    return torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16).to(torch.float32)


# ---- what a code means, built by hand: sign, exponent and mantissa as written in the standards


def meaning(code: int, exponent_bits: int, mantissa_bits: int, bias: int) -> Fraction:
    """The value of a finite code."""
    sign = -1 if code >> (exponent_bits + mantissa_bits) else 1
    exponent, mantissa = code >> mantissa_bits & (2**exponent_bits - 1), code & (2**mantissa_bits - 1)
    if exponent == 0:
        return sign * Fraction(mantissa, 2**mantissa_bits) * Fraction(2) ** (1 - bias)
    return sign * (1 + Fraction(mantissa, 2**mantissa_bits)) * Fraction(2) ** (exponent - bias)


STANDARD = {"e4m3": (4, 3, 7), "e5m2": (5, 2, 15), "e2m1": (2, 1, 1)}
FINITE = {"e4m3": 0x7F, "e5m2": 0x7C, "e2m1": 0x8}  # so many codes without a sign are finite


@cache
def magnitudes(format: Format) -> list[Fraction]:
    """Every finite value without a sign, ascending: its place is its code."""
    return [meaning(code, *STANDARD[format.name]) for code in range(FINITE[format.name])]


def nearest(x: float, table: list[Fraction], sign_bit: int) -> int:
    """The code of the nearest value, of two the even one; the last for values beyond."""
    magnitude = Fraction(2**2000) if math.isinf(x) else abs(Fraction(x))
    place = bisect_left(table, magnitude)
    code = min(range(max(place - 1, 0), min(place + 1, len(table))), key=lambda i: (abs(table[i] - magnitude), i % 2))
    return code + (sign_bit if math.copysign(1, x) < 0 else 0)


def delicate(format: Format) -> Tensor:
    """Every value, every midpoint, their neighbours in float32 and float64; both signs, float64."""
    table = magnitudes(format)
    points = [float(v) for v in table] + [float((a + b) / 2) for a, b in pairwise(table)]
    points += [format.max * 2, float(table[1] / 4), 5e-324, 1e-45, 1e308, math.inf]
    x = torch.tensor(points, dtype=torch.float64)
    x = torch.cat(
        [x, torch.nextafter(x, x + math.inf), torch.nextafter(x, torch.zeros_like(x)), *_float32_neighbours(x)]
    )
    return torch.cat([x, -x])


def _float32_neighbours(x: Tensor) -> list[Tensor]:
    narrow = x.to(torch.float32)
    return [
        torch.nextafter(narrow, narrow + math.inf).double(),
        torch.nextafter(narrow, torch.zeros_like(narrow)).double(),
    ]


# ---- decode


@pytest.mark.parametrize("format", [E4M3, E5M2, E8M0], **named)
def test_every_code_means_what_torch_says(format):
    expected = all_codes(format).view(TORCH[format.name]).to(torch.float32)
    assert torch.equal(
        decode(all_codes(format), format).view(torch.int32) & 0x7FFFFFFF, canonical(expected) & 0x7FFFFFFF
    )
    assert torch.equal(
        torch.signbit(decode(all_codes(format), format)) | expected.isnan(), torch.signbit(expected) | expected.isnan()
    )


def canonical(x: Tensor) -> Tensor:
    """The bits of x; the one NaN for every NaN."""
    return torch.where(x.isnan(), torch.nan, x).view(torch.int32)


@pytest.mark.parametrize("format", SIGNED, **named)
def test_every_code_means_what_the_standard_says(format):
    finite = [code for code in all_codes(format).tolist() if code % format.sign_bit < FINITE[format.name]]
    values = decode(torch.tensor(finite, dtype=torch.uint8), format, dtype=torch.float64).tolist()
    assert [Fraction(v) for v in values] == [meaning(code, *STANDARD[format.name]) for code in finite]


@pytest.mark.parametrize(("format", "top"), [(E4M3, 448), (E5M2, 57344), (E2M1, 6), (E8M0, 2.0**127)], **named)
def test_the_largest_value_is_that_of_the_standard(format, top):
    values = decode(all_codes(format), format)
    assert (
        values[values.isfinite()].max()
        == top
        == format.max
        == decode(torch.tensor([format.max_code], dtype=torch.uint8), format)
    )


def test_the_smallest_e8m0_is_a_float32_subnormal_and_255_is_nan():
    values = decode(torch.tensor([0, 127, 254, 255], dtype=torch.uint8), E8M0)
    assert values[:3].tolist() == [2.0**-127, 1.0, 2.0**127]
    assert values[3].isnan()


def test_a_call_without_memory_leaves_nothing_behind():
    codes = torch.tensor([1, 2, 3], dtype=torch.uint8)
    with FakeTensorMode():
        decode(torch.empty(3, dtype=torch.uint8), E4M3, dtype=torch.float16)
    assert decode(codes, E4M3, dtype=torch.float16).tolist() == [2.0**-9, 2.0**-8, 3 * 2.0**-9]


def test_e5m2_keeps_infinity_apart_from_nan():
    assert decode(torch.tensor([0x7C, 0xFC], dtype=torch.uint8), E5M2).tolist() == [math.inf, -math.inf]
    assert decode(torch.tensor([0x7D, 0x7E, 0x7F, 0xFD], dtype=torch.uint8), E5M2).isnan().all()


# ---- encode


@pytest.mark.parametrize("format", [*SIGNED, E8M0], **named)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_finite_value_keeps_its_code(format, dtype):
    values = decode(all_codes(format), format, dtype=dtype)
    assert torch.equal(encode(values, format)[values.isfinite()], all_codes(format)[values.isfinite()])


@pytest.mark.parametrize("format", [E4M3, E5M2], **named)
def test_every_bf16_value_is_encoded_as_torch_casts_it_when_clamped(format):
    x = every_bf16()
    expected = x.clamp(-format.max, format.max).to(TORCH[format.name]).view(torch.uint8)
    number = ~x.isnan()
    assert torch.equal(encode(x, format)[number], expected[number])
    assert (encode(x, format)[~number] == 0x7F).all()
    assert torch.equal(encode(x.bfloat16(), format), encode(x, format))


@pytest.mark.parametrize("format", [E4M3, E5M2], **named)
def test_float32_next_to_every_midpoint_is_encoded_as_torch_casts_it_when_clamped(format):
    x = delicate(format).to(torch.float32)
    expected = x.clamp(-format.max, format.max).to(TORCH[format.name]).view(torch.uint8)
    assert torch.equal(encode(x, format), expected)


@pytest.mark.parametrize("format", SIGNED, **named)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_code_is_that_of_the_nearest_exact_value(format, dtype):
    x = delicate(format).to(dtype)
    assert encode(x, format).tolist() == [nearest(v, magnitudes(format), format.sign_bit) for v in x.tolist()]


def test_float64_is_not_rounded_by_way_of_float32():
    x = torch.tensor(
        [1.0625 + 2.0**-40], dtype=torch.float64
    )  # just above the middle of 1 and 1.125; in float32 it is the middle
    assert decode(encode(x, E4M3), E4M3) == 1.125
    assert decode(encode(x.float(), E4M3), E4M3) == 1.0


@pytest.mark.parametrize(("format", "nan", "top"), [(E4M3, 0x7F, 0x7E), (E5M2, 0x7F, 0x7B), (E2M1, 0x7, 0x7)], **named)
def test_special_values(format, nan, top):
    x = torch.tensor([math.nan, -math.nan, math.inf, -math.inf, 1e38, -1e38, 0.0, -0.0])
    sign = format.sign_bit
    assert encode(x, format).tolist() == [nan, nan, top, top + sign, top, top + sign, 0, sign]


def test_e8m0_rounds_up():
    x = torch.tensor([1.0, 1.0 + 2**-23, 1.5, 2.0, 2.0**-126, 2.0**127, 2.0**127 * 1.5, math.inf, math.nan, -3.0])
    assert encode(x, E8M0).tolist() == [127, 128, 128, 128, 1, 254, 254, 254, 255, 129]


def test_e8m0_of_what_is_up_to_its_smallest_value_is_0():
    x = torch.tensor([0.0, 2.0**-149, 2.0**-128 * 1.5, 2.0**-127, 2.0**-127 + 2.0**-149, 2.0**-126 * 1.5])
    assert encode(x, E8M0).tolist() == [0, 0, 0, 0, 1, 2]
    assert encode(torch.tensor([1e-300, 2.0**-127 * (1 + 2**-52), 1e300], dtype=torch.float64), E8M0).tolist() == [
        0,
        1,
        254,
    ]


def test_e8m0_of_every_bf16_is_the_least_power_of_two_that_is_not_below():
    x = every_bf16().abs()
    x = x[x.isfinite()]
    powers = torch.tensor([math.ldexp(1, e) for e in range(-127, 128)], dtype=torch.float64)
    expected = torch.searchsorted(powers, x.double()).clamp(max=254)
    assert torch.equal(encode(x, E8M0).long(), expected)


# ---- stochastic rounding


def test_noise_below_the_rest_rounds_away_from_zero():
    x = torch.tensor([1.125, -1.125, 1.125, 1.0, 6.5, -0.0])  # 1.125: a quarter of the way to 1.5
    noise = torch.tensor([0.2499, 0.2499, 0.25, 0.0, 0.0, 0.0])
    assert decode(encode(x, E2M1, noise=noise), E2M1).tolist() == [1.5, -1.5, 1.0, 1.0, 6.0, -0.0]


@pytest.mark.parametrize("format", SIGNED, **named)
def test_the_mean_over_equally_spaced_noise_is_the_value_itself(format):
    table = magnitudes(format)
    low, high = (torch.tensor([float(v) for v in side], dtype=torch.float64) for side in (table[:-1], table[1:]))
    x = low + (high - low) * 5 / 16
    noise = (torch.arange(16, dtype=torch.float64) / 16)[:, None].expand(16, len(x))
    values = decode(encode(x.expand(16, -1), format, noise=noise), format, dtype=torch.float64)
    assert torch.equal(values.mean(0), x)


def test_what_is_far_below_the_smallest_value_is_rounded_up_as_rarely_as_it_should_be():
    x = torch.full((2,), 2.0**-70)
    assert encode(x, E2M1, noise=torch.tensor([0.0, 2.0**-60])).tolist() == [1, 0]


# ---- twins: a wrong rule must be seen by the comparisons above


# ---- refusals


def test_what_cannot_be_encoded_is_refused():
    with pytest.raises(ValueError, match=r"x is of dtype torch\.int64; it must be floating point"):
        encode(torch.tensor([1]), E4M3)
    with pytest.raises(ValueError, match="noise is given with e8m0"):
        encode(torch.ones(1), E8M0, noise=torch.zeros(1))
    with pytest.raises(ValueError, match=r"noise is of shape \(1,\)"):
        encode(torch.ones(2), E2M1, noise=torch.zeros(1))
    with pytest.raises(ValueError, match=r"codes is of dtype torch\.int32"):
        decode(torch.zeros(1, dtype=torch.int32), E4M3)
