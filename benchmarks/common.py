"""Shared by all benchmarks: random inputs, clocks, the report, the capture in a CUDA graph.

Versions of an operation alternate in one process; medians are reported, ratios within one run only.
`--quick` checks tiny shapes and times nothing; it needs no GPU.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from conformance.engine.speed.clocks import BF16 as BF16
from conformance.engine.speed.clocks import COLD_BYTES as COLD_BYTES
from conformance.engine.speed.clocks import Call, Times, ceilings, interleaved, medians
from moe_fast.launch.backend import INTERPRETED, triton

DEVICE = "cpu" if INTERPRETED else "cuda"
FP32 = 4  # bytes per element
PAUSE = 0.3  # seconds in which the GPU clock recovers
BURST_CALLS = 4  # ends before the GPU clock falls


class Shape(NamedTuple):
    """A model: hidden size, local experts, experts per token, FFN size per expert."""

    hidden: int
    experts: int
    topk: int
    width: int


SHAPES = {
    "mixtral-8x7b": Shape(4096, 8, 2, 14336),
    "dsv3-ep8": Shape(7168, 32, 8, 2048),
    "qwen3-30b": Shape(2048, 128, 8, 768),
    "qwen3-235b": Shape(4096, 128, 8, 1536),
    "gptoss-120b": Shape(2880, 128, 4, 2880),
    "kimi-k2-ep8": Shape(7168, 48, 8, 2048),
    "qwen3next-80b": Shape(2048, 512, 10, 512),
}
TINY_SHAPES = {"tiny": Shape(40, 8, 2, 24), "tiny-wide": Shape(136, 20, 5, 40)}


class Random:
    """Draws tensors on the device."""

    def __init__(self, seed: int = 0) -> None:
        self.generator = torch.Generator(DEVICE).manual_seed(seed)

    def normal(self, *size: int, std: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(size, dtype=dtype, device=DEVICE).normal_(std=std, generator=self.generator)

    def uniform(self, *size: int) -> Tensor:
        return torch.rand(size, device=DEVICE, generator=self.generator)


# --- clocks


def rotated(versions: Mapping[str, list[Call]], blocks: int, reps: int) -> Times:
    """Calls in one CUDA graph per version, on different inputs that together exceed the L2."""
    replays = {}
    for name, calls in versions.items():
        calls[0]()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = [call() for call in calls]  # no call reuses another's memory
        del results
        replays[name] = graph.replay
    return {name: us / len(versions[name]) for name, us in medians(replays, blocks, reps).items()}


def replayed(versions: Mapping[str, Call], blocks: int, reps: int, calls: int = 20) -> Times:
    """Repeated calls in a CUDA graph, with a warm L2."""
    return rotated({name: [call] * calls for name, call in versions.items()}, blocks, reps)


def bursts(versions: Mapping[str, Call], blocks: int, reps: int, pause: float = PAUSE) -> Times:
    """The GPU rests, one call warms up, a few calls are timed together: power sets the clock.

    The order of the versions differs in each of `blocks` rounds.
    """
    order = random.Random(0)
    times: dict[str, list[float]] = {name: [] for name in versions}
    for call in versions.values():
        call()
    torch.cuda.synchronize()
    for _ in range(blocks):
        for name in order.sample(list(versions), len(versions)):
            time.sleep(pause)
            versions[name]()
            times[name].append(elapsed_us(versions[name], BURST_CALLS))
    return {name: statistics.median(measured) for name, measured in times.items()}


def elapsed_us(call: Call, calls: int = 1) -> float:
    """The mean time of a call between two events of the stream, of several calls in succession."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / calls


# --- one run


@dataclass(frozen=True)
class Operation:
    """One line of the report: moe_fast first, then other implementations."""

    title: str
    versions: Mapping[str, Any]  # calls, as `clock` takes them
    minimum: float = 0  # bytes to move at least; 0: no floor
    size: str = ""
    flops: float = 0
    clock: Callable[[Mapping[str, Any], int, int], Times] = interleaved
    ours: tuple[str, ...] = ()  # versions of moe_fast besides the first


