"""Each law rejects a namespace with right values on the case; the reference keeps all laws."""

import itertools
from dataclasses import replace

import pytest
import torch

import moe_ref
from conformance.catalogue import CONTRACTS
from conformance.core.autocast import AUTOCAST
from conformance.core.axes import Dtype
from conformance.core.case import axes_of
from conformance.core.shared_out_laws import ONE_PROCESS
from conformance.engine.child.evaluate import evaluate
from conformance.families.dispatch.cases import FUNCTIONS as COLLECTIVES
from conformance.families.dispatch.flat_experts import FlatCase
from conformance.families.experts.laws import ordinary
from conformance.families.layer.laws import RERUN, SENT_AGAIN
from conformance.families.permutation.cases import RoutingCase
from conformance.interface import Implementation, load
from tests.common.suite import outcome_of, wrapped
from tests.core.call_twins import CALL_TWINS
from tests.core.law_twins import (
    ACTIVATED,
    ACTIVATION,
    ALIGNED,
    ATTACH,
    AUX,
    BIAS,
    BLOCKS,
    CHUNKS,
    DGRAD,
    DROP,
    FORWARD,
    FORWARD_LINEAR,
    FORWARD_MLP,
    GATE,
    GLU,
    JITTER,
    LAYOUT,
    LINEAR,
    LOSS,
    MLP,
    ONE_STEP,
    PAD,
    PERMUTE,
    PROJECTION,
    QUANTIZE,
    ROUTE,
    SHARED,
    SINKHORN,
    SPREAD_TOPK,
    TO_INDICES,
    TO_MULTIHOT,
    TOPK,
    TRAINED_MLP,
    TWINS,
    UNPERMUTE,
    WGRAD,
    Z,
)  # fmt: skip
from tests.core.layer_laws import LAYER_TWINS, OF_LAYER
from tests.core.parameter_laws import OF_PARAMETERS, PARAMETER_TWINS

OF_RANKS = {ONE_PROCESS.name, RERUN.name, SENT_AGAIN.name}  # their twins are ranks
ALONE = {
    function: [law for law in contract.laws.values() if law.name not in OF_RANKS]
    for function, contract in CONTRACTS.items()
    if function not in COLLECTIVES
}
ON_A_CPU = {function: [law for law in laws if law.device != "cuda"] for function, laws in ALONE.items()}


@pytest.mark.parametrize(
    ("law", "case", "broken"),
    TWINS + LAYER_TWINS + PARAMETER_TWINS,
    ids=lambda x: x if isinstance(x, str) else getattr(x, "__name__", ""),
)
def test_a_namespace_with_right_values_that_breaks_a_law_is_found_by_that_law(law, case, broken):
    """A namespace with memory is built anew for each run."""
    build = broken if callable(broken) else lambda: broken
    assert outcome_of(case, build()).status == "PASS"
    outcome = outcome_of(replace(case, law=law), build())
    assert (outcome.status, outcome.finding["check"]) == ("FAIL", law)


def test_every_law_has_a_twin_that_must_fail():
    assert {law for law, _, _ in TWINS + CALL_TWINS + LAYER_TWINS + PARAMETER_TWINS} == {
        law.name for laws in ON_A_CPU.values() for law in laws
    }


def adds_by_layout():
    """A sum whose order, and so its last bit, depends on the input's strides."""

    def activated(original, h, d_out, recipe, **settings):
        out = original(h, d_out, recipe, **settings)
        return out if d_out.is_contiguous() else out._replace(d_probs=torch.nextafter(out.d_probs, torch.zeros(())))

    return wrapped("glu_backward_and_quantize", activated, deterministic=True)


def test_no_law_minds_a_sum_whose_order_follows_the_layout():
    case = replace(ACTIVATED, function="glu_backward_and_quantize", layout="transposed", layout_of="d_out")
    laws = [law for law in CONTRACTS[case.function].laws.values() if law.device != "cuda" and law.applies(case)]
    assert "padding_values" in {law.name for law in laws}
    assert {law.name: outcome_of(replace(case, law=law.name), adds_by_layout()).status for law in laws} == {
        law.name: "PASS" for law in laws
    }


