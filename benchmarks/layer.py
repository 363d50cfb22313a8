"""Time the whole layer on one GPU, and say which kernels its time goes to.

    PYTHONPATH=. python3 -m benchmarks.layer [--shapes qwen3] [--tokens 8192] [--profile] [--quick]

`moe_fast.moe_layer` with L local experts that all tokens choose from, from the gate to the combined
output, forward and with its backward, in bf16 and with FP8 recipes. The peers are the same layer in
stock torch (index_select, grouped_mm, SwiGLU, index_add), and that by `torch.compile`, and other
packages' (`benchmarks.layer_peers`), each compared with ours first. `--only` chooses by the titles'
beginnings. TFLOP/s are those of the experts' products: 6·M·H·F forward, which saves nothing,
18·M·H·F with the backward, M = T · topk.

Times are of replays of CUDA graphs, of calls where the host waits in them, in bursts: power sets
the clock, so only ratios within one run are meaningful. Host time is that of a forward launched
from Python into an empty queue, "replay" that of launching the forward's graph. Saved is the memory
that a forward keeps for its backward, without its output; the minimum of bf16 is 2·T·H + 4·M·F
bytes, without h after the activation.
"Weights kept" is a micro-batch after the first of a step, within `moe_fast.weights_quantized_once`:
its weights' codes are there already, and are not counted as saved; "moe_act" also computes the
activation again, "permute" copies the rows again, and "h in E4M3" saves codes of h, which changes
gradients (`fp8_input_store`).

`--profile` lists the kernels of a forward and backward: launches, µs, share.
"""

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import moe_fast
from benchmarks.common import BF16, DEVICE, SHAPES, Random, Shape, bursts, captured, heading, parse, table, write
from benchmarks.layer_peers import ADAPTERS, Peer, installed, replayed
from moe_ref.config import LayerConfig, LayerParameters, Recipe, RouterConfig, RouterState
from moe_ref.config.state import new_state

MODELS = ("mixtral-8x7b", "dsv3-ep8", "qwen3-30b", "gptoss-120b")
TINY = {"tiny": Shape(128, 8, 2, 128)}
RECIPES = {"bf16": None, "FP8 block": Recipe("block"), "FP8 current": Recipe("current")}
RECOMPUTED: dict[str, Any] = {"moe_act": "moe_act", "permute": "permute", "both": ("permute", "moe_act")}
PEERS = ("stock torch", "torch.compile", *ADAPTERS)
NEEDED = ("bf16", "stock torch")  # the right results; what ratios are to
HOST_CALLS = 20
Part = Callable[["Layer", Callable[[], Tensor]], list[Tensor]]


class Layer(NamedTuple):
    """The parameters, the config of each recipe, the router's state, and an input with its
    cotangent.
    """

    shape: Shape
    parameters: LayerParameters
    state: RouterState
    x_TH: Tensor
    d_out_TH: Tensor

    def config(self, recipe: Recipe | None, stored: bool = False) -> LayerConfig:
        router = RouterConfig(num_experts=self.shape.experts, topk=self.shape.topk)
        # also for gpt-oss, whose clamped and interleaved SwiGLU has the same products and bytes
        return LayerConfig(router=router, recipe=recipe, fp8_input_store=stored)

    @property
    def flops(self) -> float:
        return 6.0 * len(self.x_TH) * self.shape.topk * self.shape.hidden * self.shape.width

    @property
    def least_saved(self) -> float:
        tokens, shape = len(self.x_TH), self.shape
        return BF16 * tokens * (shape.hidden + 2 * shape.topk * shape.width)


def make_layer(shape: Shape, tokens: int, seed: int = 0) -> Layer:
    normal = Random(seed).normal
    hidden, experts, _, width = shape
    parameters = LayerParameters(
        router_weight=normal(experts, hidden, std=hidden**-0.5),
        fc1_weight=normal(experts, 2 * width, hidden, std=hidden**-0.5),
        fc2_weight=normal(experts, hidden, width, std=width**-0.5),
    )
    for parameter in parameters[:3]:
        parameter.requires_grad_()
    state = new_state(RouterConfig(num_experts=experts, topk=shape.topk), torch.device(DEVICE))
    return Layer(shape, parameters, state, normal(tokens, hidden).requires_grad_(), normal(tokens, hidden))


