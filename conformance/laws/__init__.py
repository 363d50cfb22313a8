"""Laws: relations between runs of the implementation itself, that hold whatever the reference says.

A law has a name, says to which cases it applies, and returns a `Finding` or None. It runs after the values have been
judged, and costs one more run of the implementation at most.
"""

from conformance.contracts.dispatching import FUNCTIONS, MAPPED
from conformance.laws import dispatch, experts, general, mlp, moves, permuted_quantization, quantization, quantized_activations, routing, sums
from conformance.laws.base import Law, Trial

__all__ = ["LAWS", "Law", "Trial"]

_EVERYWHERE = (general.HISTORY, general.DETERMINISM, general.BUFFER_REUSE, general.LATE_PRODUCER)
_STATIC = (general.HOST_SYNC, general.GRAPH_CAPTURE)
_CHOICES = (routing.TOKEN_REVERSAL, routing.EXPERT_RELABELLING, routing.BATCH_CONCAT)
_PRODUCT = (general.HISTORY, general.DETERMINISM, experts.BUFFER_REUSE, general.LATE_PRODUCER, general.HOST_SYNC, experts.GRAPH_CAPTURE)
_SEGMENTS = (experts.NEIGHBOUR_INDEPENDENCE, experts.PADDING_INDEPENDENCE, experts.EXPERT_RELABELLING)
_ROWS = (routing.TOKEN_REVERSAL, routing.BATCH_CONCAT, experts.NEIGHBOUR_INDEPENDENCE, experts.SCALING, experts.COTANGENT_SCALING)
_QUANTIZED = (
    *(quantization.IDEMPOTENCE, quantization.ROW_INDEPENDENCE, quantization.SCALING, quantization.GROUPS_ALONE, quantization.ZERO_ROWS),
    *(quantization.PADDING_INDEPENDENCE, general.HISTORY, general.DETERMINISM, quantization.BUFFER_REUSE, general.LATE_PRODUCER),
    *(general.HOST_SYNC, quantization.GRAPH_CAPTURE),
)
_PERMUTED_AND_QUANTIZED = (
    *(permuted_quantization.EXPERT_RELABELLING, permuted_quantization.PADDING_INDEPENDENCE, permuted_quantization.TWO_STEPS),
    *(general.HISTORY, general.DETERMINISM, permuted_quantization.BUFFER_REUSE, general.LATE_PRODUCER),
    *(general.HOST_SYNC, permuted_quantization.GRAPH_CAPTURE),
)
_ACTIVATED_AND_QUANTIZED = (
    *(quantized_activations.NEIGHBOUR_GROUPS, quantized_activations.PADDING_VALUES, quantized_activations.DOUBLED_PROBS),
    *(general.HISTORY, general.DETERMINISM, quantized_activations.BUFFER_REUSE, general.LATE_PRODUCER),
    *(general.HOST_SYNC, quantized_activations.GRAPH_CAPTURE),
)
_MLP = (*_EVERYWHERE, *_STATIC, mlp.RECOMPUTE, mlp.COTANGENT_SCALING)
_EXPERTS = (*_MLP, *_SEGMENTS, experts.GROUP_SPLIT, mlp.ZERO_PROBS, mlp.SCALING, mlp.ALIGNMENT)
_RANKS = (
    *(general.HISTORY, dispatch.DETERMINISM, dispatch.BUFFER_REUSE, dispatch.LATE_PRODUCER, dispatch.HOST_SYNC, dispatch.GRAPH_CAPTURE),
    *(dispatch.IN_FLIGHT, dispatch.DENSE),
)

LAWS: dict[str, dict[str, Law]] = {
    function: {law.name: law for law in laws}
    for function, laws in {
        "permute": (
            *_EVERYWHERE,
            *_STATIC,
            moves.TOKEN_PERMUTATION,
            moves.EXPERT_RELABELLING,
            moves.SPLIT,
            moves.PADDING_INDEPENDENCE,
            moves.NEIGHBOUR_INDEPENDENCE,
            sums.ADJOINTNESS,
            sums.SCALING,
        ),
        "unpermute": (*_EVERYWHERE, *_STATIC, sums.GARBAGE_INDEPENDENCE, sums.ADJOINTNESS, sums.SCALING),
        "sort_chunks": (*_EVERYWHERE, *_STATIC, moves.NEIGHBOUR_INDEPENDENCE, moves.ROUND_TRIP, sums.ADJOINTNESS, sums.SCALING),
        "pad_routing_map": (*_EVERYWHERE, *_STATIC, moves.IDEMPOTENCE, moves.COLUMN_RELABELLING),
        "indices_to_multihot": (*_EVERYWHERE, *_STATIC, moves.ROW_REVERSAL, sums.SCALING),
        "multihot_to_indices": (*_EVERYWHERE, *_STATIC, moves.ROW_REVERSAL, sums.SCALING),
        "gate": (*_EVERYWHERE, *_STATIC, routing.TOKEN_REVERSAL, routing.BATCH_CONCAT),
        "jitter": (*_EVERYWHERE, *_STATIC, routing.EVENLY_SPREAD),
        "topk_indices": (*_EVERYWHERE, *_STATIC, *_CHOICES, routing.SHIFT, routing.REPLAY),
        "topk_routing": (*_EVERYWHERE, *_STATIC, *_CHOICES, routing.SHIFT, routing.REPLAY),
        "sinkhorn_routing": (*_EVERYWHERE, routing.EXPERT_RELABELLING),
        "drop_tokens": (*_EVERYWHERE, *_STATIC, routing.EXPERT_RELABELLING, sums.SCALING),
        "aux_loss_scores": (*_EVERYWHERE, *_STATIC, *_CHOICES, routing.SHIFT, routing.PADDING_TOKENS),
        "load_balancing_loss": (*_EVERYWHERE, *_STATIC, routing.SHARES, sums.SCALING),
        "z_loss": (*_EVERYWHERE, *_STATIC, routing.TOKEN_REVERSAL, routing.EXPERT_RELABELLING, routing.PADDING_TOKENS),
        "attach_loss": (*_EVERYWHERE, *_STATIC, sums.SCALING),
        "route": (general.HISTORY, general.DETERMINISM, general.LATE_PRODUCER, *_STATIC),
        "update_expert_bias": (*_EVERYWHERE, *_STATIC, routing.EXPERT_RELABELLING),
        "quantize": _QUANTIZED,
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
        "shared_experts": (*_MLP, mlp.TOKEN_REVERSAL),
        **dict.fromkeys(FUNCTIONS, (*_RANKS, dispatch.ADJOINTNESS)),
        **dict.fromkeys(("deepep_low_latency_dispatch", "deepep_low_latency_combine"), _RANKS),
        **dict.fromkeys((f"{name}_dispatch" for name in MAPPED), (*_RANKS, dispatch.ADJOINTNESS, dispatch.RELABELLING)),
    }.items()
}
