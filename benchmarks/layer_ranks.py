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
from collections.abc import Callable
from contextlib import ExitStack
from contextvars import copy_context
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

import moe_fast
from benchmarks import dispatch
from benchmarks.common import DEVICE, Call, Random, Shape, captured, heading, line, table, write
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
PAUSE = 0.05  # seconds before a turn
ALONE = "no exchange"
HEADS = ["shape", "dtype", "part", "launched", "layer", "µs", "TFLOP/s", "÷ no exchange"]
LAUNCHED = _, GRAPH = ("from Python", "as a graph")
PARTS = {"forward": "forward", "with backward": "step"}
KINDS = {"bf16": RECIPES["bf16"], "FP8": RECIPES["FP8 block"]}


class Route(NamedTuple):
    """How the tokens reach their experts."""

    dispatcher: str | None = None  # None: own experts alone
    shared_memory: bool = False
    budget: bool = False  # of rows: the host never waits
    shared: bool = False  # with a shared expert
    overlap: bool = False  # of the shared expert with the dispatch
    late: bool = False  # the experts' weight gradients beside the dispatch's backward


MEMORY = Route("hybridep", shared_memory=True)
BUDGET = MEMORY._replace(budget=True)
ROUTES = {
    ALONE: Route(),
    "alltoall": Route("alltoall"),
    "hybridep": Route("hybridep"),
    "hybridep, shared memory": MEMORY,
    "…, a budget of rows": BUDGET,
    "…, wgrad overlapped": BUDGET._replace(late=True),
}
WITH_SHARED = {
    ALONE: Route(shared=True),
    "hybridep, shared memory, a budget of rows": BUDGET._replace(shared=True),
    "…, shared expert overlapped": BUDGET._replace(shared=True, overlap=True),
}


