"""The functions of `moe_ref`, fused in Triton: compiled on a GPU, in Triton's interpreter on a CPU.

Signatures, results, errors and gradients are those of the reference; a dispatcher has one rank's part of them, and a process group.

Read `metadata` first (where each token's rows are), then `permutation` and `routing_map`. `routing`, `balancing`, `capacity` and `gating`
stand by themselves, and `router` is made of them; so do `activations`. `quantized` says what codes and scales are, `quantization` makes them,
with `group_scaling` and `nvfp4`; `permuted_quantization` and `quantized_activations` make them in the launch of what is before. `segments`
and `linear` hold the products of each expert's rows, `scaled_linear` those in low precision; `experts` and `shared` are made of them.
`dispatch` brings rows to other ranks. `declared` says what is promised. The kernels are in `kernels`, their block sizes in `tuning`.
"""

from moe_fast.launch import backend as backend  # first: it chooses the interpreter before any kernel is decorated

# isort: split
from moe_fast.declared import declares, supports
from moe_fast.dispatch import (
    allgather_combine,
    allgather_dispatch,
    alltoall_combine,
    alltoall_dispatch,
    deepep_cached_dispatch,
    deepep_combine,
    deepep_dispatch,
    deepep_layout,
    deepep_low_latency_combine,
    deepep_low_latency_dispatch,
    hybridep_cached_dispatch,
    hybridep_combine,
    hybridep_dispatch,
)
from moe_fast.experts.activations import activation, activation_backward, glu, glu_backward
from moe_fast.experts.linear import grouped_dgrad, grouped_linear, grouped_wgrad
from moe_fast.experts.mlp import grouped_mlp, latent_projection, sequential_mlp
from moe_fast.experts.shared import shared_experts
from moe_fast.fused.activate_and_quantize import (
    activation_and_quantize,
    activation_backward_and_quantize,
    glu_and_quantize,
    glu_backward_and_quantize,
)
from moe_fast.fused.permute_and_quantize import permute_and_quantize
from moe_fast.permutation.permute import permute, sort_chunks, unpermute
from moe_fast.permutation.routing_map import indices_to_multihot, multihot_to_indices, pad_routing_map
from moe_fast.quantization.group_scales import new_quantizer_state, update_scales
from moe_fast.quantization.quantize import quantize
from moe_fast.quantization.quantized import amax, codes, dequantize, scales
from moe_fast.router.balancing import attach_loss, aux_loss_scores, load_balancing_loss, update_expert_bias, z_loss
from moe_fast.router.capacity import drop_tokens, expert_capacity
from moe_fast.router.gating import gate, jitter
from moe_fast.router.route import finish_batch, new_state, route, state_from, state_tensors
from moe_fast.router.selection import topk_indices, topk_routing

__all__ = [
    "activation",
    "activation_and_quantize",
    "activation_backward",
    "activation_backward_and_quantize",
    "allgather_combine",
    "allgather_dispatch",
    "alltoall_combine",
    "alltoall_dispatch",
    "amax",
    "attach_loss",
    "aux_loss_scores",
    "codes",
    "declares",
    "deepep_cached_dispatch",
    "deepep_combine",
    "deepep_dispatch",
    "deepep_layout",
    "deepep_low_latency_combine",
    "deepep_low_latency_dispatch",
    "dequantize",
    "drop_tokens",
    "expert_capacity",
    "finish_batch",
    "gate",
    "glu",
    "glu_and_quantize",
    "glu_backward",
    "glu_backward_and_quantize",
    "grouped_dgrad",
    "grouped_linear",
    "grouped_mlp",
    "grouped_wgrad",
    "hybridep_cached_dispatch",
    "hybridep_combine",
    "hybridep_dispatch",
    "indices_to_multihot",
    "jitter",
    "latent_projection",
    "load_balancing_loss",
    "multihot_to_indices",
    "new_quantizer_state",
    "new_state",
    "pad_routing_map",
    "permute",
    "permute_and_quantize",
    "quantize",
    "route",
    "scales",
    "sequential_mlp",
    "shared_experts",
    "sort_chunks",
    "state_from",
    "state_tensors",
    "supports",
    "topk_indices",
    "topk_routing",
    "unpermute",
    "update_expert_bias",
    "update_scales",
    "z_loss",
]
