"""Far cases lie far in each dimension; worlds with less room have all kinds of cases."""

import pytest

from conformance.catalogue import CONTRACTS
from conformance.core.ranks import ranks_of
from conformance.core.space import Space
from conformance.engine.choose.draw import drawn, scope_of, strategy
from conformance.engine.choose.plan import fixed_cases
from conformance.families.dispatch.cases import FUNCTIONS as COLLECTIVES
from conformance.families.dispatch.cases import DispatchCase
from conformance.families.dispatch.flat_experts import FlatCase
from conformance.families.experts.cases import ActivationCase, GroupedCase
from conformance.families.experts.cases_mlp import MlpCase, SharedCase
from conformance.families.fused.cases import PermutedQuantizationCase, QuantizedActivationCase
from conformance.families.permutation.cases import ChunksCase, IndicesCase, RoutingCase
from conformance.families.quantization.cases import (
    QuantizeCase,
)
from conformance.families.router.cases import GateCase, LoadCase, LogitsCase
from tests.engine.drawn_cases import (
    ACTIVATED_AND_QUANTIZED,
    BACK_AND_QUANTIZED,
    CHOOSE,
    ELEMENTWISE,
    FAR,
    FUNCTIONS,
    MLPS,
    NEAR,
)
from tests.engine.promises import GRADS_OF

# ---- far cases

FULLEST = {
    **{
        name: DispatchCase(
            function=name,
            counts=(3,),
            local_experts=3,
            topk=2,
            hidden=3,
            probs="" if name == "deepep_low_latency_dispatch" else "float32",
            scales=3 if name.startswith("deepep_") and "low" not in name else 0,
            grads=GRADS_OF[name][-1],
            seed=1,
        )
        for name in COLLECTIVES
    },
    "permute": RoutingCase(function="permute", tokens=3, experts=3, hidden=3, probs="float32", grads="tokens+probs"),
    "unpermute": RoutingCase(function="unpermute", tokens=3, experts=3, hidden=3, probs="float32", grads="rows+probs"),
    "sort_chunks": ChunksCase(
        function="sort_chunks", sizes=(1, 2), order=(1, 0), hidden=3, probs="float32", grads="rows+probs"
    ),
    "pad_routing_map": RoutingCase(function="pad_routing_map", tokens=3, experts=3, align=2),
    "indices_to_multihot": IndicesCase(function="indices_to_multihot", tokens=3, topk=2, experts=3, grads="probs"),
    "deepep_layout": IndicesCase(function="deepep_layout", tokens=3, topk=2, experts=4, ranks=2),
    "flatten_experts": FlatCase(function="flatten_experts", tokens=3, experts=4, groups=2, shards=2, grads="x"),
    "multihot_to_indices": RoutingCase(function="multihot_to_indices", tokens=3, topk=2, experts=3, grads="probs"),
    "gate": GateCase(function="gate", tokens=3, hidden=3, experts=3, bias=True, grads="x+weight+bias"),
    "jitter": GateCase(function="jitter", tokens=3, hidden=3),
    "attach_loss": GateCase(function="attach_loss", tokens=3, hidden=3, grads="x+loss"),
    **{
        name: LogitsCase(
            function=name, tokens=3, experts=3, score="sigmoid", bias="small", precomputed=True, grads="logits"
        )
        for name in CHOOSE
    },
    **{
        name: LogitsCase(function=name, tokens=3, experts=3, padding=4, grads="logits")
        for name in ("aux_loss_scores", "z_loss")
    },
    "sinkhorn_routing": LogitsCase(function="sinkhorn_routing", tokens=3, experts=3, grads="logits"),
    "drop_tokens": LoadCase(function="drop_tokens", tokens=3, experts=3, grads="probs"),
    "load_balancing_loss": LoadCase(function="load_balancing_loss", tokens=3, experts=3, grads="scores"),
    "update_expert_bias": LoadCase(function="update_expert_bias", tokens=3, experts=3),
    **{
        name: ActivationCase(function=name, tokens=3, width=3, probs="float32", grads="h+probs") for name in ELEMENTWISE
    },
    "quantize": QuantizeCase(
        function="quantize", scaling="nvfp4", role="grad_output", tokens=2, experts=2, hidden=1, grads="x"
    ),
    **{
        name: QuantizedActivationCase(
            function=name,
            tokens=3,
            experts=2,
            width=3,
            probs="float32",
            grads="" if name in BACK_AND_QUANTIZED else "h+probs",
        )
        for name in ACTIVATED_AND_QUANTIZED
    },
    "permute_and_quantize": PermutedQuantizationCase(
        function="permute_and_quantize",
        scaling="delayed",
        tokens=3,
        experts=3,
        hidden=3,
        probs="float32",
        grads="tokens+probs",
    ),
    "grouped_linear": GroupedCase(
        function="grouped_linear", tokens=3, experts=3, hidden=3, width=3, bias="float32", grads="rows+weight+bias"
    ),
    "latent_projection": GroupedCase(
        function="latent_projection", tokens=3, hidden=3, width=3, bias="float32", grads="x+weight+bias"
    ),
    "grouped_dgrad": GroupedCase(function="grouped_dgrad", tokens=3, experts=3, hidden=3, width=3),
    **{
        name: MlpCase(
            function=name,
            **dict.fromkeys(("tokens", "experts", "hidden", "width"), 3),
            **dict.fromkeys(("probs", "bias1", "bias2"), "float32"),
            grads="rows+probs+fc1_weight+fc2_weight+fc1_bias+fc2_bias",
        )
        for name in MLPS
    },
    "shared_experts": SharedCase(
        function="shared_experts", tokens=3, hidden=3, width=3, gate=True, grads="x+fc1_weight+fc2_weight+gate_weight"
    ),
    "grouped_wgrad": GroupedCase(function="grouped_wgrad", tokens=3, experts=3, hidden=3, width=3, into="float32"),
}


