"""The number formats of low precision, bit by bit: E4M3, E5M2, E2M1 and E8M0.

A code is sign · exponent field · mantissa field, most significant first. With bias b and M mantissa
bits it means

    (-1)^s · (2^M + m) · 2^(e - b - M)    for e > 0          (normal)
    (-1)^s ·        m  · 2^(1 - b - M)    for e = 0          (subnormal)

Nothing here goes through torch's own float8 types: whether their casts saturate depends on torch's
version.

Sources: OCP 8-bit Floating Point Specification 1.0 (E4M3, E5M2); OCP Microscaling Formats 1.0
(E2M1, E8M0); PTX ISA, cvt with .satfinite (saturation, NaN into a format without one);
`float_to_e8m0` of transformer_engine/common (the rounding of E8M0).
"""

import math
from array import array
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from moe_ref.config import require
from moe_ref.rounding import round_to


@dataclass(frozen=True)
class Format:
    """What the bits of a code mean."""

    name: str
    signed: bool
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max: float  # the largest finite value
    max_code: int  # its code, without the sign
    infinity: int | None  # the code of +∞; None: the format has none
    nan: int | None  # the code that a NaN becomes; None: the format has none

    @property
    def sign_bit(self) -> int:
        """The code of -0; 0 for a format without a sign."""
        return 1 << (self.exponent_bits + self.mantissa_bits) if self.signed else 0


# OFP8 1.0: S.1111.111 is E4M3's only NaN; E5M2 is as IEEE 754, 0x7D … 0x7F are NaN
E4M3 = Format("e4m3", True, 4, 3, bias=7, max=448.0, max_code=0x7E, infinity=None, nan=0x7F)
E5M2 = Format("e5m2", True, 5, 2, bias=15, max=57344.0, max_code=0x7B, infinity=0x7C, nan=0x7F)
E2M1 = Format("e2m1", True, 2, 1, bias=1, max=6.0, max_code=0x7, infinity=None, nan=None)  # MX 1.0: 0 ½ 1 1½ 2 3 4 6
# MX 1.0: E8M0 is a power of two, without zero
E8M0 = Format("e8m0", False, 8, 0, bias=127, max=2.0**127, max_code=0xFE, infinity=None, nan=0xFF)

# IEEE 754 binary32 and binary64: the integers that have their bits, mantissa bits, bias
FLOATS = {torch.float32: (torch.int32, 23, 127), torch.float64: (torch.int64, 52, 1023)}


def encode(x: Tensor, format: Format, *, noise: Tensor | None = None) -> Tensor:
    """The codes of x, rounded once, saturated.

        |x| = k · u + r,   u the spacing of the format at |x|,   0 ≤ r < u
        to nearest:    k + 1 if r > u/2, or r = u/2 and k is odd
        stochastic:    k + 1 if noise < r/u               (noise uniform in [0, 1): the mean is |x|)
        E8M0:          k + 1 if r > 0, that is 2^⌈log₂|x|⌉

    Values past the largest finite one, ±∞ included, saturate; the sign of zero is kept. NaN becomes
    the format's NaN, without a sign. E2M1 has none: there NaN becomes +6, as in the hardware's
    conversion.

    E8M0 has neither a sign nor a zero: |x| is encoded, and everything up to 2^-127, 0 included,
    becomes code 0, the value 2^-127.

    Args:
        x: floating point. float64 is rounded once, not by way of float32.
        noise: of x's shape, in [0, 1), or None for rounding to nearest. Not for E8M0.

    Raises:
        ValueError: x is not floating point, or noise is of another shape or not wanted.

    Source: `satfinite` casts of transformer_engine/common; `float_to_e8m0` of its ptx.cuh.
    """
    require(x.is_floating_point(), "x", f"of dtype {x.dtype}", "floating point")
    if noise is not None:
        require(format.signed, "noise", f"given with {format.name}", "None: a scale is rounded up, never at random")
        require(noise.shape == x.shape, "noise", f"of shape {tuple(noise.shape)}", f"of shape {tuple(x.shape)}, as x")
    x = x.detach()
    # exact; in float64 2^-127, the least value of E8M0, is a normal number
    exact = torch.float64 if x.dtype == torch.float64 or format is E8M0 else torch.float32
    magnitude = round_to(x, exact).abs()
    magnitude = magnitude.clamp(max=2 * format.max)  # an infinity saturates like a number
    code = _round_up(magnitude) if format is E8M0 else _round(magnitude, format, noise)
    code = code.clamp(max=format.max_code).to(torch.uint8) + format.sign_bit * torch.signbit(x).to(torch.uint8)
    return code.masked_fill(torch.isnan(x), format.max_code if format.nan is None else format.nan)


