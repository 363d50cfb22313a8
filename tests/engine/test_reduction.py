"""A failure is reduced to the smallest case that fails in the same way, in time, through legal cases only."""

import time
from dataclasses import replace

import pytest

from conformance.catalogue import CONTRACTS
from conformance.core.case import Case
from conformance.core.space import Space
from conformance.engine.child.runner import Outcome
from conformance.engine.choose.draw import drawn, scope_of, strategy
from conformance.engine.choose.plan import fixed_cases
from conformance.engine.run.reduction import failure_key, reduce
from conformance.families.dispatch.cases import DispatchCase, slots_of
from conformance.families.experts.cases import ActivationCase, GroupedCase, counts_of, hidden_of
from conformance.families.experts.cases_mlp import MlpCase, SharedCase
from conformance.families.fused.cases import PermutedQuantizationCase, QuantizedActivationCase
from conformance.families.permutation.cases import ChunksCase, IndicesCase, RoutingCase, indices, routed
from conformance.families.quantization.cases import QuantizeCase, splits_of, x_of
from conformance.families.router.cases import GateCase, LoadCase, LogitsCase, logits_of, map_of
from conformance.families.router.cases_route import RouteCase

LONG = 60.0
LARGE = RoutingCase(
    function="permute", tokens=60, experts=9, hidden=20, topk=3, spread="uniform", dtype="bfloat16", probs="float32", zero_probs=True, values="special",
    align=4, slack=2, map_dtype="int32", layout="strided", layout_of="tokens", grads="tokens+probs", unused="probs", law="history", poison="max", seed=5,
)  # fmt: skip
MANY_CHUNKS = ChunksCase(
    function="sort_chunks",
    sizes=(4, 0, 9, 1, 30, 2),
    order=(5, 4, 3, 2, 1, 0),
    tail=3,
    hidden=17,
    probs="float32",
    grads="rows",
)
MANY_SLOTS = IndicesCase(
    function="indices_to_multihot",
    tokens=20,
    topk=4,
    experts=11,
    empty=1,
    repeats=True,
    dtype="float16",
    grads="probs",
    seed=3,
)

MANY_LOGITS = LogitsCase(
    function="topk_routing", tokens=30, experts=8, topk=4, score="sigmoid", bias="large", groups=4, group_topk=2, scaling=20, dtype="bfloat16",
    layout="strided", layout_of="logits", grads="logits", law="history", poison="max", seed=5,
)  # fmt: skip
MANY_LOADS = LoadCase(
    function="drop_tokens", tokens=30, experts=9, topk=3, capacity=7, pad=True, policy="position", values="zeros", map_dtype="int32", dtype="float16",
    layout="shifted", layout_of="probs", grads="probs", law="history", poison="max", seed=6,
)  # fmt: skip
MANY_STATES = GateCase(
    function="gate", tokens=20, hidden=30, experts=9, bias=True, router_dtype="fp32", weight_dtype="float32", dtype="bfloat16",
    layout="strided", layout_of="x", grads="x+weight+bias", law="history", poison="zero", seed=2,
)  # fmt: skip
MANY_NUMBERS = ActivationCase(
    function="glu", tokens=20, width=12, kind="quick_geglu", alpha=1000, clamp=56, offset=8, interleave=4, early=True, dtype="bfloat16", probs="float32",
    weights="signed", values="bounds", layout="strided", layout_of="probs", grads="h+probs", law="history", poison="zero", seed=2,
)  # fmt: skip
MANY_SEGMENTS = GroupedCase(
    function="grouped_linear", tokens=30, experts=5, counts=(0, 12, 0, 17, 1), tail=4, hidden=20, width=11, bias="float32", accumulator="float64",
    values="special", index_dtype="int32", dtype="bfloat16", layout="strided", layout_of="bias", grads="rows+weight+bias", law="history", seed=2,
)  # fmt: skip
MANY_BLOCKS = QuantizeCase(
    function="quantize", scaling="mxfp8", variant=2, role="grad_output", direction="both", tokens=5, experts=4, counts=(0, 2, 0, 3), tail=3, hidden=4,
    dtype="bfloat16", values="bounds", gemm=True, index_dtype="int32", grads="x", layout="strided", layout_of="splits", law="history", poison="max", seed=7,
)  # fmt: skip
MANY_UPDATES = QuantizeCase(
    function="quantize", scaling="delayed", variant=1, role="weight", tokens=9, experts=2, hidden=40, dtype="float16", values="special",
    steps="quantize+update+quantize+reload+reduced+quantize", seed=3,
)  # fmt: skip
MANY_STEPS = RouteCase(
    function="route", tokens=12, experts=8, topk=3, groups=4, group_topk=2, bias=True, losses="aux+seq+global+z", capacity=3, pad=True, padding=3,
    per_token=True, scale=3, grads="logits", sequences=2, steps="record+forward+eval+finish+backward+reload+train", law="history", seed=4,
)  # fmt: skip