class Bench:
    """The layer of one rank, and of all."""

    def __init__(self, rank: int, ranks: int, shape: Shape, tokens: int, shared: int | None, stack: ExitStack) -> None:
        self.ranks, self.shape, self.width = ranks, shape, shared or 0
        layers = [make_layer(shape, tokens, seed) for seed in range(ranks)]
        self.local: Layer = layers[rank]
        self.weights = [x.parameters for x in layers]
        self.router = torch.cat([p.router_weight for p in self.weights]).detach().requires_grad_()
        normal = Random(ranks).normal
        sizes = ((2 * self.width, shape.hidden), (shape.hidden, self.width))
        weights = [normal(*size, std=size[1] ** -0.5).requires_grad_() for size in sizes] if shared else [None, None]
        self.shared = dict(zip(("shared_fc1_weight", "shared_fc2_weight"), weights, strict=True))
        numbers = {shape.experts, shape.experts * ranks}
        configs = {number: RouterConfig(num_experts=number, topk=shape.topk) for number in numbers}
        self.states = {number: new_state(config, self.local.x_TH.device) for number, config in configs.items()}
        once, self.context = moe_fast.weights_quantized_once(), copy_context()
        self.context.run(once.__enter__)
        stack.callback(self.context.run, once.__exit__, None, None, None)

    def parameters(self, route: Route) -> LayerParameters:
        parameters = self.local.parameters
        if route.dispatcher is not None:
            parameters = parameters._replace(router_weight=self.router)
        return parameters._replace(**self.shared) if route.shared else parameters

    def config(self, route: Route, recipe: Recipe | None) -> LayerConfig:
        experts, topk, tokens = self.shape.experts, self.shape.topk, len(self.local.x_TH)
        router = RouterConfig(num_experts=experts * (1 if route.dispatcher is None else self.ranks), topk=topk)
        rows = rank_budget(tokens, topk=topk, capacity_factor=SLACK if DEVICE == "cuda" else self.ranks)
        settings = {} if route.dispatcher is None else {"dispatcher": route.dispatcher}
        return LayerConfig(router=router, recipe=recipe, num_rows=rows if route.budget else None, **settings)

    def layer(self, route: Route, recipe: Recipe | None, **settings: Any) -> Tensor:
        config = self.config(route, recipe)
        settings |= {"state": self.states[config.router.num_experts]}
        settings |= {"overlap_shared": route.overlap, "shared_memory": route.shared_memory}
        settings |= {} if route.dispatcher is None else {"group": dist.group.WORLD}
        return self.context.run(
            lambda: moe_fast.moe_layer(self.local.x_TH, self.parameters(route), config, **settings).output
        )

    def forward(self, route: Route, recipe: Recipe | None) -> list[Tensor]:
        return [self.layer(route, recipe).detach()]

    def step(self, route: Route, recipe: Recipe | None) -> list[Tensor]:
        """Output, and the gradients of the input and of all parameters."""
        x_TH, d_out_TH = self.local.x_TH, self.local.d_out_TH
        inputs = [x_TH, *(p for p in self.parameters(route) if p is not None)]
        if not route.late:
            out = self.layer(route, recipe)
            return [out.detach(), *torch.autograd.grad(out, inputs, d_out_TH)]
        waiting: list[Callable[..., Tensor]] = []
        done: list[Tensor] = []

        def compute() -> None:
            done.extend(self.context.run(gradient) for gradient in waiting)

        out = self.layer(route, recipe, wgrads=waiting, in_dispatch_backward=compute)
        early_inputs = [inputs[0], inputs[1], *inputs[4:]]
        gradients = torch.autograd.grad(out, early_inputs, d_out_TH)
        wait_for(done, x_TH.device)
        waiting.clear()  # the gradients' factors, which hold the graph, whose node holds `waiting`
        return [out.detach(), *gradients[:2], *reversed(done), *gradients[2:]]

    def flops(self, route: Route) -> float:
        """Of a forward."""
        shared = 6.0 * len(self.local.x_TH) * self.shape.hidden * self.width
        return self.local.flops + (shared if route.shared else 0)

    def whole(self, shared: bool) -> list[Tensor]:
        """Output and gradient of the input by one rank with all experts, in bf16."""
        experts = [
            torch.cat([getattr(p, name) for p in self.weights]).detach() for name in ("fc1_weight", "fc2_weight")
        ]
        parameters = LayerParameters(self.router, *experts)
        parameters = parameters._replace(**self.shared) if shared else parameters
        config = self.config(MEMORY, None)
        state = self.states[config.router.num_experts]
        out = moe_fast.moe_layer(self.local.x_TH, parameters, config, state=state).output
        return [out.detach(), *torch.autograd.grad(out, [self.local.x_TH], self.local.d_out_TH)]

    def check(self, routes: dict[str, Route]) -> None:
        """Compares each route's output and gradient of the input with one rank's.

        Raises:
            AssertionError: a relative error of the norm is larger.
        """
        expected = self.whole(next(iter(routes.values())).shared)
        for kind, recipe in KINDS.items():
            for name, route in routes.items():
                if route.dispatcher is None:
                    continue
                for x, y in zip(self.step(route, recipe), expected, strict=False):
                    error = float((x.float() - y.float()).norm() / y.float().norm())
                    assert error < (0.02 if recipe is None else 0.1), (kind, name, error)

    def with_leaves(self) -> "Bench":
        """The same with tensors of its own to differentiate by: a CUDA graph may not wait for the
        stream on which an earlier step has used them.
        """

        def leaf(x: Tensor | None) -> Any:
            return None if x is None else x.detach().requires_grad_()

        out = copy.copy(self)
        parameters = LayerParameters(*map(leaf, self.local.parameters))
        out.local = self.local._replace(parameters=parameters, x_TH=leaf(self.local.x_TH))
        out.router, out.shared = leaf(self.router), {name: leaf(x) for name, x in self.shared.items()}
        return out

    def graphs(self, phase: str, routes: dict[str, Route], recipe: Recipe | None) -> dict[str, Call]:
        """The replays of those whose host never waits, up to the first that cannot be captured."""
        replays: dict[str, Call] = {}
        for name, route in routes.items():
            gc.collect()
            try:
                replays[name] = captured(partial(getattr(self.with_leaves(), phase), route, recipe))[0].replay
            except RuntimeError as error:
                torch.cuda.set_sync_debug_mode("default")
                print(f"{name}, {phase}: not captured: {error}", flush=True)
                break
        return replays


