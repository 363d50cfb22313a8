"""How fast grouped_linear and its gradients are: each expert's rows times its weight, beside torch's grouped products.

    PYTHONPATH=. python3 -m benchmarks.grouped_linear [--shapes dsv3,qwen3] [--rounds 6] [--json FILE] [--quick]

A burst: the GPU rests, one call warms up, then a few calls are timed together; versions take their turns in another order every round,
and medians are kept. Only ratios within one run mean something: power sets the clock. Counts are one multinomial draw, data is random
normal. Results are compared before they are timed. `--quick` only compares, at tiny sizes; it runs without a GPU.

In low precision the operands are quantised before the time begins; what turns them for a gradient counts. torch's FP8 product has a scale
for each row and never promotes its sums.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

import moe_fast
from benchmarks.common import table
from moe_fast.experts.scaled_linear import (
    Precision,
    quantized_rows,
    quantized_weight,
    scaled_dgrad,
    scaled_fprop,
    scaled_plan,
    scaled_wgrad,
)
from moe_fast.launch.backend import INTERPRETED, triton
from moe_fast.quantization.quantized import Quantized
from moe_ref.config import Recipe

DEVICE = "cpu" if INTERPRETED else "cuda"
REST_SECONDS = 0.3  # long enough for the clock to recover
CALLS = 4  # of a burst: less than the clock takes to fall
RECIPES = ("current", "block")
Versions = dict[str, Callable[[], object]]


class Layer(NamedTuple):
    """A model's expert layer: how many experts, inputs, outputs, rows in all."""

    experts: int
    ins: int
    outs: int
    rows: int


LAYERS = {
    "mixtral fc1": Layer(8, 4096, 28672, 16384),
    "mixtral fc2": Layer(8, 14336, 4096, 16384),
    "dsv3 fc1": Layer(32, 7168, 4096, 65536),
    "dsv3 fc2": Layer(32, 2048, 7168, 65536),
    "qwen3 fc1": Layer(128, 2048, 1536, 65536),
    "qwen3 fc2": Layer(128, 768, 2048, 65536),
    "gptoss fc1": Layer(128, 2880, 5760, 32768),
    "gptoss fc2": Layer(128, 2880, 2880, 32768),
    "qwen3, 8 rows an expert": Layer(128, 2048, 1536, 1024),
}
QUICK_LAYERS = {"tiny": Layer(5, 24, 40, 70), "tiny, few rows": Layer(6, 40, 24, 5)}


@dataclass(frozen=True)
class Problem:
    """Operands in bfloat16. torch takes the ends of the segments, which are not timed."""

    rows_PN: Tensor
    weight_LMN: Tensor
    d_out_PM: Tensor
    tokens_per_expert_L: Tensor
    ends_L: Tensor

    @property
    def flops(self) -> int:
        """Of each of the three products."""
        return 2 * self.rows_PN.numel() * self.weight_LMN.shape[1]


def make(layer: Layer, seed: int = 0) -> Problem:
    """Each row goes to an expert at random."""
    generator = torch.Generator(DEVICE).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(
            shape, generator=generator, device=DEVICE, dtype=torch.float32 if INTERPRETED else torch.bfloat16
        ).bfloat16()

    expert = torch.randint(layer.experts, (layer.rows,), generator=generator, device=DEVICE)
    counts = torch.bincount(expert, minlength=layer.experts)
    weight = normal(layer.experts, layer.outs, layer.ins)
    return Problem(
        normal(layer.rows, layer.ins), weight, normal(layer.rows, layer.outs), counts, counts.cumsum(0).int()
    )


def versions_of(p: Problem) -> dict[str, Versions]:
    """By product, by version. The plan of the tiles is part of every call of ours."""
    counts, turned = p.tokens_per_expert_L, p.weight_LMN.mT
    return {
        "forward": {
            "moe_fast": lambda: moe_fast.grouped_linear(p.rows_PN, p.weight_LMN, counts),
            "grouped_mm": lambda: torch._grouped_mm(p.rows_PN, turned, offs=p.ends_L),
        },
        "dgrad": {
            "moe_fast": lambda: moe_fast.grouped_dgrad(p.d_out_PM, p.weight_LMN, counts),
            "grouped_mm": lambda: torch._grouped_mm(p.d_out_PM, p.weight_LMN, offs=p.ends_L),
        },
        "wgrad": {
            "moe_fast": lambda: moe_fast.grouped_wgrad(p.d_out_PM, p.rows_PN, counts),
            "grouped_mm": lambda: torch._grouped_mm(p.d_out_PM.mT, p.rows_PN, offs=p.ends_L),
        },
    }


