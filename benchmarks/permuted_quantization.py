"""How fast permute_and_quantize is: beside the bytes it must move, and beside permuting first and quantising then.

    PYTHONPATH=. python3 -m benchmarks.permuted_quantization [--tokens 8192] [--shapes mixtral-8x7b,qwen3-30b] [--recipes "MXFP8, rows"] [--json FILE] [--quick]

Every result is compared with that of moe_fast's permute and quantize before it is timed, bit by bit. `--quick` only compares, at tiny sizes; it
runs without a GPU. A floor is the time in which this run's copy ceiling (of 2 GiB) reads each token once (current scaling: twice) and writes
each code and scale once. All are replayed in CUDA graphs of several calls, in turns. Moves know where the rows go, and so does index_select over a zero row,
before a quantiser of one group by torch.compile; calls find it out.
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
from benchmarks.common import BF16, QUICK_SHAPES, SHAPES, ceilings, replayed, table
from benchmarks.permutation import Problem, make_problem, padded_gather
from benchmarks.quantization import eager_block, eager_current, eager_delayed, eager_mxfp8
from moe_fast.fused.permute_and_quantize import Work
from moe_fast.launch.backend import INTERPRETED, triton
from moe_fast.permutation import row_map as metadata
from moe_ref.config import QuantizerState, Recipe

DEVICE = "cpu" if INTERPRETED else "cuda"


@dataclass(frozen=True)
class Kind:
    """A recipe, the alignment of its segments, and what a quantiser of one group does in torch."""

    title: str
    recipe: Recipe
    align: int
    reads: int  # of a token
    written: float  # bytes for each element of a row
    peer: Callable[..., object]
    columnwise: bool = False


KINDS = (
    Kind("block 1×128, rows", Recipe("block"), 128, 1, 1 + 4 / 128, partial(eager_block, dims=(1,))),
    Kind("MXFP8, rows", Recipe("mxfp8"), 32, 1, 1 + 1 / 32, partial(eager_mxfp8, dims=(1,))),
    Kind(
        "block 1×128, rows and columns", Recipe("block"), 128, 1, 2 + 8 / 128, partial(eager_block, dims=(1, 0)), True
    ),
    Kind("MXFP8, rows and columns", Recipe("mxfp8"), 32, 1, 2 + 2 / 32, partial(eager_mxfp8, dims=(1, 0)), True),
    Kind("current", Recipe("current"), 16, 2, 1, eager_current),
    Kind("delayed", Recipe("delayed", amax_history_len=16), 16, 1, 1, eager_delayed),
)


def state_of(kind: Kind, experts: int) -> QuantizerState | None:
    """Scales of earlier steps, where the recipe has them."""
    if kind.recipe.scaling != "delayed":
        return None
    return QuantizerState(torch.zeros(experts, 16, device=DEVICE), torch.full((experts,), 64.0, device=DEVICE))


def one_step(p: Problem, kind: Kind, state: QuantizerState | None) -> Any:
    how: dict[str, Any] = {
        "probs": p.probs_TE,
        "align": kind.align,
        "num_rows": p.num_rows,
        "columnwise": kind.columnwise,
        "state": state,
    }
    return moe_fast.permute_and_quantize(p.tokens_TH, p.routing_map_TE, kind.recipe, **how)


def two_steps(p: Problem, kind: Kind, state: QuantizerState | None) -> tuple[Any, Any]:
    permuted = moe_fast.permute(p.tokens_TH, p.routing_map_TE, probs=p.probs_TE, align=kind.align, num_rows=p.num_rows)
    splits = permuted.tokens_per_expert
    return permuted, moe_fast.quantize(
        permuted.rows, kind.recipe, splits=splits, columnwise=kind.columnwise, state=state
    )


def moves(p: Problem, kind: Kind, state: QuantizerState | None) -> Callable[[], object]:
    """The launches that move, with the places known."""
    lists, slots = metadata.place(p.routing_map_TE, kind.align, p.num_rows)
    row_map = lists.without_bases()
    return lambda: Work(p.tokens_TH, p.probs_TE, kind.recipe, "input", lists, row_map, slots.tokens_per_expert).done(
        True, kind.columnwise, state
    )


def compiled(p: Problem, kind: Kind) -> Callable[[], object]:
    """Permuted by index_select, then quantised by a fused kernel."""
    tokens_0 = torch.cat([p.tokens_TH, p.tokens_TH.new_zeros(1, p.tokens_TH.shape[1])])
    scale = (torch.full((), 64.0, device=DEVICE),) if kind.recipe.scaling == "delayed" else ()
    quantizer = torch.compile(kind.peer, dynamic=False)
    return lambda: quantizer(padded_gather(tokens_0, p.token_P), *scale)


def check(p: Problem, kind: Kind) -> None:
    """One step makes every bit of two."""
    state = state_of(kind, p.routing_map_TE.shape[1])
    whole, (permuted, made) = one_step(p, kind, state), two_steps(p, kind, state)
    for columnwise in (False, True)[: 1 + kind.columnwise]:
        for read in (moe_fast.codes, moe_fast.scales, moe_fast.amax, moe_fast.dequantize):
            assert torch.equal(
                read(whole.quantized, columnwise=columnwise), read(made.quantized, columnwise=columnwise)
            ), (kind.title, read.__name__)
    assert torch.equal(whole.probs, permuted.probs) and torch.equal(whole.tokens_per_expert, permuted.tokens_per_expert)
    ones = torch.ones_like(permuted.rows)
    assert torch.equal(moe_fast.unpermute(ones, whole.row_map), moe_fast.unpermute(ones, permuted.row_map))
    if state is not None:
        assert torch.equal(whole.state.amax_history, made.state.amax_history)


def check_graph(p: Problem, kind: Kind) -> None:
    """A captured call follows what is in the tokens and the map at the replay, and waits for no device."""
    state, tokens, chosen = state_of(kind, p.routing_map_TE.shape[1]), p.tokens_TH.clone(), p.routing_map_TE.clone()

    def step() -> list[Tensor]:
        made = moe_fast.permute_and_quantize(
            tokens, chosen, kind.recipe, align=kind.align, num_rows=p.num_rows, columnwise=kind.columnwise, state=state
        )
        return [
            moe_fast.dequantize(made.quantized, columnwise=columnwise)
            for columnwise in (False, True)[: 1 + kind.columnwise]
        ]

    torch.cuda.set_sync_debug_mode("error")
    step()
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    tokens.mul_(0.7)
    chosen.copy_(chosen.flip(0))
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, step(), strict=True)), kind.title


HEADER = [
    "shape",
    "recipe",
    "T → P · H",
    "floor µs",
    "moves µs",
    "÷ floor",
    "index_select, torch.compile µs (÷ moves)",
    "call µs",
    "permute, quantize µs (÷ call)",
]


def measure(names: list[str], kinds: list[Kind], num_tokens: int, blocks: int, reps: int) -> dict[str, Any]:
    """All figures of one run; a line is printed as soon as it is known."""
    top, started = ceilings(blocks, reps), time.perf_counter()
    results: dict[str, dict[str, dict]] = {kind.title: {} for kind in kinds}
    print(f"copy {top['copy']:.2f} TB/s" + table("one launch of all, or two calls", HEADER, []), flush=True)
    for name in names:
        torch._dynamo.reset()  # each shape has its own compilation, and no limit on how many
        for kind in kinds:
            p = make_problem(SHAPES[name], num_tokens, kind.align)
            check(p, kind)
            check_graph(p, kind)
            state, hidden = state_of(kind, SHAPES[name].experts), SHAPES[name].hidden
            floor = (kind.reads * num_tokens * BF16 + p.num_rows * kind.written) * hidden / top["copy"] / 1e6
            versions = {"moves": moves(p, kind, state), "peer": compiled(p, kind)}
            versions |= {"call": partial(one_step, p, kind, state), "two calls": partial(two_steps, p, kind, state)}
            us = replayed(versions, blocks, reps)
            results[kind.title][name] = {"size": f"{num_tokens} → {p.num_rows} · {hidden}", "floor_us": floor, "us": us}
            print(line_of(name, kind.title, results[kind.title][name]), flush=True)
    after = ceilings(blocks, reps)
    print(f"\ncopy after {after['copy']:.2f} TB/s; {time.perf_counter() - started:.0f} s")
    return {"ceilings": top, "ceilings_after": after, "operations": results}


def line_of(shape: str, title: str, result: dict[str, Any]) -> str:
    """A line of the table."""
    ours, peer, one, two = result["us"].values()
    times = [
        f"{result['floor_us']:.1f}",
        f"{ours:.1f}",
        f"{ours / result['floor_us']:.3f}",
        f"{peer:.1f} ({peer / ours:.2f})",
    ]
    return (
        "| " + " | ".join([shape, title, result["size"], *times, f"{one:.1f}", f"{two:.1f} ({two / one:.2f})"]) + " |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--shapes", default="all", help="names separated by commas")
    parser.add_argument(
        "--recipes",
        default="all",
        help="beginnings of their titles, separated by semicolons: compiling the peers takes long",
    )
    parser.add_argument("--blocks", type=int, default=7, help="turns that each version takes")
    parser.add_argument("--reps", type=int, default=15, help="calls a turn")
    parser.add_argument("--json", help="write every figure to this file")
    parser.add_argument("--quick", action="store_true", help="compare at tiny sizes, time nothing")
    options = parser.parse_args()
    with torch.no_grad():
        if options.quick:
            for shape in QUICK_SHAPES.values():
                for kind in KINDS:
                    whole = shape._replace(hidden=-(-shape.hidden // 32) * 32)
                    check(make_problem(whole, 70, kind.align), kind)
            print("one step makes every bit of two")
            return
        names = list(SHAPES) if options.shapes == "all" else options.shapes.split(",")
        kinds = [
            kind
            for kind in KINDS
            if options.recipes == "all" or kind.title.startswith(tuple(options.recipes.split(";")))
        ]
        print(
            f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}, T = {options.tokens}"
        )
        figures = measure(names, kinds, options.tokens, options.blocks, options.reps)
    print("\ncaptured calls follow changed tokens and maps, and wait for no device")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(figures, file, indent=1)


if __name__ == "__main__":
    main()