FLAT = FlatCase(function="flatten_experts", tokens=3, experts=4, groups=2, shards=2, grads="x")
MXFP8 = replace(QUANTIZE, scaling="mxfp8", counts=(1, 0, 2), tokens=3, hidden=2)
NVFP4 = replace(MXFP8, scaling="nvfp4")
NARROW = replace(ACTIVATED, counts=(1, 0, 2), tokens=3, width=2)
CALLS = [
    PERMUTE,
    replace(ALIGNED, probs="float32", grads="tokens+probs", map_dtype="int64"),
    replace(FORWARD, dtype="float8_e4m3fn", values="special"),
    replace(FORWARD, dtype="bfloat16", capacity=2, probs="bfloat16", zero_probs=True, grads="probs"),
    replace(FORWARD, capacity=9, layout="strided", layout_of="tokens"),
    replace(ALIGNED, slack=2, values="special", poison="max"),
    replace(PERMUTE, slack=-2),
    replace(PERMUTE, tokens=0, routing=()),
    UNPERMUTE,
    replace(UNPERMUTE, align=4, probs="float32", grads="rows+probs", poison="max"),
    replace(UNPERMUTE, dtype="bfloat16", values="special", probs="bfloat16", capacity=2),
    replace(UNPERMUTE, grads="", align=2),
    CHUNKS,
    replace(CHUNKS, grads="rows"),
    replace(CHUNKS, dtype="float8_e5m2", tail=0, index_dtype="int32"),
    replace(CHUNKS, probs="float32", grads="rows+probs", values="special"),
    replace(CHUNKS, sizes=(), order=(), tail=0),
    PAD,
    replace(PAD, align=16, map_dtype="uint8", layout="transposed", layout_of="routing_map"),
    TO_MULTIHOT,
    replace(TO_MULTIHOT, slots=(), repeats=True, empty=1, grads="probs", dtype="float16"),
    LAYOUT,
    replace(LAYOUT, slots=(), repeats=True, empty=1, experts=6, ranks=3, index_dtype="int16"),
    TO_INDICES,
    replace(TO_INDICES, topk=5, grads="probs", dtype="bfloat16", zero_probs=True),
    replace(TO_INDICES, tokens=0, routing=()),
    TOPK,
    SPREAD_TOPK,
    replace(SPREAD_TOPK, function="topk_indices"),
    replace(SPREAD_TOPK, function="topk_indices", grads="logits", scaling=20),
    replace(
        SPREAD_TOPK,
        function="topk_indices",
        score="sqrtsoftplus",
        bias="large",
        grads="logits",
        layout="strided",
        layout_of="expert_bias",
    ),
    replace(SPREAD_TOPK, experts=8, topk=3, groups=4, group_topk=2, score="sigmoid", bias="small", grads="logits"),
    replace(SPREAD_TOPK, function="topk_indices", spread="ties", dtype="bfloat16", score="softmax_pre", grads="logits"),
    replace(SPREAD_TOPK, precomputed=True, layout="transposed", layout_of="logits"),
    replace(SPREAD_TOPK, spread="minus_inf", grads="logits"),
    replace(SPREAD_TOPK, tokens=0),
    AUX,
    replace(AUX, score="sqrtsoftplus", spread="ties", grads="logits", dtype="float64"),
    replace(AUX, padding=8),
    Z,
    replace(Z, padding=0, grads="logits", dtype="float16"),
    replace(Z, spread="nan"),
    SINKHORN,
    replace(SINKHORN, topk=1, evaluation=True, grads="logits", dtype="bfloat16"),
    DROP,
    replace(DROP, pad=True, policy="position", values="zeros", map_dtype="uint8", grads="probs"),
    replace(DROP, capacity=9, values="negative", layout="strided", layout_of="probs"),
    LOSS,
    replace(LOSS, sequences=3, total="device", grads="scores", dtype="bfloat16"),
    replace(LOSS, total="zero"),
    BIAS,
    replace(BIAS, even=True, rate=250, map_dtype="int32"),
    GATE,
    replace(GATE, bias=True, router_dtype="fp64", dtype="bfloat16", weight_dtype="float32", grads="x+weight+bias"),
    replace(GATE, tokens=0),
    JITTER,
    replace(JITTER, eps=0, dtype="bfloat16"),
    ATTACH,
    replace(ATTACH, grads="x+loss", scale=-3, dtype="float16"),
    GLU,
    replace(GLU, clamp=6, offset=8, alpha=1702, interleave=2, values="bounds", weights="signed", dtype="bfloat16"),
    replace(GLU, kind="geglu", values="special", early=True, grads="", dtype="float16"),
    replace(GLU, kind="geglu_erf", values="saturated", probs="float64", layout="expanded", layout_of="d_out"),
    ACTIVATION,
    replace(ACTIVATION, kind="gelu_tanh", values="rows", dtype="bfloat16", early=True, weights="zeros"),
    replace(ACTIVATION, kind="relu", values="special", grads="", probs="bfloat16"),
    ONE_STEP,
    replace(
        ONE_STEP, scaling="mxfp8", hidden=2, align=1, slack=1, direction="both", probs="float32", grads="tokens+probs"
    ),
    replace(ONE_STEP, scaling="delayed", align=0, capacity=2, values="special"),
    ACTIVATED,
    replace(NARROW, function="activation_and_quantize", scaling="mxfp8", direction="both", dtype="bfloat16"),
    replace(ACTIVATED, function="activation_and_quantize", grads="h"),
    replace(ACTIVATED, function="glu_backward_and_quantize", values="special", rounded=True, interleave=2),
    replace(NARROW, function="glu_backward_and_quantize", scaling="nvfp4"),
    replace(NARROW, function="activation_backward_and_quantize", scaling="block", kind="gelu_tanh"),
    replace(ACTIVATED, scaling="delayed", grads="h+probs", values="rows"),
    LINEAR,
    FORWARD_LINEAR,
    replace(
        LINEAR, values="rows", tail=3, dtype="bfloat16", index_dtype="int32", layout="transposed", layout_of="weight"
    ),
    replace(LINEAR, values="special", bias="bfloat16", grads="rows+weight+bias", accumulator="float64"),
    replace(FORWARD_LINEAR, tokens=0, counts=(0, 0, 0), tail=2),
    replace(LINEAR, experts=1, counts=(), hidden=70, width=70, tokens=70),
    DGRAD,
    replace(DGRAD, values="special", tail=2, dtype="float16"),
    replace(DGRAD, layout="expanded", layout_of="d_out"),
    WGRAD,
    replace(WGRAD, values="special", tail=2, dtype="bfloat16", into="float32"),
    replace(WGRAD, into="float64", values="rows", counts=(9, 0, 0)),
    MLP,
    replace(
        MLP, values="special", bias1="float32", bias2="bfloat16", dtype="bfloat16", tail=2, align=4, recompute="moe"
    ),
    replace(FORWARD_MLP, function="sequential_mlp", on_input=True, index_dtype="int32"),
    FORWARD_MLP,
    replace(MLP, function="sequential_mlp", tail=1, recompute="moe_act"),
    replace(FORWARD_MLP, function="sequential_mlp", weights="signed"),
    SHARED,
    replace(SHARED, grads=""),
    PROJECTION,
    replace(PROJECTION, grads=""),
    replace(SHARED, gate=True, values="rows", dtype="bfloat16", again=True, grads="x+gate_weight"),
    QUANTIZE,
    replace(
        QUANTIZE,
        scaling="delayed",
        steps="quantize+update+quantize+reduced+reload+quantize",
        tail=2,
        grads="x",
        direction="both",
    ),
    replace(QUANTIZE, scaling="delayed", variant=2, role="grad_output", values="special", dtype="float16"),
    BLOCKS,
    replace(BLOCKS, variant=1, values="wide", direction="both", tail=1, dtype="bfloat16", gemm=True),
    replace(BLOCKS, role="weight", values="huge", experts=0, counts=(), layout="transposed", layout_of="x"),
    replace(QUANTIZE, variant=1, values="rows", role="weight"),
    replace(MXFP8, values="bounds", tail=3),
    replace(MXFP8, variant=2, values="tiny", role="weight", direction="both", gemm=True),
    replace(NVFP4, role="grad_output", direction="both", dtype="bfloat16", grads="x"),
    replace(NVFP4, variant=1, values="zeros", dtype="float16"),
    replace(NVFP4, variant=2, values="rows", direction="both", tail=1),
    replace(QUANTIZE, tokens=0, counts=(0, 0, 0), tail=2),
    ROUTE,
    replace(
        ROUTE,
        steps="record+forward+eval+nograd+backward+frozen+reload+train",
        sequences=2,
        losses="seq+global",
        capacity=3,
        padding=3,
    ),
]


