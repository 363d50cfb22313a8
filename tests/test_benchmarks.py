"""Every benchmark imports without a GPU; its `--quick` checks tiny shapes."""

import importlib
import math
import pkgutil
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import benchmarks
import moe_ref
from benchmarks import dispatch, exhaustive, growth, layer_ranks, steadiness
from benchmarks.common import SHAPES, Shape
from benchmarks.honest import Counts, sweep
from benchmarks.layer import check, make_layer
from conformance.engine.choose.profiles import PROFILES
from conformance.interface import Implementation


@pytest.mark.parametrize("name", [module.name for module in pkgutil.iter_modules(benchmarks.__path__)])
def test_a_benchmark_imports_without_a_gpu(name):
    importlib.import_module(f"benchmarks.{name}")


def one_gate_wrong(h, **settings):
    """The gate of one bit pattern, a little too large."""
    out = moe_ref.glu(h, **settings)
    return torch.where(h[:, : out.shape[1]].view(torch.int16) == 0x1234, out * 1.0625 + 1e-30, out)


def found_in(glu, monkeypatch):
    """What an exhaustive check of one kind, dtype and setting finds."""
    monkeypatch.setattr(exhaustive, "SETTINGS", ({},))
    return exhaustive.judge(Implementation(SimpleNamespace(glu=glu), "planted"), "glu", "swiglu", 1, "cpu")


def test_one_wrong_number_of_all_is_found(monkeypatch):
    assert found_in(moe_ref.glu, monkeypatch) == []
    findings = found_in(one_gate_wrong, monkeypatch)
    assert len(findings) == 2 and all("FAIL: out [bound]" in finding for finding in findings)


class Unsteady:
    """The third call's gradient of the weight is another in its last bit."""

    def __init__(self):
        self.calls = 0

    def grouped_linear(self, rows, weight, counts, **settings):
        self.calls += 1
        third = self.calls == 3
        weight.register_hook(lambda d: (d.view(torch.int16) ^ int(third)).view(d.dtype))
        return moe_ref.grouped_linear(rows, weight, counts, **settings)


@pytest.mark.parametrize(("implementation", "unsteady_weights"), [(moe_ref, 0), (Unsteady(), 1)])
def test_a_run_with_other_bits_is_found(implementation, unsteady_weights):
    layer = steadiness.Layer(2, 8, 16, 24)
    differences = {"out": 0, "d_rows": 0, "d_weight": unsteady_weights}
    assert steadiness.unsteady(implementation, layer, None, 4) == differences
    ((line, equal), _) = steadiness.judged(implementation, {"tiny": layer}, 4)
    assert line == "tiny, bf16: equal of 3 runs" and equal  # the third call has been


def test_every_activation_has_cases():
    for function, kinds in exhaustive.KINDS.items():
        for kind in kinds:
            settings = {(case.dtype, case.clamp, case.probs) for case in exhaustive.cases(function, kind, 1)}
            assert {dtype for dtype, *_ in settings} == {"bfloat16", "float16"}
            assert len(settings) == 2 * (4 if function == "glu" else 3)


def test_a_sweep_of_an_honest_implementation_judges_its_cases():
    counts = Counts()
    sweep(counts, "moe_ref", 1, PROFILES["smoke"], 1, ["attach_loss"], math.inf)
    assert counts.seeds == 1 and counts.statuses["PASS"] > 0
    assert not counts.rejected


def test_a_layer_that_differs_is_found():
    layer, mistaken = (torch.full((4, 8), value, dtype=torch.bfloat16) for value in (1.0, 1.2))
    check({"bf16": lambda: layer, "FP8 block": lambda: layer})
    with pytest.raises(AssertionError, match="FP8 block"):
        check({"bf16": lambda: layer, "FP8 block": lambda: mistaken})


def test_a_skewed_routing_leaves_experts_without_rows():
    layer = make_layer(Shape(32, 64, 2, 8), 256)
    uniform, skewed = (growth.load(growth.part_of(layer, 256, routing)) for routing in growth.ROUTINGS)
    assert int(uniform.sum()) == int(skewed.sum()) == 512
    assert int(skewed[:8].sum()) > 256 > int(uniform[:8].sum())  # the first eighth of the experts
    assert int((skewed == 0).sum()) > 2 * int((uniform == 0).sum())


