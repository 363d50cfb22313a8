"""The page of features is computed: it is not stale, and what it names exists."""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import coverage
from benchmarks.coverage import GATE_ON_A_GPU, GATED_FAMILIES, SECTIONS, Feature
from conformance.catalogue import CONTRACTS
from conformance.core.axes import Choice
from conformance.interface import Implementation

DOCS = Path(__file__).parents[2] / "docs"
FEATURES = [feature for features in SECTIONS.values() for feature in features]


def record_of(name):
    return json.loads((DOCS / "results" / f"{name}.json").read_text())


def test_the_page_is_what_the_catalogue_gives_today():
    command = "python -m benchmarks.coverage > docs/coverage.md"
    assert (DOCS / "coverage.md").read_text() == coverage.document(), f"stale: {command}"


def test_every_feature_is_there_once():
    assert [feature.number for feature in FEATURES] == list(range(1, 135))
    assert len({feature.name for feature in FEATURES}) == 134


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: str(feature.number))
def test_a_column_that_is_not_yes_has_a_sentence_and_no_other_row_has_one(feature):
    lacking = {coverage.NO, coverage.PARTLY} & set(coverage.state_of(feature).values())
    assert bool(lacking) == bool(feature.why)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"calls": "permuted"}, "permuted, which no contract judges"),
        ({"calls": "permute alignment=16"}, "permute has no axis alignment"),
        ({"calls": "permute law:splitting"}, "permute has no law splitting"),
        ({"calls": "permute dtype=float31"}, "no value 'float31'"),
        ({"calls": "topk_routing score=softmax bias=small"}, "no case of topk_routing"),
        ({"ref": "permuted"}, "moe_ref has no permuted"),
        ({"fast": "MoELayers"}, "moe_fast has no MoELayers"),
    ],
    ids=str,
)
def test_a_feature_that_names_what_does_not_exist_is_an_error(fields, message):
    with pytest.raises(LookupError, match=re.escape(message)):
        coverage.state_of(Feature(0, "a feature", **fields))


def test_a_value_that_no_case_has_is_not_judged():
    contract = CONTRACTS["drop_tokens"]
    judged_feature = Feature(0, "a feature", "drop_tokens policy=position")
    assert coverage.state_of(judged_feature)["contract"] == coverage.YES
    call = coverage.calls_of(judged_feature)[0]
    policy = next(axis for axis in coverage.scope_of("drop_tokens").axes if axis.name == "policy")
    assert isinstance(policy, Choice)
    assert coverage._occurs(contract.function, policy, coverage.case_of(call).policy)
    assert not coverage._occurs(contract.function, replace(policy, also=("never",)), "never")


def test_a_feature_that_moe_fast_lacks_or_refuses_has_the_state_no(monkeypatch):
    with monkeypatch.context() as without:
        without.setattr(coverage, "FAST", Implementation(SimpleNamespace(), "of nothing"))
        assert coverage.state_of(Feature(0, "lacking", "gate bias=False"))["fast"] == coverage.NO
    refused = coverage.Call("topk_routing", (("experts", "4"),), ())
    assert coverage.is_supported(refused)
    supports = coverage.FAST.namespace.supports
    try:
        coverage.FAST.namespace.supports = lambda function, *arguments, **settings: "not today"
        assert not coverage.is_supported(coverage.Call("topk_routing", (("experts", "5"),), ()))
    finally:
        coverage.FAST.namespace.supports = supports


def test_the_recorded_gate_judged_the_functions_that_moe_fast_has():
    functions = [name for name in CONTRACTS if coverage.FAMILY_OF[name] in GATED_FAMILIES]
    offered = sum(coverage.FAST.offers(name) for name in functions)
    rows = record_of(GATE_ON_A_GPU)["tables"][0]["rows"]
    assert {row[1] for row in rows} == {str(offered)} and {row[-1] for row in rows} == {"CONFORMANT"}
    assert all(record_of(feature.record) for feature in FEATURES if feature.record)
