"""Configs that are refused: the option that the message must name, the settings, and a change to them that is accepted."""

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
    (
        "moe_router_enable_expert_bias",
        {"moe_router_enable_expert_bias": True},
        {"moe_router_score_function": "sqrtsoftplus"},
    ),
    (
        "moe_router_enable_expert_bias",
        {"moe_router_enable_expert_bias": True, "moe_router_pre_softmax": True},
        {"moe_router_score_function": "sigmoid"},
    ),
    ("moe_router_num_groups", {"moe_router_group_topk": 2}, {"moe_router_num_groups": 2}),
    ("moe_router_group_topk", {"moe_router_num_groups": 2}, {"moe_router_group_topk": 2}),
    ("moe_router_num_groups", {**GROUPS, "moe_router_num_groups": 3}, {"moe_router_num_groups": 2}),
    (
        "moe_router_group_topk",
        {**GROUPS, "moe_router_group_topk": 5},
        {"moe_router_group_topk": 4, "moe_router_topk": 4},
    ),
    ("moe_router_group_topk", {**GROUPS, "moe_router_group_topk": 3}, {"moe_router_topk": 3}),
    ("moe_router_group_topk", {**GROUPS, "moe_router_topk": 5}, {"moe_router_topk": 4}),
    (
        "moe_router_group_topk",
        {**GROUPS, "moe_router_group_topk": 1, "moe_router_topk": 6},
        {"moe_router_group_topk": 3},
    ),
    (
        "moe_router_load_balancing_type",
        {"moe_router_load_balancing_type": ["sinkhorn"], "moe_aux_loss_coeff": [0.0]},
        {**SINKHORN, "moe_aux_loss_coeff": 0.0},
    ),
    (
        "moe_router_load_balancing_type",
        {"moe_router_load_balancing_type": ["aux_loss", "aux_loss"], "moe_aux_loss_coeff": [0.1, 0.2]},
        {"moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"]},
    ),
    (
        "moe_aux_loss_coeff",
        {"moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"], "moe_aux_loss_coeff": [0.1]},
        {"moe_aux_loss_coeff": [0.1, 0.2]},
    ),
    (
        "moe_aux_loss_coeff",
        {"moe_router_load_balancing_type": ["aux_loss"], "moe_aux_loss_coeff": 0.1},
        {"moe_aux_loss_coeff": [0.1]},
    ),
    ("moe_aux_loss_coeff", {"moe_aux_loss_coeff": [0.1]}, {"moe_router_load_balancing_type": ["aux_loss"]}),
    ("moe_aux_loss_coeff", {"moe_aux_loss_coeff": -0.1}, {"moe_aux_loss_coeff": 0.0}),
    (
        "moe_aux_loss_coeff",
        {"moe_router_load_balancing_type": ["aux_loss"], "moe_aux_loss_coeff": [-0.1]},
        {"moe_aux_loss_coeff": [0.0]},
    ),
    ("moe_aux_loss_coeff", {**SINKHORN, "moe_aux_loss_coeff": 0.1}, {"moe_router_load_balancing_type": "none"}),
    (
        "moe_enable_routing_replay",
        {"moe_enable_routing_replay": True, "moe_router_fusion": True},
        {"moe_router_fusion": False},
    ),
    (
        "moe_enable_routing_replay",
        {"moe_enable_routing_replay": True, **SINKHORN},
        {"moe_router_load_balancing_type": "seq_aux_loss"},
    ),
]

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
    (
        "moe_single_grouped_weight",
        {"moe_single_grouped_weight": True, **TENSOR, "use_megatron_fsdp": True},
        {"use_megatron_fsdp": False},
    ),
    (
        "moe_single_grouped_bias",
        {"moe_single_grouped_bias": True, "add_bias_linear": True, **TENSOR, "use_megatron_fsdp": True},
        {"use_megatron_fsdp": False},
    ),
    ("moe_single_grouped_bias", {"moe_single_grouped_bias": True, **TENSOR}, {"add_bias_linear": True}),
    ("add_bias_linear", {"add_bias_linear": True, "tensor_model_parallel_size": 2}, {"expert_tensor_parallel_size": 1}),
    (
        "moe_apply_probs_on_input",
        {"moe_apply_probs_on_input": True},
        {"moe_router_topk": 1, "moe_router_pre_softmax": True},
    ),
    (
        "moe_apply_probs_on_input",
        {"moe_apply_probs_on_input": True, "moe_router_topk": 1, "moe_router_pre_softmax": True, **FUSED},
        {"use_transformer_engine_op_fuser": False},
    ),
    (
        "expert_tensor_parallel_size",
        {**FUSED, "expert_tensor_parallel_size": 2},
        {"use_transformer_engine_op_fuser": False},
    ),
    ("activation_func", {**FUSED, "activation_func": "gelu"}, {"activation_func": "quick_gelu"}),
    (
        "activation_func",
        {**FUSED, "gated_linear_unit": False},
        {"activation_func": "squared_relu", "use_fused_weighted_squared_relu": True},
    ),
    (
        "use_fused_weighted_squared_relu",
        {"use_fused_weighted_squared_relu": True, "add_bias_linear": True},
        {"add_bias_linear": False},
    ),
    (
        "bias_activation_fusion",
        {**SWIGLU, "bias_activation_fusion": True, "use_te_activation_func": True},
        {"use_te_activation_func": False},
    ),
    (
        "bias_activation_fusion",
        {"bias_activation_fusion": True, "activation_func": "silu"},
        {"gated_linear_unit": True},
    ),
    ("bias_activation_fusion", {**SWIGLU, "bias_activation_fusion": True, "add_bias_linear": True}, GROUPED),
    (
        "use_te_activation_func",
        {"use_te_activation_func": True, "activation_func": "quick_gelu"},
        {"activation_func": "relu"},
    ),
    (
        "glu_linear_offset",
        {**SWIGLU, "bias_activation_fusion": True, "glu_linear_offset": 1.0},
        {"activation_func": "quick_gelu"},
    ),
    (
        "activation_func_fp8_input_store",
        {"activation_func_fp8_input_store": True, "activation_func": "silu"},
        {"gated_linear_unit": True},
    ),
    (
        "activation_func_clamp_value",
        {**SWIGLU, "activation_func_clamp_value": 7.0, "num_moe_experts": None, "moe_ffn_hidden_size": None},
        {"activation_func": "quick_gelu"},
    ),
    (
        "activation_func_clamp_value",
        {**SWIGLU, "activation_func_clamp_value": 7.0, "glu_linear_offset": 1.0},
        {"glu_linear_offset": 0.0},
    ),
    (
        "activation_func_clamp_value",
        {**SWIGLU, "activation_func_clamp_value": 7.0, "use_te_activation_func": True},
        {"use_te_activation_func": False},
    ),
    ("moe_mlp_glu_interleave_size", {**SWIGLU, "moe_mlp_glu_interleave_size": 16}, GROUPED),
    (
        "moe_mlp_glu_interleave_size",
        {**SWIGLU, **GROUPED, "moe_mlp_glu_interleave_size": 12},
        {"moe_mlp_glu_interleave_size": 32},
    ),
    (
        "moe_mlp_glu_interleave_size",
        {**SWIGLU, **GROUPED, "moe_mlp_glu_interleave_size": 32, "expert_tensor_parallel_size": 2},
        {"expert_tensor_parallel_size": 1},
    ),
    ("moe_shared_expert_intermediate_size", {**SHARED, "add_bias_linear": True}, {"add_bias_linear": False}),
    ("moe_shared_expert_overlap", {**SHARED, "moe_shared_expert_overlap": True}, A2A),
    (
        "moe_shared_expert_overlap",
        {**SHARED, **A2A, "moe_shared_expert_overlap": True, "moe_latent_size": 8},
        {"moe_latent_size": None},
    ),
    (
        "moe_shared_expert_overlap",
        {**SHARED, **A2A, "moe_shared_expert_overlap": True, "moe_latent_size": 8},
        {"moe_latent_size": None},
    ),
    (
        "use_grouped_gemm_for_shared_expert",
        {**SHARED, **MXFP8, "use_grouped_gemm_for_shared_expert": True, "moe_shared_expert_glu_interleave_size": 16},
        SWIGLU,
    ),
    (
        "use_grouped_gemm_for_shared_expert",
        {**SHARED, **MXFP8, **SWIGLU, "use_grouped_gemm_for_shared_expert": True},
        {"moe_shared_expert_glu_interleave_size": 16},
    ),
    (
        "use_grouped_gemm_for_shared_expert",
        {
            **SHARED,
            **SWIGLU,
            "fp8": "hybrid",
            "use_grouped_gemm_for_shared_expert": True,
            "moe_shared_expert_glu_interleave_size": 16,
        },
        {"fp8": None, "fp4": "e2m1"},
    ),
]

