"""Time the whole layer over several GPUs of one host, the exchange included.

    TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NCCL_NVLS_ENABLE=0 python -m benchmarks.layer_ranks --ranks 2
    python -m benchmarks.layer_ranks --quick

Each rank has T tokens, which choose from the experts of all ranks: forward, and forward with
backward, in bf16 and with FP8 blocks and weights kept, by several dispatchers. "No exchange" is the
same rank's layer with its own experts alone: as many rows, nothing to send. First all are launched
from Python, then those whose host never waits are replayed as CUDA graphs. TFLOP/s per GPU are
those of the experts' products, 6·M·H·F forward and 18·M·H·F with the backward, M = T · topk; a
shared expert's are added. Times are the slowest rank's, medians of alternating turns. Output and
gradient of the input are first compared with those of one rank that has all experts. `--quick` only
compares, on two processes without a GPU.
"""

import copy
import gc
import json
from collections.abc import Callable
from contextlib import ExitStack
from contextvars import copy_context
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

import moe_fast
from benchmarks import dispatch
from benchmarks.common import DEVICE, Call, Shape, captured, line, table, triton
from benchmarks.layer import RECIPES, Layer, make_layer
from moe_fast.dispatch.overlap import wait_for
from moe_ref.config import LayerConfig, LayerParameters, Recipe, RouterConfig
from moe_ref.config.layer import rank_budget
from moe_ref.config.state import new_state

# with the experts of each rank: half of the 128 of Qwen3-30B, 32 of the 256 of DeepSeek-V3
SHAPES = {"qwen3-30b": Shape(2048, 64, 8, 768), "dsv3": Shape(7168, 32, 8, 2048)}
SHARED = {"dsv3": 2048, "tiny": 32}  # FFN size of the shared expert
TINY = {"tiny": Shape(128, 4, 4, 128)}
SLACK = 1.25  # rows of a budget ÷ rows of balanced routing
REST = 0.05  # seconds before a turn
ALONE = "no exchange"
HEADS = ["shape", "dtype", "part", "launched", "layer", "µs", "TFLOP/s", "÷ no exchange"]
LAUNCHED = _, GRAPH = ("from Python", "as a graph")
PARTS = {"forward": "forward", "with backward": "step"}
KINDS = {"bf16": RECIPES["bf16"], "FP8": RECIPES["FP8 block"]}


class Way(NamedTuple):
    """How the tokens reach their experts."""

    dispatcher: str | None = None  # None: own experts alone
    shared_memory: bool = False
    budget: bool = False  # of rows: the host never waits
    shared: bool = False  # with a shared expert
    overlap: bool = False  # of the shared expert with the dispatch
    late: bool = False  # the experts' weight gradients beside the dispatch's backward


MEMORY = Way("hybridep", shared_memory=True)
BUDGET = MEMORY._replace(budget=True)
WAYS = {
    ALONE: Way(),
    "alltoall": Way("alltoall"),
    "hybridep": Way("hybridep"),
    "hybridep, shared memory": MEMORY,
    "…, a budget of rows": BUDGET,
    "…, wgrad overlapped": BUDGET._replace(late=True),
}
WITH_SHARED = {
    ALONE: Way(shared=True),
    "hybridep, shared memory, a budget of rows": BUDGET._replace(shared=True),
    "…, shared expert overlapped": BUDGET._replace(shared=True, overlap=True),
}


