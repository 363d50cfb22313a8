"""Time the whole layer over several GPUs of one host, the exchange included.

    TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NCCL_NVLS_ENABLE=0 python -m benchmarks.layer_ranks --ranks 2
    python -m benchmarks.layer_ranks --quick

Each rank has T tokens, which choose from the experts of all ranks: forward, and forward with
backward, in bf16 and with FP8 blocks and weights kept, by several dispatchers. "No exchange" is the
same rank's layer with its own experts alone, as a CUDA graph: as many rows, nothing to send.
TFLOP/s per GPU are those of the experts' products, 6·M·H·F forward and 18·M·H·F with the backward,
M = T · topk; a shared expert's are added. Times are the slowest rank's, medians of alternating
turns. Output and gradient of the input are first compared with those of one rank that has all
experts. `--quick` only compares, on two processes without a GPU.
"""

import json
from collections.abc import Callable
from contextvars import copy_context
from functools import partial
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

# of each rank: DeepSeek-V3 with 32 experts of 256, Qwen3-30B with half of 128
SHAPES = {"dsv3": Shape(7168, 32, 8, 2048), "qwen3-30b": Shape(2048, 64, 8, 768)}
SHARED = {"dsv3": 2048, "tiny": 32}  # FFN size of the shared expert
TINY = {"tiny": Shape(128, 4, 2, 128)}
SLACK = 1.25  # rows of a budget ÷ rows of balanced routing
REST = 0.05  # seconds before a turn
ALONE = "no exchange"
KINDS = {"bf16": RECIPES["bf16"], "FP8": RECIPES["FP8 block"]}


class Way(NamedTuple):
    """How the tokens reach their experts."""

    dispatcher: str | None = None  # None: own experts alone
    shared_memory: bool = False
    budget: bool = False  # of rows: the host never waits
    shared: bool = False  # with a shared expert
    overlap: bool = False  # of the shared expert with the dispatch
    late: bool = False  # the experts' weight gradients beside the dispatch's backward
    graph: bool = False  # captured


MEMORY = Way("hybridep", shared_memory=True)
WAYS = {
    ALONE: Way(graph=True),
    "no exchange, launched one by one": Way(),
    "alltoall": Way("alltoall"),
    "hybridep": Way("hybridep"),
    "hybridep, shared memory": MEMORY,
    "…, a budget of rows": MEMORY._replace(budget=True),
    "…, wgrad overlapped": MEMORY._replace(budget=True, late=True),
    "…, as a graph": MEMORY._replace(budget=True, graph=True),
}
WITH_SHARED = {
    ALONE: Way(graph=True, shared=True),
    "hybridep, shared memory, a budget of rows": MEMORY._replace(budget=True, shared=True),
    "…, shared expert overlapped": MEMORY._replace(budget=True, shared=True, overlap=True),
    "…, as a graph": MEMORY._replace(budget=True, shared=True, overlap=True, graph=True),
}


class Bench:
    """The layer of one rank, and of all."""

    def __init__(self, rank: int, ranks: int, shape: Shape, tokens: int, shared: int | None) -> None:
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
        self.once, self.context = moe_fast.weights_quantized_once(), copy_context()
        self.context.run(self.once.__enter__)

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
        state, group = new_state(config.router, self.own.x_TH.device), dist.group.WORLD
        settings |= {"overlap_shared": way.overlap, "shared_memory": way.shared_memory}
        settings |= {} if way.dispatcher is None else {"group": group}
        return self.context.run(
            lambda: moe_fast.moe_layer(self.own.x_TH, self.parameters(way), config, state=state, **settings).output
        )

    def forward(self, way: Way, recipe: Recipe | None) -> list[Tensor]:
        return [self.layer(way, recipe).detach()]

    def step(self, way: Way, recipe: Recipe | None) -> list[Tensor]:
        """The gradients of the input, and of all parameters."""
        x_TH, d_out_TH = self.own.x_TH, self.own.d_out_TH
        inputs = [x_TH, *(p for p in self.parameters(way) if p is not None)]
        if not way.late:
            return list(torch.autograd.grad(self.layer(way, recipe), inputs, d_out_TH))
        waiting: list[Callable[..., Tensor]] = []
        done: list[Tensor] = []

        def compute() -> None:
            done.extend(self.context.run(gradient) for gradient in waiting)

        out = self.layer(way, recipe, wgrads=waiting, in_dispatch_backward=compute)
        others = [inputs[0], inputs[1], *inputs[4:]]
        gradients = torch.autograd.grad(out, others, d_out_TH)
        wait_for(done, x_TH.device)  # their factors are in `waiting` until here
        return [*gradients[:2], *reversed(done), *gradients[2:]]

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
        state = new_state(config.router, self.own.x_TH.device)
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
                found = [*self.forward(way, recipe), self.step(way, recipe)[0]]
                for x, y in zip(found, right, strict=True):
                    error = float((x.float() - y.float()).norm() / y.float().norm())
                    assert error < (0.02 if recipe is None else 0.1), (kind, name, error)

    def call(self, part: Callable[..., list[Tensor]], way: Way, recipe: Recipe | None) -> Call:
        run = partial(part, way, recipe)
        return captured(run)[0].replay if way.graph else run