MANY_PRODUCTS = replace(
    MANY_SEGMENTS,
    scaling="mxfp8",
    variant=2,
    tokens=6,
    counts=(0, 3, 0, 2, 1),
    hidden=3,
    width=2,
    bias="",
    accumulator="",
    grads="rows",
)
MANY_STAGES = MlpCase(
    function="grouped_mlp", tokens=30, experts=5, counts=(0, 12, 0, 17, 1), tail=4, hidden=20, width=12, kind="quick_geglu", alpha=1000, clamp=56, offset=8,
    interleave=4, early=True, bias1="float32", bias2="bfloat16", align=8, recompute="moe", probs="float32", weights="signed", values="special",
    index_dtype="int32", dtype="bfloat16", layout="strided", layout_of="fc1_bias", grads="rows+probs+fc1_bias", law="history", seed=2,
)  # fmt: skip
MANY_TOKENS = SharedCase(
    function="shared_experts", tokens=20, hidden=17, width=12, kind="geglu", interleave=4, gate=True, again=True, values="rows", dtype="bfloat16",
    layout="strided", layout_of="gate_weight", grads="x+gate_weight", law="recompute", poison="max", seed=3,
)  # fmt: skip
MANY_PERMUTED = PermutedQuantizationCase(
    function="permute_and_quantize", scaling="mxfp8", variant=2, role="grad_output", direction="both", tokens=20, experts=5, hidden=4, topk=2,
    dtype="bfloat16", probs="float32", align=2, slack=1, values="bounds", gemm=True, map_dtype="int32", layout="strided", layout_of="tokens",
    grads="tokens+probs", law="history", seed=2,
)  # fmt: skip
MANY_ACTIVATED = QuantizedActivationCase(
    function="glu_and_quantize", scaling="mxfp8", variant=2, direction="both", tokens=5, experts=4, counts=(0, 2, 0, 3), tail=3, width=4, kind="quick_geglu",
    alpha=1000, clamp=56, offset=8, interleave=4, rounded=True, dtype="bfloat16", probs="float32", weights="signed", values="bounds", index_dtype="int32",
    layout="strided", layout_of="probs", grads="h+probs", law="history", poison="max", seed=2,
)  # fmt: skip
MANY_RANKS = DispatchCase(
    function="alltoall_dispatch", counts=(9, 0, 7, 12), local_experts=3, hidden=6, topk=3, map_dtype="int32", dtype="bfloat16", probs="float32",
    zero_probs=True, values="special", capacity=5, shards=2, layout="strided", layout_of="probs", grads="tokens+probs", unused="probs", law="history", seed=4,
)  # fmt: skip


def failed(output: str = "rows", check: str = "exact", status: str = "FAIL") -> Outcome:
    return Outcome(status, {"output": output, "check": check, "message": "", "index": ()} if status == "FAIL" else None)


def failing_if(condition):
    """An attempt that fails where the condition holds, and a list of every case it was asked for."""
    tried: list[Case] = []

    def attempt(case: Case) -> Outcome:
        tried.append(case)
        return failed() if condition(case) else Outcome("PASS")

    return attempt, tried


def two_tokens_and_somebody_in_a_third_expert(case) -> bool:
    return case.tokens >= 2 and bool(routed(case)[:, 2:].any())


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
        function="glu_and_quantize", scaling="mxfp8", direction="columnwise", tokens=found.case.tokens, experts=2, counts=found.case.counts, width=0,
        probs="float32",
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