class Bench:
    """The layer of one rank, and of all."""

    def __init__(self, rank: int, ranks: int, shape: Shape, tokens: int, shared: int | None, stack: ExitStack) -> None:
        self.ranks, self.shape, self.width = ranks, shape, shared or 0
        every = [make_layer(shape, tokens, seed) for seed in range(ranks)]
        self.own: Layer = every[rank]
        self.weights = [x.parameters for x in every]
        self.router = torch.cat([p.router_weight for p in self.weights]).detach().requires_grad_()
        generator = torch.Generator(DEVICE).manual_seed(ranks)
        normal = partial(torch.randn, dtype=torch.bfloat16, device=DEVICE, generator=generator)
        sizes = ((2 * self.width, shape.hidden), (shape.hidden, self.width))
        weights = [(normal(size) / size[1] ** 0.5).requires_grad_() for size in sizes] if shared else [None, None]
        self.shared = dict(zip(("shared_fc1_weight", "shared_fc2_weight"), weights, strict=True))
        numbers = {shape.experts, shape.experts * ranks}
        configs = {number: RouterConfig(num_experts=number, topk=shape.topk) for number in numbers}
        self.states = {number: new_state(own, self.own.x_TH.device) for number, own in configs.items()}
        once, self.context = moe_fast.weights_quantized_once(), copy_context()
        self.context.run(once.__enter__)
        stack.callback(self.context.run, once.__exit__, None, None, None)

    def parameters(self, way: Way) -> LayerParameters:
        own = self.own.parameters if way.dispatcher is None else self.own.parameters._replace(router_weight=self.router)
        return own._replace(**self.shared) if way.shared else own

    def config(self, way: Way, recipe: Recipe | None) -> LayerConfig:
        experts, topk, tokens = self.shape.experts, self.shape.topk, len(self.own.x_TH)
        router = RouterConfig(num_experts=experts * (1 if way.dispatcher is None else self.ranks), topk=topk)
        rows = rank_budget(tokens, topk=topk, capacity_factor=SLACK if DEVICE == "cuda" else self.ranks)
        settings = {} if way.dispatcher is None else {"dispatcher": way.dispatcher}
        return LayerConfig(router=router, recipe=recipe, num_rows=rows if way.budget else None, **settings)

    def layer(self, way: Way, recipe: Recipe | None, **settings: Any) -> Tensor:
        config = self.config(way, recipe)
        settings |= {"state": self.states[config.router.num_experts]}
        settings |= {"overlap_shared": way.overlap, "shared_memory": way.shared_memory}
        settings |= {} if way.dispatcher is None else {"group": dist.group.WORLD}
        return self.context.run(
            lambda: moe_fast.moe_layer(self.own.x_TH, self.parameters(way), config, **settings).output
        )

    def forward(self, way: Way, recipe: Recipe | None) -> list[Tensor]:
        return [self.layer(way, recipe).detach()]

    def step(self, way: Way, recipe: Recipe | None) -> list[Tensor]:
        """Output, and the gradients of the input and of all parameters."""
        x_TH, d_out_TH = self.own.x_TH, self.own.d_out_TH
        inputs = [x_TH, *(p for p in self.parameters(way) if p is not None)]
        if not way.late:
            out = self.layer(way, recipe)
            return [out.detach(), *torch.autograd.grad(out, inputs, d_out_TH)]
        waiting: list[Callable[..., Tensor]] = []
        done: list[Tensor] = []

        def compute() -> None:
            done.extend(self.context.run(gradient) for gradient in waiting)

        out = self.layer(way, recipe, wgrads=waiting, in_dispatch_backward=compute)
        others = [inputs[0], inputs[1], *inputs[4:]]
        gradients = torch.autograd.grad(out, others, d_out_TH)
        wait_for(done, x_TH.device)
        waiting.clear()  # the gradients' factors, which hold the graph, whose node holds `waiting`
        return [out.detach(), *gradients[:2], *reversed(done), *gradients[2:]]

    def flops(self, way: Way) -> float:
        """Of a forward."""
        shared = 6.0 * len(self.own.x_TH) * self.shape.hidden * self.width
        return self.own.flops + (shared if way.shared else 0)

    def whole(self, shared: bool) -> list[Tensor]:
        """Output and gradient of the input by one rank with all experts, in bf16."""
        every = [torch.cat([getattr(p, name) for p in self.weights]).detach() for name in ("fc1_weight", "fc2_weight")]
        parameters = LayerParameters(self.router, *every)
        parameters = parameters._replace(**self.shared) if shared else parameters
        config = self.config(MEMORY, None)
        state = self.states[config.router.num_experts]
        out = moe_fast.moe_layer(self.own.x_TH, parameters, config, state=state).output
        return [out.detach(), *torch.autograd.grad(out, [self.own.x_TH], self.own.d_out_TH)]

    def check(self, ways: dict[str, Way]) -> None:
        """Compares each way's output and gradient of the input with one rank's.

        Raises:
            AssertionError: a relative error of the norm is larger.
        """
        right = self.whole(next(iter(ways.values())).shared)
        for kind, recipe in KINDS.items():
            for name, way in ways.items():
                if way.dispatcher is None:
                    continue
                for x, y in zip(self.step(way, recipe), right, strict=False):
                    error = float((x.float() - y.float()).norm() / y.float().norm())
                    assert error < (0.02 if recipe is None else 0.1), (kind, name, error)

    def with_leaves(self) -> "Bench":
        """The same with tensors of its own to differentiate by: a CUDA graph may not wait for the
        stream on which an earlier step has used them.
        """

        def leaf(x: Tensor | None) -> Any:
            return None if x is None else x.detach().requires_grad_()

        out = copy.copy(self)
        parameters = LayerParameters(*map(leaf, self.own.parameters))
        out.own = self.own._replace(parameters=parameters, x_TH=leaf(self.own.x_TH))
        out.router, out.shared = leaf(self.router), {name: leaf(x) for name, x in self.shared.items()}
        return out

    def graphs(self, part: str, ways: dict[str, Way], recipe: Recipe | None) -> dict[str, Call]:
        """The replays of those whose host never waits, up to the first that cannot be captured."""
        replays: dict[str, Call] = {}
        for name, way in ways.items():
            gc.collect()
            try:
                replays[name] = captured(partial(getattr(self.with_leaves(), part), way, recipe))[0].replay
            except RuntimeError as error:
                torch.cuda.set_sync_debug_mode("default")
                print(f"{name}, {part}: not captured: {error}", flush=True)
                break
        return replays


