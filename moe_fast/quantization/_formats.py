"""Numbers of eight and four bits, E4M3, E5M2, E2M1 and E8M0: from float32 to codes, and back.

A code is sign · exponent field · mantissa field. The codes of positive numbers have the order of
the numbers. So the code of a float32 is its own bits, shortened: rounded to fewer bits of mantissa,
minus the difference of the exponents' biases. If the code is subnormal, adding a power of two with
the spacing of the subnormal codes rounds in the same way.

Source: OCP 8-bit Floating Point Specification 1.0; OCP Microscaling Formats 1.0; PTX ISA, cvt with
.satfinite.
"""

import triton
import triton.language as tl

from moe_fast.launch import backend

INTERPRETED = tl.constexpr(backend.INTERPRETED)
FLOAT32_MAX = tl.constexpr(3.4028234663852886e38)
MAGNITUDE = tl.constexpr(0x7FFFFFFF)  # of a float32: all but its sign
INFINITY = tl.constexpr(0x7F800000)
E2M1_MAX = tl.constexpr(6.0)
LARGEST_POWER = tl.constexpr(254)  # E8M0's code of 2^127
SUBNORMAL_HALF = tl.constexpr(0x400000)  # the bits of 2^-127


@triton.jit
def as_float32(x):
    """x in float32. Triton's interpreter (3.9) would turn bfloat16's subnormal numbers into 0."""
    if INTERPRETED and x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def encoded(x, FORMAT: tl.constexpr, HARDWARE: tl.constexpr):
    """The codes of float32 numbers, rounded with ties to even, and saturated. A NaN becomes 0x7F;
    E2M1 has no NaN, and it becomes the largest code.
    """
    if HARDWARE and FORMAT == "e4m3":
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    if HARDWARE and FORMAT == "e5m2":
        return x.to(tl.float8e5).to(tl.uint8, bitcast=True)
    if FORMAT == "e2m1":
        return encoded_by_sum(x, HARDWARE)
    MANTISSA: tl.constexpr = 3 if FORMAT == "e4m3" else 2
    BIAS: tl.constexpr = 7 if FORMAT == "e4m3" else 15
    MAX_CODE: tl.constexpr = 0x7E if FORMAT == "e4m3" else 0x7B
    DROPPED: tl.constexpr = 23 - MANTISSA
    # the bits of the power of two whose spacing is 2^(1 - BIAS - MANTISSA)
    SPACED: tl.constexpr = (127 + 24 - BIAS - MANTISSA) << 23
    word = x.to(tl.int32, bitcast=True)
    body = word & MAGNITUDE
    normal = ((body + ((1 << (DROPPED - 1)) - 1) + ((body >> DROPPED) & 1)) >> DROPPED) - ((127 - BIAS) << MANTISSA)
    spaced = tl.full([], SPACED, tl.int32).to(tl.float32, bitcast=True)
    subnormal = (body.to(tl.float32, bitcast=True) + spaced).to(tl.int32, bitcast=True) - SPACED
    code = tl.minimum(tl.where(body < ((128 - BIAS) << 23), subnormal, normal), MAX_CODE)
    code = code | (((word >> 31) & 1) << 7)
    return tl.where(body > INFINITY, 0x7F, code).to(tl.uint8)


@triton.jit
def encoded_by_sum(x, HARDWARE: tl.constexpr):
    """The E2M1 codes of float32 products: k + 2e, with 2^e ≤ |x| (e ≥ 0), u = 2^(e-1) and k = |x| /
    u.

    The sum of |x| and u · (2^23 + 6) has the spacing u. So it rounds k, which stands in its last
    bits. Its exponent field is e + 149, and 6 + 2 · 149 is divisible by 8.
    """
    size = tl.minimum(tl.abs(x), E2M1_MAX)  # a NaN becomes 6
    word = size.to(tl.int32, bitcast=True)
    spaced = tl.maximum((word & INFINITY) + ((22 << 23) + 6), (149 << 23) + 6)
    total = (size + spaced.to(tl.float32, bitcast=True)).to(tl.uint32, bitcast=True)
    signed = x if HARDWARE else tl.where(x == x, x, 0.0)  # on the hardware a NaN made by an operation has no sign
    sign = signed.to(tl.uint32, bitcast=True) >> 28
    return ((((total + (total >> 22)) ^ sign) & 7) ^ sign).to(tl.uint8)


