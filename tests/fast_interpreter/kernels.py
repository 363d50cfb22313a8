"""Runs many kernels, prints a digest of each result or the error: `interpreted.py plain|quick`."""

import hashlib
import json
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
import torch
import triton
import triton.language as tl
from triton.language import core
from triton.runtime import interpreter

import fast_interpreter
from conformance.engine.child.addresses import Addresses
from conformance.engine.child.poison import Poison
from conformance.judge.exact import bits

SIZE = 16
INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@triton.jit
def arithmetic_kernel(a, b, out, N: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    x, y = tl.load(a + at), tl.load(b + at)
    total = x + y * 2 - 1
    total = 3 - total
    total = tl.where(x < y, total, x * y)
    total = tl.maximum(total, y) + tl.minimum(x, 1)
    tl.store(out + at, total.to(tl.float64))
    compared = (x <= y).to(tl.int32) + (x > y) * 2 + (x == y) * 4 + (x != 1) * 8 + (y <= 2) * 16
    tl.store(out + 2 * N + at, compared.to(tl.float64))


@triton.jit
def integer_kernel(a, b, out, N: tl.constexpr):
    at = tl.arange(0, N)
    x, y = tl.load(a + at), tl.load(b + at) | 1
    bitwise = (x & y) ^ (x | 3) ^ (~y)
    tl.store(out + at, bitwise.to(tl.int64))
    tl.store(out + N + at, ((x << 1) + (x >> 2) + (7 & x) + (1 | x)).to(tl.int64))


@triton.jit
def division_kernel(a, b, out, N: tl.constexpr):
    at = tl.arange(0, N)
    x, y = tl.load(a + at), tl.load(b + at) | 1
    tl.store(out + at, ((x // y) + (x % y)).to(tl.int64))


@triton.jit
def cast_kernel(a, out, N: tl.constexpr):
    at = tl.arange(0, N)
    x = tl.load(a + at)
    tl.store(out + at, x.to(out.dtype.element_ty))


@triton.jit
def bitcast_kernel(a, out, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, tl.load(a + at).to(out.dtype.element_ty, bitcast=True))


@triton.jit
def add_pair(x, y):
    return x + y, x * y


@triton.jit
def twice(x, scale: tl.constexpr = 2):
    total, product = add_pair(x, x)
    return total * scale + product


@triton.jit
def first_max(x, i, y, j):
    return tl.where(x >= y, x, y), tl.where(x >= y, i, j)


@triton.jit
def shapes_kernel(a, out, mask_below, N: tl.constexpr):
    rows, columns = tl.arange(0, 4), tl.arange(0, N // 4)
    at = rows[:, None] * (N // 4) + columns[None, :]
    keep = (columns[None, :] < mask_below) & (rows[:, None] >= 1)
    x = tl.load(a + at, mask=keep, other=-1.5)
    total = tl.zeros((4, N // 4), tl.float32)
    for step in tl.static_range(3):
        total += x * (step + 1)
    for step in range(mask_below):
        total = total + tl.sum(x, axis=1)[:, None] - step
    total += twice(x, scale=3) + tl.max(x, axis=0)[None, :] - tl.min(x)
    total = tl.trans(tl.reshape(total, (N // 4, 4)))
    tl.store(out + at, total)
    tl.store(out + N + at, tl.broadcast_to(tl.argmax(x, axis=1)[:, None], (4, N // 4)).to(tl.float32), mask=keep)


@triton.jit
def scan_kernel(a, out, N: tl.constexpr):
    at = tl.arange(0, N)
    x = tl.load(a + at)
    tl.store(out + at, tl.cumsum(x, axis=0, reverse=True) + tl.sort(x))
    best, best_at = tl.reduce((x, at), 0, first_max)
    tl.store(out + N + at, best + best_at + tl.associative_scan((x, at), 0, first_max)[0])
    y = x.to(tl.float32)
    tl.store(out + 2 * N + at, tl.rand(7, at) + tl.randn(7, at) + tl.flip(x) + tl.softmax(y) + tl.sigmoid(y))


@triton.jit
def dot_kernel(a, b, out, precision: tl.constexpr):
    i = tl.arange(0, 4)
    at = i[:, None] * 4 + i[None, :]
    x, y = tl.load(a + at), tl.load(b + at)
    accumulator = tl.full((4, 4), 0.5, tl.float32)
    tl.store(out + at, tl.dot(x, y, accumulator, input_precision=precision))


@triton.jit
def atomic_kernel(out, counts, flag):
    at = tl.arange(0, 8)
    tl.atomic_add(out + at % 2, at * 1.5, mask=at > 1)
    tl.atomic_max(counts + at % 4, at + tl.program_id(0))
    tl.atomic_xchg(counts + 4, tl.num_programs(0))
    tl.atomic_cas(flag, 0, 5)


@triton.jit
def constants_kernel(out, number, fraction, text: tl.constexpr, pair):
    scalar = number * 2 + fraction - 0.0
    negative = -0.0 * tl.full((4,), 1.0, tl.float32)
    big = tl.zeros((4,), tl.int64) + 2**40
    if text == "yes":
        scalar += pair[0] + pair[1]
    at = tl.arange(0, 4)
    tl.store(out + at, negative)
    tl.store(out + 4 + at, (big // 3).to(tl.float32) + scalar)
    tl.store(out + 8 + at, tl.where(at < 2, 0.0, -0.0) + (number > 0.0) + (at >= 1) + core.minimum(at, 2))


@triton.jit
def bad_types_kernel(a, out):
    tl.store(out, tl.load(a) & 1.5)


@triton.jit
def bad_pointers_kernel(a, out):
    tl.store(out, a + a)


@triton.jit
def bad_pointer_offset_kernel(a, out):
    tl.store(a + 1.5, 0.0)


@triton.jit
def bad_sign_kernel(a, out):
    tl.store(out, tl.load(a).to(tl.uint32) + (-1))


@triton.jit
def bad_shapes_kernel(a, out):
    tl.store(out, tl.sum(tl.arange(0, 4) + tl.arange(0, 8)))


@triton.jit
def bad_block_kernel(a, out):
    tl.store(out, tl.sum(tl.zeros((3,), tl.float32)))


@triton.jit
def bad_assert_kernel(a, out):
    tl.device_assert(tl.load(a) > 1e9, "too small")


@triton.jit
def bad_overflow_kernel(a, out):
    tl.store(out, tl.load(a).to(tl.int32) + 2147483647)


@triton.jit
def bad_assumption_kernel(a, out):
    tl.assume(tl.load(a) > 1e9)


@triton.jit
def bad_store_kernel(a, out):
    tl.store(out, tl.arange(0, 4))


@triton.jit
def bad_division_kernel(a, out):
    tl.store(out, (tl.load(a).to(tl.uint32) // tl.load(a).to(tl.int32)).to(tl.float32))


@triton.jit
def outside_kernel(a, out):
    tl.store(out + tl.arange(0, 4), tl.load(a + 4096 + tl.arange(0, 4)))


BAD = [kernel for name, kernel in list(globals().items()) if name.startswith("bad_")]


def values(dtype: torch.dtype, seed: int) -> torch.Tensor:
    """2 × SIZE values, small and large, and for floats also special ones."""
    noise = torch.randn(2 * SIZE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 20
    if dtype in INTEGERS:
        return (noise.abs() if dtype in (torch.uint8, torch.uint16, torch.uint32) else noise).to(dtype)
    noise[:6] = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-9], dtype=torch.float64)
    return noise.to(dtype)


def digest(*tensors: torch.Tensor) -> str:
    return hashlib.sha256(b"".join(bits(x).tobytes() for x in tensors)).hexdigest()


def attempt(results: dict[str, str], name: str, call: Callable[[], Any]) -> None:
    try:
        results[name] = call()
    except Exception as error:
        results[name] = f"{type(error).__name__}: {error}"


def arithmetic(a: torch.dtype, b: torch.dtype) -> str:
    out = torch.zeros(4 * SIZE, dtype=torch.float64)
    arithmetic_kernel[(2,)](values(a, 0), values(b, 1), out, SIZE)
    return digest(out)


def integers(kernel: Any, a: torch.dtype, b: torch.dtype) -> str:
    out = torch.zeros(2 * SIZE, dtype=torch.int64)
    kernel[(1,)](values(a, 0), values(b, 1), out, SIZE)
    return digest(out)


def cast(kernel: Any, a: torch.dtype, b: torch.dtype) -> str:
    out = torch.zeros(SIZE, dtype=b)
    kernel[(1,)](values(a, 2), out, SIZE)
    return digest(out)


def shapes(dtype: torch.dtype) -> str:
    out = torch.zeros(2 * SIZE)
    shapes_kernel[(1,)](values(dtype, 3)[8:], out, 3, SIZE)
    return digest(out)


def scans(dtype: torch.dtype) -> str:
    out = torch.zeros(3 * SIZE, dtype=torch.float64)
    scan_kernel[(1,)](values(dtype, 4)[8:], out, SIZE)
    return digest(out)


def dot(dtype: torch.dtype, precision: str) -> str:
    out = torch.zeros(16)
    dot_kernel[(1,)](values(dtype, 5)[6:], values(dtype, 6)[6:], out, precision)
    return digest(out)


def atomics() -> str:
    out, counts, flag = torch.zeros(2), torch.zeros(5, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    atomic_kernel[(3,)](out, counts, flag)
    return digest(out, counts, flag)


def constants(number: Any) -> str:
    out = torch.zeros(12)
    constants_kernel[(1,)](out, number, 0.25, "yes", (number, 2))
    return digest(out)


def bad(kernel: Any, debug: bool) -> str:
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, debug=debug)
    try:
        kernel[(1,)](torch.ones(4), torch.ones(4))
    finally:
        builder.options = replace(builder.options, debug=False)
    return "accepted"


def outside() -> str:
    with Addresses(Poison("nan")) as addresses:
        outside_kernel[(1,)](torch.ones(4), torch.ones(4))
    return addresses.outside.rsplit(": the first")[0]


def outside_of_a_kernel() -> str:
    tl.arange(0, 4)
    return "accepted"


def results() -> dict[str, str]:
    """A digest, or an error, by the name of what was run."""
    digests: dict[str, str] = {}
    for a in (*INTEGERS, *FLOATS):
        for b in (*INTEGERS, *FLOATS):
            attempt(digests, f"arithmetic {a} {b}", lambda a=a, b=b: arithmetic(a, b))
            if a in INTEGERS and b in INTEGERS:
                attempt(digests, f"integers {a} {b}", lambda a=a, b=b: integers(integer_kernel, a, b))
                attempt(digests, f"division {a} {b}", lambda a=a, b=b: integers(division_kernel, a, b))
    for a in (*INTEGERS, *FLOATS, *FP8):
        for b in (*INTEGERS, *FLOATS, *FP8):
            attempt(digests, f"cast {a} {b}", lambda a=a, b=b: cast(cast_kernel, a, b))
            attempt(digests, f"bitcast {a} {b}", lambda a=a, b=b: cast(bitcast_kernel, a, b))
        attempt(digests, f"shapes {a}", lambda a=a: shapes(a))
        attempt(digests, f"scans {a}", lambda a=a: scans(a))
        for precision in ("ieee", "tf32"):
            attempt(digests, f"dot {a} {precision}", lambda a=a, p=precision: dot(a, p))
    attempt(digests, "atomics", atomics)
    for number in (0, 1, True, 3, -7, 2**31, 2**33, 0.0, -0.0, 1.0, float("inf"), float("nan"), 1e300):
        attempt(digests, f"constants {number}", lambda number=number: constants(number))
    for kernel in BAD:
        attempt(digests, kernel.__name__, lambda kernel=kernel: bad(kernel, False))
        attempt(digests, f"{kernel.__name__} debug", lambda kernel=kernel: bad(kernel, True))
    attempt(digests, "outside", outside)
    attempt(digests, "outside of a kernel", outside_of_a_kernel)
    return digests


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    active = fast_interpreter.install() if sys.argv[1] == "quick" else {}
    if not active:  # bfloat16 is that of a GPU in both
        fast_interpreter.mended.apply(sys.modules["triton.runtime.interpreter"])
    once = results()
    # A second round meets what the first has stored.
    stable = not active or results() == once
    print(json.dumps({"active": active, "sentence": fast_interpreter.sentence(), "results": once, "stable": stable}))
