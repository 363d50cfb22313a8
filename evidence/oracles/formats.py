"""The number formats, by ml_dtypes, gfloat and torch: every code, and a rounding of every value
that can be told from its neighbours.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from evidence.oracles.compare import EITHER, OURS, Comparison, Known, compare
from moe_ref.quantization.formats import E2M1, E4M3, E5M2, E8M0, Format, decode, encode

FORMATS = (E4M3, E5M2, E2M1, E8M0)
TORCH = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "e8m0": torch.float8_e8m0fnu}


def codes_of(format: Format) -> Tensor:
    """All codes."""
    return torch.arange(2 ** (format.signed + format.exponent_bits + format.mantissa_bits)).to(torch.uint8)


def values_of(format: Format) -> Tensor:
    """float32 values: all numbers of 16 bits, all numbers of the format, the midpoints between
    them, and both float32 neighbours of each, in the order of their magnitude.
    """
    all_codes = torch.arange(-(2**15), 2**15).to(torch.int16)
    all_numbers = [all_codes.view(dtype).float() for dtype in (torch.bfloat16, torch.float16)]
    format_numbers = decode(codes_of(format), format).double()
    format_numbers = format_numbers[format_numbers.isfinite()].unique()
    near = torch.cat([format_numbers, (format_numbers[1:] + format_numbers[:-1]) / 2]).float()
    up, down = (torch.nextafter(near, torch.full_like(near, end)) for end in (torch.inf, -torch.inf))
    x = torch.cat([near, up, down, *all_numbers])
    return x[torch.sort(torch.where(x.isnan(), torch.inf, x.abs()), stable=True).indices]


def decoded(name: str, format: Format, theirs: Callable[[Tensor], Tensor]) -> Comparison:
    """All codes, as values."""
    codes = codes_of(format)
    return compare(
        f"{name}: values of all codes of {format.name}",
        decode(codes, format),
        theirs(codes),
        case=lambda at, _: f"code {int(codes[at]):#x}",
    )


def encoded(name: str, format: Format, theirs: Callable[[Tensor], Tensor], *, takes_nan: bool = True) -> Comparison:
    """Rounded values, as codes. A cast that does not saturate gets values within the range."""
    x = values_of(format)
    x = x if takes_nan else x[~x.isnan()]
    in_range = x.clamp(-format.max, format.max)
    nan, sign = x.isnan(), format.sign_bit
    causes = [Known("the code of a NaN: the formats leave its sign open, moe_ref drops it", EITHER, nan)]
    if format.nan is None:
        causes = [Known("NaN in a format without one: the hardware's conversion gives the largest value", OURS, nan)]
    if not sign:
        causes.insert(0, Known("E8M0 has no sign: of a scale moe_ref takes the magnitude", EITHER, x < 0))
    return compare(
        f"{name}: {format.name} codes of rounded values",
        encode(in_range, format),
        theirs(in_range),
        case=lambda at, _: f"x = {x[at].item():.9g}",
        known_causes=causes,
    )


# ---- one function per package, which gives the casts of each format


def _widened(dtype: torch.dtype, codes: Tensor) -> Tensor:
    return codes.view(dtype).float()


def _cast(dtype: torch.dtype, x: Tensor) -> Tensor:
    return x.to(dtype).view(torch.uint8)


def by_torch() -> Iterator[Comparison]:
    """torch's float8 types."""
    for format in (E4M3, E5M2, E8M0):
        yield decoded("torch", format, partial(_widened, TORCH[format.name]))
    for format in (E4M3, E5M2):
        yield encoded("torch", format, partial(_cast, TORCH[format.name]))


def by_ml_dtypes() -> Iterator[Comparison]:
    """ml_dtypes: numpy types, with casts of their own."""
    import ml_dtypes
    import numpy as np

    types = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2", "e2m1": "float4_e2m1fn", "e8m0": "float8_e8m0fnu"}
    for format in FORMATS:
        numpy_type = getattr(ml_dtypes, types[format.name])

        def values(codes: Tensor, numpy_type: Any = numpy_type) -> Tensor:
            return torch.from_numpy(codes.numpy().view(numpy_type).astype(np.float32))

        def codes(x: Tensor, numpy_type: Any = numpy_type) -> Tensor:
            with np.errstate(invalid="ignore"):  # NaN in a format without one
                return torch.from_numpy(x.numpy().astype(numpy_type).view(np.uint8))

        yield decoded("ml_dtypes", format, values)
        if format is not E8M0:  # its cast rounds to nearest, but a scale is rounded up
            yield encoded("ml_dtypes", format, codes)


def by_gfloat() -> Iterator[Comparison]:
    """gfloat: formats as data, values by formulas in float64."""
    import gfloat
    import gfloat.formats as named
    import numpy as np

    types = {"e4m3": "ocp_e4m3", "e5m2": "ocp_e5m2", "e2m1": "ocp_e2m1", "e8m0": "ocp_e8m0"}
    for format in FORMATS:
        format_info = getattr(named, f"format_info_{types[format.name]}")
        up = format is E8M0
        mode = gfloat.RoundMode.TowardPositive if up else gfloat.RoundMode.TiesToEven

        def codes(x: Tensor, format_info: Any = format_info, mode: Any = mode, up: bool = up) -> Tensor:
            values = x.double().numpy()
            values = np.maximum(np.abs(values), 2.0**-127) if up else values  # E8M0 has no zero: the smallest code
            rounded = gfloat.round_ndarray(format_info, values, mode, sat=True)
            return torch.from_numpy(gfloat.encode_ndarray(format_info, rounded).astype(np.uint8))

        def values(codes: Tensor, format_info: Any = format_info) -> Tensor:
            return torch.from_numpy(gfloat.decode_ndarray(format_info, codes.long().numpy()).astype(np.float32))

        yield decoded("gfloat", format, values)
        yield encoded("gfloat", format, codes, takes_nan=format.nan is not None)