class Quantizeds(NamedTuple):
    """The operands in low precision, in both directions."""

    rows: Quantized
    weight: Quantized
    d_out: Quantized


def quantized(p: Problem, scaling: str) -> Quantizeds:
    """The operands by a recipe's defaults."""
    how, counts = Precision(Recipe(scaling), None, None), p.tokens_per_expert_L
    rows, d_out = (
        quantized_rows(x, role, counts, how, True, True)
        for x, role in ((p.rows_PN, "input"), (p.d_out_PM, "grad_output"))
    )
    return Quantizeds(rows, quantized_weight(p.weight_LMN, how, True, True), d_out)


def scaled_versions_of(p: Problem) -> dict[str, Versions]:
    """The same products in FP8, by the name of the recipe; and torch's, which has no gradients of it here."""
    counts = p.tokens_per_expert_L

    def versions(q: Quantizeds) -> Versions:
        return {
            "forward": lambda: scaled_fprop(q.rows, q.weight, scaled_plan(counts, len(p.rows_PN))),
            "dgrad": lambda: scaled_dgrad(q.d_out, q.weight, scaled_plan(counts, len(p.rows_PN))),
            "wgrad": lambda: scaled_wgrad(q.d_out, q.rows, scaled_plan(counts, len(p.rows_PN))),
        }

    by_recipe = {scaling: versions(quantized(p, scaling)) for scaling in RECIPES}
    by_product = {
        product: {scaling: by_recipe[scaling][product] for scaling in RECIPES}
        for product in ("forward", "dgrad", "wgrad")
    }
    if DEVICE == "cuda":
        x, weight = p.rows_PN.to(torch.float8_e4m3fn), p.weight_LMN.to(torch.float8_e4m3fn).mT
        ones = torch.ones(len(x), device=DEVICE), torch.ones(len(weight), weight.shape[2], device=DEVICE)
        settings = {"offs": p.ends_L, "out_dtype": torch.bfloat16, "use_fast_accum": True}
        by_product["forward"]["scaled_grouped_mm"] = lambda: torch._scaled_grouped_mm(x, weight, *ones, **settings)
    return by_product


def compare_scaled(p: Problem) -> None:
    """Each product in FP8 against one of what its codes stand for: those of the same numbers in float32 are the same, and stand for exact ones.

    Raises:
        AssertionError: they differ by more than sums of 14 bits, and a rounding to bfloat16, can.
    """
    versions = scaled_versions_of(p)
    wide = replace(p, rows_PN=p.rows_PN.float(), weight_LMN=p.weight_LMN.float(), d_out_PM=p.d_out_PM.float())
    for scaling in RECIPES:
        q = quantized(wide, scaling)
        rows, d_out, weight = (
            [moe_fast.dequantize(x, columnwise=columns).float() for columns in (False, True)]
            for x in (q.rows, q.d_out, q.weight)
        )
        ours: dict[str, Any] = {product: by_recipe[scaling]() for product, by_recipe in versions.items()}
        begin = 0
        for e, count in enumerate(p.tokens_per_expert_L.tolist()):
            own, matrix = slice(begin, begin + count), slice(e * p.weight_LMN.shape[1], (e + 1) * p.weight_LMN.shape[1])
            begin += count
            right = {
                "forward": (rows[0][own], weight[0][matrix].T),
                "dgrad": (d_out[0][own], weight[1][matrix]),
                "wgrad": (d_out[1][own].T, rows[1][own]),
            }
            for product, (left, factor) in right.items():
                got = ours[product][e] if product == "wgrad" else ours[product][own]
                noise = 2.0**-8 * (left.abs() @ factor.abs())
                assert ((got.float() - left @ factor).abs() <= noise + 2.0**-8 * (left @ factor).abs()).all(), (
                    scaling,
                    product,
                )