CALLS += [*OF_LAYER, replace(OF_LAYER[0], evaluation=True)]
CALLS += [FLAT, replace(FLAT, grads="")]
CALLS += [replace(case, grads="probs") for case in (TO_MULTIHOT, TO_INDICES)]
CALLS += [replace(case, grads="logits") for case in (Z, SINKHORN)]
CALLS += [*OF_PARAMETERS, TRAINED_MLP, replace(TRAINED_MLP, scaling="delayed")]
CALLS += [replace(GATE, grads="x+weight"), replace(ATTACH, grads="x+loss"), replace(LOSS, grads="scores")]


def inside_autocast(function):
    """A case of which the law of autocast is asked: in 16 bits, or of products in float64."""
    law = CONTRACTS[function].laws.get(AUTOCAST.name)
    for case, dtype in itertools.product(
        [case for case in CALLS if case.function == function], ("bfloat16", "float64")
    ):
        axes = {name: axis for name, axis in axes_of(type(case)).items() if isinstance(axis, Dtype)}
        floats = {name: axis for name, axis in axes.items() if "float" in getattr(case, name)}
        narrow = {name: dtype if dtype in axis.values + axis.also else "" for name, axis in floats.items()}
        if law and law.applies(replace(case, **narrow)):
            return [replace(case, **narrow)]
    return []


