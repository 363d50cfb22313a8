"""A failure is reduced to the smallest case failing the same way, in time, by legal cases only."""

from dataclasses import replace

import pytest

from conformance.core.scope import Scope
from conformance.engine.child.outcome import Outcome
from conformance.engine.run.pool import Lost
from conformance.engine.run.reduction import failure_key, reduce
from conformance.families.dispatch.cases import DispatchCase, slots_of
from conformance.families.experts.cases import ActivationCase, GroupedCase, counts_of, hidden_of
from conformance.families.experts.cases_mlp import MlpCase, SharedCase
from conformance.families.fused.cases import PermutedQuantizationCase, QuantizedActivationCase
from conformance.families.permutation.cases import ChunksCase, RoutingCase, indices, routed
from conformance.families.quantization.cases import QuantizeCase, splits_of, x_of
from conformance.families.router.cases import GateCase, LoadCase, LogitsCase, logits_of, map_of
from conformance.families.router.cases_route import RouteCase
from tests.engine.reduction_helpers import (
    LARGE,
    LONG,
    MANY_ACTIVATED,
    MANY_BLOCKS,
    MANY_CHUNKS,
    MANY_LOADS,
    MANY_LOGITS,
    MANY_NUMBERS,
    MANY_PERMUTED,
    MANY_PRODUCTS,
    MANY_RANKS,
    MANY_SEGMENTS,
    MANY_SLOTS,
    MANY_STAGES,
    MANY_STATES,
    MANY_STEPS,
    MANY_TOKENS,
    MANY_UPDATES,
    failed,
    failing_if,
    two_tokens_and_somebody_in_a_third_expert,
)


def test_a_routing_case_is_reduced_to_the_known_minimum():
    attempt, tried = failing_if(two_tokens_and_somebody_in_a_third_expert)
    found = reduce(LARGE, failed(), attempt, LONG)
    assert found.finished
    assert found.attempts == len(tried)
    assert sum(found.case.routing) == 0b100  # one routed cell
    assert found.case == RoutingCase(function="permute", tokens=2, experts=3, hidden=0, routing=found.case.routing)


def test_a_chunks_case_is_reduced_to_the_known_minimum():
    attempt, _ = failing_if(lambda case: any(size >= 2 for size in case.sizes[1:]) and case.hidden >= 3)
    found = reduce(MANY_CHUNKS, failed(), attempt, LONG)
    assert found.finished
    assert (found.case.sizes, found.case.hidden) == ((0, 2), 3)
    assert found.case == ChunksCase(function="sort_chunks", sizes=(0, 2), order=found.case.order, hidden=3)


def test_an_indices_case_is_reduced_to_the_known_minimum():
    attempt, _ = failing_if(lambda case: bool((indices(case) >= 2).any()) and case.topk >= 2)
    found = reduce(MANY_SLOTS, failed(), attempt, LONG)
    assert found.finished
    assert (found.case.tokens, found.case.topk) == (1, 2)
    assert found.case.experts == max(found.case.slots) + 1
    assert sorted(found.case.slots)[0] == -1


def test_logits_are_reduced_to_the_known_minimum():
    attempt, _ = failing_if(lambda case: case.tokens > 1 and bool((logits_of(case)[:, 2:] > 1).any()))
    found = reduce(MANY_LOGITS, failed(), attempt, LONG)
    assert found.finished
    assert found.case == LogitsCase(function="topk_routing", tokens=2, experts=3, logits=found.case.logits)
    assert sum(x != 0 for x in found.case.logits) == 1


def test_a_load_case_is_reduced_to_the_known_minimum():
    attempt, _ = failing_if(lambda case: case.pad and len(map_of(case)) > 4)
    found = reduce(MANY_LOADS, failed(), attempt, LONG)
    assert found.finished
    assert found.case == LoadCase(function="drop_tokens", tokens=5, pad=True)


def test_a_gate_case_is_reduced_to_the_known_minimum():
    attempt, _ = failing_if(lambda case: case.hidden > 4 and "weight" in case.grads)
    found = reduce(MANY_STATES, failed(), attempt, LONG)
    assert found.finished
    assert found.case == GateCase(function="gate", tokens=0, hidden=5, grads="weight")


def test_an_activation_case_is_reduced_to_the_known_minimum():
    attempt, _ = failing_if(
        lambda case: (
            case.clamp and "probs" in case.grads and case.width > 2 and bool((hidden_of(case, case.width) == 7).any())
        )
    )
    found = reduce(MANY_NUMBERS, failed(), attempt, LONG)
    assert found.finished
    assert found.case == ActivationCase(
        function="glu",
        tokens=1,
        width=3,
        clamp=56,
        values="bounds",
        probs="float32",
        grads="probs",
        seed=found.case.seed,
    )


