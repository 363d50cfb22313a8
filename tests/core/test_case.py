"""A case is its own replay: its text names it, reads back as itself, and makes the same tensors everywhere."""

import hashlib
import json
from dataclasses import replace

import pytest
import torch

from conformance.catalogue import CONTRACTS
from conformance.core.case import SCHEMA, Case, CaseError, case_from
from conformance.core.tensors import BITS, DTYPES, PROB_BITS, WIDE, hashed, laid_out, payload, probabilities, row_scales
from conformance.engine.run.corpus import checked
from conformance.families.dispatch.cases import DispatchCase
from conformance.families.experts.cases import (
    FAR,
    ActivationCase,
    GroupedCase,
    counts_of,
    grouped_rows,
    hidden_of,
    probs_of,
    weights_of,
)
from conformance.families.experts.cases_mlp import MlpCase, SharedCase
from conformance.families.fused.cases import PermutedQuantizationCase, QuantizedActivationCase
from conformance.families.permutation.cases import ChunksCase, IndicesCase, RoutingCase, routed
from conformance.families.quantization.cases import QuantizeCase
from conformance.families.router.cases import (
    MINUS_INFINITY,
    NOT_A_NUMBER,
    SPREADS,
    GateCase,
    LoadCase,
    LogitsCase,
    indices_of,
    logits_of,
    padding_of,
)
from conformance.families.router.cases_route import RouteCase
from conformance.judge.exact import bits

