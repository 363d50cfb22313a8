"""Megatron's `TransformerConfig` as a `MoEConfig`. Megatron itself is not needed: its configuration
is a dataclass, of which the fields are read.
"""

from dataclasses import MISSING, fields, is_dataclass, replace
from inspect import getmro
from typing import Any

import torch

from moe_ref.config import MoEConfig, Recipe, require
from moe_ref.config.megatron.refused import REFUSED

DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
DELAYED = {
    "fp8_margin": "margin",
    "fp8_amax_history_len": "amax_history_len",
    "fp8_amax_compute_algo": "amax_compute_algo",
}
_MODE = "no function has such a mode"
_KITCHEN = "recipes are those of Transformer Engine"
ONLY_DEFAULT = REFUSED | {  # options that must have their default value, each with the reason
    "moe_extended_tp": "it is no option of a dispatcher here",
    "moe_use_legacy_grouped_gemm": "experts have one grouped product",
    "deterministic_mode": _MODE,
    "use_inference_optimized_layers": "inference engines are not implemented",
    "fp8_interval": "scales are updated each step",
    "fp8_wgrad": "all three products have the recipe",
    "tp_only_amax_red": "amaxes are of one rank",
    "fp8_quantizer_factory": _KITCHEN,
    "fp4_quantizer_factory": _KITCHEN,
    "use_kitchen": _KITCHEN,
    "quant_recipe": _KITCHEN,
    "first_last_layers_bf16": "make those layers of a configuration without fp8",
}
# Options of the other layers, of parallelism and schedules around the layer, of initial values but
# for init_method_std, and of memory, graphs and logs.
_TRAINER = """
pipeline_model_parallel_comm_backend hierarchical_context_parallel_sizes max_seqlen_per_dp_cp_rank
hybrid_context_parallel perform_initialization use_cpu_initialization timers finalize_model_grads_func
grad_scale_func no_sync_func grad_sync_func param_sync_func enable_autocast autocast_dtype
num_microbatches_with_partial_activation_checkpoints gradient_accumulation_fusion
async_tensor_model_parallel_allreduce use_te_rng_tracker tp_comm_overlap tp_comm_bulk_wgrad
tp_comm_bulk_dgrad tp_comm_overlap_ag tp_comm_overlap_rs tp_comm_overlap_rs_dgrad tp_comm_split_ag
tp_comm_atomic_ag tp_comm_split_rs tp_comm_atomic_rs cross_entropy_loss_fusion cross_entropy_fusion_impl
tp_comm_overlap_disable_qkv tp_comm_overlap_disable_fc1 tp_comm_bootstrap_backend pipeline_dtype
overlap_p2p_comm batch_p2p_comm batch_p2p_sync use_ring_exchange_p2p deallocate_pipeline_outputs
defer_embedding_wgrad_compute wgrad_deferral_limit overlap_p2p_comm_warmup_flush
microbatch_group_size_per_vp_stage mtp_standalone cpu_offloading_num_layers _cpu_offloading_context
cpu_offloading_activations cpu_offloading_weights cpu_offloading_double_buffering barrier_with_L1_time
mtp_loss_scaling_factor num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage
pipeline_model_parallel_layout account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split
num_attention_heads attention_backend softmax_scale softmax_type num_query_groups kv_channels
hidden_dropout attention_dropout fp32_residual_connection apply_residual_connection_post_layernorm
layernorm_epsilon layernorm_zero_centered_gamma add_qkv_bias rotary_interleaved window_size
window_attn_skip_freq normalization qk_layernorm qk_l2_norm qk_clip qk_clip_alpha qk_clip_threshold
log_max_attention_logit attention_output_gate test_mode multi_latent_attention no_rope_freq
experimental_attention_variant dsa_indexer_n_heads dsa_indexer_head_dim dsa_indexer_topk
dsa_indexer_loss_coeff dsa_indexer_use_sparse_loss linear_attention_freq linear_conv_kernel_dim
linear_key_head_dim linear_value_head_dim linear_num_key_heads linear_num_value_heads init_method
output_layer_init_method embedding_init_method embedding_init_method_std init_model_with_meta_device
apply_query_key_layer_scaling attention_softmax_in_fp32 disable_bf16_reduced_precision_matmul
masked_softmax_fusion persist_layer_norm memory_efficient_layer_norm bias_dropout_fusion
apply_rope_fusion fused_single_qkv_rope distribute_saved_activations fp8_dot_product_attention
fp8_multi_head_attention num_layers_at_start_in_bf16 num_layers_at_end_in_bf16 use_kitchen_attention
kitchen_attention_backend cp_comm_type enable_cuda_graph cuda_graph_use_single_mempool
cuda_graph_retain_backward_graph cuda_graph_warmup_steps external_cuda_graph cuda_graph_scope
clone_scatter_output_in_embedding disable_parameter_transpose_cache config_logger_dir flash_decode
inference_rng_tracker inference_sampling_seed symmetric_ar_type inference_fuse_tp_communication
mrope_section is_hybrid_model mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads
use_mamba_mem_eff_path mlp_chunks_for_prefill heterogeneous_block_specs hetereogenous_dist_checkpoint
min_offloaded_tensor_size
"""
OF_THE_TRAINER = frozenset(_TRAINER.split())
USED = {*DELAYED, "init_method_std"}


def is_transformer_config(config: Any) -> bool:
    """Whether it is a `TransformerConfig`, or of a class derived from it."""
    return is_dataclass(config) and "TransformerConfig" in [base.__name__ for base in getmro(type(config))]


def moe_config(config: Any) -> MoEConfig:
    """The options that `MoEConfig` has.

    Raises:
        ValueError: an option without an implementation here that is not at its default, or an
            unknown one; see `MoEConfig`.
    """
    options = {}
    names = {field.name for field in fields(MoEConfig)}
    for field in fields(config):
        name, value = field.name, getattr(config, field.name)
        default = field.default if field.default_factory is MISSING else field.default_factory()
        if name in names and (name not in MoEConfig.deprecated or value != default):
            options[name] = _plain(name, value)
        elif name not in names | OF_THE_TRAINER | USED:
            reason = ONLY_DEFAULT.get(name, "MoELayer does not know this option")
            require(value == default, name, repr(value), f"{default!r}: {reason}")
    return MoEConfig(**options)


def recipe_of(config: Any, recipe: Recipe | None) -> Recipe | None:
    """The recipe, with the options of delayed scaling, which `MoEConfig` does not have."""
    if recipe is None or recipe.scaling != "delayed":
        return recipe
    return replace(recipe, **{ours: getattr(config, theirs) for theirs, ours in DELAYED.items()})


def _plain(name: str, value: Any) -> Any:
    """The value of an option as `MoEConfig` writes it: functions and dtypes by their names."""
    if name == "activation_func":
        return getattr(value, "__name__", repr(value))
    if name == "params_dtype":
        require(value in DTYPES, name, value, f"one of {', '.join(map(str, DTYPES))}")
        return DTYPES[value]
    return value
