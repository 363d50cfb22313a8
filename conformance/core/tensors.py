"""Tensors made from a case by integer hashing: the same bytes on every device, library and version.

Values are dyadic, an integer over a power of two: they fill the significands of bfloat16 and
float16, and sums of a few products are exact in float32 in any order. So a narrower accumulator
shows, and a float32 input rounded to TF32, float16 or bfloat16 too. Those of float64 have more bits
than float32, so that a float64 input rounded to float32 shows.
"""

import zlib

import numpy as np
import torch
from torch import Tensor

from conformance.private_parts import available

SPREAD = 12  # log2 of the largest row scale
WIDE = 2**31 + 2**12  # elements from the first to the last row of a wide tensor: past 32 bits
STRANGE = ("special", "edges", "every")  # styles with NaN and infinities
WIDER = 16  # columns that a matrix has beside its slice, so that rows stay as well aligned
SHARED = ("expanded", "overlapping")  # layouts whose elements share memory, so that their values change
WIDE_LAYOUTS = ("wide_rows", "wide_columns", "wide_depth")
# The bits of a payload's integer, without its sign. Float64 has more of them than float32 holds,
# and its product with a probability is still exact.
BITS = {torch.float32: 12, torch.float16: 11, torch.bfloat16: 8, torch.float64: 26}
PROB_BITS = {torch.float32: 10, torch.float16: 10, torch.bfloat16: 7, torch.float64: 26}
FLOATS = ("float32", "bfloat16", "float16", "float64", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu")
DTYPES = {name: getattr(torch, name) for name in (*FLOATS, "uint8", "bool", "int32", "int64")}


def hashed(seed: int, name: str, count: int) -> np.ndarray:
    """`count` 32-bit hashes of (seed, name, position), by the finaliser of MurmurHash3."""
    start = np.uint32((zlib.crc32(name.encode()) ^ (seed * 0x85EBCA6B)) & 0xFFFFFFFF)
    x = np.arange(count, dtype=np.uint32) * np.uint32(0x9E3779B1) + start
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
    return x ^ (x >> np.uint32(16))


def payload(seed: int, name: str, shape: tuple[int, ...], dtype: str, style: str = "dyadic") -> Tensor:
    """A tensor of rows to be moved or summed.

    Styles: `dyadic`, integers of BITS bits over a power of two, from -2 to 2, the first column
    distinct in any 511 consecutive rows · `wide`, 24 random bits times 2^-12 to 2^12 · `special`,
    dyadic with random NaN, infinities and -0 · `ends`, dyadic with these at both ends of each row ·
    `edges`, the same with subnormal numbers, to be moved only: a sum may flush them · `every`,
    consecutive bit patterns of a permutation of all. One-byte dtypes: random bytes, all codes.
    """
    count = int(np.prod(shape))
    kind = DTYPES[dtype]
    if style == "every":
        return every_pattern(seed, shape, kind)
    noise = hashed(seed, name, count)
    if kind.itemsize == 1:
        return torch.from_numpy(noise.astype(np.uint8)).reshape(shape).view(kind)
    most = 2 ** BITS[kind] - 1
    number = (noise % (2 * most + 1)).astype(np.float64) - most
    if len(shape) == 2 and count:
        step = 1201 * 2 ** max(BITS[kind] - 12, 0)
        number.reshape(shape)[:, 0] = (np.arange(shape[0]) * step + seed) % (2 * most + 1) - most
    number /= 2 ** (BITS[kind] - 1)
    if style == "wide":
        number = ((noise >> 8) / 2**23 - 1) * np.exp2(hashed(seed, f"{name} exponents", count) % 25 - 12.0)
    if style == "special":
        strange = np.array([np.nan, np.inf, -np.inf, -0.0])
        number = np.where((noise >> 16) % 8 == 0, strange[(noise >> 20) % 4], number)
    x = torch.from_numpy(number).to(kind).reshape(shape)
    return with_ends(x, seed, style == "edges") if style in ("ends", "edges") else x


def with_ends(x: Tensor, seed: int, subnormal: bool = True) -> Tensor:
    """x with NaN, infinities, -0 and subnormal numbers as the first and last element of each row.

    The first element of x is NaN for even seeds, the last one for every third.
    """
    if not x.numel():
        return x
    info = torch.finfo(x.dtype)
    least = info.smallest_normal * info.eps
    small = (least, least - info.smallest_normal) if subnormal else ()
    strange = torch.tensor([torch.nan, torch.inf, -0.0, -torch.inf, *small], dtype=torch.float64).to(x.dtype)
    columns = x.reshape(-1, x.shape[-1]).clone()
    row_numbers = torch.arange(len(columns))
    columns[:, 0] = strange[(row_numbers + seed % 2) % len(strange)]
    columns[:, -1] = strange[(len(columns) - 1 - row_numbers + seed % 3) % len(strange)]
    return columns.reshape(x.shape)


def every_pattern(seed: int, shape: tuple[int, ...], kind: torch.dtype) -> Tensor:
    """Bit patterns i·odd + start: of 2ⁿ consecutive elements, no two of an n-bit dtype are equal.

    Of float64 the upper 32 bits vary. NaNs included, with every payload.
    """
    pattern = np.arange(int(np.prod(shape)), dtype=np.uint64) * np.uint64(0x9E3779B1) + np.uint64(seed * 7919)
    if kind.itemsize == 8:
        return torch.from_numpy((pattern << np.uint64(32)).view(np.int64)).view(kind).reshape(shape)
    carrier = {1: np.uint8, 2: np.int16, 4: np.int32}[kind.itemsize]
    unsigned = pattern.astype({1: np.uint8, 2: np.uint16, 4: np.uint32}[kind.itemsize])
    return torch.from_numpy(unsigned.view(carrier)).view(kind).reshape(shape)


def probabilities(seed: int, name: str, shape: tuple[int, ...], dtype: str, zeros: bool = False) -> Tensor:
    """Probabilities k / 2^PROB_BITS in (0, 1]; with `zeros`, a quarter of them 0 or -0."""
    noise = hashed(seed, name, int(np.prod(shape)))
    steps = 2 ** PROB_BITS[DTYPES[dtype]]
    number = (noise % steps + 1) / steps
    if zeros:
        number = np.where((noise >> 16) % 4 == 0, np.where((noise >> 18) % 2 == 0, 0.0, -0.0), number)
    return torch.from_numpy(number).to(DTYPES[dtype]).reshape(shape)


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The same values in another memory layout, with garbage in the gaps.

    Layouts: `contiguous` · `transposed`, the last two dimensions swapped (a vector: `strided`) ·
    `strided`, gaps in every dimension · `shifted`, one element into its storage, so that no vector
    load is aligned · `sliced`, rows of a wider matrix, whose elements are adjacent (a vector: one
    of its columns) · `uneven`, rows of a matrix one column wider, which begin anywhere ·
    `negated`, the negative values under a minus that torch leaves pending ·
    `expanded`, stride 0 in the first dimension: the first entry repeats, the values change ·
    `overlapping`, strides 1 and 1: a row begins at the second element of the row before, the values
    change ·
    `wide_rows`, `wide_columns`, `wide_depth`, the first and last entry of the first, second or
    third dimension more than 2³¹ elements apart.
    """
    if layout == "expanded":
        return x[:1].expand(x.shape) if x.shape[0] else x
    if layout == "overlapping":
        return _overlapping(x)
    if layout == "transposed":
        return x.mT.contiguous().mT if x.dim() >= 2 else laid_out(x, "strided")
    if layout == "strided":
        sizes, strides = x.shape, [2 * s for s in torch.empty([2 * n for n in x.shape], device="meta").stride()]
        return _in_storage(x, strides, 0, sizes)
    if layout == "shifted":
        return _in_storage(x, list(x.stride()), 1, x.shape)
    if layout in ("sliced", "uneven"):
        return _in_storage(x, _of_wider(x.shape, WIDER if layout == "sliced" else 1), 0, x.shape)
    if layout == "negated":
        negated_view = available("torch._neg_view")
        return negated_view(-x) if negated_view else x.clone()
    if layout in WIDE_LAYOUTS:
        dim = min(WIDE_LAYOUTS.index(layout), x.dim() - 1)
        strides = list(x.stride())
        strides[dim] = WIDE // max(x.shape[dim] - 1, 1)
        return _in_storage(x, strides, 0, x.shape)
    return x


def _of_wider(shape: torch.Size, extra_columns: int) -> list[int]:
    """The strides of a tensor's rows in a matrix that is wider by `extra_columns`."""
    wider = torch.empty([*shape[:-1], shape[-1] + extra_columns], device="meta") if len(shape) > 1 else None
    return [*wider.stride()] if wider is not None else [1 + extra_columns] * len(shape)


def _overlapping(x: Tensor) -> Tensor:
    """All rows in one line: the first row, then the last element of each further row."""
    if x.dim() < 2 or not x.numel():
        return x
    kind, payload = x.dtype, x.view(torch.uint8) if x.element_size() == 1 else x
    line = torch.cat([payload[..., 0, :], payload[..., 1:, -1]], dim=-1)
    rows = line.unfold(-1, x.shape[-1], 1)
    return rows.view(kind) if x.element_size() == 1 else rows


def _in_storage(x: Tensor, strides: list[int], offset: int, sizes: torch.Size) -> Tensor:
    """x copied into a fresh strided view."""
    extent = offset + 1 + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True)) if x.numel() else offset + 1
    storage = torch.empty(extent, dtype=x.dtype, device=x.device)
    if extent < 2**20:
        storage.view(torch.uint8).fill_(0xFF)  # garbage fills the gaps; the pages of a wide storage stay unmapped
    view = storage.as_strided(sizes, strides, storage.storage_offset() + offset)
    return view.copy_(x)


def row_scales(seed: int, rows: int) -> Tensor:
    """[rows,1] float64, powers of two from 2⁻¹² to 2¹²."""
    return torch.from_numpy(np.exp2(hashed(seed, "row scales", rows) % (2 * SPREAD + 1) - float(SPREAD)))[:, None]