CALLS += [case for function in ON_A_CPU for case in inside_autocast(function)]


@pytest.mark.parametrize("case", CALLS, ids=lambda case: f"{case.function}-{case.id}")
def test_the_reference_keeps_every_law(case):
    for law in ON_A_CPU[case.function]:
        if law.applies(case):
            outcome = outcome_of(replace(case, law=law.name), load("moe_ref").namespace)
            assert outcome.status in ("PASS", "UNINFORMATIVE"), (law.name, outcome)


def test_every_law_is_tried_on_the_reference():
    tried = {(case.function, law.name) for case in CALLS for law in ON_A_CPU[case.function] if law.applies(case)}
    assert tried == {(function, law.name) for function, laws in ON_A_CPU.items() for law in laws}


@pytest.mark.parametrize("law", ["token_reversal", "expert_relabelling", "batch_concat", "shift", "replay"])
def test_no_law_of_choices_is_asked_where_it_does_not_hold(law):
    assert CONTRACTS["topk_routing"].laws[law].applies(SPREAD_TOPK)
    assert not CONTRACTS["topk_routing"].laws[law].applies(replace(SPREAD_TOPK, golden="softmax_of_all"))
    assert not CONTRACTS["topk_routing"].laws[law].applies(replace(SPREAD_TOPK, illegal="no_slots"))
    assert (
        not CONTRACTS["topk_routing"].laws[law].applies(replace(SPREAD_TOPK, layout="expanded", layout_of="d_probs"))
        or law == "replay"
    )


