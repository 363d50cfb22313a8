"""How fast activations are that are quantised at once: beside the bytes they must move, and beside doing one after the other.

    PYTHONPATH=. python3 -m benchmarks.quantized_activations [--tokens 8192] [--shapes mixtral-8x7b,gptoss-120b] [--json FILE] [--quick]

What is timed is compared with eager torch in float32 first: no value may be further away than half a step of its code. `--quick` only
compares, at tiny sizes; it runs without a GPU. A floor is the time in which this run's copy ceiling (of 2 GiB) moves each input once and
each output once. A copy of as many bytes, timed like the rest, shows what a launch and the size cost.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import moe_fast
from benchmarks.activations import GPT_OSS, PROB, WIDTHS, Problem, backward, forward, make
from benchmarks.common import BF16, SHAPES, ceilings, interleaved, lines_of
from benchmarks.quantization import eager_block, eager_mxfp8, segments
from moe_fast.launch.backend import INTERPRETED, triton
from moe_ref.config import Recipe

DEVICE = "cpu" if INTERPRETED else "cuda"
BLOCK, MXFP8 = Recipe("block"), Recipe("mxfp8")
SCALES = {"block": 4 / 128, "mxfp8": 1 / 32}  # bytes an element and direction
HALF_STEP, LEAST = 2.0**-4 * 1.01, 2.0**-10  # of E4M3, relative to a number and to what its code is multiplied by


@dataclass(frozen=True)
class Operation:
    """One table: ours first, then other versions of it, and the bytes that must be moved."""

    title: str
    minimum: float
    versions: dict[str, Callable[[], object]]


def one_after_the_other(
    activate: Callable[..., Any],
    cast: Callable[..., Any],
    x: tuple[Tensor, ...],
    dims: tuple[int, ...],
    **settings: Any,
) -> object:
    """An activation that is written, and quantised as one group."""
    made = activate(*x, **settings)
    return cast(made[0] if isinstance(made, tuple) else made, dims), made


def check(p: Problem, splits: Tensor, recipe: Recipe) -> None:
    """Ours beside eager torch, in both directions.

    Raises:
        AssertionError: a value is further away than half a step of its code.
    """
    call: dict[str, Any] = {"splits": splits, "probs": p.probs_P, "columnwise": True, **p.settings}
    there = moe_fast.glu_and_quantize(p.h_PF2, recipe, **call).quantized
    back = moe_fast.glu_backward_and_quantize(p.d_out_PF, p.h_PF2, recipe, **call)
    a = forward(p.h_PF2.float(), p.probs_P, **p.settings)
    d_h, d_probs = backward(p.d_out_PF.float(), p.h_PF2.float(), p.probs_P, **p.settings)
    owned = int(splits.sum())
    for quantized, right in ((there, a), (back.quantized, d_h)):
        for columnwise in (False, True):
            got = moe_fast.dequantize(quantized, columnwise=columnwise)[:owned].float()
            largest = right[:owned].abs().amax() / 448
            assert bool(((got - right[:owned]).abs() <= HALF_STEP * right[:owned].abs() + LEAST * 2 * largest).all())
    torch.testing.assert_close(back.d_probs[:owned], d_probs[:owned], rtol=1e-4, atol=2e-2)


def check_graph(p: Problem, groups: int) -> None:
    """A captured forward and backward follow what is in h and in the splits at the replay, and wait for no device."""
    for recipe in (BLOCK, MXFP8, Recipe("current")):
        h, splits = p.h_PF2.clone(), segments(len(p.h_PF2), groups, 32)

        def step(recipe: Recipe = recipe, h: Tensor = h, splits: Tensor = splits) -> list[Tensor]:
            call: dict[str, Any] = {"splits": splits, "probs": p.probs_P, "columnwise": True, **p.settings}
            there = moe_fast.glu_and_quantize(h, recipe, **call).quantized
            back = moe_fast.glu_backward_and_quantize(p.d_out_PF, h, recipe, **call)
            return [
                *(moe_fast.dequantize(q, columnwise=way) for q in (there, back.quantized) for way in (False, True)),
                back.d_probs,
            ]

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
            h.mul_(0.7)
            splits.copy_(segments(len(h), groups, 32, seed))
            graph.replay()
            assert all(torch.equal(x, y) for x, y in zip(captured, step(), strict=True))


def operations(p: Problem, groups: int) -> list[Operation]:
    """Forward by rows, in both directions of both block recipes, and the gradient in both directions: steps one after the other round in between."""
    rows, width = p.d_out_PF.shape
    splits = segments(rows, groups, 32)
    compiled = {name: torch.compile(f, dynamic=False) for name, f in (("forward", forward), ("backward", backward))}
    casts = {"block": torch.compile(eager_block, dynamic=False), "mxfp8": torch.compile(eager_mxfp8, dynamic=False)}
    there, back = (p.h_PF2, p.probs_P), (p.d_out_PF, p.h_PF2, p.probs_P)

    def two_of_ours(recipe: Recipe, columnwise: bool) -> object:
        return moe_fast.quantize(
            moe_fast.glu(p.h_PF2, probs=p.probs_P, **p.settings), recipe, splits=splits, columnwise=columnwise
        )

    def two_of_ours_back(recipe: Recipe) -> object:
        d_h = moe_fast.glu_backward(p.d_out_PF, p.h_PF2, probs=p.probs_P, **p.settings).d_h
        return moe_fast.quantize(d_h, recipe, role="grad_output", splits=splits, columnwise=True)

    found = []
    for title, recipe, columnwise in (
        ("1x128, rows", BLOCK, False),
        ("1x128, rows and columns", BLOCK, True),
        ("MXFP8, rows and columns", MXFP8, True),
    ):
        dims = (1, 0) if columnwise else (1,)
        written = len(dims) * (1 + SCALES[recipe.scaling])
        call: dict[str, Any] = {"splits": splits, "probs": p.probs_P, "columnwise": columnwise, **p.settings}
        versions: dict[str, Callable[[], object]] = {
            "moe_fast": partial(moe_fast.glu_and_quantize, p.h_PF2, recipe, **call),
            "torch.compile, twice": partial(
                one_after_the_other, compiled["forward"], casts[recipe.scaling], there, dims, **p.settings
            ),
            "glu, then quantize": partial(two_of_ours, recipe, columnwise),
        }
        found.append(Operation(f"GLU · p, {title}", rows * width * (2 * BF16 + written) + rows * PROB, versions))
    for title, recipe, rounds in (
        ("1x128, rounded first", BLOCK, True),
        ("1x128", BLOCK, False),
        ("MXFP8", MXFP8, False),
    ):
        call = {"splits": splits, "probs": p.probs_P, "columnwise": True, "round_before_quantize": rounds, **p.settings}
        versions = {
            "moe_fast": partial(moe_fast.glu_backward_and_quantize, p.d_out_PF, p.h_PF2, recipe, **call),
            "torch.compile, twice": partial(
                one_after_the_other, compiled["backward"], casts[recipe.scaling], back, (1, 0), **p.settings
            ),
            "glu_backward, then quantize": partial(two_of_ours_back, recipe),
        }
        moved = rows * width * (3 * BF16 + 4 * (1 + SCALES[recipe.scaling])) + 2 * rows * PROB
        found.append(Operation(f"GLU · p backward with d_probs, {title}, rows and columns", moved, versions))
    return found


def measure(names: list[str], num_tokens: int, blocks: int, reps: int) -> dict[str, Any]:
    """All figures of one run."""
    top = ceilings(blocks, reps)
    results: dict[str, dict[str, dict]] = {}
    started = time.perf_counter()
    for name in names:
        torch._dynamo.reset()  # each shape has its own compilation, and no limit on how many
        settings = GPT_OSS if name == "gptoss-120b" else {}
        p = make(num_tokens * SHAPES[name].topk, WIDTHS[name], settings)
        small = Problem(p.h_PF2[:4096], p.d_out_PF[:4096], p.probs_P[:4096], settings)
        check(small, segments(4096, SHAPES[name].experts, 32), BLOCK)
        check_graph(small, SHAPES[name].experts)
        results[name] = {}
        for operation in operations(p, SHAPES[name].experts):
            source = torch.empty(int(operation.minimum) // 4, dtype=torch.bfloat16, device=DEVICE).normal_()
            times = interleaved(
                {**operation.versions, "copy of as many bytes": partial(torch.empty_like(source).copy_, source)},
                blocks,
                reps,
            )
            floor = operation.minimum / top["copy"] / 1e6
            size = f"{len(p.probs_P)} · {WIDTHS[name]}"
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
        print(lines_of(results, title, "rows · F"))
    return {"ceilings": top, "ceilings_after": after, "operations": results}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--shapes", default="all", help="names separated by commas")
    parser.add_argument("--blocks", type=int, default=5, help="turns that each version takes")
    parser.add_argument("--reps", type=int, default=9, help="calls a turn")
    parser.add_argument("--json", help="write every figure to this file")
    parser.add_argument("--quick", action="store_true", help="compare tiny sizes, time nothing")
    options = parser.parse_args()
    with torch.no_grad():
        if options.quick:
            for settings in ({}, GPT_OSS, {"interleave": 4}):
                for recipe in (BLOCK, MXFP8):
                    check(make(96, 64, settings), torch.tensor([32, 0, 32]), recipe)
            print("equal to eager torch up to half a step of each code")
            return
        names = list(WIDTHS) if options.shapes == "all" else options.shapes.split(",")
        print(
            f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}, T = {options.tokens}"
        )
        figures = measure(names, options.tokens, options.blocks, options.reps)
    print("\ncaptured steps follow changed rows and splits and wait for no device")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(figures, file, indent=1)


if __name__ == "__main__":
    main()
