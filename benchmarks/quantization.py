"""How fast quantizers are: beside the bytes they must move, beside eager torch and beside torch.compile; and whether they are exact.

    PYTHONPATH=. python3 -m benchmarks.quantization [--tokens 8192] [--shapes mixtral-8x7b,gptoss-120b] [--json FILE] [--quick]
    PYTHONPATH=. python3 -m benchmarks.quantization --exact 1e9

What is timed is compared with the reference first, bit by bit, and once at a size beyond 2³¹ elements. `--exact N` compares N numbers for
each recipe, made on the device where a rounding, a saturation or a scale is decided, and casts N different float32 (from 2³² on, all). `--quick`
compares a few; it runs without a GPU. A floor is the time in which this run's copy ceiling (of 2 GiB) moves each input once and each output
once; current scaling and NVFP4 read their input twice. A copy of as many bytes, timed like the rest, shows what the size costs.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import moe_fast
import moe_ref
from benchmarks.common import BF16, SHAPES, ceilings, lines_of, rotated
from moe_fast.launch.backend import INTERPRETED, triton
from moe_fast.quantization import group_scales as group_scaling
from moe_ref.config import QuantizerState, Recipe

DEVICE = "cpu" if INTERPRETED else "cuda"
CHUNK_ROWS, CHUNK_COLUMNS = (
    (256, 128) if INTERPRETED else (2**14, 2**10)
)  # the reference takes some 200 bytes an element
DTYPES = (torch.bfloat16, torch.float32)
E4M3_MAX = 448.0
GROUPS = 12  # some of them empty
CAPTURED = 4  # calls in a CUDA graph, which hides the launches; each moves more than the L2 holds
NEAREST: dict[str, Any] = {"hadamard": False, "stochastic_rounding": False}
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
        "nvfp4",
        four_over_six="all",
        four_over_six_error="mse",
        four_over_six_bound_256="none",
        two_dimensional_weights=False,
        **NEAREST,
    ),
}
ROLES = {  # that have kernels of their own; rows alone for gradients in FP8, both directions for the others
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


# --- eager torch


def of_block(x: Tensor, size: int, dim: int) -> tuple[Tensor, Tensor]:
    """float32 blocks along rows (dim 1) or columns (dim 0), and the amax of each."""
    missing = -x.shape[dim] % size
    padded = torch.nn.functional.pad(x.float(), (0, missing) if dim == 1 else (0, 0, 0, missing))
    blocks = padded.unflatten(dim, (-1, size))
    return blocks, blocks.abs().amax(dim + 1, keepdim=True)


def cast(blocks: Tensor, scale: Tensor, dim: int, length: int) -> Tensor:
    return (
        (blocks * scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).flatten(dim, dim + 1).narrow(dim, 0, length)
    )


def eager_block(x: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Block scaling of one group: scales are powers of two."""
    made: list[Tensor] = []
    for dim in dims:
        blocks, amax = of_block(x, 128, dim)
        scale = torch.where(amax == 0, 1.0, E4M3_MAX / amax)
        scale = (scale.view(torch.int32) & -(1 << 23)).view(torch.float32)
        made += [cast(blocks, scale, dim, x.shape[dim]), (1 / scale).squeeze(dim + 1)]
    return tuple(made)


def eager_mxfp8(x: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, ...]:
    made: list[Tensor] = []
    for dim in dims:
        blocks, amax = of_block(x, 32, dim)
        bits = (amax * (1 / E4M3_MAX)).view(torch.int32)
        exponent = ((bits >> 23) + ((bits & 0x7FFFFF) != 0)).clamp(0, 254)
        scale = ((254 - exponent).clamp(min=1) << 23).view(torch.float32)
        made += [cast(blocks, scale, dim, x.shape[dim]), exponent.squeeze(dim + 1).to(torch.uint8)]
    return tuple(made)


