"""Time the layer on one GPU from few tokens to many, with even and with skewed routing.

    python -m benchmarks.growth [--shapes qwen3] [--json growth.json] [--plot growth.svg] [--quick]

The layers are those of `benchmarks.layer`, beside stock torch: in bf16, and with FP8 blocks and
weights kept. T doubles from 1024 to `--tokens`, as far as a step has at most 10¹⁴ operations. Every
size is checked first. Skewed: the router's bias is Zipf's law, -ln(1 + e) for expert e, so that the
first experts are most tokens' choice and the last ones hardly any's. Times are of replays of CUDA
graphs in short bursts; only ratios of one line are meaningful. Needs matplotlib to plot.
"""

import gc
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import DEVICE, SHAPES, Shape, bursts, heading, line, parse, table, write
from benchmarks.layer import MODELS, Layer, alone, check, graphs, make_layer, step, versions

FIRST = 1024
MOST_TOKENS = 65536
MOST_FLOPS = 1e14  # of a forward with its backward: 0.2 s on an H200
PAUSE = 0.05  # seconds before a burst
TINY = {"tiny": Shape(128, 16, 2, 128)}
BF16, FP8, STOCK = SHOWN = ("bf16", "FP8 block, weights kept", "stock torch")
PARTS = {"forward": alone, "with backward": step}
ROUTINGS = ("uniform", "skewed")
HEADS = ["shape", "routing", "T", "rows ÷ mean, most", "experts without"]
HEADS += [f"{name}, {part}" for name in ("bf16", "FP8", "stock") for part in PARTS]


def sizes(shape: Shape, most: int) -> list[int]:
    """The numbers of tokens: FIRST, and powers of two up to `most` and to MOST_FLOPS."""
    flops = 18.0 * shape.topk * shape.hidden * shape.width
    doubled = [FIRST * 2**n for n in range(most.bit_length())]
    return [FIRST, *(tokens for tokens in doubled[1:] if tokens <= most and tokens * flops <= MOST_FLOPS)]


def part_of(layer: Layer, tokens: int, routing: str) -> Layer:
    """The layer on its first tokens, with a bias of its router where the routing is skewed."""
    parameters = layer.parameters
    if routing == "skewed":
        bias_E = -torch.arange(1, layer.shape.experts + 1, device=DEVICE).log()
        parameters = parameters._replace(router_bias=bias_E.to(torch.bfloat16))
    x_TH = layer.x_TH.detach()[:tokens].requires_grad_()
    return layer._replace(parameters=parameters, x_TH=x_TH, d_out_TH=layer.d_out_TH[:tokens])


@torch.no_grad()
def load(layer: Layer) -> Tensor:
    """Rows of each expert, [E]."""
    logits = layer.x_TH @ layer.parameters.router_weight.t()
    bias = layer.parameters.router_bias
    chosen = (logits if bias is None else logits + bias).topk(layer.shape.topk).indices
    return chosen.flatten().bincount(minlength=layer.shape.experts)


def measured(layer: Layer, routing: str, blocks: int) -> dict[str, dict[str, Any]]:
    """The times of one number of tokens, checked first: by title, forward and whole."""
    rows, out = load(layer).double(), {}
    about = {"tokens": len(layer.x_TH), "routing": routing}
    about |= {"most": float(rows.max() / rows.mean()), "empty": int((rows == 0).sum())}
    with versions(layer, ";".join(SHOWN)) as layers:
        shown = {title: layers[title] for title in SHOWN}
        check(shown)
        for phase, call in PARTS.items():
            us = bursts(graphs(layer, shown, call), blocks, 1, PAUSE)
            flops = layer.flops * (3 if call is step else 1)
            figures = {"us": us, "ours": [BF16, FP8], "flops": flops, "part": phase}
            out[f"{routing}, T = {len(layer.x_TH)}, {phase}"] = figures | about
    gc.collect()
    torch.cuda.empty_cache()  # what graphs held
    return out


