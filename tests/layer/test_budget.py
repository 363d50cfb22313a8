"""A step that drops rows runs again without a budget, and is then the step without one."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

import moe_fast
import moe_ref
from conformance.engine.options import ChildOptions
from conformance.engine.run.pool import Pool
from conformance.families.layer.cases import LayerCase
from conformance.peers import reference_layer
from moe_fast import MoELayer, within_budget
from moe_ref.config import LayerConfig, LayerParameters, Recipe, RouterConfig, rank_budget
from tests.common.fast import interpreted, normal, record_reads

TOKENS, HIDDEN, TOPK = 6, 4, 2
HERE = (str(Path(__file__).parents[2]),)


@pytest.fixture(scope="module")
def group() -> Iterator[Any]:
    """One rank's."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def layers(
    group: Any, *budgets: int | None, dispatcher: str = "hybridep", recipe: Recipe | None = None, **options: bool
) -> list[MoELayer]:
    torch.manual_seed(0)
    router = RouterConfig(num_experts=3, topk=TOPK, score_function="sigmoid", expert_bias=True)
    configs = [LayerConfig(router=router, dispatcher=dispatcher, num_rows=rows, recipe=recipe) for rows in budgets]
    return [MoELayer(config, HIDDEN, 2, group=group, init_std=0.5, **options) for config in configs]


def trained(both: list[MoELayer]) -> tuple[torch.Tensor, int]:
    """The step's output, and how often it ran."""
    runs = []

    def step() -> torch.Tensor:
        runs.append(1)
        y = both[1](both[0](normal(TOKENS, HIDDEN, seed=1)))
        y.square().sum().backward()
        return y.detach()

    def reset() -> None:
        for layer in both:
            layer.zero_grad()

    return within_budget(both, step, reset), len(runs)


def learnt(both: list[MoELayer]) -> list[torch.Tensor]:
    """Gradients and states."""
    states = [layer.router.state.tokens_per_expert for layer in both]
    return [*(x.grad for layer in both for x in layer.parameters()), *states]


@interpreted
@pytest.mark.parametrize("budgets", [(5, None), (100, 5)], ids=str)
def test_a_step_that_drops_rows_in_any_layer_is_the_step_without_a_budget(group, budgets):
    unlimited, both = layers(group, None, None), layers(group, *budgets)
    (y_unlimited, runs_unlimited), (y, runs) = trained(unlimited), trained(both)
    assert (runs_unlimited, runs) == (1, 2) and torch.equal(y, y_unlimited)
    assert all(torch.equal(a, b) for a, b in zip(learnt(both), learnt(unlimited), strict=True))
    assert [layer.config.num_rows for layer in both] == list(budgets)


