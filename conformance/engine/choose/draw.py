"""Turns a function's strategy and a seed into a list of cases."""

import random
import zlib
from collections.abc import Callable

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conformance.core.case import Case
from conformance.core.space import Space
from conformance.families.dispatch.cases import FUNCTIONS as COLLECTIVES
from conformance.families.dispatch.space import dispatch_cases
from conformance.families.experts.space import activation_cases, grouped_cases
from conformance.families.experts.space_mlp import mlp_cases, shared_cases
from conformance.families.fused.space import permuted_quantization_cases
from conformance.families.fused.space_activate import FUNCTIONS as ACTIVATED_AND_QUANTIZED
from conformance.families.fused.space_activate import quantized_activation_cases
from conformance.families.permutation.space import multihot_cases, pad_cases, permutation_cases
from conformance.families.permutation.space_rows import chunk_cases, index_cases
from conformance.families.quantization.space import quantize_cases
from conformance.families.router.space import balancing_cases, gate_cases, load_cases, topk_cases
from conformance.families.router.space_route import route_cases

BYTES_A_CASE = 4096  # more than the longest case consumes


STRATEGIES: dict[str, Callable[[str, Space], st.SearchStrategy[Case]]] = {
    "permute": lambda function, space: permutation_cases(space, function, "tokens"),
    "unpermute": lambda function, space: permutation_cases(space, function, "rows"),
    "sort_chunks": lambda function, space: chunk_cases(space),
    "pad_routing_map": lambda function, space: pad_cases(space),
    **dict.fromkeys(("indices_to_multihot", "deepep_layout"), lambda function, space: index_cases(space, function)),
    "multihot_to_indices": lambda function, space: multihot_cases(space),
    **dict.fromkeys(("topk_indices", "topk_routing"), topk_cases),
    **dict.fromkeys(("aux_loss_scores", "z_loss", "sinkhorn_routing"), balancing_cases),
    **dict.fromkeys(("drop_tokens", "load_balancing_loss", "update_expert_bias"), load_cases),
    **dict.fromkeys(("gate", "jitter", "attach_loss"), gate_cases),
    "route": route_cases,
    "quantize": quantize_cases,
    **dict.fromkeys(ACTIVATED_AND_QUANTIZED, quantized_activation_cases),
    "permute_and_quantize": permuted_quantization_cases,
    **dict.fromkeys(("glu", "activation"), activation_cases),
    **dict.fromkeys(("grouped_linear", "grouped_dgrad", "grouped_wgrad", "latent_projection"), grouped_cases),
    **dict.fromkeys(("grouped_mlp", "sequential_mlp"), mlp_cases),
    "shared_experts": shared_cases,
    **dict.fromkeys(COLLECTIVES, dispatch_cases),
}


def strategy(function: str, space: Space) -> st.SearchStrategy[Case]:
    """The strategy that draws cases of `function`."""
    return STRATEGIES[function](function, space)


def run_seed(*parts: object) -> int:
    """A seed that depends on nothing but its parts: not on the directory, the worker or the test's name."""
    return zlib.crc32("/".join(map(str, parts)).encode())


def drawn(cases: st.SearchStrategy[Case], seed: int, count: int) -> list[Case]:
    """`count` different cases; hypothesis only draws, nothing is run here.

    Each case is made from its own random bytes. Hypothesis's search loop is not used: it follows every fresh example by several
    mutations of it, which helps to find failures in the loop but makes most of a batch drawn ahead near-copies.
    """
    found: dict[str, Case] = {}

    @settings(database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(cases)
    def collect(case: Case) -> None:
        found.setdefault(case.text, case)

    source = random.Random(seed)
    for _ in range(4 * count):
        if len(found) == count:
            break
        collect.hypothesis.fuzz_one_input(source.randbytes(BYTES_A_CASE))  # type: ignore[attr-defined]
    return list(found.values())