def test_what_is_added_to_all_logits_shows_where_scores_are_not_softmax():
    assert not CONTRACTS["topk_routing"].laws["shift"].applies(replace(SPREAD_TOPK, score="sigmoid"))
    assert not CONTRACTS["aux_loss_scores"].laws["shift"].applies(replace(AUX, score="sqrtsoftplus"))
    assert CONTRACTS["aux_loss_scores"].laws["shift"].applies(AUX)


@pytest.mark.parametrize(
    "law", ["token_permutation", "split", "padding_independence", "buffer_reuse", "scaling", "adjointness"]
)
def test_no_law_is_asked_where_it_does_not_hold(law):
    assert not CONTRACTS["permute"].laws[law].applies(replace(PERMUTE, golden="by_expert"))
    assert not CONTRACTS["permute"].laws[law].applies(replace(PERMUTE, illegal="align_zero"))
    assert not CONTRACTS["permute"].laws[law].applies(replace(ALIGNED, layout="expanded", layout_of="tokens"))


def test_what_raises_only_in_a_law_is_a_finding_of_that_law():
    def permute(original, tokens, routing_map, **settings):
        if len(tokens) % 2:
            raise RuntimeError("odd")
        return original(tokens, routing_map, **settings)

    finding = outcome_of(replace(FORWARD, law="split"), wrapped("permute", permute)).finding
    assert (finding["check"], "odd" in finding["message"]) == ("split", True)


class ShuffledSums:
    """Sums in another order on every run, like atomic additions; declares nothing."""

    calls = itertools.count()

    @staticmethod
    def permute(tokens, routing_map, *, probs=None, align=None, capacity=None, num_rows=None):
        return moe_ref.permute(tokens, routing_map, probs=probs, align=align, capacity=capacity, num_rows=num_rows)

    @classmethod
    def unpermute(cls, rows, row_map, *, restore_shape=None, probs=None):
        real = (row_map.token_P >= 0).nonzero().flatten()
        real = real.roll(next(cls.calls)) if next(cls.calls) % 3 else real.flip(0)
        weight = (
            torch.ones(len(real)) if probs is None else probs[row_map.token_P[real], row_map.expert_P[real]].float()
        )
        zeros = rows.new_zeros((row_map.num_tokens, rows.shape[1]), dtype=torch.float32)
        return zeros.index_add(0, row_map.token_P[real], rows[real].float() * weight[:, None]).to(rows.dtype)


SUMS = RoutingCase(
    function="unpermute", tokens=9, experts=24, hidden=5, topk=8, spread="uniform", probs="float32", values="wide"
)


def statuses(implementation, law):
    return {
        evaluate(replace(SUMS, law=law, seed=seed), Implementation(implementation, "sums")).status for seed in range(8)
    }


@pytest.mark.parametrize("law", ["scaling", "history", "determinism", "buffer_reuse", "garbage_independence"])
def test_sums_in_another_order_on_every_run_break_no_law(law):
    assert statuses(ShuffledSums, law) == {"PASS"}


def test_sums_in_another_order_on_every_run_are_found_where_determinism_is_declared():
    class Boastful(ShuffledSums):
        @staticmethod
        def declares(function):
            return {"deterministic": True}

    assert "FAIL" in statuses(Boastful, "determinism") & statuses(Boastful, "scaling")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_doubling_looks_away_from_numbers_that_are_made_of_subnormals_of_float32_alone(dtype):
    x = torch.tensor([0, 1e-39, 1e-37, 1e-20, 1.5, 1e20], dtype=dtype)
    assert ordinary(x).tolist() == [True, False, False, True, True, True]
    assert ordinary(torch.tensor([1e38], dtype=torch.float32)).tolist() == [False]


def test_doubling_looks_away_from_zeros_that_are_rounded_subnormals():
    tiny = {"dtype": "float16", "probs": "bfloat16", "values": "saturated", "weights": "signed", "grads": ""}
    case = replace(GLU, **tiny, tokens=4, width=10, seed=557, law="scaling")
    exact = wrapped("glu", lambda original, *args, **settings: original(*args, **settings), deterministic=True)
    assert outcome_of(case, exact).status == "PASS"