PRECISION = [
    ("fp16", {"fp16": True, "bf16": True}, {"bf16": False}),
    ("fp8", {"fp8": "hybrid", "fp4": "e2m1"}, {"fp8": None}),
    ("fp8_param", {"fp8_param": True}, {"fp8": "hybrid"}),
    ("fp4_param", {"fp4_param": True}, {"fp4": "e2m1"}),
    (
        "moe_single_grouped_weight",
        {"moe_single_grouped_weight": True, **TENSOR, "fp8": "hybrid"},
        {"fp8_recipe": "mxfp8"},
    ),
    (
        "moe_single_grouped_weight",
        {"moe_single_grouped_weight": True, **TENSOR, "fp4": "e2m1", "fp4_recipe": "custom", "fp4_param": True},
        {"fp4_recipe": "nvfp4"},
    ),
    ("moe_single_grouped_weight", {"moe_single_grouped_weight": True, **TENSOR, "fp4": "e2m1"}, {"fp4_param": True}),
]

FULL = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}
MEMORY = [
    ("recompute_method", {**FULL, "recompute_method": None}, {"recompute_method": "uniform"}),
    ("recompute_num_layers", {**FULL, "recompute_num_layers": None}, {"recompute_num_layers": 2}),
    ("recompute_num_layers", {**selective("mlp"), "recompute_num_layers": 1}, {"recompute_granularity": None}),
    (
        "cpu_offloading",
        {"cpu_offloading": True, "pipeline_model_parallel_size": 2},
        {"pipeline_model_parallel_size": 1},
    ),
    ("cpu_offloading", {"cpu_offloading": True, **selective("mlp")}, {"recompute_granularity": None}),
    ("offload_modules", offload("attn_proj"), offload("attn_proj", "core_attn")),
    ("recompute_modules", selective("moe_act"), GROUPED),
    (
        "recompute_modules",
        {**selective("shared_experts"), **SHARED, **A2A, "moe_shared_expert_overlap": True},
        {"moe_shared_expert_overlap": False},
    ),
    ("recompute_modules", {**selective("moe_act"), **GROUPED, "fp8": "hybrid"}, {"fp8_recipe": "tensorwise"}),
    ("recompute_modules", {**selective("layernorm"), "fp8": "hybrid"}, {"fp8": None}),
    (
        "fine_grained_activation_offloading",
        {**offload("qkv_linear"), "cpu_offloading": True, "num_layers": 2},
        {"cpu_offloading": False},
    ),
    ("offload_modules", offload(), {"offload_modules": ("moe_act",)}),
    ("offload_modules", {**offload("moe_act"), **selective("moe")}, selective("mlp")),
    ("offload_modules", offload("fused_group_mlp"), {"use_transformer_engine_op_fuser": True}),
    ("offload_modules", {**offload("fused_group_mlp", "moe_act"), **FUSED}, {"offload_modules": ("fused_group_mlp",)}),
    ("offload_modules", {**offload("expert_fc1"), **FUSED}, {"use_transformer_engine_op_fuser": False}),
    (
        "moe_paged_stash",
        {"moe_paged_stash": True, **FUSED, **HYBRIDEP, "moe_expert_rank_capacity_factor": 1.5, "cpu_offloading": True},
        {"cpu_offloading": False},
    ),
    ("moe_paged_stash", {"moe_paged_stash": True, **FUSED, **HYBRIDEP}, {"moe_expert_rank_capacity_factor": 1.5}),
    (
        "moe_paged_stash",
        {
            "moe_paged_stash": True,
            **FUSED,
            **HYBRIDEP,
            "moe_expert_rank_capacity_factor": 1.5,
            "offload_modules": ("moe_act",),
        },
        {"offload_modules": ("attn_norm",)},
    ),
]

