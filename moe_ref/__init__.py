"""The specification: the Mixture-of-Experts pipeline in plain PyTorch, slow and readable.

Every function is pure, runs on any device, accepts float64, and is differentiable by autograd. A
sum is in float32 (float64 for float64 input), in ascending row order, rounded once to the storage
dtype, in the forward and in every gradient; functions of ranks give their order and roundings.

Shape suffixes, here and everywhere in the project:

    T  tokens                    E  experts              K  slots of one token (top-k)
    H  hidden size               R  routed rows          P  permuted rows, padding included
    C  rows per expert, capacity S  chunks               F  width between an expert's linear layers
    L  local experts             M, N  out, in: rows, columns
    W  ranks                     G  tokens of all ranks  D  distinct tokens that a rank receives

Contents, in the order of reading:

    tutorial       a layer in plain loops, for somebody who has never seen one
    layer          the pipeline on one screen: gate, route, dispatch, grouped_mlp, combine
    config         settings, results, rules of illegal calls; `config.megatron`: Megatron's options
    permutation    permute (with unpermute, sort_chunks), routing_map, rows (mover)
    router         gating, scores and selection, capacity, balancing, losses, sinkhorn, route, state
    quantization   formats (bits), recipes (scales), quantize (codes of a tensor)
    experts        activations, linear, mlp, shared
    fused          permute_and_quantize, activate_and_quantize
    dispatch       plan, exchange (mover), trees; allgather, alltoall, deepep, low_latency, hybridep
    parameters     names in checkpoints, shards, extra_state, upcycling (experts of a dense layer)
"""

from importlib import import_module

_HOME = {
    "permute": "permutation.permute",
    "unpermute": "permutation.permute",
    "sort_chunks": "permutation.permute",
    "pad_routing_map": "permutation.routing_map",
    "indices_to_multihot": "permutation.routing_map",
    "multihot_to_indices": "permutation.routing_map",
    "gate": "router.gating",
    "jitter": "router.gating",
    "topk_indices": "router.selection",
    "topk_routing": "router.selection",
    "expert_capacity": "config.router",
    "drop_tokens": "router.capacity",
    "aux_loss_scores": "router.balancing",
    "load_balancing_loss": "router.balancing",
    "z_loss": "router.balancing",
    "attach_loss": "router.balancing",
    "update_expert_bias": "router.balancing",
    "sinkhorn_routing": "router.sinkhorn",
    "new_state": "config.state",
    "state_tensors": "config.state",
    "state_from": "config.state",
    "route": "router.route",
    "finish_batch": "router.state",
    "glu": "experts.activations",
    "glu_backward": "experts.activations",
    "activation": "experts.activations",
    "activation_backward": "experts.activations",
    "grouped_linear": "experts.linear",
    "grouped_dgrad": "experts.linear",
    "grouped_wgrad": "experts.linear",
    "grouped_mlp": "experts.mlp",
    "shared_experts": "experts.shared",
    "sequential_mlp": "experts.mlp",
    "latent_projection": "experts.mlp",
    "operands": "quantization.recipes",
    "new_quantizer_state": "config.state",
    "update_scales": "quantization.recipes",
    "quantize": "quantization.quantize",
    "codes": "quantization.quantize",
    "scales": "quantization.quantize",
    "amax": "quantization.quantize",
    "dequantize": "quantization.quantize",
    "moe_layer": "layer",
    "flatten_experts": "dispatch.indices",
    "apply_index_policy": "dispatch.indices",
    "allgather_dispatch": "dispatch.allgather",
    "allgather_combine": "dispatch.allgather",
    "alltoall_dispatch": "dispatch.alltoall",
    "alltoall_combine": "dispatch.alltoall",
    "deepep_layout": "dispatch.deepep",
    "deepep_dispatch": "dispatch.deepep",
    "deepep_cached_dispatch": "dispatch.deepep",
    "deepep_combine": "dispatch.deepep",
    "deepep_low_latency_dispatch": "dispatch.low_latency",
    "deepep_low_latency_combine": "dispatch.low_latency",
    "hybridep_dispatch": "dispatch.hybridep",
    "hybridep_cached_dispatch": "dispatch.hybridep",
    "hybridep_combine": "dispatch.hybridep",
    "glu_and_quantize": "fused.activate_and_quantize",
    "glu_backward_and_quantize": "fused.activate_and_quantize",
    "activation_and_quantize": "fused.activate_and_quantize",
    "activation_backward_and_quantize": "fused.activate_and_quantize",
    "permute_and_quantize": "fused.permute_and_quantize",
    "normalize_parameters": "parameters.names",
    "normalize_master_parameters": "parameters.names",
    "convert_experts": "parameters.names",
    "shard_parameters": "parameters.shards",
    "expand_shard": "parameters.shards",
    "split_extra_state": "parameters.extra_state",
    "merge_extra_state": "parameters.extra_state",
    "upcycle": "parameters.upcycling",
}
__all__ = list(_HOME)


def __getattr__(name: str):
    """Load a function's module when it is first asked for, so that `moe_ref.config` can be imported
    on its own.
    """
    if name not in _HOME:
        raise AttributeError(f"module 'moe_ref' has no attribute {name!r}")
    return getattr(import_module(f"moe_ref.{_HOME[name]}"), name)