@triton.jit
def encoded_randomly(x, noise):
    """The E2M1 codes of float32 numbers, uint8, saturated, rounded at random: with the spacing u
    and |x| = k·u + r, k becomes k + 1 where noise < r/u.

    Every step is exact. Noise in float64 is compared in float64.
    """
    size = tl.where(tl.abs(x) < E2M1_MAX, tl.abs(x), E2M1_MAX)
    units = size * tl.where(size < 2, 2.0, tl.where(size < 4, 1.0, 0.5))
    floor = tl.floor(units)
    fraction = units - floor
    up = fraction.to(tl.float64) > noise if noise.dtype == tl.float64 else fraction > as_float32(noise)
    code = floor.to(tl.int32) + tl.where(size < 2, 0, tl.where(size < 4, 2, 4)) + up.to(tl.int32)
    negative = (x.to(tl.int32, bitcast=True) < 0) & (x == x)
    return (code + tl.where(negative, 8, 0)).to(tl.uint8)


@triton.jit
def decoded(code, FORMAT: tl.constexpr):
    """The values of codes in float32, exact. The code of ∞ in E5M2 has no case, because casts
    saturate.
    """
    MANTISSA: tl.constexpr = 3 if FORMAT == "e4m3" else 2 if FORMAT == "e5m2" else 1
    BIAS: tl.constexpr = 7 if FORMAT == "e4m3" else 15 if FORMAT == "e5m2" else 1
    MAX_CODE: tl.constexpr = 0x7E if FORMAT == "e4m3" else 0x7B if FORMAT == "e5m2" else 7
    return value_of(code, MANTISSA, BIAS, MAX_CODE, 3 if FORMAT == "e2m1" else 7)


@triton.jit
def decoded_bytes(code, mantissa):
    """The values of codes in E4M3 or E5M2, told apart by the number of bits of the mantissa, so
    that one kernel serves both.
    """
    is_e4m3 = mantissa == 3
    return value_of(code, mantissa, tl.where(is_e4m3, 7, 15), tl.where(is_e4m3, 0x7E, 0x7B), 7)


@triton.jit
def value_of(code, mantissa, bias, max_code, SIGN: tl.constexpr):
    """The values of codes with `mantissa` bits of mantissa; NaN for codes above `max_code`."""
    code = code.to(tl.int32)
    body = code & ((1 << SIGN) - 1)
    rebias = tl.full([], (127 + 127 - bias) << 23, tl.int32).to(tl.float32, bitcast=True)  # 2^(127 - bias)
    value = (body << (23 - mantissa)).to(
        tl.float32, bitcast=True
    ) * rebias  # a subnormal of the format is one of float32, too
    value = tl.where(body > max_code, float("nan"), value)
    sign = (code >> SIGN) << 31
    # a minus is 0 - value in Triton 3.6, which loses the sign of 0
    return (value.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def encoded_up(x):
    """The E8M0 codes of numbers ≥ 0, int32, rounded up: ⌈log₂ x⌉ + 127, within 0 … 254."""
    word = x.to(tl.int32, bitcast=True)
    field = word >> 23
    above = (word & 0x7FFFFF) > tl.where(field == 0, SUBNORMAL_HALF, 0)  # more than the power of two below
    return tl.minimum(field + above.to(tl.int32), LARGEST_POWER)


@triton.jit
def power_of_two(code):
    """2^(code - 127) in float32, which is a subnormal number for code 0."""
    code = code.to(tl.int32)
    return tl.where(code == 0, SUBNORMAL_HALF, code << 23).to(tl.float32, bitcast=True)
