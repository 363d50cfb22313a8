"""Time quantisers against the bytes they must move and against torch; check exactness.

    PYTHONPATH=. python3 -m benchmarks.quantization [--shapes mixtral] [--json FILE] [--quick]
    PYTHONPATH=. python3 -m benchmarks.quantization --exact 1e9

Every version is first compared with the reference bit by bit, once on more than 2³¹ elements.
`--exact N` compares N numbers per recipe, drawn at the decision points of rounding, saturation and
scales, and casts N distinct float32 numbers (N ≥ 2³²: all). Current scaling and NVFP4 read their
input twice; their floors count both reads.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

import moe_fast
import moe_ref
from benchmarks.common import BF16, DEVICE, SHAPES, Operation, Shape, measure, parse, replayed
from moe_fast.launch.backend import INTERPRETED
from moe_fast.quantization import quantized as forms
from moe_ref.config import QuantizerState, Recipe

CHUNK = (256, 128) if INTERPRETED else (2**14, 2**10)  # the reference takes 200 bytes per element
DTYPES = (torch.bfloat16, torch.float32)
E4M3_MAX = 448.0  # OCP OFP8 1.0
GROUPS = 12  # some empty
GRAPH_CALLS = 4  # each moves more bytes than the L2 holds
NEAREST: dict[str, Any] = {"hadamard": False, "stochastic_rounding": False}
MEAN_SQUARES: dict[str, Any] = {"four_over_six_error": "mse", "four_over_six_bound_256": "none"}
RECIPES = {
    "block": Recipe("block"),
    "block, any scale": Recipe("block", power_of_two_scales=False),
    "current": Recipe("current"),
    "delayed": Recipe("delayed", amax_history_len=4),
    "mxfp8": Recipe("mxfp8", fp8_format="hybrid"),
    "mxfp8, square weights": Recipe("mxfp8", two_dimensional_weights=True),
    "nvfp4": Recipe("nvfp4"),
    "nvfp4, plain": Recipe("nvfp4", two_dimensional_weights=False, **NEAREST),
    "nvfp4, row-scaled": Recipe("nvfp4", row_scaled_activation=True, **NEAREST),
    "nvfp4, four over six": Recipe("nvfp4", four_over_six="all", **NEAREST),
    "nvfp4, four over six, squares of errors": Recipe(
        "nvfp4", four_over_six="all", two_dimensional_weights=False, **MEAN_SQUARES, **NEAREST
    ),
}
ROLES = {  # with separate kernels; FP8 gradients rowwise, the others in both directions
    "block": ("input", "weight", "grad_output"),
    "block, any scale": ("input",),
    "current": ("input", "grad_output"),
    "delayed": ("input", "grad_output"),
    "mxfp8": ("input", "grad_output"),
    "mxfp8, square weights": ("weight",),
    "nvfp4": ("input", "weight", "grad_output"),
    "nvfp4, plain": ("input",),
    "nvfp4, row-scaled": ("input",),
    "nvfp4, four over six": ("input", "weight"),
    "nvfp4, four over six, squares of errors": ("input", "weight"),
}


# --- eager torch, of one group


def blocks_of(x: Tensor, size: int, dim: int) -> tuple[Tensor, Tensor]:
    """float32 blocks along rows (dim 1) or columns (dim 0), and their amax."""
    missing = -x.shape[dim] % size
    padded = torch.nn.functional.pad(x.float(), (0, missing) if dim == 1 else (0, 0, 0, missing))
    blocks = padded.unflatten(dim, (-1, size))
    return blocks, blocks.abs().amax(dim + 1, keepdim=True)


def cast(x: Tensor) -> Tensor:
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def cast_blocks(blocks: Tensor, scale: Tensor, dim: int, length: int) -> Tensor:
    return cast(blocks * scale).flatten(dim, dim + 1).narrow(dim, 0, length)


def eager_block(x: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Block scaling by powers of two."""
    results: list[Tensor] = []
    for dim in dims:
        blocks, amax = blocks_of(x, 128, dim)
        scale = torch.where(amax == 0, 1.0, E4M3_MAX / amax)
        scale = (scale.view(torch.int32) & -(1 << 23)).view(torch.float32)
        results += [cast_blocks(blocks, scale, dim, x.shape[dim]), (1 / scale).squeeze(dim + 1)]
    return tuple(results)


