"""What several test modules of this folder use: reduction."""

from dataclasses import replace

from conformance.core.case import Case
from conformance.engine.child.outcome import Outcome
from conformance.families.dispatch.cases import DispatchCase
from conformance.families.experts.cases import ActivationCase, GroupedCase
from conformance.families.experts.cases_mlp import MlpCase, SharedCase
from conformance.families.fused.cases import PermutedQuantizationCase, QuantizedActivationCase
from conformance.families.permutation.cases import ChunksCase, IndicesCase, RoutingCase, routed
from conformance.families.quantization.cases import QuantizeCase
from conformance.families.router.cases import GateCase, LoadCase, LogitsCase
from conformance.families.router.cases_route import RouteCase

LONG = 3600.0
LARGE = RoutingCase(
    function="permute", tokens=60, experts=9, hidden=20, topk=3, spread="uniform", dtype="bfloat16", probs="float32",
    zero_probs=True, values="special", align=4, slack=2, map_dtype="int32", layout="strided", layout_of="tokens",
    grads="tokens+probs", unused="probs", law="history", poison="max", seed=5,
)  # fmt: skip
MANY_CHUNKS = ChunksCase(
    function="sort_chunks", sizes=(4, 0, 9, 1, 30, 2), order=(5, 4, 3, 2, 1, 0), tail=3, hidden=17, probs="float32",
    grads="rows",
)  # fmt: skip
MANY_SLOTS = IndicesCase(
    function="indices_to_multihot", tokens=20, topk=4, experts=11, empty=1, repeats=True, dtype="float16",
    grads="probs", seed=3,
)  # fmt: skip
MANY_LOGITS = LogitsCase(
    function="topk_routing", tokens=30, experts=8, topk=4, score="sigmoid", bias="large", groups=4, group_topk=2,
    scaling=20, dtype="bfloat16", layout="strided", layout_of="logits", grads="logits", law="history", poison="max",
    seed=5,
)  # fmt: skip
MANY_LOADS = LoadCase(
    function="drop_tokens", tokens=30, experts=9, topk=3, capacity=7, pad=True, policy="position", values="zeros",
    map_dtype="int32", dtype="float16", layout="shifted", layout_of="probs", grads="probs", law="history", poison="max",
    seed=6,
)  # fmt: skip
MANY_STATES = GateCase(
    function="gate", tokens=20, hidden=30, experts=9, bias=True, router_dtype="fp32", weight_dtype="float32",
    dtype="bfloat16", layout="strided", layout_of="x", grads="x+weight+bias", law="history", poison="zero", seed=2,
)  # fmt: skip
MANY_NUMBERS = ActivationCase(
    function="glu", tokens=20, width=12, kind="quick_geglu", alpha=1000, clamp=56, offset=8, interleave=4, early=True,
    dtype="bfloat16", probs="float32", weights="signed", values="bounds", layout="strided", layout_of="probs",
    grads="h+probs", law="history", poison="zero", seed=2,
)  # fmt: skip
MANY_SEGMENTS = GroupedCase(
    function="grouped_linear", tokens=30, experts=5, counts=(0, 12, 0, 17, 1), tail=4, hidden=20, width=11,
    bias="float32", accumulator="float64", values="special", index_dtype="int32", dtype="bfloat16", layout="strided",
    layout_of="bias", grads="rows+weight+bias", law="history", seed=2,
)  # fmt: skip
MANY_BLOCKS = QuantizeCase(
    function="quantize", scaling="mxfp8", variant=2, role="grad_output", direction="both", tokens=5, experts=4,
    counts=(0, 2, 0, 3), tail=3, hidden=4, dtype="bfloat16", values="bounds", gemm=True, index_dtype="int32", grads="x",
    layout="strided", layout_of="splits", law="history", poison="max", seed=7,
)  # fmt: skip
MANY_UPDATES = QuantizeCase(
    function="quantize", scaling="delayed", variant=1, role="weight", tokens=9, experts=2, hidden=40, dtype="float16",
    values="special", steps="quantize+update+quantize+reload+reduced+quantize", seed=3,
)  # fmt: skip
MANY_STEPS = RouteCase(
    function="route", tokens=12, experts=8, topk=3, groups=4, group_topk=2, bias=True, losses="aux+seq+global+z",
    capacity=3, pad=True, padding=3, per_token=True, scale=3, grads="logits", sequences=2,
    steps="record+forward+eval+finish+backward+reload+train", law="history", seed=4,
)  # fmt: skip
MANY_PRODUCTS = replace(
    MANY_SEGMENTS, scaling="mxfp8", variant=2, tokens=6, counts=(0, 3, 0, 2, 1), hidden=3, width=2, bias="",
    accumulator="", grads="rows",
)  # fmt: skip
MANY_STAGES = MlpCase(
    function="grouped_mlp", tokens=30, experts=5, counts=(0, 12, 0, 17, 1), tail=4, hidden=20, width=12,
    kind="quick_geglu", alpha=1000, clamp=56, offset=8, interleave=4, early=True, bias1="float32", bias2="bfloat16",
    align=8, recompute="moe", probs="float32", weights="signed", values="special", index_dtype="int32",
    dtype="bfloat16", layout="strided", layout_of="fc1_bias", grads="rows+probs+fc1_bias", law="history", seed=2,
)  # fmt: skip
MANY_TOKENS = SharedCase(
    function="shared_experts", tokens=20, hidden=17, width=12, kind="geglu", interleave=4, gate=True, again=True,
    values="rows", dtype="bfloat16", layout="strided", layout_of="gate_weight", grads="x+gate_weight", law="recompute",
    poison="max", seed=3,
)  # fmt: skip
MANY_PERMUTED = PermutedQuantizationCase(
    function="permute_and_quantize", scaling="mxfp8", variant=2, role="grad_output", direction="both", tokens=20,
    experts=5, hidden=4, topk=2, dtype="bfloat16", probs="float32", align=2, slack=1, values="bounds", gemm=True,
    map_dtype="int32", layout="strided", layout_of="tokens", grads="tokens+probs", law="history", seed=2,
)  # fmt: skip
MANY_ACTIVATED = QuantizedActivationCase(
    function="glu_and_quantize", scaling="mxfp8", variant=2, direction="both", tokens=5, experts=4, counts=(0, 2, 0, 3),
    tail=3, width=4, kind="quick_geglu", alpha=1000, clamp=56, offset=8, interleave=4, rounded=True, dtype="bfloat16",
    probs="float32", weights="signed", values="bounds", index_dtype="int32", layout="strided", layout_of="probs",
    grads="h+probs", law="history", poison="max", seed=2,
)  # fmt: skip
MANY_RANKS = DispatchCase(
    function="alltoall_dispatch", counts=(9, 0, 7, 12), local_experts=3, hidden=6, topk=3, map_dtype="int32",
    dtype="bfloat16", probs="float32", zero_probs=True, values="special", capacity=5, shards=2, layout="strided",
    layout_of="probs", grads="tokens+probs", unused="probs", law="history", seed=4,
)  # fmt: skip
EVERY_LARGE = [
    *(LARGE, MANY_CHUNKS, MANY_SLOTS, MANY_LOGITS, MANY_LOADS, MANY_STATES, MANY_STEPS, MANY_BLOCKS, MANY_UPDATES),
    *(MANY_PERMUTED, MANY_ACTIVATED, MANY_PRODUCTS, MANY_STAGES, MANY_TOKENS, MANY_RANKS, MANY_NUMBERS, MANY_SEGMENTS),
    replace(LARGE, function="unpermute", grads="rows+probs", unused=""),
    replace(MANY_LOGITS, function="aux_loss_scores", bias="", groups=0, group_topk=0),
    replace(MANY_ACTIVATED, function="glu_backward_and_quantize", grads=""),
    replace(MANY_STAGES, function="sequential_mlp"),
    replace(MANY_SEGMENTS, function="grouped_wgrad", grads="", bias="", into="float32"),
]


def failed(output: str = "rows", check: str = "exact", status: str = "FAIL") -> Outcome:
    return Outcome(status, {"output": output, "check": check, "message": "", "index": ()} if status == "FAIL" else None)


def failing_if(condition, failure: Outcome | None = None):
    """An attempt that fails where the condition holds, and the list of every case attempted."""
    tried: list[Case] = []

    def attempt(case: Case) -> Outcome:
        tried.append(case)
        return (failure or failed()) if condition(case) else Outcome("PASS")

    return attempt, tried


def two_tokens_and_somebody_in_a_third_expert(case) -> bool:
    return case.tokens >= 2 and bool(routed(case)[:, 2:].any())
