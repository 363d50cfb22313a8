"""Values of options: sizes, wrong kinds, names."""

from tests.router.moe_config_cases import EXPERTS, HYBRIDEP, PLACES, ROUTER, SWIGLU, TENSOR
from tests.router.moe_config_memory_cases import GRAPHS, MEMORY, OVERLAPS, PRECISION

CASES = [*ROUTER, *PLACES, *EXPERTS, *PRECISION, *MEMORY, *GRAPHS, *OVERLAPS]
NOT_NEGATIVE = (
    "num_layers hidden_size ffn_hidden_size moe_ffn_hidden_size mtp_num_layers recompute_num_layers moe_z_loss_coeff "
    "moe_router_bias_update_rate"
)


POSITIVE = (
    "tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size "
    "context_parallel_size expert_model_parallel_size expert_tensor_parallel_size moe_router_topk "
    "moe_router_num_groups moe_router_group_topk moe_flex_dispatcher_num_sms moe_hybridep_num_sms_preprocessing "
    "moe_hybridep_num_blocks_permute moe_hybridep_num_blocks_unpermute moe_expert_rank_capacity_factor "
    "moe_paged_stash_page_size moe_mlp_glu_interleave_size moe_shared_expert_glu_interleave_size "
    "moe_router_topk_scaling_factor moe_expert_capacity_factor moe_input_jitter_eps "
    "moe_shared_expert_intermediate_size moe_latent_size activation_func_clamp_value"
)


ALSO = {  # what a value of 1 needs beside it
    "moe_router_topk": {"moe_router_pre_softmax": True},
    "moe_router_num_groups": {"moe_router_group_topk": 1},
    "moe_router_group_topk": {"moe_router_num_groups": 2},
    "moe_expert_rank_capacity_factor": {**HYBRIDEP, **TENSOR},
}


SIZES = [
    *((name, {name: -1}, {name: 0}) for name in NOT_NEGATIVE.split()),
    *((name, {name: value}, {name: 1, **ALSO.get(name, {})}) for name in POSITIVE.split() for value in (0, -1)),
    ("moe_router_topk_scaling_factor", {"moe_router_topk_scaling_factor": 0.0},
     {"moe_router_topk_scaling_factor": None}),
    ("moe_expert_capacity_factor", {"moe_expert_capacity_factor": -1.0}, {"moe_expert_capacity_factor": 4.5}),
    ("activation_func_clamp_value", {**SWIGLU, "activation_func_clamp_value": 0.0},
     {"activation_func_clamp_value": 0.5}),
    ("num_moe_experts", {"num_moe_experts": 0}, {"num_moe_experts": 2}),
    ("num_moe_experts", {"num_moe_experts": 32768}, {"num_moe_experts": 32767}),
    ("num_moe_experts", {"num_moe_experts": None, "moe_ffn_hidden_size": None, "expert_model_parallel_size": 2},
     {"expert_model_parallel_size": 1}),
    ("num_moe_experts", {"expert_model_parallel_size": 3}, {"num_moe_experts": 6}),
    ("moe_ffn_hidden_size", {"num_moe_experts": None}, {"moe_ffn_hidden_size": None}),
    ("moe_ffn_hidden_size", {"expert_tensor_parallel_size": 3}, {"moe_ffn_hidden_size": 33}),
    ("moe_latent_size", {"num_moe_experts": None, "moe_ffn_hidden_size": None, "moe_latent_size": 8},
     {"num_moe_experts": 8}),
    ("moe_layer_freq", {"moe_layer_freq": 0}, {"moe_layer_freq": 1}),
    ("moe_layer_freq", {"moe_layer_freq": [0, 2]}, {"moe_layer_freq": [0, 1]}),
    ("moe_layer_freq", {"num_layers": 3, "moe_layer_freq": [0, 1]}, {"num_layers": 2}),
    ("sequence_parallel", {"sequence_parallel": True}, {"tensor_model_parallel_size": 2}),
]  # fmt: skip