def eager_current(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = E4M3_MAX / x.abs().amax().float()
    return (x.float() * scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), 1 / scale


def eager_delayed(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return (x.float() * scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), x.abs().amax().float()


# --- what is measured


@dataclass(frozen=True)
class Operation:
    """One table: ours first, then other versions of it (of one group), and the bytes that must be moved."""

    title: str
    minimum: float
    versions: dict[str, Callable[[], object]]


def segments(rows: int, groups: int, unit: int, seed: int = 0) -> Tensor:
    """Random rows of each group, in multiples of `unit`, that fill all rows."""
    generator = torch.Generator().manual_seed(seed)
    cuts = torch.randint(0, rows // unit + 1, (groups - 1,), generator=generator).sort().values * unit
    cuts = torch.where(torch.arange(groups - 1) % 5 == 3, cuts.roll(1), cuts)  # an empty group now and then
    edges = torch.cat([torch.tensor([0]), cuts, torch.tensor([rows])])
    return edges.diff().to(DEVICE)


def check_peers() -> None:
    """What is timed beside ours computes the same."""
    x = torch.empty(256, 256, dtype=torch.bfloat16, device=DEVICE).normal_()
    for recipe, peer in ((RECIPES["block"], eager_block), (RECIPES["mxfp8"], eager_mxfp8)):
        quantized = moe_fast.quantize(x, recipe, columnwise=True).quantized
        codes, scale, columns, column_scale = peer(x, (1, 0))
        assert torch.equal(moe_fast.codes(quantized), codes.view(torch.uint8))
        assert torch.equal(moe_fast.codes(quantized, columnwise=True), columns.view(torch.uint8))
        assert torch.equal(moe_fast.scales(quantized), scale) and torch.equal(
            moe_fast.scales(quantized, columnwise=True), column_scale
        )
    quantized = moe_fast.quantize(x, RECIPES["current"]).quantized
    assert torch.equal(moe_fast.codes(quantized), eager_current(x)[0].view(torch.uint8))


def operations(x: Tensor, groups: int) -> list[Operation]:
    """Quantizers of routed rows, of an expert's segment each."""
    fp8, mx = segments(len(x), groups, 16), segments(len(x), groups, 32)
    state = QuantizerState(torch.zeros(groups, 1024, device=DEVICE), torch.full((groups,), 64.0, device=DEVICE))
    one = torch.full((), 64.0, device=DEVICE)

    def operation(
        title: str, bytes_each: float, scaling: str, peer: Callable[..., object], *arguments: Any, **settings: Any
    ) -> Operation:
        ours = partial(
            moe_fast.quantize, x, RECIPES[scaling] if scaling != "delayed" else Recipe("delayed"), **settings
        )
        others = {
            "torch.compile": partial(torch.compile(peer, dynamic=False), x, *arguments),
            "eager": partial(peer, x, *arguments),
        }
        return Operation(title, bytes_each * x.numel(), {"moe_fast": ours, **others})

    both = {"columnwise": True}
    return [
        operation("block 1×128, rows", BF16 + 1 + 4 / 128, "block", eager_block, (1,), splits=fp8),
        operation(
            "block 1×128, rows and columns", BF16 + 2 + 8 / 128, "block", eager_block, (1, 0), splits=fp8, **both
        ),
        operation("MXFP8, rows", BF16 + 1 + 1 / 32, "mxfp8", eager_mxfp8, (1,), splits=mx),
        operation("MXFP8, rows and columns", BF16 + 2 + 2 / 32, "mxfp8", eager_mxfp8, (1, 0), splits=mx, **both),
        operation("current", 2 * BF16 + 1, "current", eager_current, splits=fp8),
        operation("delayed", BF16 + 1, "delayed", eager_delayed, one, splits=fp8, state=state),
        Operation(
            "NVFP4, rows",
            (2 * BF16 + 1 + 1 / 16) * x.numel(),
            {"moe_fast": partial(moe_fast.quantize, x, RECIPES["nvfp4"], splits=mx)},
        ),
        Operation(
            "NVFP4, rows and columns",
            (2 * BF16 + 2 + 2 / 16) * x.numel(),
            {"moe_fast": partial(moe_fast.quantize, x, RECIPES["nvfp4"], splits=mx, **both)},
        ),
    ]


# --- whether it is exact


def seen(namespace: Any, x: Tensor, recipe: Recipe, call: dict[str, Any]) -> dict[str, Tensor]:
    """Everything that a quantizer makes."""
    quantized, state = namespace.quantize(x, recipe, **call)
    made = {} if state is None else {"history": state.amax_history}
    for columnwise in (False, True):
        if call["columnwise" if columnwise else "rowwise"]:
            for name in ("codes", "scales", "amax", "dequantize"):
                made[f"{name} {'by columns' if columnwise else 'by rows'}"] = getattr(namespace, name)(
                    quantized, columnwise=columnwise
                )
    return made


def compare(x: Tensor, recipe: Recipe, title: str, call: dict[str, Any]) -> None:
    """moe_fast beside the reference, both on this device.

    Raises:
        AssertionError: they differ; it names the first element that does.
    """
    fast, right = seen(moe_fast, x, recipe, call), seen(moe_ref, x, recipe, call)
    for name, want in right.items():
        got = fast[name]
        assert got.shape == want.shape and got.dtype == want.dtype, (title, name, got.shape, want.shape)
        different = (got != want) & ~(got.isnan() & want.isnan())
        if different.any():
            place = tuple(different.nonzero()[0].tolist())
            raise AssertionError(
                f"{title}: {int(different.sum())} of {got.numel()} {name} differ, first at {place}: {got[place]} for {want[place]}"
            )


def decisive(rows: int, columns: int, generator: torch.Generator, alike: bool = False) -> Tensor:
    """float32 numbers from bits: each row within 2^12 of an exponent of its own (all of one, alike), some rows anywhere; a third of the
    mantissas beside a tie of some format."""

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator, device=DEVICE)

    exponent = (
        integers(-30, 255, 1 if alike else rows, 1)
        + integers(0, 13, rows, columns)
        + torch.where(integers(0, 4096 if alike else 64, rows, 1) == 0, integers(0, 255, rows, columns), 0)
    )
    kept = integers(1, 4, rows, columns)  # leading bits of the mantissa; behind them lies a tie, or a neighbour of one
    tie = (1 << (22 - kept)) + integers(-1, 2, rows, columns)
    near = (integers(0, 8, rows, columns) << 20 >> (23 - kept) << (23 - kept)) + tie
    fits = 0x600000 + integers(-2, 3, rows, columns)  # 1.75: 448 and 57344
    kind = integers(0, 6, rows, columns)
    mantissa = torch.where(kind < 2, near, torch.where(kind == 2, fits, integers(0, 2**23, rows, columns)))
    bits = (exponent.clamp(0, 255) << 23) | (mantissa & 0x7FFFFF) | (integers(0, 2, rows, columns) << 31)
    bits = torch.where(
        integers(0, 97, rows, columns) == 0, integers(0, 2, rows, columns) << 31, bits
    )  # zeros of both signs
    return bits.to(torch.int32).view(torch.float32)


def chunks(count: float) -> Iterator[int]:
    """Indices of as many chunks as hold so many numbers."""
    yield from range(max(1, -(-int(count) // (CHUNK_ROWS * CHUNK_COLUMNS))))


def exact_recipe(name: str, count: float) -> None:
    """So many numbers, of two dtypes and every role, in groups that fill x or do not; of NVFP4, which scales groups, half in rows alike."""
    recipe, generator = RECIPES[name], torch.Generator(DEVICE).manual_seed(0)
    unit = 32 if recipe.scaling in ("mxfp8", "nvfp4") else 1
    for i in chunks(count):
        two_levels, role = recipe.scaling == "nvfp4", ROLES[name][i // 2 % len(ROLES[name])]
        transformed = bool(recipe.hadamard) and role != "weight"
        x = decisive(CHUNK_ROWS, CHUNK_COLUMNS, generator, alike=two_levels and i % 4 < 2).to(
            torch.bfloat16 if transformed else DTYPES[i % 2]
        )
        splits = segments(CHUNK_ROWS - 64 * (i % 3), GROUPS, unit, seed=i)
        state = None
        if recipe.scaling == "delayed":
            scale = decisive(1, GROUPS, generator).flatten().abs()
            state = QuantizerState(torch.zeros(GROUPS, 4, device=DEVICE), scale)
        call = {
            "role": role,
            "splits": splits,
            "rowwise": True,
            "columnwise": two_levels or role != "grad_output",
            "state": state,
        }
        if recipe.stochastic_rounding and role == "grad_output":
            call["noise"] = torch.rand(2, *x.shape, generator=generator, device=DEVICE)
        compare(x, recipe, f"{name}, {role}, chunk {i}", call)


def exact_casts(role: str, count: float, hardware: bool) -> None:
    """So many different float32, cast with a scale of 1: by the device's conversions, or by integer arithmetic."""
    chosen, group_scaling.casts_in_hardware = group_scaling.casts_in_hardware, (lambda device: hardware)  # type: ignore[assignment]
    try:
        size = CHUNK_ROWS * CHUNK_COLUMNS
        state = QuantizerState(torch.zeros(1, 4, device=DEVICE), torch.ones(1, device=DEVICE))
        for i in chunks(min(count, 2**32)):
            bits = (
                torch.arange(i * size, (i + 1) * size, device=DEVICE) * 0x9E3779B1
            ) & 0xFFFFFFFF  # odd: 2³² different ones in a row
            x = (bits - ((bits >> 31) << 32)).to(torch.int32).view(torch.float32).view(CHUNK_ROWS, CHUNK_COLUMNS)
            compare(
                x,
                RECIPES["delayed"],
                f"casts of {role}, chunk {i}",
                {"role": role, "rowwise": True, "columnwise": False, "state": state},
            )
    finally:
        group_scaling.casts_in_hardware = chosen
    every = (
        (torch.arange(2**16, device=DEVICE) << 16).to(torch.int32).view(torch.float32).to(torch.bfloat16).view(256, 256)
    )
    compare(
        every,
        RECIPES["delayed"],
        f"every bfloat16 as {role}",
        {"role": role, "rowwise": True, "columnwise": False, "state": state},
    )


def exact(count: float) -> None:
    """Every recipe and every cast."""
    for role in ("input", "grad_output"):
        for hardware in (False,) if INTERPRETED else (True, False):
            started = time.perf_counter()
            exact_casts(role, count, hardware)
            print(
                f"casts of {role}, {'by the device' if hardware else 'by integers'}: {min(count, 2**32):.3g} numbers, {time.perf_counter() - started:.1f} s"
            )
    for name in RECIPES:
        started = time.perf_counter()
        exact_recipe(name, count)
        print(f"{name}: {count:.3g} numbers, {time.perf_counter() - started:.1f} s")
    print("every code, scale, amax and value equals the reference's")


def check_large(rows: int, columns: int, recipe: Recipe, **call: Any) -> None:
    """The last rows of a problem beside those rows by themselves, bit by bit."""
    x = torch.empty(rows, columns, dtype=torch.bfloat16, device=DEVICE).normal_()
    last = 256 if INTERPRETED else 2**12
    splits = torch.tensor([rows - last, last], device=DEVICE)
    whole = moe_fast.quantize(x, recipe, splits=splits, **call).quantized
    alone = moe_fast.quantize(x[-last:], recipe, **call).quantized
    for columnwise in (False, True):
        assert torch.equal(
            moe_fast.codes(whole, columnwise=columnwise)[-last:], moe_fast.codes(alone, columnwise=columnwise)
        )
        scale, right = moe_fast.scales(whole, columnwise=columnwise), moe_fast.scales(alone, columnwise=columnwise)
        assert torch.equal(scale[-len(right) :], right)


def check_graph(x: Tensor, groups: int) -> None:
    """A captured quantizer follows what is in x and in the splits at the replay, and waits for no device."""
    for recipe in (
        RECIPES[name] for name in ("block", "mxfp8", "current", "nvfp4", "nvfp4, row-scaled", "nvfp4, four over six")
    ):
        y, splits = x.clone(), segments(len(x), groups, 32)

        def step(recipe: Recipe = recipe, y: Tensor = y, splits: Tensor = splits) -> list[Tensor]:
            quantized = moe_fast.quantize(y, recipe, splits=splits, columnwise=True).quantized
            return [moe_fast.dequantize(quantized), moe_fast.dequantize(quantized, columnwise=True)]

        torch.cuda.set_sync_debug_mode("error")
        step()
        torch.cuda.set_sync_debug_mode("default")
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph):
            captured = step()
        for seed in (1, 2):
            y.mul_(0.7)
            splits.copy_(segments(len(x), groups, 32, seed))
            graph.replay()
            assert all(torch.equal(a, b) for a, b in zip(captured, step(), strict=True))


# --- the report


def measure(names: list[str], num_tokens: int, blocks: int, reps: int) -> dict[str, Any]:
    """All figures of one run."""
    top = ceilings(blocks, reps)
    results: dict[str, dict[str, dict]] = {}
    started = time.perf_counter()
    for name in names:
        torch._dynamo.reset()  # each shape has its own compilation, and no limit on how many
        shape = SHAPES[name]
        x = torch.empty(num_tokens * shape.topk, shape.hidden, dtype=torch.bfloat16, device=DEVICE).normal_()
        check_graph(x[:4096], shape.experts)
        results[name] = {}
        for operation in operations(x, shape.experts):
            source = torch.empty(int(operation.minimum) // 4, dtype=torch.bfloat16, device=DEVICE).normal_()
            versions = {**operation.versions, "copy of as many bytes": partial(torch.empty_like(source).copy_, source)}
            times = rotated({version: [call] * CAPTURED for version, call in versions.items()}, blocks, reps)
            floor = operation.minimum / top["copy"] / 1e6
            size = f"{len(x)} · {shape.hidden}"
            results[name][operation.title] = {
                "size": size,
                "floor_us": floor,
                "to_floor": times["moe_fast"] / floor,
                "us": times,
            }
    after = ceilings(blocks, reps)
    print(
        f"copy {top['copy']:.2f} TB/s (after: {after['copy']:.2f}), write {top['write']:.2f}, read {top['read']:.2f}; {time.perf_counter() - started:.0f} s"
    )
    for title in next(iter(results.values())):
        print(lines_of(results, title, "rows · H"))
    return {"ceilings": top, "ceilings_after": after, "operations": results}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--shapes", default="all", help="names separated by commas")
    parser.add_argument("--blocks", type=int, default=7, help="turns that each version takes")
    parser.add_argument("--reps", type=int, default=15, help="calls a turn")
    parser.add_argument("--json", help="write every figure to this file")
    parser.add_argument("--quick", action="store_true", help="compare a few numbers, time nothing")
    parser.add_argument("--exact", type=float, metavar="N", help="compare N numbers for each recipe, time nothing")
    options = parser.parse_args()
    with torch.no_grad():
        if options.quick or options.exact:
            check_peers()
            exact(options.exact or CHUNK_ROWS * CHUNK_COLUMNS)
            return
        names = list(SHAPES) if options.shapes == "all" else options.shapes.split(",")
        print(
            f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}, T = {options.tokens}"
        )
        check_peers()
        exact(2**26)
        figures = measure(names, options.tokens, options.blocks, options.reps)
        for recipe in (RECIPES["block"], RECIPES["mxfp8"]):
            check_large(2**16 + 2**12, 2**15 + 128, recipe, columnwise=True)  # more than 2³¹ elements
        check_large(2**24, 64, RECIPES["mxfp8"], columnwise=True)  # many tiles
    print(
        "\ncaptured steps follow changed rows and splits and wait for no device; the last of more than 2³¹ elements are right"
    )
    if options.json:
        with open(options.json, "w") as file:
            json.dump(figures, file, indent=1)


if __name__ == "__main__":
    main()
