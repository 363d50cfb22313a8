"""Configs that are refused: the option that the message must name, the settings, and a change to
them that is accepted.
"""

BASE = {
    "num_moe_experts": 8,
    "hidden_size": 16,
    "ffn_hidden_size": 32,
    "moe_ffn_hidden_size": 32,
    "add_bias_linear": False,
}


A2A = {"moe_token_dispatcher_type": "alltoall"}
DEEPEP = {"moe_token_dispatcher_type": "flex"}
HYBRIDEP = {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "hybridep"}
SWIGLU = {"activation_func": "silu", "gated_linear_unit": True}
GROUPED = {"moe_grouped_gemm": True}
FUSED = {**SWIGLU, **GROUPED, "use_transformer_engine_op_fuser": True}
TENSOR = {**GROUPED, "moe_use_grouped_tensor": True}
SHARED = {"moe_shared_expert_intermediate_size": 32}
MXFP8 = {"fp8": "e4m3", "fp8_recipe": "mxfp8"}
OVERLAP = {"overlap_moe_expert_parallel_comm": True, "expert_model_parallel_size": 2, "bf16": True, **A2A}
SINKHORN = {"moe_router_load_balancing_type": "sinkhorn"}
GROUPS = {"moe_router_num_groups": 4, "moe_router_group_topk": 2}
CAPACITY = {"moe_expert_capacity_factor": 1.0}
PADDED = {**CAPACITY, "moe_pad_expert_input_to_capacity": True}
ALIGNED = {"moe_router_padding_for_quantization": True}


def selective(*modules):
    return {"recompute_granularity": "selective", "recompute_modules": modules}


def offload(*modules):
    return {"fine_grained_activation_offloading": True, "offload_modules": modules}


def graphs(*modules, impl="transformer_engine"):
    return {"cuda_graph_impl": impl, "cuda_graph_modules": modules}


ROUTER = [
    ("moe_router_topk", {"moe_router_topk": 9}, {"moe_router_topk": 8}),
    ("moe_router_topk", {"moe_router_topk": 1}, {"moe_router_pre_softmax": True}),
    ("moe_router_topk", {"moe_router_topk": 1}, {"moe_router_score_function": "sigmoid"}),
    ("moe_router_topk", {"moe_router_topk": 1}, SINKHORN),
    ("moe_router_enable_expert_bias", {"moe_router_enable_expert_bias": True},
     {"moe_router_score_function": "sqrtsoftplus"}),
    ("moe_router_enable_expert_bias", {"moe_router_enable_expert_bias": True, "moe_router_pre_softmax": True},
     {"moe_router_score_function": "sigmoid"}),
    ("moe_router_num_groups", {"moe_router_group_topk": 2}, {"moe_router_num_groups": 2}),
    ("moe_router_group_topk", {"moe_router_num_groups": 2}, {"moe_router_group_topk": 2}),
    ("moe_router_num_groups", {**GROUPS, "moe_router_num_groups": 3}, {"moe_router_num_groups": 2}),
    ("moe_router_group_topk", {**GROUPS, "moe_router_group_topk": 5},
     {"moe_router_group_topk": 4, "moe_router_topk": 4}),
    ("moe_router_group_topk", {**GROUPS, "moe_router_group_topk": 3}, {"moe_router_topk": 3}),
    ("moe_router_group_topk", {**GROUPS, "moe_router_topk": 5}, {"moe_router_topk": 4}),
    ("moe_router_group_topk", {**GROUPS, "moe_router_group_topk": 1, "moe_router_topk": 6},
     {"moe_router_group_topk": 3}),
    ("moe_router_load_balancing_type", {"moe_router_load_balancing_type": ["sinkhorn"], "moe_aux_loss_coeff": [0.0]},
     {**SINKHORN, "moe_aux_loss_coeff": 0.0}),
    ("moe_router_load_balancing_type",
     {"moe_router_load_balancing_type": ["aux_loss", "aux_loss"], "moe_aux_loss_coeff": [0.1, 0.2]},
     {"moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"]}),
    ("moe_aux_loss_coeff",
     {"moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"], "moe_aux_loss_coeff": [0.1]},
     {"moe_aux_loss_coeff": [0.1, 0.2]}),
    ("moe_aux_loss_coeff", {"moe_router_load_balancing_type": ["aux_loss"], "moe_aux_loss_coeff": 0.1},
     {"moe_aux_loss_coeff": [0.1]}),
    ("moe_aux_loss_coeff", {"moe_aux_loss_coeff": [0.1]}, {"moe_router_load_balancing_type": ["aux_loss"]}),
    ("moe_aux_loss_coeff", {"moe_aux_loss_coeff": -0.1}, {"moe_aux_loss_coeff": 0.0}),
    ("moe_aux_loss_coeff", {"moe_router_load_balancing_type": ["aux_loss"], "moe_aux_loss_coeff": [-0.1]},
     {"moe_aux_loss_coeff": [0.0]}),
    ("moe_aux_loss_coeff", {**SINKHORN, "moe_aux_loss_coeff": 0.1}, {"moe_router_load_balancing_type": "none"}),
    ("moe_enable_routing_replay", {"moe_enable_routing_replay": True, "moe_router_fusion": True},
     {"moe_router_fusion": False}),
    ("moe_enable_routing_replay", {"moe_enable_routing_replay": True, **SINKHORN},
     {"moe_router_load_balancing_type": "seq_aux_loss"}),
]  # fmt: skip