def compare(p: Problem) -> None:
    """Each product against one of float32 operands, an expert at a time.

    Raises:
        AssertionError: they differ by more than sums in another order and a rounding to bfloat16 can.
    """
    counts = p.tokens_per_expert_L.tolist()
    ours: dict[str, Any] = {name: versions["moe_fast"]() for name, versions in versions_of(p).items()}
    begin = 0
    for e, count in enumerate(counts):
        x, d_out, weight = (
            tensor.float()
            for tensor in (p.rows_PN[begin : begin + count], p.d_out_PM[begin : begin + count], p.weight_LMN[e])
        )
        right = {"forward": (x, weight.T), "dgrad": (d_out, weight), "wgrad": (d_out.T, x)}
        for name, (left, factor) in right.items():
            got = ours[name][e] if name == "wgrad" else ours[name][begin : begin + count]
            noise = (
                2.0**-24 * left.shape[1] * (left.abs() @ factor.abs())
            )  # a sum of n terms in float32 is that near at worst
            exact = left @ factor
            assert ((got.float() - exact).abs() <= 2 * noise + 2.0**-8 * exact.abs()).all(), name
        begin += count


def captured(p: Problem, layer: Layer) -> None:
    """A captured forward and its gradients follow counts that change, and wait for no device.

    Raises:
        AssertionError: a replay differs from a call.
    """
    counts, x, weight = (
        p.tokens_per_expert_L.clone(),
        p.rows_PN.detach().requires_grad_(),
        p.weight_LMN.detach().requires_grad_(),
    )

    def step() -> list[Tensor]:
        out = moe_fast.grouped_linear(x, weight, counts)
        return [out.detach(), *torch.autograd.grad(out, [x, weight], p.d_out_PM)]

    torch.cuda.set_sync_debug_mode("error")
    step()
    torch.cuda.set_sync_debug_mode("default")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = step()
    for changed in (make(layer, 1).tokens_per_expert_L, torch.zeros_like(counts), counts.flip(0)):
        counts.copy_(changed)
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(replayed, step(), strict=True))


def burst(call: Callable[[], object]) -> float:
    """Microseconds of a call, after a rest."""
    time.sleep(REST_SECONDS)
    call()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(CALLS):
        call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e3 / CALLS


def bursts(versions: Versions, rounds: int) -> dict[str, float]:
    """The median of each version's bursts, in microseconds."""
    order = random.Random(0)
    times: dict[str, list[float]] = {name: [] for name in versions}
    for call in versions.values():
        call()
    torch.cuda.synchronize()
    for _ in range(rounds):
        for name in order.sample(list(versions), len(versions)):
            times[name].append(burst(versions[name]))
    return {name: statistics.median(each) for name, each in times.items()}


def lines_of(results: dict[str, dict[str, dict[str, float]]], flops: dict[str, int], product: str) -> str:
    """The table of one product: a line a layer."""
    lines = []
    for layer, by_product in results.items():
        times = by_product[product]
        ours, theirs = times["moe_fast"], times["grouped_mm"]
        lines.append(
            [layer, *(f"{flops[layer] / us / 1e6:.0f}" for us in times.values()), f"{theirs / ours:.3f}", f"{ours:.0f}"]
        )
    return table(f"{product}, bursts, TFLOP/s", ["layer", *times, "grouped_mm / moe_fast", "moe_fast µs"], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="", help="beginnings of names of layers, separated by commas")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--json", help="write every figure to this file")
    parser.add_argument("--quick", action="store_true", help="compare tiny sizes, time nothing")
    options = parser.parse_args()
    if options.quick:
        for name, layer in QUICK_LAYERS.items():
            compare(make(layer))
            compare_scaled(make(layer))
            print(f"{name}: right")
        return
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}, {options.rounds} rounds of {CALLS} calls"
    )
    results: dict[str, dict[str, dict[str, float]]] = {}
    flops: dict[str, int] = {}
    for name, layer in LAYERS.items():
        if not name.startswith(tuple(options.shapes.split(","))):
            continue
        p = make(layer)
        compare(p)
        compare_scaled(p)
        captured(p, layer)
        flops[name] = p.flops
        scaled = scaled_versions_of(p)
        results[name] = {
            product: bursts(versions | scaled[product], options.rounds) for product, versions in versions_of(p).items()
        }
    for product in ("forward", "dgrad", "wgrad"):
        print(lines_of(results, flops, product))
    print("\nall results are right; captured steps follow changed counts; no host sync")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