WRONG_KINDS = [
    ("num_moe_experts", 8.0),
    ("num_moe_experts", True),
    ("moe_router_topk", None),
    ("moe_router_topk", "2"),
    ("moe_router_score_function", "tanh"),
    ("moe_router_score_function", None),
    ("moe_router_dtype", "bf16"),
    ("moe_router_load_balancing_type", "switch"),
    ("moe_router_load_balancing_type", ["aux_loss", "switch"]),
    ("moe_aux_loss_coeff", None),
    ("moe_aux_loss_coeff", float("nan")),
    ("moe_aux_loss_coeff", [0.1, None]),
    ("moe_z_loss_coeff", float("inf")),
    ("moe_token_drop_policy", "random"),
    ("moe_token_dispatcher_type", "alltoall_seq"),
    ("moe_flex_dispatcher_backend", None),
    ("moe_router_pre_softmax", 1),
    ("moe_router_fusion", None),
    ("moe_layer_freq", "[0]+[1]*3"),
    ("moe_layer_freq", [True, False]),
    ("activation_func", "swish"),
    ("params_dtype", "float32"),
    ("fp8", True),
    ("fp8_recipe", None),
    ("recompute_granularity", "none"),
    ("recompute_modules", "moe"),
    ("recompute_modules", ["experts"]),
    ("offload_modules", None),
    ("cuda_graph_modules", "full"),
    ("cuda_graph_modules", ["router"]),
    ("activation_func_clamp_value", float("inf")),
]


_NO_CLAMP = "knows no rule of clamped SwiGLU"
ELSEWHERE = {  # (option, beside) of a rule: what megatron-core 0.16.1 does instead
    ("moe_router_enable_expert_bias", "moe_router_score_function"): "knows no sqrtsoftplus",
    ("activation_func_clamp_value", "activation_func gated_linear_unit"): _NO_CLAMP,
    ("activation_func_clamp_value", "num_moe_experts"): _NO_CLAMP,
    ("activation_func_clamp_value", "glu_linear_offset"): _NO_CLAMP,
    ("activation_func_clamp_value", "use_te_activation_func"): _NO_CLAMP,
    ("offload_modules", "recompute_modules"): "accepts it",
    ("cuda_graph_modules", "offload_modules"): "accepts it",
    ("cuda_graph_modules", "cuda_graph_impl fine_grained_activation_offloading"): "accepts it",
    ("offload_modules", "cuda_graph_impl"): "accepts it",
    ("overlap_moe_expert_parallel_comm", "recompute_modules"): "accepts it",
    ("overlap_moe_expert_parallel_comm", "mtp_num_layers"): "wants pipeline ranks with an MTP layer",
}


_NAMES = """
        num_moe_experts moe_ffn_hidden_size moe_layer_freq moe_shared_expert_intermediate_size moe_shared_expert_gate
    moe_shared_expert_overlap     use_grouped_gemm_for_shared_expert moe_shared_expert_glu_interleave_size
    moe_router_load_balancing_type moe_aux_loss_coeff moe_z_loss_coeff     moe_router_topk moe_router_num_groups
    moe_router_group_topk moe_router_topk_limited_devices moe_router_pre_softmax     moe_router_topk_scaling_factor
    moe_router_score_function moe_router_dtype moe_router_enable_expert_bias moe_router_bias_update_rate
    moe_router_fusion     moe_router_padding_for_quantization moe_router_padding_for_fp8 moe_enable_routing_replay
    moe_input_jitter_eps moe_expert_capacity_factor     moe_pad_expert_input_to_capacity moe_token_drop_policy
    moe_token_dropping     moe_token_dispatcher_type moe_flex_dispatcher_backend moe_enable_deepep
    moe_flex_dispatcher_num_sms moe_deepep_num_sms moe_hybridep_num_sms     moe_permute_fusion
    moe_permute_fusion_into_hybridep moe_hybridep_num_blocks_permute moe_hybridep_num_blocks_unpermute
    moe_hybridep_num_sms_preprocessing moe_hybridep_pad_uneven_dispatch_inputs moe_expert_rank_capacity_factor
    moe_grouped_gemm moe_use_grouped_tensor moe_single_grouped_weight moe_single_grouped_bias
    moe_apply_probs_on_input moe_latent_size moe_mlp_glu_interleave_size glu_linear_offset activation_func_clamp_value
    use_fused_weighted_squared_relu activation_func_fp8_input_store moe_layer_recompute recompute_modules
    moe_paged_stash     moe_paged_stash_page_size moe_paged_stash_buffer_size_factor_cuda
    moe_paged_stash_buffer_size_factor_cpu moe_per_layer_logging     overlap_moe_expert_parallel_comm
    delay_wgrad_compute overlap_dispatch_backward_with_experts_wgrad     cuda_graph_modules add_bias_linear
"""


OPTIONS = set(_NAMES.split())
