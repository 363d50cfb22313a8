"""Checks that the same products have the same bits in every run, at the sizes of models.

    PYTHONPATH=. python3 -m benchmarks.steadiness [--impl moe_fast] [--runs 20] [--shapes qwen3]

A race is rare, and shows where a kernel waits for memory. So each step, a forward and backward of
`grouped_linear` in bf16 and with FP8 blocks, has the tiles and waves of a real layer, and before
each half other bytes replace its plan and its operands in the L2 cache. An implementation whose
sums have no fixed order cannot be judged in this way.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import DEVICE
from benchmarks.experts import LAYERS, TINY, Layer, Operands, make_operands
from conformance.interface import load
from moe_ref.config import Recipe

EVICTED = 2**28  # bytes, several times an L2
RESULTS = ("out", "d_rows", "d_weight")
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def step(implementation: Any, x: Operands, counts: Tensor, recipe: Recipe | None, evict: Callable[[], Any]) -> Any:
    """out, d_rows and d_weight of one forward and backward."""
    leaves = [operand.detach().requires_grad_() for operand in (x.rows_PN, x.weight_LMN)]
    evict()
    out = implementation.grouped_linear(*leaves, counts, recipe=recipe)
    evict()
    return out.detach(), *torch.autograd.grad(out, leaves, x.d_out_PM)


def unsteady(implementation: Any, layer: Layer, recipe: Recipe | None, runs: int) -> dict[str, int]:
    """For each result the runs that differ from the first one."""
    x, counts = make_operands(layer)
    evicting = torch.empty(EVICTED if DEVICE == "cuda" else 1, dtype=torch.uint8, device=DEVICE)
    expected = step(implementation, x, counts, recipe, evicting.zero_)
    differing = dict.fromkeys(RESULTS, 0)
    for _ in range(runs - 1):
        results = step(implementation, x, counts, recipe, evicting.zero_)
        for name, first, result in zip(RESULTS, expected, results, strict=True):
            differing[name] += not torch.equal(first.view(BITS[first.itemsize]), result.view(BITS[result.itemsize]))
    return differing


def judged(implementation: Any, layers: dict[str, Layer], runs: int) -> Iterator[tuple[str, bool]]:
    """A line for each layer and precision, and whether all runs agree."""
    for name, layer in layers.items():
        for precision, recipe in (("bf16", None), ("FP8 block", Recipe("block"))):
            differing = unsteady(implementation, layer, recipe, runs)
            counts = ", ".join(f"{result} {count}" for result, count in differing.items() if count)
            yield f"{name}, {precision}: {f'differ in {counts}' if counts else 'equal'} of {runs - 1} runs", not counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--impl", default="moe_fast")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--shapes", default="", help="parts of names, comma-separated")
    options = parser.parse_args()
    wanted = options.shapes.split(",")
    layers = {name: layer for name, layer in LAYERS.items() if any(text in name for text in wanted)}
    if DEVICE != "cuda":
        layers = {name: layer for name, layer in TINY.items() if isinstance(layer, Layer)}
    steady = True
    for line, equal in judged(load(options.impl).namespace, layers, options.runs):
        print(line, flush=True)
        steady &= equal
    return not steady


if __name__ == "__main__":
    sys.exit(main())
