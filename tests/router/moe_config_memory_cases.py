"""Configs that MoEConfig refuses: precision, memory, graphs, overlaps."""

from tests.router.moe_config_cases import (
    A2A,
    ALIGNED,
    CAPACITY,
    DEEPEP,
    FUSED,
    GROUPED,
    HYBRIDEP,
    OVERLAP,
    PADDED,
    SHARED,
    TENSOR,
    graphs,
    offload,
    selective,
)

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
