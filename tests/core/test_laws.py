"""Each law rejects a namespace with right values on the case; the reference keeps all laws."""

import itertools
from dataclasses import replace

import pytest
import torch

import moe_ref
from conformance.catalogue import CONTRACTS
from conformance.core.each_value import left_out
from conformance.core.ranks import ranks_of
from conformance.core.shared_out_laws import ONE_PROCESS
from conformance.core.space import Space
from conformance.engine.child.evaluate import evaluate
from conformance.engine.choose.draw import scope_of
from conformance.families.dispatch.cases import FUNCTIONS as COLLECTIVES
from conformance.families.experts.laws import ordinary
from conformance.families.layer.laws import RERUN, SENT_AGAIN
from conformance.families.permutation.cases import RoutingCase
from conformance.interface import Implementation, load
from tests.common.suite import outcome_of, wrapped
from tests.core.call_twins import CALL_TWINS
from tests.core.law_twins import (
    ACTIVATED,
    ALIGNED,
    AUX,
    FORWARD,
    FORWARD_MLP,
    GLU,
    LAYOUT,
    PAD,
    PERMUTE,
    SPREAD_TOPK,
    TRAINED_MLP,
    TWINS,
)  # fmt: skip
from tests.core.layer_laws import LAYER as MOE_LAYER
from tests.core.layer_laws import LAYER_TWINS
from tests.core.parameter_laws import MASTER, PARAMETER_TWINS

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


RARE = [  # laws that no case of a covering array asks for
    replace(MOE_LAYER, law="no_grad"),
    replace(MASTER, law="round_trip"),
    replace(TRAINED_MLP, scaling="delayed", law="amaxes"),
    replace(PAD, law="autocast"),
    replace(LAYOUT, law="autocast"),
    replace(FORWARD_MLP, function="sequential_mlp", dtype="bfloat16", probs="bfloat16", law="autocast"),
]


def tried(function):
    """A case of an array for each law that a process alone can break."""
    scope = scope_of(function, Space(ranks=1))
    rows = scope.covering().cases
    rare = [case for case in RARE if case.function == function]
    cases = [case for case in [*rows, *left_out(scope, rows, rows), *rare] if ranks_of(CONTRACTS[function], case) < 2]
    return {case.law: case for case in reversed(cases) if case.law in {law.name for law in ON_A_CPU[function]}}


@pytest.mark.parametrize("function", ON_A_CPU)
def test_the_reference_keeps_every_law(function):
    cases = tried(function)
    assert {*cases} == {law.name for law in ON_A_CPU[function]}
    for law, case in cases.items():
        outcome = outcome_of(case, load("moe_ref").namespace)
        assert outcome.status in ("PASS", "UNINFORMATIVE"), (law, outcome)


@pytest.mark.parametrize("law", ["token_reversal", "expert_relabelling", "batch_concat", "shift", "replay"])
def test_no_law_of_choices_is_asked_where_it_does_not_hold(law):
    assert CONTRACTS["topk_routing"].laws[law].applies(SPREAD_TOPK)
    assert not CONTRACTS["topk_routing"].laws[law].applies(replace(SPREAD_TOPK, golden="softmax_of_all"))
    assert not CONTRACTS["topk_routing"].laws[law].applies(replace(SPREAD_TOPK, illegal="no_slots"))
    assert (
        not CONTRACTS["topk_routing"].laws[law].applies(replace(SPREAD_TOPK, layout="expanded", layout_of="d_probs"))
        or law == "replay"
    )


def test_the_law_of_shifted_logits_applies_to_softmax_alone():
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


def test_an_error_raised_only_in_a_law_is_a_finding_of_that_law():
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
def test_the_law_of_scaling_ignores_numbers_computed_from_float32_subnormals(dtype):
    x = torch.tensor([0, 1e-39, 1e-37, 1e-20, 1.5, 1e20], dtype=dtype)
    assert ordinary(x).tolist() == [True, False, False, True, True, True]
    assert ordinary(torch.tensor([1e38], dtype=torch.float32)).tolist() == [False]


def test_the_law_of_scaling_ignores_zeros_that_are_rounded_subnormals():
    tiny = {"dtype": "float16", "probs": "bfloat16", "values": "saturated", "weights": "signed", "grads": ""}
    case = replace(GLU, **tiny, tokens=4, width=10, seed=557, law="scaling")
    exact = wrapped("glu", lambda original, *args, **settings: original(*args, **settings), deterministic=True)
    assert outcome_of(case, exact).status == "PASS"