def test_segments_are_reduced_to_the_known_minimum():
    attempt, _ = failing_if(lambda case: 0 in counts_of(case)[1:] and case.width > 2)
    found = reduce(MANY_SEGMENTS, failed(), attempt, LONG)
    assert found.finished
    assert found.case == GroupedCase(
        function="grouped_linear", tokens=found.case.tokens, experts=2, hidden=0, width=3, counts=found.case.counts
    )
    assert counts_of(found.case) in ((0, 0), (1, 0))


def test_a_quantised_tensor_is_reduced_to_the_known_minimum():
    attempt, _ = failing_if(
        lambda case: case.scaling == "mxfp8" and 0 in splits_of(case)[1:] and case.direction != "rowwise"
    )
    found = reduce(MANY_BLOCKS, failed(), attempt, LONG)
    assert found.finished
    assert found.case == QuantizeCase(
        function="quantize",
        scaling="mxfp8",
        direction="columnwise",
        tokens=found.case.tokens,
        experts=2,
        hidden=0,
        counts=found.case.counts,
    )
    assert splits_of(found.case) in ((0, 0), (32, 0))


def test_steps_of_a_quantiser_are_reduced_to_the_known_minimum():
    attempt, _ = failing_if(lambda case: "reduced" in case.steps and bool(x_of(case).isnan().any()))
    found = reduce(MANY_UPDATES, failed(), attempt, LONG)
    assert found.finished
    assert found.case.steps == "quantize+reduced"
    assert found.case == QuantizeCase(
        function="quantize",
        scaling="delayed",
        steps=found.case.steps,
        tokens=1,
        hidden=found.case.hidden,
        values="special",
        seed=found.case.seed,
    )


def test_products_of_a_recipe_are_reduced_to_the_known_minimum():
    attempt, _ = failing_if(lambda case: case.scaling == "mxfp8" and 0 in counts_of(case)[1:] and case.width > 1)
    found = reduce(MANY_PRODUCTS, failed(), attempt, LONG)
    assert found.finished
    assert found.case == GroupedCase(
        function="grouped_linear",
        scaling="mxfp8",
        tokens=found.case.tokens,
        experts=2,
        hidden=0,
        width=2,
        counts=found.case.counts,
    )
    assert counts_of(found.case) in ((0, 0), (1, 0))


def test_layers_are_reduced_to_the_known_minimum():
    attempt, _ = failing_if(
        lambda case: (
            case.bias1 == "float32" and "fc1_bias" in case.grads and 0 in counts_of(case)[1:] and case.width > 2
        )
    )
    found = reduce(MANY_STAGES, failed(), attempt, LONG)
    assert found.finished
    assert found.case == MlpCase(
        function="grouped_mlp",
        tokens=found.case.tokens,
        experts=2,
        hidden=0,
        width=3,
        counts=found.case.counts,
        bias1="float32",
        grads="fc1_bias",
    )
    assert counts_of(found.case) in ((0, 0), (1, 0))


def test_tokens_of_shared_experts_are_reduced_to_the_known_minimum():
    attempt, _ = failing_if(lambda case: case.gate and "gate_weight" in case.grads and case.tokens > 1)
    found = reduce(MANY_TOKENS, failed(), attempt, LONG)
    assert found.finished
    assert found.case == SharedCase(
        function="shared_experts", tokens=2, hidden=0, width=0, gate=True, grads="gate_weight"
    )


def test_what_is_permuted_and_quantised_is_reduced_to_the_known_minimum():
    attempt, _ = failing_if(
        lambda case: (
            case.scaling == "mxfp8" and case.direction != "rowwise" and two_tokens_and_somebody_in_a_third_expert(case)
        )
    )
    found = reduce(MANY_PERMUTED, failed(), attempt, LONG)
    assert found.finished
    assert found.case == PermutedQuantizationCase(
        function="permute_and_quantize",
        scaling="mxfp8",
        direction="columnwise",
        tokens=2,
        experts=3,
        hidden=0,
        routing=found.case.routing,
    )
    assert routed(found.case).sum() == 1


