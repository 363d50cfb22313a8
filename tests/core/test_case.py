"""The text of a case names it, parses back to it, and makes equal tensors on every machine."""

import hashlib
import json
from dataclasses import replace

import pytest

from conformance.core.case import SCHEMA, CaseError, case_from
from conformance.engine.run.corpus import checked
from conformance.families.permutation.cases import RoutingCase

CASE = RoutingCase(function="permute", tokens=3, experts=3, routing=(1, 2, 7))
RECORD = {"function": "permute", "tokens": 2}


def test_the_text_is_canonical_json_without_defaults():
    text = '{"experts":3,"function":"permute","routing":[1,2,7],"schema":1,"tokens":3}'
    assert CASE.text == text
    assert RoutingCase(function="permute").text == '{"function":"permute","schema":1}'
    shuffled = (
        '{ "tokens": 3, "poison": "nan", "schema": 1, "routing": [1, 2, 7], "function": "permute", "experts": 3 }'
    )
    assert case_from(json.loads(shuffled)).text == text


def test_the_id_is_the_start_of_the_texts_hash():
    assert CASE.id == hashlib.sha256(CASE.text.encode()).hexdigest()[:12] == "29d2156f4571"


def test_cases_that_differ_have_other_ids():
    changes = ({}, {"seed": 1}, {"routing": (1, 2, 6)}, {"function": "unpermute"}, {"golden": "by_expert"})
    assert len({replace(CASE, **change).id for change in changes}) == len(changes)


def test_none_and_zero_are_not_confused():
    assert case_from(RECORD | {"slack": 0}).slack == 0
    assert case_from(RECORD).slack is None
    assert case_from(RECORD | {"slack": 0}).id != case_from(RECORD).id


@pytest.mark.parametrize(
    ("record", "named"),
    [
        ([1, 2], "list"),
        ("permute", "str"),
        (None, "NoneType"),
        ({}, "function"),
        ({"function": "transmute"}, "transmute"),
        ({"function": ["permute"]}, "function"),
        ({"function": 3}, "function"),
        (RECORD | {"schema": SCHEMA + 1}, "schema"),
        (RECORD | {"schema": "1"}, "schema"),
        (RECORD | {"tokenz": 3}, "tokenz"),
        (RECORD | {"family": {}}, "family"),
        (RECORD | {"sizes": [1]}, "sizes"),
        (RECORD | {"tokens": "two"}, "tokens"),
        (RECORD | {"tokens": 2.0}, "tokens"),
        (RECORD | {"tokens": True}, "tokens"),
        (RECORD | {"tokens": None}, "tokens"),
        (RECORD | {"zero_probs": 1}, "zero_probs"),
        (RECORD | {"dtype": 16}, "dtype"),
        (RECORD | {"slack": "2"}, "slack"),
        (RECORD | {"slack": 1.5}, "slack"),
        (RECORD | {"slack": [1]}, "slack"),
        (RECORD | {"slack": None}, "slack"),
        (RECORD | {"routing": [1, "2"]}, "routing"),
        (RECORD | {"routing": 7}, "routing"),
        (RECORD | {"routing": [1]}, "routing"),
        (RECORD | {"routing": [1, 2]}, "routing"),
        (RECORD | {"tokens": -1}, "tokens"),
        (RECORD | {"experts": 0}, "experts"),
        (RECORD | {"spread": "wild"}, "wild"),
        ({"function": "sort_chunks", "sizes": [1, 2], "order": [0, 0]}, "order"),
        ({"function": "sort_chunks", "sizes": [-1], "order": [0]}, "sizes"),
        ({"function": "indices_to_multihot", "slots": [4]}, "slots"),
        ({"function": "topk_indices", "tokens": 2, "logits": [8]}, "logits"),
        ({"function": "topk_indices", "logits": [0.5]}, "logits"),
        ({"function": "route", "steps": "finish"}, "steps"),
        ({"function": "route", "steps": "train+tain"}, "steps"),
        ({"function": "route", "tokens": 3, "sequences": 2}, "sequences"),
        ({"function": "gate", "topk": 2}, "topk"),
        ({"function": "glu", "width": -1}, "width"),
        ({"function": "grouped_linear", "tail": -1}, "tail"),
        ({"function": "grouped_linear", "tokens": 3, "experts": 2, "counts": [3]}, "counts"),
        ({"function": "grouped_wgrad", "tokens": 3, "experts": 2, "counts": [1, 1]}, "counts"),
        ({"function": "grouped_dgrad", "tokens": 3, "experts": 2, "counts": [4, -1]}, "counts"),
        ({"function": "quantize", "variant": 99}, "variant"),
        ({"function": "glu_and_quantize", "variant": 5}, "variant"),
        ({"function": "activation_and_quantize", "tail": 1}, "tail"),
        ({"function": "quantize", "hidden": -1}, "hidden"),
        ({"function": "quantize", "tokens": 3, "experts": 2, "counts": [3]}, "counts"),
        ({"function": "quantize", "tail": 1}, "tail"),
        ({"function": "quantize", "scaling": "delayed", "steps": "update"}, "steps"),
        ({"function": "quantize", "steps": "quantize+quantize"}, "steps"),
        ({"function": "permute_and_quantize", "variant": 99}, "variant"),
        ({"function": "alltoall_dispatch", "counts": []}, "counts"),
        ({"function": "alltoall_dispatch", "counts": [1, 2], "shards": 3}, "shards"),
        ({"function": "deepep_dispatch", "counts": [1, 2], "shards": 2}, "shards"),
        ({"function": "deepep_dispatch", "topk": 2}, "topk"),
        ({"function": "deepep_dispatch", "local_experts": 2, "topk": 2, "slots": [1, 1]}, "slots"),
        ({"function": "hybridep_dispatch", "slots": [1]}, "slots"),
        ({"function": "deepep_low_latency_dispatch", "hidden": 64, "fp8": "fp8"}, "hidden"),
    ],
    ids=str,
)
def test_a_record_that_is_no_case_is_refused_with_the_name_of_its_field(record, named):
    with pytest.raises(CaseError, match=named):
        checked(case_from(record))