GRAPHS = [
    ("cuda_graph_modules", graphs("attn", impl="full_iteration"), {"cuda_graph_modules": ()}),
    ("cuda_graph_impl", {**graphs("attn"), "cpu_offloading": True, "num_layers": 2}, {"cpu_offloading": False}),
    ("cuda_graph_modules", {**graphs("moe", "moe_router"), **PADDED}, graphs("moe")),
    ("cuda_graph_modules", graphs("moe_preprocess"), graphs("moe_router", "moe_preprocess")),
    (
        "cuda_graph_modules",
        {**graphs("moe_preprocess", "moe"), **PADDED, "cuda_graph_impl": "local"},
        graphs("moe_preprocess", impl="local"),
    ),
    (
        "cuda_graph_modules",
        {**graphs("moe_router"), "num_moe_experts": None, "moe_ffn_hidden_size": None},
        graphs("attn"),
    ),
    (
        "cuda_graph_modules",
        {**graphs("moe_router"), "num_moe_experts": 1, "moe_router_topk": 1, "moe_router_pre_softmax": True},
        {"num_moe_experts": 2},
    ),
    ("cuda_graph_modules", graphs("mlp"), {"moe_layer_freq": 2}),
    ("cuda_graph_modules", {**graphs("mlp"), "num_layers": 2, "moe_layer_freq": [1, 1]}, {"moe_layer_freq": [0, 1]}),
    ("cuda_graph_modules", {**graphs("moe"), **CAPACITY}, PADDED),
    ("cuda_graph_modules", {**graphs("moe_router", "moe_preprocess"), **A2A, **CAPACITY}, PADDED),
    (
        "cuda_graph_modules",
        {**graphs("moe_router", "moe_preprocess"), **A2A, **CAPACITY},
        {"moe_token_dispatcher_type": "allgather"},
    ),
    ("cuda_graph_modules", {**graphs("moe_router", "moe_preprocess"), **A2A, **ALIGNED, "fp8": "hybrid"}, DEEPEP),
    (
        "cuda_graph_impl",
        {**graphs("attn"), **FULL},
        graphs(impl="full_iteration"),
    ),
    ("cuda_graph_modules", {**graphs("moe_router"), **selective("moe")}, graphs("moe_router", impl="local")),
    ("moe_input_jitter_eps", {**graphs(), **selective("moe"), "moe_input_jitter_eps": 0.1}, graphs("attn")),
    (
        "moe_input_jitter_eps",
        {**graphs("moe"), **PADDED, **selective("moe"), "moe_input_jitter_eps": 0.1},
        selective("core_attn"),
    ),
    ("offload_modules", {**graphs("attn", impl="local"), **offload("moe_act", "qkv_linear")}, offload("moe_act")),
    ("cuda_graph_modules", {**graphs(impl="local"), **offload("moe_act")}, graphs("attn", impl="local")),
    ("cuda_graph_modules", {**graphs("moe"), **PADDED, **offload("qkv_linear")}, graphs("attn")),
]