def test_what_is_activated_and_quantised_is_reduced_to_the_known_minimum():
    attempt, _ = failing_if(
        lambda case: case.scaling == "mxfp8" and case.direction != "rowwise" and 0 in splits_of(case)[1:] and case.probs
    )
    found = reduce(MANY_ACTIVATED, failed(), attempt, LONG)
    assert found.finished
    assert found.case == QuantizedActivationCase(
        function="glu_and_quantize", scaling="mxfp8", direction="columnwise", tokens=found.case.tokens, experts=2,
        counts=found.case.counts, width=0, probs="float32",
    )  # fmt: skip
    assert splits_of(found.case) in ((0, 0), (32, 0))


def test_ranks_are_reduced_to_the_known_minimum():
    attempt, _ = failing_if(
        lambda case: (
            len(case.counts) > 1 and case.counts[1] == 0 and case.shards == 1 and bool((slots_of(case) == 1).any())
        )
    )
    found = reduce(replace(MANY_RANKS, shards=1), failed(), attempt, LONG)
    assert found.finished
    assert found.case == DispatchCase(function="alltoall_dispatch", counts=(1, 0), slots=(1,))


def test_steps_are_reduced_to_the_known_minimum():
    attempt, _ = failing_if(lambda case: "finish" in case.steps and "z" in case.losses)
    found = reduce(MANY_STEPS, failed(), attempt, LONG)
    assert found.finished
    assert sorted(found.case.steps.split("+"))[0] == "finish"
    assert found.case == RouteCase(function="route", tokens=1, losses="z", steps=found.case.steps)
    assert len(found.case.steps.split("+")) == 2


@pytest.mark.parametrize(
    "needed",
    [
        "values",
        "layout",
        "align",
        "probs",
        "dtype",
        "grads",
        "poison",
        "law",
        "map_dtype",
        "seed",
        "slack",
        "zero_probs",
    ],
)
def test_only_the_settings_that_matter_are_kept(needed):
    default = RoutingCase.__dataclass_fields__[needed].default
    attempt, _ = failing_if(lambda case: getattr(case, needed) != default)
    case = reduce(LARGE, failed(), attempt, LONG).case
    kept = set(case.record()) - {"schema", "function", "tokens", "hidden", "routing", "layout_of"}
    assert kept - {"probs", "grads"} == {needed} - {"probs", "grads"}
    assert needed in kept


def test_a_crash_is_reduced_like_a_wrong_value():
    def attempt(case):
        return Outcome("CRASH", reason="SIGSEGV") if case.experts > 2 else Outcome("PASS")

    found = reduce(LARGE, Outcome("CRASH", reason="SIGSEGV"), attempt, LONG)
    assert (found.case.experts, found.case.tokens, found.outcome.status) == (3, 0, "CRASH")


@pytest.mark.parametrize(
    "other",
    [
        failed("probs"),
        failed("rows", "shape"),
        failed(status="CRASH"),
        failed(status="HANG"),
        Outcome("BLOCKED"),
        Outcome("ERROR"),
    ],
)
def test_what_fails_in_another_way_is_not_taken(other):
    def attempt(case):
        return failed() if case.tokens >= 30 else other

    found = reduce(LARGE, failed(), attempt, LONG)
    assert found.case.tokens == 30
    assert failure_key(found.case, found.outcome) == failure_key(LARGE, failed())


# ---- errors of the suite


def test_an_error_of_an_attempt_ends_the_search_at_the_smallest_case_so_far():
    sound, _ = failing_if(two_tokens_and_somebody_in_a_third_expert)
    found = []

    def attempt(case):
        outcome = sound(case)
        found.extend([case] if outcome.status == "FAIL" else [])
        if len(found) == 3:
            raise KeyError("a field")
        return outcome

    reduced = reduce(LARGE, failed(), attempt, LONG)
    assert (reduced.case, reduced.finished, reduced.error) == (found[1], False, "KeyError: 'a field'")
    assert reduce(LARGE, failed(), sound, LONG).error == ""


def test_an_error_of_a_contract_ends_the_search(monkeypatch):
    def smaller(scope, case):
        yield replace(case, hidden=0)
        raise ZeroDivisionError("no smaller case")

    monkeypatch.setattr(Scope, "smaller", smaller)
    attempt, _ = failing_if(lambda case: case.hidden == LARGE.hidden)
    reduced = reduce(LARGE, failed(), attempt, LONG)
    assert (reduced.case, reduced.attempts, reduced.finished) == (LARGE, 1, False)
    assert reduced.error == "ZeroDivisionError: no smaller case"


@pytest.mark.parametrize("error", [Lost("the device is lost"), KeyboardInterrupt()])
def test_the_end_of_the_run_is_no_error_of_the_search(error):
    def attempt(case):
        raise error

    with pytest.raises(type(error)):
        reduce(LARGE, failed(), attempt, LONG)