def fast(
    layer: Layer, recipe: Recipe | None, recompute: str | Sequence[str] | None = None, stored: bool = False
) -> Tensor:
    config = layer.config(recipe, stored)
    return moe_fast.moe_layer(layer.x_TH, layer.parameters, config, state=layer.state, recompute=recompute).output


def stock(layer: Layer) -> Tensor:
    """The layer in torch, as one would write it without other libraries."""
    x, p, topk = layer.x_TH, layer.parameters, layer.shape.topk
    logits = x @ p.router_weight.t()
    logits = logits if p.router_bias is None else logits + p.router_bias
    chosen, experts = logits.topk(topk)
    order = experts.flatten().argsort(stable=True)
    tokens = order // topk
    ends = torch.arange(1, layer.shape.experts + 1, device=x.device)
    offsets = torch.searchsorted(experts.flatten()[order], ends).to(torch.int32)  # bincount waits for the device
    h = torch.nn.functional.grouped_mm(x.index_select(0, tokens), p.fc1_weight.transpose(1, 2), offs=offsets)
    u, v = h.chunk(2, dim=1)
    a = torch.nn.functional.silu(u) * v * chosen.float().softmax(-1).flatten()[order][:, None].to(x.dtype)
    y = torch.nn.functional.grouped_mm(a, p.fc2_weight.transpose(1, 2), offs=offsets)
    return torch.zeros_like(x).index_add(0, tokens, y)


@torch.no_grad()
def alone(layer: Layer, forward: Callable[[], Tensor]) -> list[Tensor]:
    """A forward that saves nothing."""
    return [forward()]


def step(layer: Layer, forward: Callable[[], Tensor]) -> list[Tensor]:
    """Forward and backward: the gradients."""
    leaves = forward.leaves if isinstance(forward, Peer) else [layer.x_TH, *layer.parameters[:3]]
    return list(torch.autograd.grad(forward(), leaves, layer.d_out_TH))


@contextmanager
def versions(layer: Layer, only: str = "") -> Iterator[dict[str, Callable[[], Tensor]]]:
    """The layers whose titles begin as `only` says, with those that are needed; the weights of one
    are quantised by its first call alone.
    """
    layers: dict[str, Callable[[], Tensor]] = {name: partial(fast, layer, recipe) for name, recipe in RECIPES.items()}
    layers |= {f"bf16, {title}": partial(fast, layer, None, recompute) for title, recompute in RECOMPUTED.items()}
    context, once = copy_context(), moe_fast.weights_quantized_once()
    context.run(once.__enter__)
    with_codes = partial(context.run, fast, layer, RECIPES["FP8 block"])
    layers["FP8 block, weights kept"] = with_codes
    layers |= {f"… and {title}": partial(with_codes, recompute) for title, recompute in RECOMPUTED.items()}
    layers["… permute and h in E4M3"] = partial(with_codes, "permute", True)
    compiled = torch.compile(stock, dynamic=False)
    layers |= {"stock torch": partial(stock, layer), "torch.compile": partial(compiled, layer)}
    begins = tuple(only.split(";"))
    layers = {title: call for title, call in layers.items() if title.startswith(begins) or title in NEEDED}
    peers = installed(layer, lambda title: title.startswith(begins)) if DEVICE == "cuda" else {}
    yield layers | peers
    context.run(once.__exit__, None, None, None)


def check(layers: Mapping[str, Callable[[], Tensor]]) -> None:
    """The layers agree with bf16's, each within the rounding of its dtypes; peers only on a GPU.

    Raises:
        AssertionError: a relative error of the norm is larger.
    """
    expected = layers["bf16"]().detach().float()
    for title, call in layers.items():
        if title not in PEERS or DEVICE == "cuda":
            error = (call().detach().float() - expected).norm() / expected.norm()
            assert error < (0.02 if title in PEERS else 0.1), (title, float(error))


def saved_bytes(forward: Callable[[], Tensor]) -> int:
    """The memory that a forward keeps, without its output."""
    torch.cuda.synchronize()
    allocated = torch.cuda.memory_allocated()
    out = forward()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated() - allocated - out.numel() * out.itemsize