def eager_mxfp8(x: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, ...]:
    results: list[Tensor] = []
    for dim in dims:
        blocks, amax = blocks_of(x, 32, dim)
        bits = (amax * (1 / E4M3_MAX)).view(torch.int32)
        exponent = ((bits >> 23) + ((bits & 0x7FFFFF) != 0)).clamp(0, 254)
        scale = ((254 - exponent).clamp(min=1) << 23).view(torch.float32)
        results += [cast_blocks(blocks, scale, dim, x.shape[dim]), exponent.squeeze(dim + 1).to(torch.uint8)]
    return tuple(results)


def eager_current(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = E4M3_MAX / x.abs().amax().float()
    return cast(x.float() * scale), 1 / scale


def eager_delayed(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return cast(x.float() * scale), x.abs().amax().float()


def check_peers() -> None:
    """Compares the eager versions with moe_fast."""
    x = torch.empty(256, 256, dtype=torch.bfloat16, device=DEVICE).normal_()
    for scaling, peer in (("block", eager_block), ("mxfp8", eager_mxfp8)):
        quantized, results = moe_fast.quantize(x, RECIPES[scaling], columnwise=True).quantized, peer(x, (1, 0))
        for columnwise, (codes, scale) in ((False, results[:2]), (True, results[2:])):
            assert torch.equal(moe_fast.codes(quantized, columnwise=columnwise), codes.view(torch.uint8)), scaling
            assert torch.equal(moe_fast.scales(quantized, columnwise=columnwise), scale), scaling
    quantized = moe_fast.quantize(x, RECIPES["current"]).quantized
    assert torch.equal(moe_fast.codes(quantized), eager_current(x)[0].view(torch.uint8))


# --- operations


def segments(rows: int, groups: int, unit: int, seed: int = 0) -> Tensor:
    """Random rows per group, multiples of `unit`, `rows` in total; some groups are empty."""
    generator = torch.Generator().manual_seed(seed)
    cuts = torch.randint(0, rows // unit + 1, (groups - 1,), generator=generator).sort().values * unit
    cuts = torch.where(torch.arange(groups - 1) % 5 == 3, cuts.roll(1), cuts)
    return torch.cat([torch.tensor([0]), cuts, torch.tensor([rows])]).diff().to(DEVICE)


def operations(shape: Shape, num_tokens: int) -> Iterator[Operation]:
    """Quantisers of routed rows, in one group per expert."""
    x = torch.empty(num_tokens * shape.topk, shape.hidden, dtype=torch.bfloat16, device=DEVICE).normal_()
    groups = shape.experts
    fp8, mx = segments(len(x), groups, 16), segments(len(x), groups, 32)
    state = QuantizerState(torch.zeros(groups, 1024, device=DEVICE), torch.full((groups,), 64.0, device=DEVICE))
    clock, unit_scale = partial(replayed, calls=GRAPH_CALLS), torch.full((), 64.0, device=DEVICE)

    def operation(title: str, size: float, recipe: Recipe, *peer: Any, **settings: Any) -> Operation:
        versions = {"moe_fast": partial(moe_fast.quantize, x, recipe, **settings)}
        if peer:
            eager, *arguments = peer
            versions["torch.compile"] = partial(torch.compile(eager, dynamic=False), x, *arguments)
        return Operation(title, versions, size * x.numel(), f"{len(x)} · {shape.hidden}", clock=clock)

    block, mxfp8, nvfp4, both = RECIPES["block"], RECIPES["mxfp8"], RECIPES["nvfp4"], {"columnwise": True}
    yield operation("block 1×128, rows", BF16 + 1 + 4 / 128, block, eager_block, (1,), splits=fp8)
    title = "block 1×128, rows and columns"
    yield operation(title, BF16 + 2 + 8 / 128, block, eager_block, (1, 0), splits=fp8, **both)
    yield operation("MXFP8, rows", BF16 + 1 + 1 / 32, mxfp8, eager_mxfp8, (1,), splits=mx)
    yield operation("MXFP8, rows and columns", BF16 + 2 + 2 / 32, mxfp8, eager_mxfp8, (1, 0), splits=mx, **both)
    yield operation("current", 2 * BF16 + 1, RECIPES["current"], eager_current, splits=fp8)
    yield operation("delayed", BF16 + 1, Recipe("delayed"), eager_delayed, unit_scale, splits=fp8, state=state)
    yield operation("NVFP4, rows", 2 * BF16 + 1 + 1 / 16, nvfp4, splits=mx)
    yield operation("NVFP4, rows and columns", 2 * BF16 + 2 + 2 / 16, nvfp4, splits=mx, **both)


def check_last_rows(rows: int, columns: int, recipe: Recipe) -> None:
    """The last rows of a large input equal the same rows alone, bit by bit."""
    x = torch.empty(rows, columns, dtype=torch.bfloat16, device=DEVICE).normal_()
    last = 256 if INTERPRETED else 2**12
    splits = torch.tensor([rows - last, last], device=DEVICE)
    of_all_rows = moe_fast.quantize(x, recipe, splits=splits, columnwise=True).quantized
    of_last_rows = moe_fast.quantize(x[-last:], recipe, columnwise=True).quantized
    for columnwise in (False, True):
        for read in (moe_fast.codes, moe_fast.scales):
            expected = read(of_last_rows, columnwise=columnwise)
            assert torch.equal(read(of_all_rows, columnwise=columnwise)[-len(expected) :], expected)


# --- exactness


def results_of(package: Any, x: Tensor, recipe: Recipe, call: dict[str, Any]) -> dict[str, Tensor]:
    """Every result of a quantiser."""
    quantized, state = package.quantize(x, recipe, **call)
    results = {} if state is None else {"history": state.amax_history}
    for direction in ("rowwise", "columnwise"):
        if call[direction]:
            for name in ("codes", "scales", "amax", "dequantize"):
                read = getattr(package, name)
                results[f"{name}, {direction}"] = read(quantized, columnwise=direction == "columnwise")
    return results


def compare(x: Tensor, recipe: Recipe, title: str, call: dict[str, Any]) -> None:
    """moe_fast against the reference, both on this device.

    Raises:
        AssertionError: they differ; the message gives the first differing element.
    """
    fast, reference = results_of(moe_fast, x, recipe, call), results_of(moe_ref, x, recipe, call)
    for name, expected in reference.items():
        result = fast[name]
        assert result.shape == expected.shape and result.dtype == expected.dtype, (title, name, result.shape)
        different = (result != expected) & ~(result.isnan() & expected.isnan())
        if different.any():
            index, count = tuple(different.nonzero()[0].tolist()), int(different.sum())
            first = f"{result[index]} for {expected[index]} at {index}"
            raise AssertionError(f"{title}: {count} of {result.numel()} {name} differ, first {first}")


def decisive(rows: int, columns: int, generator: torch.Generator, alike: bool = False) -> Tensor:
    """float32 from bits: row exponents within 2^12, mantissas at or next to a format's tie.

    Exponents differ by row (`alike`: rarely); some rows have random exponents; some numbers are ±0.
    """
    shape = rows, columns

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator, device=DEVICE)

    anywhere = integers(0, 4096 if alike else 64, rows, 1) == 0
    exponent = integers(-30, 255, 1 if alike else rows, 1) + integers(0, 13, *shape)
    exponent = exponent + torch.where(anywhere, integers(0, 255, *shape), 0)
    leading_bits = integers(1, 4, *shape)  # leading mantissa bits, before the tie
    tie = (1 << (22 - leading_bits)) + integers(-1, 2, *shape)
    near = (integers(0, 8, *shape) << 20 >> (23 - leading_bits) << (23 - leading_bits)) + tie
    largest = 0x600000 + integers(-2, 3, *shape)  # 1.75: 448 and 57344
    kind = integers(0, 6, *shape)
    mantissa = torch.where(kind < 2, near, torch.where(kind == 2, largest, integers(0, 2**23, *shape)))
    bits = (exponent.clamp(0, 255) << 23) | (mantissa & 0x7FFFFF) | (integers(0, 2, *shape) << 31)
    bits = torch.where(integers(0, 97, *shape) == 0, integers(0, 2, *shape) << 31, bits)
    return bits.to(torch.int32).view(torch.float32)


def chunks(count: float) -> range:
    """Indices of the chunks of `count` numbers."""
    return range(max(1, -(-int(count) // (CHUNK[0] * CHUNK[1]))))


def exact_recipe(name: str, count: float) -> None:
    """Two dtypes, every role, groups that fill x or leave a tail; NVFP4: half with rows alike."""
    recipe, generator = RECIPES[name], torch.Generator(DEVICE).manual_seed(0)
    two_levels, unit = recipe.scaling == "nvfp4", 32 if recipe.scaling in ("mxfp8", "nvfp4") else 1
    for i in chunks(count):
        role = ROLES[name][i // 2 % len(ROLES[name])]
        transformed = bool(recipe.hadamard) and role != "weight"
        x = decisive(*CHUNK, generator, alike=two_levels and i % 4 < 2)
        x = x.to(torch.bfloat16 if transformed else DTYPES[i % 2])
        call: dict[str, Any] = {"role": role, "splits": segments(CHUNK[0] - 64 * (i % 3), GROUPS, unit, seed=i)}
        call |= {"rowwise": True, "columnwise": two_levels or role != "grad_output"}
        if recipe.scaling == "delayed":
            scale = decisive(1, GROUPS, generator).flatten().abs()
            call["state"] = QuantizerState(torch.zeros(GROUPS, 4, device=DEVICE), scale)
        if recipe.stochastic_rounding and role == "grad_output":
            call["noise"] = torch.rand(2, *x.shape, generator=generator, device=DEVICE)
        compare(x, recipe, f"{name}, {role}, chunk {i}", call)


def exact_casts(role: str, count: float) -> None:
    """Distinct float32 numbers, every bfloat16 and every float16, cast with scale 1."""
    state = QuantizerState(torch.zeros(1, 4, device=DEVICE), torch.ones(1, device=DEVICE))
    call = {"role": role, "rowwise": True, "columnwise": False, "state": state}
    size = CHUNK[0] * CHUNK[1]
    for i in chunks(min(count, 2**32)):
        # odd factor: 2³² consecutive products are distinct
        bits = (torch.arange(i * size, (i + 1) * size, device=DEVICE) * 0x9E3779B1) & 0xFFFFFFFF
        x = (bits - ((bits >> 31) << 32)).to(torch.int32).view(torch.float32).view(CHUNK)
        compare(x, RECIPES["delayed"], f"casts of {role}, chunk {i}", call)
    all_codes = torch.arange(-(2**15), 2**15, device=DEVICE).to(torch.int16).view(256, 256)
    for dtype in (torch.bfloat16, torch.float16):
        compare(all_codes.view(dtype), RECIPES["delayed"], f"every {dtype} as {role}", call)


def exact(count: float) -> None:
    """Every cast, by hardware conversion and by integer arithmetic, and every recipe."""

    def timed(title: str, check: Callable[[str, float], None], name: str, count: float) -> None:
        started = time.perf_counter()
        check(name, count)
        print(f"{title}: {count:.3g} numbers, {time.perf_counter() - started:.1f} s", flush=True)

    in_hardware = forms.casts_in_hardware
    for role in ("input", "grad_output"):
        for hardware in (False,) if INTERPRETED else (True, False):
            forms.casts_in_hardware = lambda device, hardware=hardware: hardware
            try:
                means = "by the device" if hardware else "by integers"
                timed(f"casts of {role}, {means}", exact_casts, role, min(count, 2**32))
            finally:
                forms.casts_in_hardware = in_hardware
    for name in RECIPES:
        timed(name, exact_recipe, name, count)
    print("every code, scale, amax and value equals the reference's")


@torch.no_grad()
def main() -> None:
    number = {"type": float, "metavar": "N", "help": "compare N numbers per recipe, time nothing"}
    tiny = {"tiny": Shape(64, 4, 2, 0)}
    options = parse(__doc__, SHAPES, tiny, tokens=96, flags={"--exact": number})
    check_peers()
    exact(options.exact or (CHUNK[0] * CHUNK[1] if options.quick else 2**26))
    if options.exact:
        return
    measure(lambda shape: operations(shape, options.tokens), options)
    if not options.quick:
        for scaling in ("block", "mxfp8"):
            check_last_rows(2**16 + 2**12, 2**15 + 128, RECIPES[scaling])  # more than 2³¹ elements
        check_last_rows(2**24, 64, RECIPES["mxfp8"])  # many tiles
        print("the last of more than 2³¹ elements are correct")


if __name__ == "__main__":
    main()