def tflops(result: dict[str, Any], title: str) -> float:
    return float(result["flops"] / result["us"][title] / 1e6)


def cells(results: dict[str, dict[str, Any]]) -> list[str]:
    """The cells of a line: TFLOP/s, and in brackets the ratio to stock torch."""
    first = next(iter(results.values()))
    ratios = [(x, title, x["us"][STOCK] / x["us"][title]) for title in (BF16, FP8) for x in results.values()]
    return [
        *(first["routing"], str(first["tokens"]), f"{first['most']:.1f}", str(first["empty"])),
        *(f"{tflops(x, title):.0f} ({ratio:.2f})" for x, title, ratio in ratios),
        *(f"{tflops(x, STOCK):.0f}" for x in results.values()),
    ]


def curves(results: dict[str, dict[str, Any]], phase: str) -> dict[str, tuple[list[int], list[float]]]:
    """(T, TFLOP/s) of each layer and routing."""
    out = {}
    for title in SHOWN:
        for routing in ROUTINGS:
            points = [x for x in results.values() if (x["routing"], x["part"]) == (routing, phase)]
            out[f"{title}, {routing}"] = [x["tokens"] for x in points], [tflops(x, title) for x in points]
    return out


def plot(operations: dict[str, dict[str, dict[str, Any]]], path: Path) -> None:
    import matplotlib.pyplot as plt

    size = (3.2 * len(operations), 6.4)
    figure, grid = plt.subplots(2, len(operations), figsize=size, sharex=True, sharey=True, squeeze=False)
    for column, (name, results) in enumerate(operations.items()):
        for axes, phase in zip(grid[:, column], PARTS, strict=True):
            for n, (title, (tokens, rates)) in enumerate(curves(results, phase).items()):
                style = "--" if title.endswith(ROUTINGS[1]) else "-"
                axes.semilogx(tokens, rates, style, base=2, marker=".", color=f"C{n // 2}", label=title, linewidth=1.2)
            axes.set_title(f"{name}, {phase}", fontsize=9)
            axes.set_ylim(bottom=0)
            axes.grid(alpha=0.3)
        grid[1, column].set_xlabel("T")
    for row in grid:
        row[0].set_ylabel("TFLOP/s")
    grid[0, 0].legend(fontsize=6)
    figure.tight_layout()
    figure.savefig(path)


def grown(name: str, shape: Shape, options: Any) -> dict[str, dict[str, Any]]:
    """Prints a line for each routing and number of tokens; all times. With --quick only checks."""
    chosen = [options.tokens] if options.quick else sizes(shape, options.tokens)
    largest, out = make_layer(shape, max(chosen)), {}
    for routing in ROUTINGS:
        for tokens in chosen:
            layer = part_of(largest, tokens, routing)
            if options.quick:
                with versions(layer) as layers:
                    check({title: layers[title] for title in SHOWN})
                print(f"{name}, {routing}: checked", flush=True)
            else:
                results = measured(layer, routing, options.blocks)
                print(line([name, *cells(results)]), flush=True)
                out |= results
    return out


def main() -> None:
    shapes = {name: SHAPES[name] for name in MODELS}
    flags: dict[str, dict[str, Any]] = {"--plot": {"type": Path, "help": "draw TFLOP/s over T"}}
    options = parse(__doc__, shapes, TINY, blocks=2, most=MOST_TOKENS, flags=flags)
    if options.quick:
        for name, shape in options.shapes.items():
            grown(name, shape, options)
        return
    print(f"{heading(options.tokens)}; TFLOP/s")
    print(table("", HEADS, []), flush=True)
    operations: dict[str, dict[str, Any]] = {}
    for name, shape in options.shapes.items():
        operations[name] = grown(name, shape, options)
        write(options.json, operations)
    if options.plot:
        plot(operations, options.plot)


if __name__ == "__main__":
    main()