PLACES = [  # capacity and dispatcher
    ("moe_pad_expert_input_to_capacity", {"moe_pad_expert_input_to_capacity": True}, CAPACITY),
    ("moe_pad_expert_input_to_capacity", {**PADDED, **DEEPEP}, HYBRIDEP),
    ("moe_expert_capacity_factor", {**CAPACITY, **SINKHORN}, {"moe_router_load_balancing_type": "none"}),
    (
        "moe_token_dropping",
        {"moe_token_dropping": True},
        {"moe_token_dropping": False, "moe_expert_capacity_factor": 100.0},
    ),
    ("moe_router_padding_for_quantization", {**ALIGNED, **A2A}, {"fp8": "hybrid"}),
    ("moe_router_padding_for_quantization", {**ALIGNED, **A2A}, {"fp4": "e2m1"}),
    ("moe_router_padding_for_quantization", {**ALIGNED, "fp8": "hybrid"}, A2A),
    ("variable_seq_lengths", {"variable_seq_lengths": True}, A2A),
    ("moe_expert_rank_capacity_factor", {**FUSED, **DEEPEP, "moe_expert_rank_capacity_factor": 1.5}, HYBRIDEP),
    ("moe_expert_rank_capacity_factor", {**FUSED, **HYBRIDEP, **A2A, "moe_expert_rank_capacity_factor": 1.5}, HYBRIDEP),
    ("moe_expert_rank_capacity_factor", {**HYBRIDEP, "moe_expert_rank_capacity_factor": 1.5}, TENSOR),
]


