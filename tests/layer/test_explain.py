"""explain names the first stage that is wrong by itself."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from conformance.cli import main
from conformance.core.case import CaseError, case_from
from conformance.engine.run.corpus import checked
from conformance.engine.run.explain import Explained, explain
from conformance.families.dispatch.dispatcher import together
from conformance.interface import Implementation
from conformance.judge import judge
from conformance.usage import UsageError
from tests.common.suite import outcome_of
from tests.layer.test_suite import LAYER, case, with_gradients
from tests.layer.wrong_stages import composed, larger, without_gradient

SIZES = {"tokens": 4, "hidden": 3, "width": 2}
CASE = with_gradients(case(**SIZES, shared=1, losses="aux+z", bias=True))


def explained(implementation, layer_case=CASE) -> Explained:
    here = Implementation(implementation, "here")
    return explain(layer_case, SimpleNamespace(run_alone=lambda stage_case: outcome_of(stage_case, here)))


@pytest.mark.parametrize("name", ["route", "grouped_mlp", "unpermute", "shared_experts"])
def test_a_stage_that_is_wrong_is_named(name):
    explanation = explained(composed(**{name: larger}))
    assert (explanation.case.status, explanation.first) == ("FAIL", name)
    assert f"{name} is the first stage that is wrong by itself" in explanation.lines()
    failing = [stage for stage, outcome in explanation.stages.items() if outcome.status == "FAIL"]
    assert failing == [name]


def test_of_two_wrong_stages_the_first_is_named():
    assert explained(composed(unpermute=larger, grouped_mlp=larger)).first == "grouped_mlp"


def test_a_stage_that_is_wrong_in_its_gradient_alone_is_named():
    explanation = explained(composed(grouped_mlp=without_gradient))
    assert (explanation.case.finding or {})["output"] == "d_x"
    assert explanation.first == "grouped_mlp"


@pytest.mark.parametrize("fields", [{"padding": 3}, {"capacity": 2, "pad": True}], ids=str)
def test_of_a_right_layer_no_stage_is_wrong(fields):
    layer_case = replace(CASE, **fields)
    explanation = explained(composed(), layer_case)
    assert explanation.case.status == "PASS"
    assert {outcome.status for outcome in explanation.stages.values()} == {"PASS"}
    assert [*explanation.lines()][-1] == "no stage is wrong"


def test_right_stages_that_are_joined_wrongly_are_not_blamed():
    joined = composed()
    moe_layer = joined.moe_layer
    joined.moe_layer = lambda x, p, *arguments, **settings: moe_layer(
        x, p._replace(fc2_weight=p.fc2_weight.flip(0)), *arguments, **settings
    )
    explanation = explained(joined)
    assert (explanation.case.status, explanation.first) == ("FAIL", "")
    assert [*explanation.lines()][-1] == "no stage is wrong by itself, so what joins them is wrong"


def test_a_stage_that_is_not_offered_is_not_judged():
    stages = composed()
    del stages.shared_experts
    stages.moe_layer = lambda *arguments, **settings: composed().moe_layer(*arguments, **settings)
    explanation = explained(stages)
    assert explanation.stages["shared_experts"].status == "NOT_OFFERED"
    assert [*explanation.lines()][-1] == "not judged: shared_experts"


def test_a_case_without_stages_is_refused():
    with pytest.raises(UsageError, match="takes drawn cases of moe_layer"):
        explained(composed(), replace(CASE, golden="biases_of_experts"))
    with pytest.raises(CaseError, match="stage is 'alltoall_combine'; the layer of this case has gate, route, permute"):
        checked(case_from(CASE.record() | {"stage": "alltoall_combine"}))


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall", "deepep", "hybridep"])
def test_the_references_functions_of_ranks_are_right_on_the_stages_inputs(dispatcher, shards):
    """And a result that lacks a row is not."""
    room = 0 if dispatcher == "deepep" else 6
    layer_case = replace(CASE, counts=(1, 3), dispatcher=dispatcher, grads="x", budget=room, shards=shards)
    for name in layer_case.stages:
        stage = replace(layer_case, stage=name)
        if not name.startswith(dispatcher):
            continue
        calls = LAYER.calls(stage)
        output = "rows" if "dispatch" in name else "tokens"
        for rank, result in enumerate(together(calls)):
            expected = LAYER.right_at(rank, stage, calls, {})[output].resolve({output: getattr(result, output, result)})
            computed = getattr(result, output, result).detach()
            assert judge(output, expected, computed) is None
            assert judge(output, expected, torch.cat([0 * computed[:1], computed[1:]])) is not None


def test_over_ranks_the_wrong_combine_is_named(capsys):
    """A layer of the reference, which has its own combine, is right."""
    layer_case = case(counts=(2, 2), tokens=4, experts=2, topk=1, hidden=2, width=1, dispatcher="alltoall")
    assert main(["explain", layer_case.text, "--impl", "tests.layer.wrong_stages:wrong_combine"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "the whole: PASS"
    assert lines[-1] == "alltoall_combine is the first stage that is wrong by itself"