def parse(
    document: str | None,
    shapes: Mapping[str, Any],
    tiny: Mapping[str, Any],
    *,
    tokens: int = 24,
    blocks: int = 7,
    reps: int = 15,
    most: int = 8192,
    flags: Mapping[str, dict[str, Any]] | None = None,
) -> argparse.Namespace:
    """The options of a run; `shapes` are the chosen shapes, with --quick `tiny`, whose tokens are
    `tokens`, else `most` by default.
    """
    parser = argparse.ArgumentParser(description=document, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=most)
    parser.add_argument("--shapes", default="", help=f"prefixes of names, comma-separated: {', '.join(shapes)}")
    parser.add_argument("--only", default="", help="prefixes of operations' titles, semicolon-separated")
    parser.add_argument("--blocks", type=int, default=blocks, help="turns per version")
    parser.add_argument("--reps", type=int, default=reps, help="calls per turn")
    parser.add_argument("--json", help="write every figure to this file")
    parser.add_argument("--quick", action="store_true", help="check tiny shapes, time nothing")
    for name, settings in (flags or {}).items():
        parser.add_argument(name, **settings)
    options = parser.parse_args()
    begins = tuple(options.shapes.split(","))
    options.shapes = tiny if options.quick else {name: x for name, x in shapes.items() if name.startswith(begins)}
    options.tokens = tokens if options.quick else options.tokens
    return options


def measure(operations: Callable[[Any], Iterable[Operation]], options: argparse.Namespace) -> None:
    """Time and print the operations of each shape; `operations` checks each before yielding it."""
    if options.quick:
        for name, shape in options.shapes.items():
            print(f"{name}: {len(list(operations(shape)))} operations checked", flush=True)
        return
    print(heading(options.tokens))
    top, started = ceilings(options.blocks, options.reps), time.perf_counter()
    print("TB/s: " + ", ".join(f"{name} {rate:.2f}" for name, rate in top.items()))
    print(table("", ["shape", "operation", "size", "floor µs", "µs", "÷ floor", "TFLOP/s", "peers (÷ the first)"], []))
    results: dict[str, dict[str, Any]] = {}
    for name, shape in options.shapes.items():
        torch._dynamo.reset()  # no limit on compilations per shape
        for operation in operations(shape):
            if operation.title.startswith(tuple(options.only.split(";"))):
                result = timed(operation, top["copy"], options)
                results.setdefault(name, {})[operation.title] = result
                print(line([name, operation.title, operation.size, *cells(result)]), flush=True)
    last = ceilings(options.blocks, options.reps)
    print(f"\ncopy {last['copy']:.2f} TB/s at the end; {time.perf_counter() - started:.0f} s")
    write(options.json, results, ceilings=top, ceilings_after=last)


def heading(tokens: int, gpus: int = 1) -> str:
    """The machine, the versions and the number of tokens of a run."""
    machine = torch.cuda.get_device_name() if gpus == 1 else f"{gpus} × {torch.cuda.get_device_name()}"
    return f"{machine}, torch {torch.__version__}, Triton {triton.__version__}, T = {tokens}"


def write(path: str | None, operations: Mapping[str, Any], **figures: Any) -> None:
    """Write the figures as JSON for `moe-conformance bench`, if there is a path."""
    if path:
        Path(path).write_text(json.dumps(figures | {"operations": operations}, indent=1))


def timed(operation: Operation, copy: float, options: argparse.Namespace) -> dict[str, Any]:
    """Times and floor; a copy of the same bytes shows the cost of the launch and the size."""
    versions = dict(operation.versions)
    if operation.minimum:
        source = torch.empty(int(operation.minimum) // 4, dtype=torch.bfloat16, device=DEVICE).normal_()
        versions["copy of the same bytes"] = partial(torch.empty_like(source).copy_, source)
    us = operation.clock(versions, options.blocks, options.reps)
    ours = [next(iter(operation.versions)), *operation.ours]
    floor = operation.minimum / copy / 1e6
    return {"size": operation.size, "us": us, "ours": ours, "floor_us": floor, "flops": operation.flops}


def cells(result: Mapping[str, Any]) -> list[str]:
    """The cells of a line."""
    (_, ours), *peers = result["us"].items()
    floor, flops = result["floor_us"], result["flops"]
    return [
        f"{floor:.1f}" if floor else "",
        f"{ours:.1f}",
        f"{ours / floor:.3f}" if floor else "",
        f"{flops / ours / 1e6:.0f}" if flops else "",
        ", ".join(f"{name} {us:.1f} ({us / ours:.3f})" for name, us in peers),
    ]


def line(fields: Iterable[str]) -> str:
    return "| " + " | ".join(fields) + " |"


def table(title: str, header: list[str], lines: list[list[str]]) -> str:
    """A Markdown table."""
    return "\n".join([f"\n{title}\n" if title else "", *map(line, [header, ["---"] * len(header), *lines])])


# --- graphs


def captured(step: Callable[[], Sequence[Tensor]], pool: Any = None) -> tuple[torch.cuda.CUDAGraph, Sequence[Tensor]]:
    """A CUDA graph of a step, and the results that each replay writes; graphs of one pool share the
    memory that nobody holds, and may be replayed in turns.

    Raises:
        RuntimeError: the step waits for the device.
    """
    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    step()
    torch.cuda.set_sync_debug_mode("default")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        results = step()
    return graph, results