OVERLAPS = [
    (
        "overlap_moe_expert_parallel_comm",
        {**OVERLAP, "expert_model_parallel_size": 1},
        {"expert_model_parallel_size": 4},
    ),
    ("overlap_moe_expert_parallel_comm", {**OVERLAP, "moe_token_dispatcher_type": "allgather"}, DEEPEP),
    (
        "overlap_moe_expert_parallel_comm",
        {**OVERLAP, "pipeline_model_parallel_size": 2},
        {"virtual_pipeline_model_parallel_size": 2, "num_layers": 4},
    ),
    (
        "overlap_moe_expert_parallel_comm",
        {**OVERLAP, **FULL},
        {"recompute_granularity": None, "recompute_method": None, "recompute_num_layers": None},
    ),
    ("overlap_moe_expert_parallel_comm", {**OVERLAP, "recompute_method": "block"}, {"recompute_method": None}),
    ("overlap_moe_expert_parallel_comm", {**OVERLAP, "recompute_num_layers": 1}, {"recompute_num_layers": None}),
    ("overlap_moe_expert_parallel_comm", {**OVERLAP, **selective("moe")}, selective("mlp")),
    ("overlap_moe_expert_parallel_comm", {**OVERLAP, "bf16": False}, {"fp16": True}),
    (
        "overlap_moe_expert_parallel_comm",
        {**OVERLAP, **SHARED, "moe_shared_expert_overlap": True},
        {"moe_shared_expert_overlap": False},
    ),
    ("overlap_moe_expert_parallel_comm", {**OVERLAP, "mtp_num_layers": 2}, {"mtp_num_layers": 1}),
    ("overlap_moe_expert_parallel_comm", {**OVERLAP, **graphs("moe"), **PADDED}, graphs("attn")),
    ("overlap_moe_expert_parallel_comm", {**OVERLAP, **graphs("mlp"), "moe_layer_freq": 2}, graphs("moe_router")),
    ("delay_wgrad_compute", {"delay_wgrad_compute": True}, OVERLAP),
    (
        "delay_wgrad_compute",
        {**OVERLAP, "delay_wgrad_compute": True, "transformer_impl": "local"},
        {"transformer_impl": "transformer_engine"},
    ),
    (
        "delay_wgrad_compute",
        {**OVERLAP, "delay_wgrad_compute": True, "overlap_dispatch_backward_with_experts_wgrad": True},
        {"overlap_dispatch_backward_with_experts_wgrad": False},
    ),
    (
        "overlap_dispatch_backward_with_experts_wgrad",
        {**OVERLAP, "overlap_dispatch_backward_with_experts_wgrad": True},
        {"overlap_moe_expert_parallel_comm": False},
    ),
    ("ep_overlap_early_attn_memory_release", {"ep_overlap_early_attn_memory_release": True}, OVERLAP),
]