def measure(bench: Bench, ways: dict[str, Way], kind: str, options: Any) -> dict[str, dict[str, Any]]:
    """Times and TFLOP/s of each way, forward and whole."""
    out: dict[str, dict[str, Any]] = {}
    for part, call, times in (("forward", bench.forward, 1), ("with backward", bench.step, 3)):
        shown = {name: way for name, way in ways.items() if times > 1 or not way.late}
        calls = {name: bench.call(call, way, KINDS[kind]) for name, way in shown.items()}
        us = dispatch.timed(calls, options.turns, options.calls, REST)
        rates = {name: times * bench.flops(way) / us[name] / 1e6 for name, way in shown.items()}
        out[f"{kind}, {part}"] = {"us": us, "tflops": rates, "ours": [name for name in us if name != ALONE]}
    return out


def lines_of(name: str, kind: str, figures: dict[str, dict[str, Any]]) -> list[list[str]]:
    """TFLOP/s per GPU of each way, and its ratio to the layer without exchange."""
    parts = list(figures.values())
    lines = []
    for way in parts[-1]["us"]:
        cells = [name, kind, way]
        for part in parts:
            us, rates = part["us"], part["tflops"]
            cells += [f"{rates[way]:.0f}", f"{us[ALONE] / us[way]:.2f}"] if way in us else ["", ""]
        lines.append(cells)
    return lines


def run(rank: int, options: Any) -> None:
    shapes = TINY if options.quick else {name: SHAPES[name] for name in options.shapes.split(",")}
    heads = ["shape", "dtype", "layer", "forward", "÷ no exchange", "with backward", "÷ no exchange"]
    if rank == 0 and not options.quick:
        versions = f"torch {torch.__version__}, Triton {triton.__version__}"
        print(f"{options.ranks} × {torch.cuda.get_device_name()}, {versions}, T = {options.tokens} per rank")
        print(table("", heads, []), flush=True)
    operations: dict[str, dict[str, Any]] = {}
    for name, shape in shapes.items():
        bench = Bench(rank, options.ranks, shape, options.tokens, SHARED.get(name))
        for title, ways in ((name, WAYS), (f"{name}, shared expert", WITH_SHARED if name in SHARED else {})):
            if ways:
                bench.check(ways)
            for kind in KINDS if ways and not options.quick else ():
                figures = measure(bench, ways, kind, options)
                operations.setdefault(title, {}).update(figures)
                if rank == 0:
                    print("\n".join(map(line, lines_of(title, kind, figures))), flush=True)
    if rank == 0 and options.quick:
        print("all layers are correct", flush=True)
    if rank == 0 and options.json and not options.quick:
        with open(options.json, "w") as file:
            json.dump({"operations": operations}, file, indent=1)


def work(rank: int, options: Any) -> None:
    """One rank."""
    with dispatch.world(rank, options):
        run(rank, options)


def main() -> None:
    options = dispatch.parse(__doc__, 8192, ",".join(SHAPES), SHAPES, turns=3, calls=3)
    mp.spawn(work, args=(options,), nprocs=options.ranks)


if __name__ == "__main__":
    main()
