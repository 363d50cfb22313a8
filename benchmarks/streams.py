"""Two streams on a GPU: results are those of one stream, bit by bit; and how long both are busy.

    python -m benchmarks.streams

Random layers run their shared experts and their weight gradients on a second stream, and again with
the same calls on one; a part of them in a CUDA graph that is replayed with other values. Copies of
counts to the host are late while other work overwrites the counts. Prints JSON; exit code 1 where a
bit differs.
"""

import json
import random
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from torch import Tensor

import moe_fast
from benchmarks.common import DEVICE
from moe_fast.dispatch import counts, overlap
from moe_ref.config import LayerConfig, RouterConfig

X = TypeVar("X")
LAYERS, REPLAYED, PAIRS = 60, 12, 50
TWO = {"overlap_shared": True, "delay_wgrad": True, "overlap_wgrad": True}
# H, F, F of the shared experts
SIZES = ((256, 128, 256, torch.bfloat16), (512, 256, 128, torch.bfloat16), (256, 256, 256, torch.float32))
TIMED = (512, 4096)  # tokens


def on_one_stream(run: Callable[[], X]) -> X:
    """run(), whose calls for the second stream are made on the current one."""

    def here(device: torch.device) -> Any:
        return torch.cuda.current_stream(device)

    with patch.object(overlap, "side_stream", here), patch.object(counts, "side_stream", here):
        return run()


def wrong_counts() -> dict[str, int]:
    """Copies of counts that are not of the call, or whose making waited for the GPU."""
    device, wrong, waited = torch.device("cuda", torch.cuda.current_device()), 0, 0
    for seed in range(PAIRS):
        right = torch.randint(0, 1000, (64,), generator=torch.Generator().manual_seed(seed))
        source, own = right.to(device), torch.zeros(64, dtype=torch.int64, device=device)
        torch.cuda.synchronize()
        with torch.cuda.stream(overlap.side_stream(device)):
            torch.cuda._sleep(2_000_000)  # the copy is late
        torch.cuda._sleep(20_000_000)  # so are the counts
        own.copy_(source)
        pair = counts.CountsOnHost(own)
        own.add_(1)
        waited += torch.cuda.current_stream().query()
        wrong += not (torch.equal(pair.host, right) and torch.equal(pair.device.cpu(), right + 1))
    return {"pairs": PAIRS, "wrong": wrong, "waited": waited}


def random_layer(seed: int, **options: bool) -> tuple[moe_fast.MoELayer, Tensor, Tensor]:
    """A layer, its input and the gradient of its output."""
    draw = random.Random(seed)
    hidden, width, shared, dtype = draw.choice(SIZES)
    router = RouterConfig(num_experts=8, topk=draw.choice((2, 4)), score_function=draw.choice(("sigmoid", "softmax")))
    torch.manual_seed(seed)
    tensor: dict[str, Any] = {"device": DEVICE, "dtype": dtype}
    config = LayerConfig(router=router)
    layer = moe_fast.MoELayer(config, hidden, width, shared_width=shared, init_std=0.1, **tensor, **options)
    x, dy = torch.randn(2, 16 * draw.randint(2, 128), hidden, **tensor)
    return layer, x.requires_grad_(), dy


def step(layer: moe_fast.MoELayer, x: Tensor, dy: Tensor) -> list[Tensor]:
    """The output, dx and the weights' gradients."""
    x.grad = None
    layer.zero_grad(set_to_none=True)
    y = layer(x)
    y.backward(dy)
    if layer.delay_wgrad:
        layer.backward_dw()
    return [y.detach(), *(leaf.grad for leaf in (x, *layer.parameters()) if leaf.grad is not None)]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    torch.cuda.synchronize()
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def different_layers() -> dict[str, int]:
    """Runs that the second stream changes; without overlap dx may add in another order."""
    found = {"layers": LAYERS, "than on one stream": 0, "than without overlap, beside dx": 0}
    for seed in range(LAYERS):
        layer, x, dy = random_layer(seed, **TWO)
        right = on_one_stream(partial(step, layer, x, dy))
        for delay in (0, 100_000, 1_000_000):
            torch.cuda._sleep(delay)
            found["than on one stream"] += not same(step(layer, x, dy), right)
        plain = step(*random_layer(seed))
        found["than without overlap, beside dx"] += not same(plain[:1] + plain[2:], right[:1] + right[2:])
    return found


def captured(layer: moe_fast.MoELayer, x: Tensor, dy: Tensor) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    """A graph of a step, and its results."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step(layer, x, dy)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = step(layer, x, dy)
    return graph, held


def different_replays() -> dict[str, int]:
    """Replays, of both streams in one graph, with other results than eager calls on one."""
    found = {"graphs": REPLAYED, "replays": 3 * REPLAYED, "different": 0}
    for seed in range(REPLAYED):
        layer, x, dy = random_layer(seed, **TWO)
        graph, held = captured(layer, x, dy)
        for _ in range(3):
            with torch.no_grad():
                x.copy_(torch.randn_like(x))
                dy.copy_(torch.randn_like(dy))
            graph.replay()
            other, *_ = random_layer(seed, **TWO)
            again = x.detach().clone().requires_grad_()
            found["different"] += not same(held, on_one_stream(partial(step, other, again, dy)))
    return found


def busy(run: Callable[[], Any]) -> dict[str, float]:
    """µs of kernels, µs in which two streams have one, and µs from the first to the last."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        profiler.export_chrome_trace(str(path := Path(folder) / "trace.json"))
        events = json.loads(path.read_text())["traceEvents"]
    spans = [(event["ts"], event["ts"] + event["dur"]) for event in events if event.get("cat") == "kernel"]
    edges = sorted([(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans])
    both, depth, last = 0.0, 0, edges[0][0]
    for time, change in edges:
        both += (time - last) * (depth > 1)
        depth, last = depth + change, time
    whole = sum(end - start for start, end in spans)
    return {"kernels": round(whole), "two at once": round(both), "in all": round(last - edges[0][0])}


def times() -> dict[str, dict[str, float]]:
    """Of a step of a larger layer, eager and in a graph."""
    found = {}
    router = RouterConfig(num_experts=16, topk=4, score_function="sigmoid")
    for tokens in TIMED:
        for name, options in {"one stream": {}, "two": TWO}.items():
            tensor: dict[str, Any] = {"device": DEVICE, "dtype": torch.bfloat16}
            layer = moe_fast.MoELayer(LayerConfig(router=router), 2048, 1024, shared_width=2048, **tensor, **options)
            x, dy = torch.randn(2, tokens, 2048, **tensor)
            x.requires_grad_()
            graph, _ = captured(layer, x, dy)
            found[f"{tokens} tokens, {name}, eager"] = busy(partial(step, layer, x, dy))
            found[f"{tokens} tokens, {name}, graph"] = busy(graph.replay)
    return found


def main() -> int:
    if DEVICE != "cuda":
        sys.exit("benchmarks.streams needs a GPU: a CPU has one stream")
    with torch.cuda.stream(torch.cuda.Stream()):
        parts: dict[str, dict[str, Any]] = {"counts": wrong_counts(), "layers": different_layers()}
        parts |= {"graphs": different_replays(), "µs": times()}
    print(json.dumps(parts, indent=1, ensure_ascii=False))
    layers = parts["layers"]
    wrong = (parts["counts"]["wrong"], parts["graphs"]["different"], *list(layers.values())[1:])
    return int(any(wrong))


if __name__ == "__main__":
    sys.exit(main())