CASES = [*ROUTER, *PLACES, *EXPERTS, *PRECISION, *MEMORY, *GRAPHS, *OVERLAPS]

NOT_NEGATIVE = "num_layers hidden_size ffn_hidden_size moe_ffn_hidden_size mtp_num_layers recompute_num_layers moe_z_loss_coeff moe_router_bias_update_rate"
POSITIVE = (
    "tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size context_parallel_size expert_model_parallel_size "
    "expert_tensor_parallel_size moe_router_topk moe_router_num_groups moe_router_group_topk moe_flex_dispatcher_num_sms "
    "moe_hybridep_num_sms_preprocessing moe_hybridep_num_blocks_permute moe_hybridep_num_blocks_unpermute moe_expert_rank_capacity_factor "
    "moe_paged_stash_page_size moe_mlp_glu_interleave_size moe_shared_expert_glu_interleave_size moe_router_topk_scaling_factor "
    "moe_expert_capacity_factor moe_input_jitter_eps moe_shared_expert_intermediate_size moe_latent_size activation_func_clamp_value"
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
    (
        "moe_router_topk_scaling_factor",
        {"moe_router_topk_scaling_factor": 0.0},
        {"moe_router_topk_scaling_factor": None},
    ),
    ("moe_expert_capacity_factor", {"moe_expert_capacity_factor": -1.0}, {"moe_expert_capacity_factor": 4.5}),
    (
        "activation_func_clamp_value",
        {**SWIGLU, "activation_func_clamp_value": 0.0},
        {"activation_func_clamp_value": 0.5},
    ),
    ("num_moe_experts", {"num_moe_experts": 0}, {"num_moe_experts": 2}),
    ("num_moe_experts", {"num_moe_experts": 32768}, {"num_moe_experts": 32767}),
    (
        "num_moe_experts",
        {"num_moe_experts": None, "moe_ffn_hidden_size": None, "expert_model_parallel_size": 2},
        {"expert_model_parallel_size": 1},
    ),
    ("num_moe_experts", {"expert_model_parallel_size": 3}, {"num_moe_experts": 6}),
    ("moe_ffn_hidden_size", {"num_moe_experts": None}, {"moe_ffn_hidden_size": None}),
    ("moe_ffn_hidden_size", {"expert_tensor_parallel_size": 3}, {"moe_ffn_hidden_size": 33}),
    (
        "moe_latent_size",
        {"num_moe_experts": None, "moe_ffn_hidden_size": None, "moe_latent_size": 8},
        {"num_moe_experts": 8},
    ),
    ("moe_layer_freq", {"moe_layer_freq": 0}, {"moe_layer_freq": 1}),
    ("moe_layer_freq", {"moe_layer_freq": [0, 2]}, {"moe_layer_freq": [0, 1]}),
    ("moe_layer_freq", {"num_layers": 3, "moe_layer_freq": [0, 1]}, {"num_layers": 2}),
    ("sequence_parallel", {"sequence_parallel": True}, {"tensor_model_parallel_size": 2}),
]

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
    num_moe_experts moe_ffn_hidden_size moe_layer_freq moe_shared_expert_intermediate_size moe_shared_expert_gate moe_shared_expert_overlap
    use_grouped_gemm_for_shared_expert moe_shared_expert_glu_interleave_size moe_router_load_balancing_type moe_aux_loss_coeff moe_z_loss_coeff
    moe_router_topk moe_router_num_groups moe_router_group_topk moe_router_topk_limited_devices moe_router_pre_softmax
    moe_router_topk_scaling_factor moe_router_score_function moe_router_dtype moe_router_enable_expert_bias moe_router_bias_update_rate
    moe_router_fusion
    moe_router_padding_for_quantization moe_router_padding_for_fp8 moe_enable_routing_replay moe_input_jitter_eps moe_expert_capacity_factor
    moe_pad_expert_input_to_capacity moe_token_drop_policy moe_token_dropping
    moe_token_dispatcher_type moe_flex_dispatcher_backend moe_enable_deepep moe_flex_dispatcher_num_sms moe_deepep_num_sms moe_hybridep_num_sms
    moe_permute_fusion moe_permute_fusion_into_hybridep moe_hybridep_num_blocks_permute moe_hybridep_num_blocks_unpermute
    moe_hybridep_num_sms_preprocessing moe_hybridep_pad_uneven_dispatch_inputs moe_expert_rank_capacity_factor
    moe_grouped_gemm moe_use_grouped_tensor moe_single_grouped_weight moe_single_grouped_bias
    moe_apply_probs_on_input moe_latent_size moe_mlp_glu_interleave_size glu_linear_offset activation_func_clamp_value
    use_fused_weighted_squared_relu activation_func_fp8_input_store moe_layer_recompute recompute_modules moe_paged_stash
    moe_paged_stash_page_size moe_paged_stash_buffer_size_factor_cuda moe_paged_stash_buffer_size_factor_cpu moe_per_layer_logging
    overlap_moe_expert_parallel_comm delay_wgrad_compute overlap_dispatch_backward_with_experts_wgrad
    cuda_graph_modules add_bias_linear
"""
OPTIONS = set(_NAMES.split())