def test_tokens_double_up_to_the_most():
    assert growth.sizes(SHAPES["qwen3-30b"], 65536) == [2**n for n in range(10, 17)]
    assert growth.sizes(SHAPES["dsv3-ep8"], 65536)[-1] == 32768  # a step of 65536 has more operations than are timed
    assert growth.sizes(SHAPES["qwen3-30b"], 4096) == [1024, 2048, 4096]


def point(tokens, routing, passes, flops, **us):
    about = {"tokens": tokens, "routing": routing, "part": passes, "flops": flops, "most": 1.5, "empty": 2}
    return about | {"us": dict(zip(growth.SHOWN, us.values(), strict=True)), "ours": [*growth.SHOWN[:2]]}


def test_lines_and_curves_of_growth_are_rates():
    timed = (("forward", 4e8), ("with backward", 12e8))
    results = {
        f"{tokens}, {passes}": point(tokens, "uniform", passes, tokens * flops, bf16=2000.0, fp8=1000.0, stock=4000.0)
        for tokens in (1024, 2048)
        for passes, flops in timed
    }
    first = dict(list(results.items())[:2])
    rates = ["205 (2.00)", "614 (2.00)", "410 (4.00)", "1229 (4.00)", "102", "307"]
    assert growth.cells(first) == ["uniform", "1024", "1.5", "2", *rates]
    curves = growth.curves(results, "forward")
    assert curves["bf16, uniform"] == ([1024, 2048], [204.8, 409.6]) and curves["bf16, skewed"] == ([], [])


def test_a_layer_over_ranks_is_compared_with_no_exchange():
    one_rank = layer_ranks.ALONE
    figures = {"us": {one_rank: 100.0, "alltoall": 125.0}, "flops": {one_rank: 5e10, "alltoall": 5e10}}
    assert layer_ranks.lines_of("dsv3", ["bf16", "forward"], figures) == [
        ["dsv3", "bf16", "forward", one_rank, "100", "500", "1.00"],
        ["dsv3", "bf16", "forward", "alltoall", "125", "400", "0.80"],
    ]


def test_figures_of_dispatch_are_ratios_to_the_eager_version():
    figures = {"tiny": {"us": {dispatch.EAGER: 9.0, "symmetric": 3.0}}}
    (operation,) = dispatch.operations_of(figures, 2)["tiny, 2 ranks"].values()
    assert operation["ours"] == ["symmetric"]


@pytest.fixture
def of_one_rank():
    """The layer over a group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with ExitStack() as stack:
        yield layer_ranks.Bench(0, 1, Shape(128, 2, 1, 128), 4, None, stack)
    dist.destroy_process_group()


def test_a_wrong_layer_over_ranks_is_found(of_one_rank, monkeypatch):
    monkeypatch.setattr(layer_ranks, "KINDS", {"bf16": None})
    ways = {"late": layer_ranks.ROUTES["…, wgrad overlapped"]}
    of_one_rank.check(ways)
    step = layer_ranks.Bench.step
    monkeypatch.setattr(layer_ranks.Bench, "step", lambda *words: [1.1 * x for x in step(*words)])
    with pytest.raises(AssertionError, match="late"):
        of_one_rank.check(ways)


def accumulator(leaf):
    return leaf.expand_as(leaf).grad_fn.next_functions[0][0]


def test_a_step_keeps_no_graph(of_one_rank, monkeypatch):
    leaf, grad = of_one_rank.local.x_TH, torch.autograd.grad

    def marking(*words, **settings):
        accumulator(leaf).metadata["seen"] = True
        assert accumulator(leaf).metadata  # while the graph lives
        return grad(*words, **settings)

    monkeypatch.setattr(torch.autograd, "grad", marking)
    of_one_rank.step(layer_ranks.ROUTES["…, wgrad overlapped"], None)
    assert not accumulator(leaf).metadata