EXPERTS = [
    ("moe_use_grouped_tensor", {"moe_use_grouped_tensor": True}, GROUPED),
    ("moe_single_grouped_weight", {"moe_single_grouped_weight": True}, TENSOR),
    ("moe_single_grouped_bias", {"moe_single_grouped_bias": True, "add_bias_linear": True}, TENSOR),
    ("moe_single_grouped_weight", {"moe_single_grouped_weight": True, **GROUPED}, TENSOR),
    ("moe_single_grouped_bias", {"moe_single_grouped_bias": True, "add_bias_linear": True, **GROUPED}, TENSOR),
    ("moe_single_grouped_weight", {"moe_single_grouped_weight": True, **TENSOR, "use_megatron_fsdp": True},
     {"use_megatron_fsdp": False}),
    ("moe_single_grouped_bias",
     {"moe_single_grouped_bias": True, "add_bias_linear": True, **TENSOR, "use_megatron_fsdp": True},
     {"use_megatron_fsdp": False}),
    ("moe_single_grouped_bias", {"moe_single_grouped_bias": True, **TENSOR}, {"add_bias_linear": True}),
    ("add_bias_linear", {"add_bias_linear": True, "tensor_model_parallel_size": 2}, {"expert_tensor_parallel_size": 1}),
    ("moe_apply_probs_on_input", {"moe_apply_probs_on_input": True},
     {"moe_router_topk": 1, "moe_router_pre_softmax": True}),
    ("moe_apply_probs_on_input",
     {"moe_apply_probs_on_input": True, "moe_router_topk": 1, "moe_router_pre_softmax": True, **FUSED},
     {"use_transformer_engine_op_fuser": False}),
    ("expert_tensor_parallel_size", {**FUSED, "expert_tensor_parallel_size": 2},
     {"use_transformer_engine_op_fuser": False}),
    ("activation_func", {**FUSED, "activation_func": "gelu"}, {"activation_func": "quick_gelu"}),
    ("activation_func", {**FUSED, "gated_linear_unit": False},
     {"activation_func": "squared_relu", "use_fused_weighted_squared_relu": True}),
    ("use_fused_weighted_squared_relu", {"use_fused_weighted_squared_relu": True, "add_bias_linear": True},
     {"add_bias_linear": False}),
    ("bias_activation_fusion", {**SWIGLU, "bias_activation_fusion": True, "use_te_activation_func": True},
     {"use_te_activation_func": False}),
    ("bias_activation_fusion", {"bias_activation_fusion": True, "activation_func": "silu"},
     {"gated_linear_unit": True}),
    ("bias_activation_fusion", {**SWIGLU, "bias_activation_fusion": True, "add_bias_linear": True}, GROUPED),
    ("use_te_activation_func", {"use_te_activation_func": True, "activation_func": "quick_gelu"},
     {"activation_func": "relu"}),
    ("glu_linear_offset", {**SWIGLU, "bias_activation_fusion": True, "glu_linear_offset": 1.0},
     {"activation_func": "quick_gelu"}),
    ("activation_func_fp8_input_store", {"activation_func_fp8_input_store": True, "activation_func": "silu"},
     {"gated_linear_unit": True}),
    ("activation_func_clamp_value",
     {**SWIGLU, "activation_func_clamp_value": 7.0, "num_moe_experts": None, "moe_ffn_hidden_size": None},
     {"activation_func": "quick_gelu"}),
    ("activation_func_clamp_value", {**SWIGLU, "activation_func_clamp_value": 7.0, "glu_linear_offset": 1.0},
     {"glu_linear_offset": 0.0}),
    ("activation_func_clamp_value", {**SWIGLU, "activation_func_clamp_value": 7.0, "use_te_activation_func": True},
     {"use_te_activation_func": False}),
    ("moe_mlp_glu_interleave_size", {**SWIGLU, "moe_mlp_glu_interleave_size": 16}, GROUPED),
    ("moe_mlp_glu_interleave_size", {**SWIGLU, **GROUPED, "moe_mlp_glu_interleave_size": 12},
     {"moe_mlp_glu_interleave_size": 32}),
    ("moe_mlp_glu_interleave_size",
     {**SWIGLU, **GROUPED, "moe_mlp_glu_interleave_size": 32, "expert_tensor_parallel_size": 2},
     {"expert_tensor_parallel_size": 1}),
    ("moe_shared_expert_intermediate_size", {**SHARED, "add_bias_linear": True}, {"add_bias_linear": False}),
    ("moe_shared_expert_overlap", {**SHARED, "moe_shared_expert_overlap": True}, A2A),
    ("moe_shared_expert_overlap", {**SHARED, **A2A, "moe_shared_expert_overlap": True, "moe_latent_size": 8},
     {"moe_latent_size": None}),
    ("use_grouped_gemm_for_shared_expert",
     {**SHARED, **MXFP8, "use_grouped_gemm_for_shared_expert": True, "moe_shared_expert_glu_interleave_size": 16},
     SWIGLU),
    ("use_grouped_gemm_for_shared_expert", {**SHARED, **MXFP8, **SWIGLU, "use_grouped_gemm_for_shared_expert": True},
     {"moe_shared_expert_glu_interleave_size": 16}),
    ("use_grouped_gemm_for_shared_expert", {**SHARED, **SWIGLU, "fp8": "hybrid",
     "use_grouped_gemm_for_shared_expert": True, "moe_shared_expert_glu_interleave_size": 16}, {"fp8": None,
     "fp4": "e2m1"}),
]  # fmt: skip
