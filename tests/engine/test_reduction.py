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
from conformance.families.permutation.cases import ChunksCase, IndicesCase, RoutingCase, indices, routed
from conformance.families.quantization.cases import QuantizeCase, splits_of, x_of
from conformance.families.router.cases import GateCase, LoadCase, LogitsCase, logits_of, map_of
from conformance.families.router.cases_route import RouteCase
from tests.engine import reduction_helpers as cases
from tests.engine.reduction_helpers import LARGE, LONG, failed, failing_if, two_tokens_and_somebody_in_a_third_expert


def has_an_empty_segment(counts: tuple[int, ...]) -> bool:
    return 0 in counts[1:]


REDUCED = [  # a large case, when it fails, its smallest form, and the fields that the test does not fix
    (
        LARGE, two_tokens_and_somebody_in_a_third_expert,
        RoutingCase(function="permute", tokens=2, experts=3, hidden=0),
        "routing",
        lambda case: sum(case.routing) == 0b100,  # one routed cell
    ),
    (
        cases.MANY_CHUNKS, lambda case: any(size >= 2 for size in case.sizes[1:]) and case.hidden >= 3,
        ChunksCase(function="sort_chunks", sizes=(0, 2), hidden=3), "order", None,
    ),
    (
        cases.MANY_SLOTS, lambda case: bool((indices(case) >= 2).any()) and case.topk >= 2,
        IndicesCase(function="indices_to_multihot", tokens=1, topk=2), "experts slots",
        lambda case: case.experts == max(case.slots) + 1 and min(case.slots) == -1,
    ),
    (
        cases.MANY_LOGITS, lambda case: case.tokens > 1 and bool((logits_of(case)[:, 2:] > 1).any()),
        LogitsCase(function="topk_routing", tokens=2, experts=3), "logits",
        lambda case: sum(x != 0 for x in case.logits) == 1,
    ),
    (
        cases.MANY_LOADS, lambda case: case.pad and len(map_of(case)) > 4,
        LoadCase(function="drop_tokens", tokens=5, pad=True), "", None,
    ),
    (
        cases.MANY_STATES, lambda case: case.hidden > 4 and "weight" in case.grads,
        GateCase(function="gate", tokens=0, hidden=5, grads="weight"), "", None,
    ),
    (
        cases.MANY_NUMBERS, lambda case: (
            case.clamp and "probs" in case.grads and case.width > 2 and bool((hidden_of(case, case.width) == 7).any())
        ),
        ActivationCase(function="glu", tokens=1, width=3, clamp=56, values="bounds", probs="float32", grads="probs"),
        "seed", None,
    ),
    (
        cases.MANY_SEGMENTS, lambda case: has_an_empty_segment(counts_of(case)) and case.width > 2,
        GroupedCase(function="grouped_linear", experts=2, hidden=0, width=3), "tokens counts",
        lambda case: counts_of(case) in ((0, 0), (1, 0)),
    ),
    (
        cases.MANY_BLOCKS,
        lambda case: case.scaling == "mxfp8" and has_an_empty_segment(splits_of(case)) and case.direction != "rowwise",
        QuantizeCase(function="quantize", scaling="mxfp8", direction="columnwise", experts=2, hidden=0),
        "tokens counts",
        lambda case: splits_of(case) in ((0, 0), (32, 0)),
    ),
    (
        cases.MANY_UPDATES, lambda case: "reduced" in case.steps and bool(x_of(case).isnan().any()),
        QuantizeCase(function="quantize", scaling="delayed", steps="quantize+reduced", tokens=1, values="special"),
        "hidden seed", None,
    ),
    (
        cases.MANY_PRODUCTS,
        lambda case: case.scaling == "mxfp8" and has_an_empty_segment(counts_of(case)) and case.width > 1,
        GroupedCase(function="grouped_linear", scaling="mxfp8", experts=2, hidden=0, width=2), "tokens counts",
        lambda case: counts_of(case) in ((0, 0), (1, 0)),
    ),
    (
        cases.MANY_STAGES, lambda case: (
            case.bias1 == "float32" and "fc1_bias" in case.grads and has_an_empty_segment(counts_of(case))
            and case.width > 2
        ),
        MlpCase(function="grouped_mlp", experts=2, hidden=0, width=3, bias1="float32", grads="fc1_bias"),
        "tokens counts",
        lambda case: counts_of(case) in ((0, 0), (1, 0)),
    ),
    (
        cases.MANY_TOKENS, lambda case: case.gate and "gate_weight" in case.grads and case.tokens > 1,
        SharedCase(function="shared_experts", tokens=2, hidden=0, width=0, gate=True, grads="gate_weight"), "", None,
    ),
    (
        cases.MANY_PERMUTED, lambda case: (
            case.scaling == "mxfp8" and case.direction != "rowwise" and two_tokens_and_somebody_in_a_third_expert(case)
        ),
        PermutedQuantizationCase(
            function="permute_and_quantize", scaling="mxfp8", direction="columnwise", tokens=2, experts=3, hidden=0
        ), "routing",
        lambda case: routed(case).sum() == 1,
    ),
    (
        cases.MANY_ACTIVATED, lambda case: (
            case.scaling == "mxfp8" and case.direction != "rowwise" and has_an_empty_segment(splits_of(case))
            and case.probs
        ),
        QuantizedActivationCase(
            function="glu_and_quantize", scaling="mxfp8", direction="columnwise", experts=2, width=0, probs="float32"
        ), "tokens counts",
        lambda case: splits_of(case) in ((0, 0), (32, 0)),
    ),
    (
        replace(cases.MANY_RANKS, shards=1), lambda case: (
            len(case.counts) > 1 and case.counts[1] == 0 and case.shards == 1 and bool((slots_of(case) == 1).any())
        ),
        DispatchCase(function="alltoall_dispatch", counts=(1, 0), slots=(1,)), "", None,
    ),
    (
        cases.MANY_STEPS, lambda case: "finish" in case.steps and "z" in case.losses,
        RouteCase(function="route", tokens=1, losses="z"), "steps",
        lambda case: len(case.steps.split("+")) == 2 and "finish" in case.steps,
    ),
]  # fmt: skip