CASES = [
    RoutingCase(function="permute", tokens=3, experts=3, routing=(1, 2, 7)),
    RoutingCase(
        function="unpermute",
        tokens=40,
        experts=6,
        hidden=3,
        spread="ragged",
        topk=2,
        slack=-2,
        grads="rows",
        law="history",
    ),
    RoutingCase(function="permute", tokens=0, routing=()),
    RoutingCase(function="pad_routing_map", golden="to_two"),
    RoutingCase(function="multihot_to_indices", illegal="no_slots"),
    ChunksCase(function="sort_chunks", sizes=(2, 0, 3), order=(2, 0, 1), tail=1, probs="bfloat16", poison="max"),
    IndicesCase(function="indices_to_multihot", tokens=2, topk=2, experts=3, slots=(0, -1, 2, 2), repeats=True),
    LogitsCase(
        function="topk_indices",
        tokens=2,
        experts=3,
        topk=2,
        logits=(8, 0, -8, 4, MINUS_INFINITY, NOT_A_NUMBER),
        precomputed=True,
    ),
    LogitsCase(
        function="topk_routing",
        tokens=9,
        experts=6,
        topk=2,
        score="sigmoid",
        bias="large",
        groups=3,
        group_topk=1,
        grads="logits",
    ),
    LogitsCase(function="aux_loss_scores", tokens=9, experts=6, topk=2, padding=3, spread="minus_inf", dtype="float64"),
    LogitsCase(function="z_loss", golden="two_tokens"),
    LogitsCase(function="sinkhorn_routing", illegal="no_slots", tokens=2, experts=2),
    LoadCase(
        function="drop_tokens", tokens=9, experts=4, topk=2, capacity=3, pad=True, values="zeros", policy="position"
    ),
    LoadCase(function="load_balancing_loss", tokens=9, experts=4, sequences=3, total="device", grads="scores"),
    LoadCase(function="update_expert_bias", tokens=9, experts=4, bias=3, map_dtype="int32"),
    GateCase(
        function="gate",
        tokens=3,
        hidden=5,
        experts=2,
        router_dtype="fp64",
        weight_dtype="bfloat16",
        bias=True,
        grads="x+weight+bias",
    ),
    GateCase(function="jitter", tokens=3, hidden=5, eps=15),
    GateCase(function="attach_loss", tokens=3, hidden=5, scale=-8, grads="loss"),
    ActivationCase(
        function="glu",
        tokens=3,
        width=4,
        clamp=56,
        offset=8,
        alpha=1702,
        interleave=2,
        probs="bfloat16",
        weights="signed",
        values="bounds",
    ),
    ActivationCase(function="glu", golden="swiglu"),
    ActivationCase(
        function="activation",
        tokens=3,
        width=4,
        kind="gelu",
        early=True,
        dtype="bfloat16",
        probs="float32",
        grads="h+probs",
    ),
    GroupedCase(
        function="grouped_linear",
        tokens=5,
        experts=3,
        counts=(0, 4, 1),
        tail=2,
        hidden=3,
        width=2,
        bias="float32",
        values="special",
        grads="weight",
    ),
    GroupedCase(
        function="grouped_dgrad",
        tokens=5,
        experts=3,
        hidden=3,
        width=2,
        accumulator="float64",
        index_dtype="int32",
        dtype="float16",
    ),
    GroupedCase(
        function="grouped_wgrad",
        tokens=5,
        experts=3,
        hidden=3,
        width=2,
        into="float32",
        dtype="bfloat16",
        values="rows",
        layout="wide_depth",
    ),
    QuantizeCase(
        function="quantize",
        scaling="mxfp8",
        role="weight",
        direction="both",
        tokens=3,
        experts=3,
        counts=(1, 0, 2),
        tail=2,
        hidden=2,
        gemm=True,
    ),
    QuantizeCase(
        function="quantize",
        scaling="delayed",
        variant=1,
        tokens=5,
        hidden=7,
        steps="quantize+reduced+reload",
        values="midpoints",
        grads="x",
    ),
    QuantizeCase(
        function="quantize",
        scaling="nvfp4",
        role="grad_output",
        direction="columnwise",
        dtype="bfloat16",
        values="special",
        layout="strided",
    ),
    QuantizeCase(function="quantize", golden="two_levels"),
    PermutedQuantizationCase(
        function="permute_and_quantize",
        scaling="mxfp8",
        tokens=2,
        experts=3,
        routing=(1, 6),
        align=2,
        slack=1,
        grads="tokens",
    ),
    PermutedQuantizationCase(function="permute_and_quantize", golden="a_scale_for_each_expert"),
    QuantizedActivationCase(
        function="glu_and_quantize",
        scaling="block",
        direction="both",
        tokens=5,
        experts=2,
        counts=(0, 5),
        tail=1,
        width=6,
        clamp=4,
    ),
    MlpCase(
        function="grouped_mlp",
        tokens=5,
        experts=2,
        counts=(0, 5),
        tail=1,
        hidden=3,
        width=4,
        bias1="float32",
        align=4,
        recompute="moe",
        grads="rows",
    ),
    MlpCase(
        function="grouped_mlp",
        scaling="mxfp8",
        variant=1,
        tokens=3,
        experts=2,
        hidden=1,
        width=2,
        probs="float32",
        dtype="bfloat16",
        grads="rows",
    ),
    GroupedCase(
        function="latent_projection", scaling="current", tokens=3, hidden=5, width=2, bias="float32", grads="x+bias"
    ),
    SharedCase(
        function="shared_experts",
        tokens=3,
        hidden=5,
        width=4,
        gate=True,
        again=True,
        values="special",
        grads="x+gate_weight",
    ),
    DispatchCase(
        function="alltoall_dispatch",
        counts=(3, 0, 2, 1),
        local_experts=2,
        topk=2,
        shards=2,
        capacity=2,
        probs="bfloat16",
        grads="tokens+probs",
    ),
    DispatchCase(
        function="hybridep_combine",
        counts=(1, 2),
        topk=2,
        slots=(0, 1, -1, 1, 0, -1),
        align=4,
        slack=-1,
        values="integers",
        grads="rows",
    ),
    DispatchCase(
        function="deepep_dispatch",
        counts=(2, 2),
        local_experts=3,
        topk=3,
        repeats="last slot",
        probs="float32",
        scales=3,
        index_dtype="int32",
    ),
    DispatchCase(function="deepep_low_latency_dispatch", golden="counts"),
    RouteCase(
        function="route",
        tokens=6,
        experts=4,
        topk=2,
        steps="record+forward+backward+finish+train",
        losses="aux+z",
        grads="logits",
    ),
]
RECORD = {"function": "permute", "tokens": 2}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_a_case_reads_back_as_itself(case):
    again = case_from(json.loads(case.text))
    assert again == case
    assert (again.text, again.id) == (case.text, case.id)