def measure(bench: Bench, routes: dict[str, Route], phase: str, kind: str, graph: bool, options: Any) -> dict[str, Any]:
    """Times and TFLOP/s of each route, of its forward or of a step."""
    shown = {name: route for name, route in routes.items() if phase == "step" or not route.late}
    if graph:
        graphable = {
            name: route
            for name, route in shown.items()
            if route.dispatcher is None or (route.budget and not route.late)
        }
        calls = bench.graphs(phase, graphable, KINDS[kind])
    else:
        calls = {name: partial(getattr(bench, phase), route, KINDS[kind]) for name, route in shown.items()}
    us = dispatch.timed(calls, options.turns, options.calls, PAUSE)
    flops = {name: bench.flops(routes[name]) * (3 if phase == "step" else 1) for name in us}
    return {"us": us, "ours": [name for name in us if name != ALONE], "flops": flops}


def lines_of(title: str, about: list[str], figures: dict[str, Any]) -> list[list[str]]:
    """Time and TFLOP/s per GPU of each route, and the ratio to the layer without exchange."""
    us, flops = figures["us"], figures["flops"]
    return [
        [
            title,
            *about,
            route,
            f"{us[route]:.0f}",
            f"{flops[route] / us[route] / 1e6:.0f}",
            f"{us[ALONE] / us[route]:.2f}",
        ]
        for route in us
    ]


def benches(rank: int, options: Any, stack: ExitStack) -> dict[str, tuple[Bench, dict[str, Route]]]:
    """The layers of all shapes, compared with one rank's, and their routes."""
    shapes = TINY if options.quick else {name: SHAPES[name] for name in options.shapes.split(",")}
    out: dict[str, tuple[Bench, dict[str, Route]]] = {}
    for name, shape in shapes.items():
        bench = Bench(rank, options.ranks, shape, options.tokens, SHARED.get(name), stack)
        out[name] = bench, ROUTES
        if name in SHARED:
            out[f"{name}, shared expert"] = bench, WITH_SHARED
    for bench, routes in out.values():
        bench.check(routes)
    return out


def run(rank: int, options: Any, stack: ExitStack) -> None:
    all_benches = benches(rank, options, stack)
    if options.quick:
        if rank == 0:
            print("all layers are correct", flush=True)
        return
    if rank == 0:
        print(heading(options.tokens, options.ranks))
        print(table("", HEADS, []), flush=True)
    operations: dict[str, dict[str, Any]] = {}
    for launched, (title, (bench, routes)) in product(LAUNCHED, all_benches.items()):
        for phase, kind in product(PARTS, KINDS):
            figures = measure(bench, routes, PARTS[phase], kind, launched == GRAPH, options)
            operations.setdefault(f"{title}, {options.ranks} ranks", {})[f"{kind}, {phase}, {launched}"] = figures
            if rank == 0:
                lines = lines_of(title, [kind, phase, launched], figures)
                print("\n".join(map(line, lines)), flush=True)
                write(options.json, operations)


def work(rank: int, options: Any) -> None:
    """One rank."""
    with dispatch.world(rank, options), ExitStack() as stack:
        run(rank, options, stack)


def main() -> None:
    options = dispatch.parse(__doc__, 8192, ",".join(SHAPES), SHAPES, turns=3, calls=3)
    mp.spawn(work, args=(options,), nprocs=options.ranks)


if __name__ == "__main__":
    main()