@pytest.mark.parametrize(("large", "fails", "smallest", "free_axes", "holds"), REDUCED)
def test_a_case_is_reduced_to_the_known_minimum(large, fails, smallest, free_axes, holds):
    attempt, tried = failing_if(fails)
    reduced = reduce(large, failed(), attempt, LONG)
    assert (reduced.finished, reduced.attempts) == (True, len(tried))
    assert reduced.case == smallest.changed(**{name: getattr(reduced.case, name) for name in free_axes.split()})
    assert holds is None or holds(reduced.case)


SETTINGS = "values layout align probs dtype grads poison law map_dtype seed slack zero_probs"


@pytest.mark.parametrize("needed", SETTINGS.split())
def test_only_the_settings_that_matter_are_kept(needed):
    default = RoutingCase.__dataclass_fields__[needed].default
    attempt, _ = failing_if(lambda case: getattr(case, needed) != default)
    case = reduce(LARGE, failed(), attempt, LONG).case
    changed_fields = set(case.record()) - {"schema", "function", "tokens", "hidden", "routing", "layout_of"}
    assert changed_fields - {"probs", "grads"} == {needed} - {"probs", "grads"}
    assert needed in changed_fields


def test_a_crash_is_reduced_like_a_wrong_value():
    def attempt(case):
        return Outcome("CRASH", reason="SIGSEGV") if case.experts > 2 else Outcome("PASS")

    reduced = reduce(LARGE, Outcome("CRASH", reason="SIGSEGV"), attempt, LONG)
    assert (reduced.case.experts, reduced.case.tokens, reduced.outcome.status) == (3, 0, "CRASH")


@pytest.mark.parametrize(
    "another_failure",
    [failed("probs"), failed("rows", "shape"), *(Outcome(x) for x in ("CRASH", "HANG", "BLOCKED", "ERROR"))],
)
def test_what_fails_in_another_way_is_not_taken(another_failure):
    def attempt(case):
        return failed() if case.tokens >= 30 else another_failure

    reduced = reduce(LARGE, failed(), attempt, LONG)
    assert reduced.case.tokens == 30
    assert failure_key(reduced.case, reduced.outcome) == failure_key(LARGE, failed())


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
