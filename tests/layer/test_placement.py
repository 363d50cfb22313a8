"""Plans say where tensors are: sums that nobody adds are found, and the reference is placed so."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

import moe_ref
from benchmarks import placement
from moe_ref.config import DISPATCHERS, LayerConfig, LayerParameters, RouterConfig
from moe_ref.config.placement import AXES, PARTIAL, PLANS, PlacementError, Step, plan_of

EP = ("ep",)


def each(rule: str):
    """Every plan with each step of this kind that does something."""
    cases = [(key, step) for key, plan in PLANS.items() for step in plan.steps if step.rule == rule and step.axes]
    return pytest.mark.parametrize(
        ("key", "step"), cases, ids=lambda x: getattr(x, "out", None) or "-".join(map(str, x))
    )


@pytest.mark.parametrize("key", PLANS, ids=str)
def test_no_partial_sum_is_left_but_those_for_the_caller(key):
    plan = PLANS[key]
    places = plan.places()
    assert {name for name in places if PARTIAL in places[name].values()} >= set(plan.open_sums)
    assert places["output"] == places["x"] == places["d_x"]


@each("reduce")
def test_a_sum_that_no_rank_adds_is_found(key, step):
    plan = PLANS[key]
    without = tuple(replace(x, rule="add", letters="", axes=()) if x is step else x for x in plan.steps)
    with pytest.raises(PlacementError, match=r"partial sum|placed differently"):
        replace(plan, steps=without).places()


@each("reduce")
def test_a_sum_that_is_added_twice_is_found(key, step):
    plan = PLANS[key]
    second_sum = Step(step.out, (step.out,), "reduce", step.letters, step.axes)
    at = plan.steps.index(step) + 1
    with pytest.raises(PlacementError, match="which is no partial sum there"):
        replace(plan, steps=(*plan.steps[:at], second_sum, *plan.steps[at:])).places()


@each("move")
def test_rows_that_stay_where_they_are_do_not_fit(key, step):
    plan = PLANS[key]
    still = tuple(replace(x, axes=()) if x is step else x for x in plan.steps)
    with pytest.raises(PlacementError):
        replace(plan, steps=still).places()


def test_gradients_that_only_the_caller_can_add_are_named():
    plan = PLANS["alltoall", EP]
    with pytest.raises(PlacementError, match="d_latent_up is a partial sum over ep that no rank adds"):
        replace(plan, open_sums=()).places()
    with pytest.raises(PlacementError, match="d_fc1_weight is left to the caller to add, and is no partial sum"):
        replace(plan, open_sums=(*plan.open_sums, "d_fc1_weight")).places()


def test_an_unknown_plan_is_refused():
    for dispatcher, axes in (("nccl", EP), ("deepep", ("ep", "tp"))):
        with pytest.raises(ValueError, match=f"dispatcher is '{dispatcher}'"):
            plan_of(dispatcher, axes)
    assert {axes for _, axes in PLANS} == set(AXES)


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_the_references_tensors_are_where_its_plan_says(dispatcher):
    generator = torch.Generator().manual_seed(1)
    sizes = {"router_weight": (4, 3), "fc1_weight": (4, 4, 2), "fc2_weight": (4, 2, 2), "latent_down": (2, 3),
             "latent_up": (3, 2), "shared_fc1_weight": (4, 3), "shared_fc2_weight": (3, 2)}  # fmt: skip
    parameters = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in sizes.items()}
    x, d_output = torch.randn((2, 6, 3), generator=generator, dtype=torch.float64)
    places = PLANS[dispatcher, EP].places()

    def cut(name: str, y: torch.Tensor, ranks: int) -> list[torch.Tensor]:
        shards = y.chunk(ranks) if places[name]["ep"] in ("T", "E") else [y] * ranks
        return [shard.clone().requires_grad_() for shard in shards]

    def gradients(ranks: int) -> tuple[list[torch.Tensor], dict[str, list[torch.Tensor]]]:
        inputs = {name: cut(name, y, ranks) for name, y in ({"x": x} | parameters).items()}
        config = LayerConfig(
            router=RouterConfig(num_experts=4, topk=2, score_function="sigmoid"), dispatcher=dispatcher
        )
        weights = [LayerParameters(**{name: inputs[name][rank] for name in parameters}) for rank in range(ranks)]
        states = [moe_ref.new_state(config.router)] * ranks
        out = moe_ref.moe_layer(inputs["x"], weights, config, states=states).output
        torch.autograd.backward(out, list(d_output.chunk(ranks)))
        return out, {f"d_{name}": [y.grad for y in shards] for name, shards in inputs.items()}

    (right_out, of_one), (out, of_two) = gradients(1), gradients(2)
    assert_close(torch.cat(out), right_out[0])
    for name, shards in of_two.items():
        if places[name]["ep"] != PARTIAL:
            assert_close(torch.cat(shards), of_one[name][0])
            continue
        assert_close(sum(shards), of_one[name][0])
        assert not any(torch.allclose(shard, of_one[name][0]) for shard in shards)


def test_the_page_is_what_the_plans_give_today():
    page = Path(__file__).parents[2] / "docs" / "placement.md"
    assert page.read_text() == placement.document(), "stale: python -m benchmarks.placement > docs/placement.md"