def test_the_text_is_canonical_json_without_defaults():
    text = '{"experts":3,"function":"permute","routing":[1,2,7],"schema":1,"tokens":3}'
    assert CASES[0].text == text
    assert RoutingCase(function="permute").text == '{"function":"permute","schema":1}'
    shuffled = (
        '{ "tokens": 3, "poison": "nan", "schema": 1, "routing": [1, 2, 7], "function": "permute", "experts": 3 }'
    )
    assert case_from(json.loads(shuffled)).text == text


def test_the_id_is_the_start_of_the_texts_hash():
    for case in CASES:
        assert case.id == hashlib.sha256(case.text.encode()).hexdigest()[:12]
    assert CASES[0].id == "29d2156f4571"


def test_cases_that_differ_have_other_ids():
    changed = [
        CASES[0],
        replace(CASES[0], seed=1),
        replace(CASES[0], routing=(1, 2, 6)),
        replace(CASES[0], function="unpermute"),
        *CASES[1:],
    ]
    assert len({case.id for case in changed}) == len(changed)


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
        ({"function": "quantize", "variant": 3}, "variant"),
        ({"function": "glu_and_quantize", "variant": 3}, "variant"),
        ({"function": "activation_and_quantize", "tail": 1}, "tail"),
        ({"function": "quantize", "hidden": -1}, "hidden"),
        ({"function": "quantize", "tokens": 3, "experts": 2, "counts": [3]}, "counts"),
        ({"function": "quantize", "tail": 1}, "tail"),
        ({"function": "quantize", "scaling": "delayed", "steps": "update"}, "steps"),
        ({"function": "quantize", "steps": "quantize+quantize"}, "steps"),
        ({"function": "permute_and_quantize", "variant": 3}, "variant"),
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
def test_what_is_no_case_is_refused_by_name(record, named):
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
        {"function": "quantize", "dtype": "float64"},
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


def tensors_of(case: Case):
    problem = CONTRACTS[case.function].problem(case)
    return {
        name: bits(x).tobytes()
        for name, x in (problem.tensors | {f"d_{k}": x for k, x in problem.cotangents.items()}).items()
    }


@pytest.mark.parametrize("case", [case for case in CASES if not case.illegal], ids=lambda case: case.id)
def test_equal_cases_make_equal_tensors(case):
    assert tensors_of(case) == tensors_of(case_from(json.loads(case.text)))


def test_another_seed_makes_other_tensors():
    case = replace(CASES[0], hidden=4)
    assert tensors_of(case) != tensors_of(replace(case, seed=1))


def test_hashing_is_pinned():
    assert hashed(7, "tokens", 4).tolist() == [2928969240, 1410587951, 3064867217, 71826486]
    assert hashed(7, "tokens", 2).tolist() == hashed(7, "tokens", 4).tolist()[:2]
    assert hashed(7, "rows", 4).tolist() != hashed(7, "tokens", 4).tolist()


def test_payloads_are_pinned():
    assert payload(1, "tokens", (2, 3), "float32").tolist() == [
        [-1.9990234375, 0.921875, -0.51611328125],
        [-1.41259765625, 0.94580078125, 0.11376953125],
    ]
    assert payload(1, "tokens", (2, 3), "bfloat16").tolist() == [
        [-1.984375, -0.6875, 0.5078125],
        [-0.5859375, 0.9765625, 0.671875],
    ]
    assert payload(1, "tokens", (1, 3), "float32", "wide").tolist() == [
        [-4.38795280456543, -0.008654408156871796, -13.915393829345703]
    ]
    assert payload(0, "rows", (2, 4), "uint8").tolist() == [[17, 18, 153, 223], [71, 1, 123, 138]]


