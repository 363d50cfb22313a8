"""Checks on a GPU that two streams give the results of one stream, bit by bit.

    python -m benchmarks.streams

Random layers run their shared experts and their weight gradients on a second stream, and again with
the same calls on one stream; some of them run in a CUDA graph that is replayed with other values.
Copies of counts to the host are delayed while other work overwrites the counts. The command prints
JSON, and ends with exit code 1 if a bit differs.
"""

import json
import random
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from torch import Tensor

import moe_fast
from benchmarks.common import DEVICE, captured
from moe_fast.dispatch import counts, overlap
from moe_ref.config import LayerConfig, RouterConfig

X = TypeVar("X")
LAYERS, REPLAYED, PAIRS = 60, 12, 50
TWO = {"overlap_shared": True, "delay_wgrad": True, "overlap_wgrad": True}
# H, F, F of the shared experts
SIZES = ((256, 128, 256, torch.bfloat16), (512, 256, 128, torch.bfloat16), (256, 256, 256, torch.float32))


def on_one_stream(run: Callable[[], X]) -> X:
    """run(), whose calls for the second stream are made on the current one."""

    def here(device: torch.device) -> Any:
        return torch.cuda.current_stream(device)

    with patch.object(overlap, "side_stream", here), patch.object(counts, "side_stream", here):
        return run()


def wrong_counts() -> dict[str, int]:
    """Copies of counts that are not of the call, or whose making waited for the GPU."""
    device, mismatches, waits = torch.device("cuda", torch.cuda.current_device()), 0, 0
    for seed in range(PAIRS):
        expected = torch.randint(0, 1000, (64,), generator=torch.Generator().manual_seed(seed))
        source, counted = expected.to(device), torch.zeros(64, dtype=torch.int64, device=device)
        torch.cuda.synchronize()
        with torch.cuda.stream(overlap.side_stream(device)):
            torch.cuda._sleep(2_000_000)  # the copy is late
        torch.cuda._sleep(20_000_000)  # so are the counts
        counted.copy_(source)
        pair = counts.CountsOnHost(counted)
        counted.add_(1)
        waits += torch.cuda.current_stream().query()
        mismatches += not (torch.equal(pair.host, expected) and torch.equal(pair.device.cpu(), expected + 1))
    return {"pairs": PAIRS, "wrong": mismatches, "waited": waits}


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
    differing = {"layers": LAYERS, "than on one stream": 0, "than without overlap, beside dx": 0}
    for seed in range(LAYERS):
        layer, x, dy = random_layer(seed, **TWO)
        expected = on_one_stream(partial(step, layer, x, dy))
        for delay in (0, 100_000, 1_000_000):
            torch.cuda._sleep(delay)
            differing["than on one stream"] += not same(step(layer, x, dy), expected)
        in_order = step(*random_layer(seed))
        differing["than without overlap, beside dx"] += not same(
            in_order[:1] + in_order[2:], expected[:1] + expected[2:]
        )
    return differing


def different_replays() -> dict[str, int]:
    """Replays, of both streams in one graph, with other results than eager calls on one."""
    replays = {"graphs": REPLAYED, "replays": 3 * REPLAYED, "different": 0}
    for seed in range(REPLAYED):
        layer, x, dy = random_layer(seed, **TWO)
        graph, results = captured(partial(step, layer, x, dy))
        for _ in range(3):
            with torch.no_grad():
                x.copy_(torch.randn_like(x))
                dy.copy_(torch.randn_like(dy))
            graph.replay()
            twin, *_ = random_layer(seed, **TWO)
            leaf = x.detach().clone().requires_grad_()
            replays["different"] += not same(results, on_one_stream(partial(step, twin, leaf, dy)))
    return replays


def main() -> int:
    if DEVICE != "cuda":
        sys.exit("benchmarks.streams needs a GPU: a CPU has one stream")
    with torch.cuda.stream(torch.cuda.Stream()):
        counted = {"counts": wrong_counts(), "layers": different_layers(), "graphs": different_replays()}
    print(json.dumps(counted, indent=1))
    mismatches = (counted["counts"]["wrong"], counted["graphs"]["different"], *list(counted["layers"].values())[1:])
    return int(any(mismatches))


if __name__ == "__main__":
    sys.exit(main())