@pytest.mark.parametrize("function", FULLEST)
def test_every_input_and_cotangent_lies_far_in_each_of_its_dimensions(function):
    problem = CONTRACTS[function].problem(FULLEST[function])
    tensors = problem.tensors | {f"d_{name}": x for name, x in problem.cotangents.items()}
    wanted = {
        (name, layout) for name, x in tensors.items() for layout in FAR[name == "gate_weight" : x.dim()]
    }  # which has one row
    assert {(case.layout_of, case.layout) for case in scope_of(function, Space()).far()} == wanted


def test_only_what_is_made_of_others_has_no_far_cases():
    assert (
        set(FUNCTIONS) - set(FULLEST) == set(NEAR) == {name for name in FUNCTIONS if not scope_of(name, Space()).far()}
    )


@pytest.mark.parametrize("function", FUNCTIONS)
def test_what_lies_far_is_there(function):
    for case in scope_of(function, Space()).far():
        problem = CONTRACTS[function].problem(case)
        masters = problem.tensors | {f"d_{name}": x for name, x in problem.cotangents.items()}
        dim = FAR.index(case.layout) if masters[case.layout_of].dim() > 1 else 0
        assert masters[case.layout_of].shape[dim] > 1


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("function", [*COLLECTIVES, "route", "shared_experts"])
def test_a_world_with_less_room_has_all_kinds_of_cases_and_none_of_more_ranks(function, ranks, device):
    space = Space(device=device, ranks=ranks)
    cases = [
        *fixed_cases(function, space),
        *scope_of(function, space).always(),
        *scope_of(function, space).far(),
        *drawn(strategy(function, space), 3, 6),
    ]
    asked = [ranks_of(CONTRACTS[function], case) for case in cases if not case.golden and not case.illegal]
    assert asked
    assert max(asked) <= ranks