def host_us(call: Callable[[], object]) -> float:
    """Host time of a call whose launches never wait for a full queue."""
    times = []
    for _ in range(HOST_CALLS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    torch.cuda.synchronize()
    return statistics.median(times) * 1e6


def kernels(call: Callable[[], object]) -> tuple[Counter[str], Counter[str]]:
    """(launches, µs) of each kernel of a call."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    launches: Counter[str] = Counter()
    us: Counter[str] = Counter()
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            name = event.name.split("(")[0].split("<")[0].removeprefix("void ")[:60]
            launches[name] += 1
            us[name] += event.device_time  # type: ignore[assignment]
    return launches, us


def graphs(layer: Layer, layers: Mapping[str, Callable[[], Tensor]], run: Part) -> dict[str, Callable[[], object]]:
    """The replay of each layer's graph, of its forward (`alone`) or of a whole step."""
    pool = torch.cuda.graph_pool_handle()  # a step's gradients are large

    def capture(call: Any) -> Callable[[], object]:
        return captured(call, pool)[0].replay

    return {title: replayed(capture, partial(run, layer, call)) for title, call in layers.items()}


def report(name: str, layer: Layer, layers: dict[str, Callable[[], Tensor]], options: Any) -> dict[str, Any]:
    """Prints the table; the times of each layer beside its peers', forward and whole."""
    forwards = {title: partial(alone, layer, call) for title, call in layers.items()}
    replays = graphs(layer, layers, alone)
    forward, replay_us = bursts(replays, options.blocks, 1), {title: host_us(f) for title, f in replays.items()}
    del replays  # and the graphs' memory
    steps = bursts(graphs(layer, layers, step), options.blocks, 1)
    lines = []
    for title, call in layers.items():
        saved = saved_bytes(call)
        lines.append(
            [
                *(
                    name,
                    title,
                    f"{layer.flops / forward[title] / 1e6:.0f}",
                    f"{forward['stock torch'] / forward[title]:.2f}",
                ),
                *(f"{3 * layer.flops / steps[title] / 1e6:.0f}", f"{steps['stock torch'] / steps[title]:.2f}"),
                *(f"{saved / 2**30:.2f}", f"{saved / layer.least_saved:.2f}"),
                *(f"{host_us(forwards[title]):.0f}", f"{replay_us[title]:.0f}"),
                str(sum(kernels(forwards[title])[0].values())),
                str(sum(kernels(partial(step, layer, call))[0].values())),
            ]
        )
    heads = ["shape", "layer", "forward", "÷ stock", "with backward", "÷ stock", "saved GiB", "÷ least"]
    print(table("", [*heads, "host µs", "replay", "launches", "with backward"], lines), flush=True)
    profiled = [title for title in ("bf16", "FP8 block", "FP8 block, weights kept") if title in layers]
    for title in profiled if options.profile else ():
        launches, us = kernels(partial(step, layer, layers[title]))
        total = sum(us.values())
        shares = [[k, str(launches[k]), f"{t:.0f}", f"{t / total:.1%}"] for k, t in us.most_common() if t > total / 200]
        print(table(f"{name}, {title}: {total:.0f} µs of kernels", ["kernel", "launches", "µs", "share"], shares))
    return {
        f"{title}, {phase}": {"us": {name: times[name] for name in (title, *PEERS) if name in times}, "ours": [title]}
        for phase, times in (("forward", forward), ("with backward", steps))
        for title in layers
        if title not in PEERS
    }


def main() -> None:
    shapes = {name: SHAPES[name] for name in MODELS}
    flags: dict[str, dict[str, Any]] = {"--profile": {"action": "store_true", "help": "list the kernels"}}
    options = parse(__doc__, shapes, TINY, blocks=4, flags=flags)
    if not options.quick:
        print(f"{heading(options.tokens)}; TFLOP/s")
    operations = {}
    for name, shape in options.shapes.items():
        layer = make_layer(shape, options.tokens)
        torch._dynamo.reset()  # no limit on compilations per shape
        with versions(layer, options.only) as layers:
            check(layers)
            if options.quick:
                step(layer, layers["bf16"])
                print(f"{name}: checked")
            else:
                operations[name] = report(name, layer, layers, options)
    if not options.quick:
        write(options.json, operations)


if __name__ == "__main__":
    main()
