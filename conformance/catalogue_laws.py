"""Laws: relations between runs of the implementation itself, that hold whatever the reference says.

A law has a name, says to which cases it applies, and returns a `Finding` or None. It runs after the values have been
judged, and costs one more run of the implementation at most.
"""

from dataclasses import replace

from conformance.core import universal_laws as general
from conformance.core.law import Law, Trial
from conformance.core.shared_out_laws import SHARED_OUT, of_one_process
from conformance.families.dispatch import laws as dispatch
from conformance.families.dispatch import laws_journeys as journeys
from conformance.families.dispatch import laws_worlds as worlds
from conformance.families.dispatch.cases import CACHED, FUNCTIONS, MAPPED
from conformance.families.experts import laws as experts
from conformance.families.experts import laws_mlp as mlp
from conformance.families.fused import laws as permuted_quantization
from conformance.families.fused import laws_activate as quantized_activations
from conformance.families.router import laws as routing

__all__ = ["LAWS", "Law", "Trial"]

_EVERYWHERE, _STATIC = general.EVERYWHERE, general.STATIC
_PRODUCT = (
    general.HISTORY,
    general.DETERMINISM,
    experts.BUFFER_REUSE,
    general.LATE_PRODUCER,
    general.HOST_SYNC,
    experts.GRAPH_CAPTURE,
)
_SEGMENTS = (experts.NEIGHBOUR_INDEPENDENCE, experts.PADDING_INDEPENDENCE, experts.EXPERT_RELABELLING)
_ROWS = (
    routing.TOKEN_REVERSAL,
    routing.BATCH_CONCAT,
    experts.NEIGHBOUR_INDEPENDENCE,
    experts.SCALING,
    experts.COTANGENT_SCALING,
)
_PERMUTED_AND_QUANTIZED = (
    *(
        permuted_quantization.EXPERT_RELABELLING,
        permuted_quantization.PADDING_INDEPENDENCE,
        permuted_quantization.TWO_STEPS,
    ),
    *(general.HISTORY, general.DETERMINISM, permuted_quantization.BUFFER_REUSE, general.LATE_PRODUCER),
    *(general.HOST_SYNC, permuted_quantization.GRAPH_CAPTURE),
)
_ACTIVATED_AND_QUANTIZED = (
    *(
        quantized_activations.NEIGHBOUR_GROUPS,
        quantized_activations.PADDING_VALUES,
        quantized_activations.DOUBLED_PROBS,
    ),
    *(general.HISTORY, general.DETERMINISM, quantized_activations.BUFFER_REUSE, general.LATE_PRODUCER),
    *(general.HOST_SYNC, quantized_activations.GRAPH_CAPTURE),
)
_MLP = (*_PRODUCT, mlp.RECOMPUTE, mlp.COTANGENT_SCALING)
_EXPERTS = (*_MLP, *_SEGMENTS, experts.GROUP_SPLIT, mlp.ZERO_PROBS, mlp.SCALING, mlp.ALIGNMENT)
_RANKS = (
    *(
        general.HISTORY,
        dispatch.DETERMINISM,
        dispatch.BUFFER_REUSE,
        dispatch.LATE_PRODUCER,
        dispatch.HOST_SYNC,
        dispatch.GRAPH_CAPTURE,
    ),
    *(journeys.IN_FLIGHT, journeys.DENSE),
)
_WORLDS = (*_RANKS, worlds.CONCATENATION, worlds.REFINEMENT)


def _of_rows(*laws: Law) -> tuple[Law, ...]:
    """Those of them that look at rows, which codes and scales hide."""
    return tuple(replace(law, applies=lambda case, law=law: not case.fp8 and law.applies(case)) for law in laws)  # type: ignore[misc]


LAWS: dict[str, dict[str, Law]] = {
    function: {law.name: law for law in laws}
    for function, laws in {
        "permute_and_quantize": _PERMUTED_AND_QUANTIZED,
        "glu_and_quantize": _ACTIVATED_AND_QUANTIZED,
        "activation_and_quantize": _ACTIVATED_AND_QUANTIZED,
        "glu_backward_and_quantize": _ACTIVATED_AND_QUANTIZED,
        "activation_backward_and_quantize": _ACTIVATED_AND_QUANTIZED,
        "glu": (*_EVERYWHERE, *_STATIC, *_ROWS),
        "activation": (*_EVERYWHERE, *_STATIC, *_ROWS),
        "grouped_linear": (*_PRODUCT, *_SEGMENTS, experts.GROUP_SPLIT, experts.SCALING, experts.COTANGENT_SCALING),
        "grouped_dgrad": (*_PRODUCT, *_SEGMENTS, experts.GROUP_SPLIT, experts.SCALING),
        "grouped_wgrad": (*_PRODUCT, *_SEGMENTS, experts.SCALING),
        "grouped_mlp": _EXPERTS,
        "sequential_mlp": (mlp.GROUPED, *_EXPERTS),
        "shared_experts": (*SHARED_OUT, *of_one_process(*_MLP[2:], mlp.TOKEN_REVERSAL)),
        "latent_projection": (
            *_PRODUCT,
            mlp.TOKEN_REVERSAL,
            experts.ROW_INDEPENDENCE,
            experts.SCALING,
            experts.COTANGENT_SCALING,
        ),
        **dict.fromkeys(FUNCTIONS, (*_WORLDS, dispatch.ADJOINTNESS)),
        **dict.fromkeys(CACHED, (*_RANKS, dispatch.ADJOINTNESS)),
        **dict.fromkeys(("deepep_low_latency_dispatch", "deepep_low_latency_combine"), _WORLDS),
        **dict.fromkeys(
            (f"{name}_dispatch" for name in MAPPED), (*_WORLDS, dispatch.ADJOINTNESS, dispatch.RELABELLING)
        ),
        "hybridep_dispatch": (
            *_RANKS,
            *_of_rows(
                worlds.CONCATENATION, worlds.REFINEMENT, dispatch.ADJOINTNESS, dispatch.RELABELLING, worlds.FUSED
            ),
        ),
    }.items()
}