def test_probabilities_are_pinned():
    assert probabilities(3, "probs", (4,), "float32").tolist() == [0.787109375, 0.962890625, 0.919921875, 0.5185546875]
    assert probabilities(3, "probs", (8,), "bfloat16", zeros=True).tolist() == [
        0.296875,
        0.703125,
        0.0,
        0.1484375,
        0.96875,
        0.953125,
        0.5,
        0.0,
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dyadic_values_are_exact_and_fill_their_dtype(dtype):
    bits_of_them = BITS[DTYPES[dtype]]
    integers = payload(5, "tokens", (300, 9), dtype).double() * 2 ** (bits_of_them - 1)
    assert torch.equal(integers, integers.round())
    assert 2 ** (bits_of_them - 1) < integers.abs().max() < 2**bits_of_them
    assert bool((integers % 2 == 1).any())
    narrower = {"float32": torch.bfloat16, "float16": torch.bfloat16, "bfloat16": torch.float8_e4m3fn}[dtype]
    assert not torch.equal(
        (integers / 2 ** (bits_of_them - 1)).to(narrower).double(), integers / 2 ** (bits_of_them - 1)
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_probabilities_are_exact_and_fill_their_dtype(dtype):
    integers = probabilities(5, "probs", (300, 9), dtype).double() * 2 ** PROB_BITS[DTYPES[dtype]]
    assert torch.equal(integers, integers.round())
    assert bool((integers % 2 == 1).any())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_wide_values_lie_many_powers_of_two_apart_and_do_not_overflow(dtype):
    x = payload(5, "tokens", (300, 9), dtype, "wide").float().abs()
    assert x.isfinite().all()
    assert x.max() > 2**11
    assert 0 < x[x > 0].min() < 2**-11


def test_probabilities_lie_above_zero_unless_zeros_are_asked_for():
    assert probabilities(0, "probs", (500,), "float32").min() > 0
    assert probabilities(0, "probs", (500,), "float32").max() <= 1
    assert (probabilities(0, "probs", (500,), "float32", zeros=True) == 0).any()


def test_rows_in_sequence_differ_in_their_first_column():
    for dtype in ("float32", "bfloat16", "float16"):
        first = payload(4, "tokens", (511, 3), dtype)[:, 0]
        assert len(set(first.tolist())) == len(first)


def test_special_values_hold_every_strange_number():
    x = payload(0, "tokens", (100, 8), "float32", "special")
    assert x.isnan().any()
    assert (x == torch.inf).any()
    assert (x == -torch.inf).any()
    assert ((x == 0) & x.signbit()).any()
    assert x.isfinite().any()


def test_one_byte_payloads_hold_every_code():
    for dtype in ("float8_e4m3fn", "float8_e5m2", "uint8"):
        assert len(payload(0, "tokens", (80, 80), dtype).view(torch.uint8).unique()) == 256


def test_an_explicit_map_has_one_bit_for_each_expert():
    case = RoutingCase(function="permute", tokens=3, experts=3, routing=(0b001, 0b110, 0))
    assert routed(case).tolist() == [[True, False, False], [False, True, True], [False, False, False]]


LOGITS = LogitsCase(function="topk_routing", tokens=40, experts=24, topk=3)


def test_explicit_logits_are_eighths():
    case = LogitsCase(function="topk_indices", tokens=2, experts=2, logits=(4, -12, MINUS_INFINITY, NOT_A_NUMBER))
    assert logits_of(case).nan_to_num(nan=7).tolist() == [[0.5, -1.5], [torch.finfo(torch.float32).min, 7]]


def test_logits_are_pinned():
    assert logits_of(replace(LOGITS, tokens=1, experts=4, seed=1)).tolist() == [
        [-4.16064453125, -5.17236328125, 7.6793212890625, -5.7032470703125]
    ]
    assert logits_of(replace(LOGITS, tokens=1, experts=4, seed=1, dtype="bfloat16")).tolist() == [
        [-1.25, -4.0625, 4.5, -6.3125]
    ]


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_a_spread_is_what_its_name_says(spread, dtype):
    x = logits_of(replace(LOGITS, spread=spread, dtype=dtype))
    order = x.sort(dim=1).values.double()
    assert x.dtype == DTYPES[dtype]
    says = {
        "distinct": (order.diff(dim=1) > 0).double().mean() > 0.9 and x.isfinite().all(),
        "ties": (order.diff(dim=1) == 0).any(1).all(),
        "near": (order.diff(dim=1).abs() < 2 * x.double().abs().max() * torch.finfo(x.dtype).eps).sum(1).min() > 1
        and len(x.unique()) > 6,
        "negative": (x < 0).all(),
        "extreme": x.isfinite().all() and x.abs().max() > 2**14,
        "minus_inf": (x == -torch.inf).all(1).any() and (x == -torch.inf).any(1).all() and x.isfinite().any(),
        "nan": x.isnan().any() and (x == torch.inf).any() and x.isfinite().all(1).any(),
        "equal": len(x.unique()) == 1,
        "saturated": (x >= 16).all(),
    }
    assert says[spread]


def test_given_indices_name_different_experts():
    index = indices_of(LOGITS)
    assert index.shape == (40, 3)
    assert all(len(set(row)) == 3 and min(row) >= 0 and max(row) < 24 for row in index.tolist())


def test_padding_marks_its_share_of_the_tokens():
    assert [int(padding_of(replace(LOGITS, padding=n)).sum()) for n in (0, 8)] == [0, 40]
    assert 8 < int(padding_of(replace(LOGITS, padding=4)).sum()) < 32


ROWS = ActivationCase(function="glu", tokens=60, width=9)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("values", ["dyadic", "rows", "bounds", "saturated", "special"])
def test_hidden_values_are_what_their_name_says(values, dtype):
    x = hidden_of(replace(ROWS, values=values, dtype=dtype, clamp=56), 18)
    wide = x.double()
    says = {
        "dyadic": wide.abs().max() <= 2,
        "rows": wide.abs().amax(1).max() > 2**11 and wide.abs().amax(1).min() < 2**-10,
        "bounds": all(bool((wide == y).any()) for y in (7, -7, 0))
        and bool(((wide > 7) & (wide < 7.2)).any() and ((wide < 7) & (wide > 6.9)).any()),
        "saturated": wide.isfinite().all()
        and {abs(y) for y in wide.flatten().tolist() if abs(y) > 2}
        == {float(torch.tensor(y).to(x.dtype)) for y in FAR},
        "special": x.isnan().any()
        and (x == torch.inf).any()
        and (x == -torch.inf).any()
        and 0 < int(x.isfinite().all(1).sum()) < 60,
    }
    assert x.dtype == DTYPES[dtype]
    assert says[values]


def test_row_scales_are_powers_of_two_from_one_end_to_the_other():
    exponents = row_scales(0, 400).log2()
    assert exponents.unique().tolist() == list(range(-12, 13))


def test_signed_probs_lie_on_both_sides_of_zero_and_beyond_one():
    p = probs_of(0, 200, "float32", "signed")
    assert p.min() < -1 and p.max() > 1
    assert (p == 0).any() and p[p == 0].signbit().any() and not p[p == 0].signbit().all()


SEGMENTS = GroupedCase(function="grouped_linear", tokens=7, experts=3, tail=2, hidden=4, width=5)


def test_counts_are_as_even_as_can_be_unless_they_are_given():
    assert counts_of(SEGMENTS) == (3, 2, 2)
    assert counts_of(replace(SEGMENTS, counts=(0, 7, 0))) == (0, 7, 0)


@pytest.mark.parametrize("values", ["dyadic", "rows", "special"])
def test_rows_behind_the_last_segment_hold_nothing_but_nan(values):
    x = grouped_rows(replace(SEGMENTS, values=values), "rows", 4)
    assert x[7:].isnan().all()
    assert values == "special" or x[:7].isfinite().all()


def test_special_rows_and_weights_are_spoilt_in_places():
    case = replace(SEGMENTS, tokens=60, experts=9, values="special")
    odd, weights = ~grouped_rows(case, "rows", 4)[:60].isfinite(), ~weights_of(case, "weight", 5, 4).isfinite()
    assert 0 < int(odd.any(1).sum()) < 30 and int(odd.sum(1).max()) == 1
    assert weights.flatten(1).sum(1).tolist() == [1, 0, 0] * 3


X = payload(0, "tokens", (5, 6), "float32")


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "strided", "shifted"])
@pytest.mark.parametrize(
    "x",
    [X, X[:, 0].clone(), X[:0], X.to(torch.bfloat16), X.to(torch.float8_e4m3fn), X > 0],
    ids=lambda x: f"{x.dtype}{list(x.shape)}",
)
def test_layouts_keep_the_values(x, layout):
    placed = laid_out(x, layout)
    assert placed.dtype == x.dtype
    assert placed.shape == x.shape
    assert (bits(placed) == bits(x)).all()