@pytest.mark.parametrize("name", ["law", "golden", "illegal"])
def test_a_name_that_its_function_does_not_have_is_refused(name):
    with pytest.raises(CaseError, match=f"{name} is 'unheard'"):
        checked(case_from(RECORD | {name: "unheard"}))
    fine = {"law": "history", "golden": "by_expert", "illegal": "align_zero"}[name]
    assert getattr(checked(case_from(RECORD | {name: fine})), name) == fine


@pytest.mark.parametrize(
    "record",
    [
        {"function": "topk_routing", "spread": "wild"},
        {"function": "topk_routing", "score": "relu"},
        {"function": "topk_routing", "score": "sigmoid", "bias": "huge"},
        {"function": "drop_tokens", "values": "dyadic"},
        {"function": "drop_tokens", "policy": "random"},
        {"function": "load_balancing_loss", "total": "none"},
        {"function": "gate", "router_dtype": "fp8"},
        {"function": "permute", "values": "distinct"},
        {"function": "glu", "kind": "softmax"},
        {"function": "activation", "weights": "negative"},
        {"function": "grouped_linear", "accumulator": "bfloat16"},
        {"function": "grouped_wgrad", "into": "bfloat16"},
        {"function": "permute", "layout": "wide_depth"},
        {"function": "quantize", "scaling": "rowwise"},
        {"function": "quantize", "role": "output"},
        {"function": "quantize", "direction": "diagonal"},
        {"function": "quantize", "values": "saturated"},
        {"function": "quantize", "dtype": "uint8"},
    ],
    ids=str,
)
def test_a_word_that_its_field_does_not_know_is_refused(record):
    *_, (field, word) = record.items()
    with pytest.raises(CaseError, match=f"{field} is '{word}'"):
        checked(case_from(record))


@pytest.mark.parametrize(
    "record",
    [
        {"function": "topk_routing", "topk": 2},
        {"function": "topk_routing", "experts": 0},
        {"function": "topk_routing", "bias": "small"},
        {"function": "topk_indices", "experts": 6, "groups": 4, "group_topk": 1},
        {"function": "aux_loss_scores", "tokens": -1},
        {"function": "drop_tokens", "capacity": -1},
        {"function": "gate", "hidden": -1},
        {"function": "gate", "grads": "bias"},
        {"function": "jitter", "eps": 16},
        {"function": "glu", "kind": "silu"},
        {"function": "activation", "clamp": 8},
        {"function": "glu", "kind": "geglu", "alpha": 1000},
        {"function": "glu", "width": 4, "interleave": 3},
        {"function": "glu", "grads": "probs"},
        {"function": "grouped_linear", "grads": "bias"},
        {"function": "quantize", "grads": "splits"},
        {"function": "quantize", "scaling": "nvfp4", "direction": "columnwise"},
        {"function": "route", "groups": 2},
        {"function": "route", "steps": "forward"},
        {"function": "route", "steps": "train+backward"},
    ],
    ids=str,
)
def test_settings_that_no_call_can_have_are_refused(record):
    with pytest.raises(CaseError):
        checked(case_from(record))