def measure(bench: Bench, ways: dict[str, Way], part: str, kind: str, graph: bool, options: Any) -> dict[str, Any]:
    """Times and TFLOP/s of each way, of its forward or of a step."""
    shown = {name: way for name, way in ways.items() if part == "step" or not way.late}
    if graph:
        free = {name: way for name, way in shown.items() if way.dispatcher is None or (way.budget and not way.late)}
        calls = bench.graphs(part, free, KINDS[kind])
    else:
        calls = {name: partial(getattr(bench, part), way, KINDS[kind]) for name, way in shown.items()}
    us = dispatch.timed(calls, options.turns, options.calls, REST)
    flops = {name: bench.flops(ways[name]) * (3 if part == "step" else 1) for name in us}
    return {"us": us, "ours": [name for name in us if name != ALONE], "flops": flops}


def lines_of(title: str, about: list[str], figures: dict[str, Any]) -> list[list[str]]:
    """Time and TFLOP/s per GPU of each way, and the ratio to the layer without exchange."""
    us, flops = figures["us"], figures["flops"]
    return [
        [title, *about, way, f"{us[way]:.0f}", f"{flops[way] / us[way] / 1e6:.0f}", f"{us[ALONE] / us[way]:.2f}"]
        for way in us
    ]


def benches(rank: int, options: Any, stack: ExitStack) -> dict[str, tuple[Bench, dict[str, Way]]]:
    """The layers of all shapes, compared with one rank's, and their ways."""
    shapes = TINY if options.quick else {name: SHAPES[name] for name in options.shapes.split(",")}
    out: dict[str, tuple[Bench, dict[str, Way]]] = {}
    for name, shape in shapes.items():
        bench = Bench(rank, options.ranks, shape, options.tokens, SHARED.get(name), stack)
        out[name] = bench, WAYS
        if name in SHARED:
            out[f"{name}, shared expert"] = bench, WITH_SHARED
    for bench, ways in out.values():
        bench.check(ways)
    return out


def run(rank: int, options: Any, stack: ExitStack) -> None:
    made = benches(rank, options, stack)
    if options.quick:
        if rank == 0:
            print("all layers are correct", flush=True)
        return
    if rank == 0:
        versions = f"torch {torch.__version__}, Triton {triton.__version__}"
        print(f"{options.ranks} × {torch.cuda.get_device_name()}, {versions}, T = {options.tokens} per rank")
        print(table("", HEADS, []), flush=True)
    operations: dict[str, dict[str, Any]] = {}
    for launched, (title, (bench, ways)) in product(LAUNCHED, made.items()):
        for part, kind in product(PARTS, KINDS):
            figures = measure(bench, ways, PARTS[part], kind, launched == GRAPH, options)
            operations.setdefault(f"{title}, {options.ranks} ranks", {})[f"{kind}, {part}, {launched}"] = figures
            if rank == 0:
                lines = lines_of(title, [kind, part, launched], figures)
                print("\n".join(map(line, lines)), flush=True)
                if options.json:
                    Path(options.json).write_text(json.dumps({"operations": operations}, indent=1))


def work(rank: int, options: Any) -> None:
    """One rank."""
    with dispatch.world(rank, options), ExitStack() as stack:
        run(rank, options, stack)


def main() -> None:
    options = dispatch.parse(__doc__, 8192, ",".join(SHAPES), SHAPES, turns=3, calls=3)
    mp.spawn(work, args=(options,), nprocs=options.ranks)


if __name__ == "__main__":
    main()
