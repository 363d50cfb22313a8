"""The arguments of `MoELayer` that a configuration asks for: of Megatron's options here, of a
model of transformers in `moe_fast.layer.huggingface`.
"""

from dataclasses import replace
from typing import Any

import torch

from moe_fast.layer import megatron
from moe_fast.layer.huggingface import settings
from moe_fast.layer.huggingface.families import Family
from moe_ref.config import MoEConfig, layer_config, rank_budget, require
from moe_ref.config.layer import LayerConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
RECOMPUTED = ("moe", "moe_act")  # parts of this layer that it can compute again for its backward
# Options that other parts of a training run read: its other layers, its schedule, its memory, its
# graphs and its logs, and kernels that compute the same numbers.
_TRAINER = """
num_layers moe_layer_freq ffn_hidden_size variable_seq_lengths fp16 bf16 tensor_model_parallel_size
pipeline_model_parallel_size virtual_pipeline_model_parallel_size context_parallel_size
sequence_parallel use_megatron_fsdp transformer_impl moe_router_fusion moe_per_layer_logging
moe_token_dropping moe_grouped_gemm bias_activation_fusion moe_permute_fusion
moe_permute_fusion_into_hybridep moe_hybridep_num_sms_preprocessing
moe_hybridep_pad_uneven_dispatch_inputs moe_router_padding_for_quantization
use_fused_weighted_squared_relu use_grouped_gemm_for_shared_expert recompute_method
recompute_num_layers cpu_offloading fine_grained_activation_offloading offload_modules
moe_paged_stash moe_paged_stash_page_size moe_paged_stash_buffer_size_factor_cuda
moe_paged_stash_buffer_size_factor_cpu cuda_graph_impl cuda_graph_modules
overlap_moe_expert_parallel_comm ep_overlap_early_attn_memory_release moe_single_grouped_bias
"""
OF_THE_TRAINER = frozenset(_TRAINER.split())


def arguments_and_family(config: Any, num_tokens: int | None, ranks: int) -> tuple[dict[str, Any], Family | None]:
    """The arguments of `MoELayer`, and the family of transformers that a configuration belongs to.

    Raises:
        ValueError: an option that the layer lacks, or another number of ranks than the options say.
    """
    if megatron.is_transformer_config(config):
        arguments, _ = arguments_and_family(megatron.moe_config(config), num_tokens, ranks)
        layer = arguments["config"]
        layer = replace(layer, recipe=megatron.recipe_of(config, layer.recipe))
        return arguments | {"config": layer, "init_std": config.init_method_std}, None
    if isinstance(config, MoEConfig):
        check_world(config, ranks)
        return arguments_of(config, num_tokens), None
    fields = settings.fields_of(config)
    return settings.arguments_of(fields), settings.family_of(fields)


def arguments_of(config: MoEConfig, num_tokens: int | None) -> dict[str, Any]:
    """The arguments of `MoELayer`, without the group and the device.

    Args:
        num_tokens: the most tokens of a rank, for `moe_expert_rank_capacity_factor`; otherwise not
            read.

    Raises:
        ValueError: an option that the layer lacks, or a size that is not set; see `layer_config`
            and `rank_budget`.
    """
    for name in ("fp8_param", "fp4_param", "moe_enable_routing_replay"):
        require(not getattr(config, name), name, getattr(config, name), "False: MoELayer does not have it")
    require(config.hidden_size > 0, "hidden_size", config.hidden_size, "positive")
    return {
        "config": _with_budget(layer_config(config), config, num_tokens),
        "hidden": config.hidden_size,
        "width": config.moe_ffn_hidden_size,
        "latent": config.moe_latent_size,
        "shared_width": config.moe_shared_expert_intermediate_size,
        "shared_gate": config.moe_shared_expert_gate,
        "bias": config.add_bias_linear,
        "router_bias": config.add_bias_linear,
        "packed": config.moe_single_grouped_weight,
        "recompute": _recomputed(config),
        "delay_wgrad": config.delay_wgrad_compute,
        "overlap_wgrad": config.overlap_dispatch_backward_with_experts_wgrad,
        "overlap_shared": config.moe_shared_expert_overlap,
        "dtype": DTYPES[config.params_dtype],
    }


def check_world(config: MoEConfig, ranks: int) -> None:
    """The ranks that share the experts are as many as the options say.

    Raises:
        ValueError: they are more or fewer.
    """
    expected = config.expert_model_parallel_size * (config.expert_tensor_parallel_size or 1)
    sizes = "expert_model_parallel_size × expert_tensor_parallel_size"
    require(ranks == expected, "group", f"of {ranks} ranks", f"of {expected} ranks, {sizes}")


def _with_budget(layer: LayerConfig, config: MoEConfig, num_tokens: int | None) -> LayerConfig:
    factor = config.moe_expert_rank_capacity_factor
    if factor is None:
        return layer
    expected = f"the most tokens of a rank: moe_expert_rank_capacity_factor is {factor}"
    require(num_tokens is not None, "num_tokens", num_tokens, expected)
    assert num_tokens is not None
    rows = rank_budget(num_tokens, topk=config.moe_router_topk, capacity_factor=factor, align=layer.align or 1)
    return replace(layer, num_rows=rows)


def _recomputed(config: MoEConfig) -> str | None:
    """What the layer computes again: the option's modules that are parts of it.

    With the granularity "full" the caller recomputes whole transformer layers, this one with them.
    """
    modules = config.recompute_modules or () if config.recompute_granularity == "selective" else ()
    shared = "shared_experts" in modules and config.moe_shared_expert_intermediate_size is not None
    legal = f"of {', '.join(RECOMPUTED)} and modules outside of the layer"
    require(not shared, "recompute_modules", modules, legal)
    return next((name for name in RECOMPUTED if name in modules), None)