def test_what_differs_only_in_its_words_is_the_same_failure():
    reworded = Outcome("FAIL", {"output": "rows", "check": "exact", "message": "row 3", "index": (3,)})
    assert failure_key(LARGE, reworded) == failure_key(LARGE, failed())
    assert failure_key(LARGE, failed("probs")) != failure_key(LARGE, failed())


def test_nothing_smaller_that_fails_leaves_the_case_as_it_is():
    found = reduce(LARGE, failed(), lambda case: Outcome("PASS"), LONG)
    assert (found.case, found.finished) == (LARGE, True)


def test_time_that_runs_out_leaves_the_smallest_case_so_far():
    def attempt(case):
        time.sleep(0.02)
        return failed() if two_tokens_and_somebody_in_a_third_expert(case) else Outcome("PASS")

    started = time.monotonic()
    found = reduce(LARGE, failed(), attempt, seconds=0.1)
    assert time.monotonic() - started < LONG
    assert not found.finished
    assert found.attempts > 0
    assert two_tokens_and_somebody_in_a_third_expert(found.case)


def test_no_time_leaves_the_case_as_it_is():
    attempt, tried = failing_if(lambda case: True)
    found = reduce(LARGE, failed(), attempt, seconds=-1)
    assert (found.case, found.finished, tried) == (LARGE, False, [])


def test_no_case_is_tried_twice():
    attempt, tried = failing_if(two_tokens_and_somebody_in_a_third_expert)
    reduce(LARGE, failed(), attempt, LONG)
    assert len({case.text for case in tried}) == len(tried)


@pytest.mark.parametrize("function", CONTRACTS)
def test_literal_cases_are_not_reduced(function):
    for case in fixed_cases(function, Space()):
        attempt, tried = failing_if(lambda case: True)
        found = reduce(case, failed(), attempt, LONG)
        assert (found.case, found.finished, tried) == (case, True, [])


@pytest.mark.parametrize("function", CONTRACTS)
def test_only_legal_cases_are_tried(function):
    contract = CONTRACTS[function]
    small = [case for case in drawn(strategy(function, Space()), 5, 25) if work(case) < 2000]
    for case in small:
        candidates = list(scope_of(case.function, Space()).smaller(case))
        for simpler in candidates[:: len(candidates) // 20 + 1]:
            problem = contract.problem(simpler)
            assert set(problem.wanted) <= set(problem.tensors)
            contract.expected(simpler, problem, {})


def work(case: Case) -> int:
    """Elements of the case, so that large ones can be left out."""
    rows = sum(case.sizes) + case.tail if isinstance(case, ChunksCase) else case.tokens * case.experts
    return rows * max(getattr(case, "hidden", 1), 1)


@pytest.mark.parametrize(
    "case",
    [
        *(LARGE, replace(LARGE, function="unpermute", grads="rows+probs", unused=""), MANY_CHUNKS, MANY_SLOTS),
        *(
            MANY_LOGITS,
            replace(MANY_LOGITS, function="aux_loss_scores", bias="", groups=0, group_topk=0),
            MANY_LOADS,
            MANY_STATES,
            MANY_STEPS,
        ),
        *(
            MANY_BLOCKS,
            MANY_UPDATES,
            MANY_PERMUTED,
            MANY_ACTIVATED,
            replace(MANY_ACTIVATED, function="glu_backward_and_quantize", grads=""),
        ),
        *(MANY_PRODUCTS, MANY_STAGES, replace(MANY_STAGES, function="sequential_mlp"), MANY_TOKENS, MANY_RANKS),
        *(
            MANY_NUMBERS,
            MANY_SEGMENTS,
            replace(MANY_SEGMENTS, function="grouped_wgrad", grads="", bias="", into="float32"),
        ),
    ],
    ids=lambda c: c.function,
)
def test_whatever_fails_a_reduction_ends(case):
    """Everything fails: the greedy walk reaches a case that nothing is simpler than."""
    found = reduce(case, failed(), lambda smaller: failed(), LONG)
    assert found.finished
    assert [
        smaller
        for smaller in scope_of(case.function, Space()).smaller(found.case)
        if len(smaller.text) < len(found.case.text)
    ] == []
