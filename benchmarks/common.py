"""Timing that repeats: versions take turns in one process, the L2 is cold, medians are kept."""

import statistics
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

FLUSHED_BYTES = (
    256 * 2**20
)  # several times the L2; written, as by triton.testing.do_bench, so that a version also pays for evicting it
GRAPH_CALLS = 20
BF16 = 2  # bytes


class Shape(NamedTuple):
    """A model: hidden size, experts of this rank, experts a token."""

    hidden: int
    experts: int
    topk: int


SHAPES = {
    "mixtral-8x7b": Shape(4096, 8, 2),
    "dsv3-ep8": Shape(7168, 32, 8),
    "qwen3-30b": Shape(2048, 128, 8),
    "qwen3-235b": Shape(4096, 128, 8),
    "gptoss-120b": Shape(2880, 128, 4),
    "kimi-k2-ep8": Shape(7168, 48, 8),
    "qwen3next-80b": Shape(2048, 512, 10),
}
QUICK_SHAPES = {"tiny": Shape(40, 8, 2), "tiny-wide": Shape(136, 20, 5)}


def interleaved(versions: Mapping[str, Callable[[], object]], blocks: int, reps: int) -> dict[str, float]:
    """Microseconds of each version: the median over `blocks` turns of the median over `reps` calls with a cold L2."""
    flushed = torch.empty(FLUSHED_BYTES // 4, dtype=torch.int32, device="cuda")
    for call in versions.values():
        call()
        call()
    medians: dict[str, list[float]] = {name: [] for name in versions}
    for _ in range(blocks):
        for name, call in versions.items():
            pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(reps)]
            for begin, end in pairs:
                flushed.zero_()
                begin.record()
                call()
                end.record()
            torch.cuda.synchronize()
            medians[name].append(statistics.median(begin.elapsed_time(end) for begin, end in pairs))
    return {name: statistics.median(times) * 1e3 for name, times in medians.items()}


def replayed(versions: Mapping[str, Callable[[], object]], blocks: int, reps: int) -> dict[str, float]:
    """Microseconds of a call in a CUDA graph of `GRAPH_CALLS` calls, which hides the launches; the L2 is as the call before left it."""
    return rotated({name: [call] * GRAPH_CALLS for name, call in versions.items()}, blocks, reps)


def rotated(versions: Mapping[str, list[Callable[[], object]]], blocks: int, reps: int) -> dict[str, float]:
    """Microseconds of a call in a CUDA graph of all the calls of a version, each on its own inputs: together they exceed the L2."""
    graphs = {}
    for name, calls in versions.items():
        calls[0]()
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            kept = [call() for call in calls]  # no call reuses the memory of one before
        del kept
    medians: dict[str, list[float]] = {name: [] for name in versions}
    for _ in range(blocks):
        for name, graph in graphs.items():
            pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(reps)]
            graph.replay()
            for begin, end in pairs:
                begin.record()
                graph.replay()
                end.record()
            torch.cuda.synchronize()
            medians[name].append(statistics.median(begin.elapsed_time(end) for begin, end in pairs))
    return {name: statistics.median(times) * 1e3 / len(versions[name]) for name, times in medians.items()}


def ceilings(blocks: int, reps: int) -> dict[str, float]:
    """TB/s of a large copy (bytes read and written), of writing alone, and of reading alone."""
    source = torch.randn(2**29, device="cuda").bfloat16()
    target = torch.empty_like(source)
    count = source.numel() * BF16
    versions = {
        "copy": lambda: target.copy_(source),
        "write": lambda: target.view(torch.int32).fill_(3),
        "read": lambda: source.view(torch.float32).sum(),
    }
    times = interleaved(versions, blocks, reps)
    return {name: count * (2 if name == "copy" else 1) / time / 1e6 for name, time in times.items()}


def table(title: str, header: list[str], lines: list[list[str]]) -> str:
    """A Markdown table."""
    rows = [header, ["---", *["--:"] * (len(header) - 1)], *lines]
    return "\n".join([f"\n### {title}\n", *("| " + " | ".join(row) + " |" for row in rows)])


def lines_of(results: dict[str, dict[str, dict]], title: str, size: str = "") -> str:
    """The table of one operation: a line a shape; `size` is the heading of what each result says of its size, if it does."""
    found = {shape: by_title[title] for shape, by_title in results.items() if title in by_title}
    peers = [name for name in next(iter(found.values()))["us"] if name != "moe_fast"]
    header = [
        "shape",
        *([size] if size else []),
        "floor µs",
        "moe_fast µs",
        "÷ floor",
        *(f"{name} µs (÷ moe_fast)" for name in peers),
    ]
    lines = []
    for shape, result in found.items():
        ours = result["us"]["moe_fast"]
        compared = [f"{result['us'][name]:.1f} ({result['us'][name] / ours:.2f})" for name in peers]
        lines.append(
            [
                shape,
                *([result["size"]] if size else []),
                f"{result['floor_us']:.1f}",
                f"{ours:.1f}",
                f"{result['to_floor']:.3f}",
                *compared,
            ]
        )
    return table(title, header, lines)