def _round(magnitude: Tensor, format: Format, noise: Tensor | None) -> Tensor:
    """The codes of magnitudes, as if the format had no largest value.

    In units of the spacing a magnitude is `units` and a rest; its quotient by a power of two is
    exact. Codes of one sign count upwards through all exponents: the code is `units` counted on
    from where the exponent begins, and a carry into the next exponent needs no case of its own.
    """
    least = 1 - format.bias  # the exponent of the smallest normal number, and of the subnormals
    exponent = _exponent(magnitude).clamp(min=least)
    steps = magnitude / _power_of_two(exponent - format.mantissa_bits, magnitude.dtype)
    if noise is None:
        units = steps.round()  # ties to even
    else:
        units = steps.floor()
        units = units + (noise < steps - units)
    return (exponent - least) * 2**format.mantissa_bits + units.to(exponent.dtype)


def _round_up(magnitude: Tensor) -> Tensor:
    """⌈log₂ magnitude⌉ + 127, or 0 up to 2^-127."""
    exponent = _exponent(magnitude)
    above = magnitude > _power_of_two(exponent, magnitude.dtype)
    return torch.where(exponent < -E8M0.bias, 0, exponent + E8M0.bias + above)


def decode(codes: Tensor, format: Format, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values of codes; exact in float32 and float64, rounded once to a narrower dtype.

    E8M0: 2^(code - 127), of which code 0 is a float32 subnormal; 255 is NaN.

    Args:
        codes: uint8. Bits above the format's width are ignored.

    Raises:
        ValueError: codes are not uint8.
    """
    require(codes.dtype == torch.uint8, "codes", f"of dtype {codes.dtype}", "uint8")
    values = torch.tensor(_values(format), dtype=torch.float64, device=codes.device)
    return round_to(values, dtype)[codes.int()]


@cache
def _values(format: Format) -> "array[float]":
    """The values of the 256 codes, from which torch makes a tensor sooner than from a list."""
    return array("d", (_value(code, format) for code in range(256)))


def _value(code: int, format: Format) -> float:
    body = code & (2 ** (format.exponent_bits + format.mantissa_bits) - 1)
    field, mantissa = body >> format.mantissa_bits, body & ((1 << format.mantissa_bits) - 1)
    if format is E8M0:
        value = 2.0 ** (field - format.bias)
    else:
        significand = mantissa + (1 << format.mantissa_bits) if field > 0 else mantissa
        value = significand * 2.0 ** (max(field, 1) - format.bias - format.mantissa_bits)
    if format.infinity is not None and body == format.infinity:
        value = math.inf
    if format.nan is not None and body > (format.infinity or format.max_code):
        value = math.nan
    return -value if code & format.sign_bit else value


def _exponent(magnitude: Tensor) -> Tensor:
    """⌊log₂ magnitude⌋ of normal numbers, from their bits; less than all of these for 0 and
    subnormal numbers.
    """
    integer, mantissa_bits, bias = FLOATS[magnitude.dtype]
    return (magnitude.view(integer) >> mantissa_bits) - bias


def _power_of_two(exponent: Tensor, dtype: torch.dtype) -> Tensor:
    """2^exponent in float32 or float64, made from its bits; for exponents of normal numbers."""
    _, mantissa_bits, bias = FLOATS[dtype]
    return ((exponent + bias) << mantissa_bits).view(dtype)