def test_layouts_have_the_strides_they_promise():
    assert laid_out(X, "contiguous").stride() == (6, 1)
    assert laid_out(X, "transposed").stride() == (1, 5)
    assert laid_out(X, "strided").stride() == (24, 2)
    assert laid_out(X[:, 0].clone(), "transposed").stride() == (2,)
    matrices = payload(0, "weight", (6, 5), "float32").reshape(2, 3, 5)
    assert laid_out(matrices, "transposed").stride() == (15, 1, 3)
    shifted = laid_out(X, "shifted")
    assert (shifted.stride(), shifted.storage_offset()) == ((6, 1), 1)


def test_an_expanded_layout_repeats_its_first_entry_without_memory():
    expanded = laid_out(X, "expanded")
    assert expanded.stride() == (0, 1)
    assert torch.equal(expanded, X[:1].repeat(5, 1))
    assert laid_out(X[:0], "expanded").shape == (0, 6)


def test_what_lies_between_strided_values_is_garbage():
    raw = laid_out(X, "strided").untyped_storage()
    whole = torch.empty(0).set_(raw)
    assert whole.isnan().any()


@pytest.mark.parametrize(("layout", "dim"), [("wide_rows", 0), ("wide_columns", 1), ("wide_depth", 2)])
@pytest.mark.parametrize("entries", [2, 3, 4])
def test_wide_layouts_pass_every_32_bit_offset(layout, dim, entries):
    x = (
        payload(0, "tokens", (entries, entries), "uint8")
        if dim < 2
        else payload(0, "tokens", (entries**2, entries), "uint8").reshape(entries, entries, -1)
    )
    placed = laid_out(x, layout)
    assert placed.stride(dim) * (entries - 1) > 2**31
    assert placed.stride(dim) * (entries - 1) <= WIDE
    assert torch.equal(placed, x)


def test_a_vector_is_wide_in_its_only_dimension():
    x = payload(0, "probs", (3, 1), "uint8").flatten()
    placed = laid_out(x, "wide_columns")
    assert placed.stride(0) * 2 > 2**31
    assert torch.equal(placed, x)


@pytest.mark.parametrize("name", ["d_rows", "tokens"])
def test_an_expanded_input_repeats_in_the_master_copy_too(name):
    case = RoutingCase(
        function="permute", tokens=4, experts=2, hidden=3, grads="tokens", layout="expanded", layout_of=name
    )
    problem = CONTRACTS["permute"].problem(case)
    master = problem.cotangents["rows"] if name == "d_rows" else problem.required["tokens"]
    assert torch.equal(master, master[:1].expand(master.shape))