@interpreted
def test_a_step_that_runs_again_has_seen_no_amax_before(group):
    recipe = Recipe("delayed", amax_history_len=2)
    unlimited, both = layers(group, None, None, recipe=recipe), layers(group, 5, None, recipe=recipe)
    assert (trained(unlimited)[1], trained(both)[1]) == (1, 2)
    pairs = zip(*([x for layer in step for x in layer.experts.buffers()] for step in (both, unlimited)), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@interpreted
def test_a_step_with_room_for_all_rows_runs_once_and_one_without_the_rule_is_wrong(group):
    enough = TOKENS * TOPK
    assert trained(layers(group, enough, enough))[1] == 1
    tight, unlimited = (layers(group, rows)[0](normal(TOKENS, HIDDEN, seed=1)) for rows in (5, enough))
    assert not torch.equal(tight, unlimited)


# ---- the rule for one layer's forward: in both packages, and the contract that judges it


def jittered_layer(rows: int | None) -> dict[str, Any]:
    """A layer whose router draws noise, and its input."""
    router = RouterConfig(num_experts=3, topk=TOPK, score_function="sigmoid", expert_bias=True)
    config = LayerConfig(router=router, dispatcher="alltoall", num_rows=rows, jitter_eps=0.5)
    weights = {
        "router_weight": normal(3, HIDDEN),
        "fc1_weight": normal(3, 4, HIDDEN),
        "fc2_weight": normal(3, HIDDEN, 2),
    }
    return {"x": normal(TOKENS, HIDDEN, seed=1), "parameters": LayerParameters(**weights), "config": config}


def of_one_rank(package: Any, layer_inputs: dict[str, Any], group: Any, **settings: Any) -> Any:
    """The layer's results on the only rank, drawn from one seed; torch's next number."""
    torch.manual_seed(5)
    x, parameters, config = layer_inputs.values()
    state = moe_ref.new_state(config.router)
    if package is moe_ref:
        out = moe_ref.moe_layer([x], [parameters], config, states=[state], **settings)
        results = (out.output[0], out.routed[0])
    else:
        rank_result = package.moe_layer(x, parameters, config, state=state, group=group, **settings)
        results = (rank_result.output, rank_result.routed)
    return [results[0], results[1].state.tokens_per_expert, torch.rand(1)]


@interpreted
@pytest.mark.parametrize("package", [moe_ref, moe_fast], ids=lambda package: package.__name__)
def test_a_layer_that_runs_again_draws_and_counts_once(package, group):
    unlimited = of_one_rank(package, jittered_layer(None), group)
    second_run = of_one_rank(package, jittered_layer(5), group, rerun=True)
    once = of_one_rank(package, jittered_layer(5), group)
    assert all(torch.equal(a, b) for a, b in zip(second_run, unlimited, strict=True))
    assert not torch.equal(once[0], unlimited[0]) and torch.equal(once[2], unlimited[2])


RULED = LayerCase(
    function="moe_layer", counts=(4, 3), tokens=7, hidden=5, width=6, experts=4, topk=2, budget=7, rerun=True
)


def _last_bit_of_a_second_run(x: Any, *arguments: Any, rerun: bool = False, **settings: Any) -> Any:
    out = reference_layer.moe_layer(x, *arguments, rerun=rerun, **settings)
    return out._replace(output=torch.nextafter(out.output, out.output.new_zeros(()))) if rerun else out


LAST_BIT = SimpleNamespace(**vars(reference_layer) | {"moe_layer": _last_bit_of_a_second_run})


def test_the_law_finds_a_second_run_that_is_not_the_layer_with_room_for_all():
    with Pool(ChildOptions("tests.layer.test_budget:LAST_BIT", "cpu", search=HERE)) as pool:
        outcomes = [outcome for _, outcome in pool.run([RULED, replace(RULED, law="rerun")])]
    assert [outcome.status for outcome in outcomes] == ["PASS", "FAIL"]
    assert (outcomes[1].finding["output"], outcomes[1].finding["check"]) == ("output", "rerun")


def _other_rows(x: Any, p: Any, *arguments: Any, recompute: Any = None, **settings: Any) -> Any:
    p = p._replace(fc2_weight=p.fc2_weight * 2) if recompute else p
    return reference_layer.moe_layer(x, p, *arguments, **settings)


def _refused(*arguments: Any, recompute: Any = None, **settings: Any) -> Any:
    if recompute:
        raise ValueError("rows of other ranks are not made again")
    return reference_layer.moe_layer(*arguments, **settings)


OTHER_ROWS = SimpleNamespace(**vars(reference_layer) | {"moe_layer": _other_rows})
REFUSED = SimpleNamespace(**vars(reference_layer) | {"moe_layer": _refused})


@pytest.mark.parametrize(("name", "status"), [("OTHER_ROWS", "FAIL"), ("REFUSED", "PASS")])
def test_rows_that_are_made_again_over_ranks_are_the_same_or_refused(name, status):
    case = replace(RULED, rerun=False, budget=0, grads="x+fc1_weight", law="sent_again")
    with Pool(ChildOptions(f"tests.layer.test_budget:{name}", "cpu", search=HERE)) as pool:
        ((_, outcome),) = pool.run([case])
    assert (outcome.status, (outcome.finding or {"check": "sent_again"})["check"]) == (status, "sent_again")


@interpreted
@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall", "deepep", "hybridep"])
def test_with_a_budget_the_host_reads_nothing_and_rows_are_dropped_alike(group, dispatcher, monkeypatch):
    """The twin is the layer without a budget, which reads its counts."""
    x, dy = normal(TOKENS, HIDDEN, seed=1), normal(TOKENS, HIDDEN, seed=2)
    num_reads, reads = [], record_reads(monkeypatch)
    for rows in (None, 5):
        (layer,) = layers(group, rows, dispatcher=dispatcher)
        reads.clear()
        layer(x).backward(dy)
        num_reads.append(len(reads))
    assert num_reads[0] > 0 == num_reads[1]
    assert bool(layer.over_budget)


@interpreted
def test_every_dispatcher_drops_the_same_rows(group):
    tight = [layers(group, 5, dispatcher=name)[0] for name in ("allgather", "alltoall", "deepep", "hybridep")]
    outputs = [layer(normal(TOKENS, HIDDEN, seed=1)) for layer in tight]
    unlimited = layers(group, None)[0](normal(TOKENS, HIDDEN, seed=1))
    for y in outputs[1:]:
        assert_close(y, outputs[0])
    assert not torch.equal(outputs[0], unlimited)


@interpreted
def test_over_shared_memory_rows_are_the_same(group):
    results = []
    for shared in (False, True):
        (layer,) = layers(group, 9, shared_memory=shared)
        x = normal(TOKENS, HIDDEN, seed=1).requires_grad_()
        y = layer(x)
        y.backward(normal(TOKENS, HIDDEN, seed=2))
        results.append([y, x.grad, layer.over_budget, *(weight.grad for weight in layer.parameters())])
    assert bool(results[0][2])
    for a, b in zip(*results, strict=True):
        assert_close(a, b)


def test_shared_memory_is_refused_with_another_dispatcher_than_hybridep(group):
    (layer,) = layers(group, None, shared_memory=True)
    layer.config = replace(layer.config, dispatcher="alltoall")
    with pytest.raises(ValueError, match="shared_memory is True; it must be False with alltoall"):
        layer(normal(TOKENS, HIDDEN))


def test_a_budget_is_the_even_share_times_the_factor_in_whole_tiles():
    assert rank_budget(100, topk=2, capacity_factor=1.1) == 220
    assert rank_budget(101, topk=1, capacity_factor=1.25) == 126
    assert rank_budget(100, topk=2, capacity_factor=1.1, align=32) == 224
    with pytest.raises(ValueError, match="capacity_factor is 0"):
        rank_budget(100, topk=2, capacity_factor=0)
