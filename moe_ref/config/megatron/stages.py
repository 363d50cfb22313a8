"""The settings of each stage, made from Megatron's options."""

from moe_ref.config.layer import LayerConfig
from moe_ref.config.megatron.rule import listed
from moe_ref.config.megatron.settings import MoEConfig
from moe_ref.config.quantization import Recipe
from moe_ref.config.router import RouterConfig
from moe_ref.config.rules import require

GATED_FORM = {"silu": "swiglu", "gelu": "geglu_erf", "quick_gelu": "quick_geglu", "relu": "reglu"}

# Options that no stage reads, since the call has them: sizes of tensors, the world, parameters
# that are given or not, and arguments of functions.
_GIVEN = """
num_layers moe_layer_freq hidden_size ffn_hidden_size moe_ffn_hidden_size moe_latent_size variable_seq_lengths
add_bias_linear moe_shared_expert_intermediate_size moe_shared_expert_gate fp16 bf16 params_dtype fp8_param fp4_param
tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size context_parallel_size
expert_model_parallel_size sequence_parallel moe_enable_routing_replay
moe_expert_rank_capacity_factor
"""
GIVEN_BY_THE_CALL = frozenset(_GIVEN.split())

# Options of how a result is computed, where it is stored, and logging; the result is the same.
_SAME = """
transformer_impl use_megatron_fsdp moe_router_fusion moe_per_layer_logging moe_token_dropping
moe_hybridep_num_sms_preprocessing moe_hybridep_pad_uneven_dispatch_inputs moe_permute_fusion_into_hybridep
moe_grouped_gemm moe_single_grouped_weight moe_single_grouped_bias bias_activation_fusion
use_fused_weighted_squared_relu moe_shared_expert_overlap use_grouped_gemm_for_shared_expert recompute_granularity
recompute_method recompute_num_layers recompute_modules cpu_offloading fine_grained_activation_offloading
offload_modules moe_paged_stash moe_paged_stash_page_size moe_paged_stash_buffer_size_factor_cuda
moe_paged_stash_buffer_size_factor_cpu cuda_graph_impl cuda_graph_modules overlap_moe_expert_parallel_comm
ep_overlap_early_attn_memory_release delay_wgrad_compute overlap_dispatch_backward_with_experts_wgrad
moe_router_padding_for_quantization moe_permute_fusion
"""
SAME_RESULT = frozenset(_SAME.split())


def router_config(config: MoEConfig) -> RouterConfig:
    """The settings of `route`.

    Raises:
        ValueError: num_moe_experts is None.
    """
    experts = config.num_moe_experts
    require(experts is not None, "num_moe_experts", experts, "given: the layer has a router")
    assert experts is not None
    losses = listed(config.moe_router_load_balancing_type)
    coeffs = dict(zip(losses, listed(config.moe_aux_loss_coeff), strict=True))
    return RouterConfig(
        num_experts=experts,
        topk=config.moe_router_topk,
        score_function=config.moe_router_score_function,
        pre_softmax=config.moe_router_pre_softmax,
        num_groups=config.moe_router_num_groups,
        group_topk=config.moe_router_group_topk,
        scaling_factor=config.moe_router_topk_scaling_factor,
        expert_bias=config.moe_router_enable_expert_bias,
        bias_update_rate=config.moe_router_bias_update_rate,
        sinkhorn="sinkhorn" in losses,
        capacity_factor=config.moe_expert_capacity_factor,
        drop_policy=config.moe_token_drop_policy,
        pad_to_capacity=config.moe_pad_expert_input_to_capacity,
        aux_loss_coeff=coeffs.get("aux_loss", 0.0),
        seq_aux_loss_coeff=coeffs.get("seq_aux_loss", 0.0),
        global_aux_loss_coeff=coeffs.get("global_aux_loss", 0.0),
        z_loss_coeff=config.moe_z_loss_coeff or 0.0,
        loss_per_token=config.calculate_per_token_loss,
        loss_divisor=(config.mtp_num_layers or 1) if config.mtp_use_repeated_layer else 1,
    )


def layer_config(config: MoEConfig) -> LayerConfig:
    """The settings of `moe_layer`. Where rows need padding its experts pad them, once, whichever
    stage the options name: no other stage of it does. As in Megatron, Transformer Engine's
    activation has no offset and no clamp.

    Raises:
        ValueError: an activation without a gated form; or see `router_config`, `recipe_of` and
            `check_jitter`.
    """
    gated, name = config.gated_linear_unit, config.activation_func
    requirement = f"one of {', '.join(GATED_FORM)}"
    require(not gated or name in GATED_FORM, "activation_func", f"{name!r} with gated_linear_unit", requirement)
    flex = config.moe_token_dispatcher_type == "flex"
    dispatcher = config.moe_flex_dispatcher_backend if flex else config.moe_token_dispatcher_type
    hybridep, shaped = dispatcher == "hybridep", gated and not config.use_te_activation_func
    return LayerConfig(
        router=router_config(config),
        router_dtype=config.moe_router_dtype,
        jitter_eps=config.moe_input_jitter_eps,
        dispatcher=dispatcher,
        num_sms=config.moe_flex_dispatcher_num_sms if hybridep else None,
        num_blocks_permute=config.moe_hybridep_num_blocks_permute if hybridep else None,
        num_blocks_unpermute=config.moe_hybridep_num_blocks_unpermute if hybridep else None,
        expert_tensor_parallel=config.expert_tensor_parallel_size or 1,
        kind=GATED_FORM[name] if gated else name,
        offset=config.glu_linear_offset if shaped else 0.0,
        clamp=config.activation_func_clamp_value if shaped else None,
        interleave=config.moe_mlp_glu_interleave_size if gated else None,
        shared_interleave=config.moe_shared_expert_glu_interleave_size if gated else None,
        fp8_input_store=config.activation_func_fp8_input_store,
        probs_on_input=config.moe_apply_probs_on_input,
        align=quantization_alignment(config) or None if _needs_padding(config) else None,
        recipe=recipe_of(config),
    )


def recipe_of(config: MoEConfig) -> Recipe | None:
    """The recipe of the experts' products; None for high precision.

    Raises:
        ValueError: a custom recipe, which is a function that no configuration describes.
    """
    if config.fp8 is not None:
        names = {"tensorwise": "current", "blockwise": "block"}
        require(config.fp8_recipe != "custom", "fp8_recipe", "'custom'", "delayed, tensorwise, blockwise or mxfp8")
        return Recipe(names.get(config.fp8_recipe, config.fp8_recipe), fp8_format=config.fp8)
    if config.fp4 is not None:
        require(config.fp4_recipe != "custom", "fp4_recipe", "'custom'", "nvfp4")
        return Recipe("nvfp4")
    return None


def quantization_alignment(config: MoEConfig) -> int:
    """The multiple that each expert's number of rows must be; 0 for any number.

        op fuser or grouped tensors 256 · fp8 32 for mxfp8, 16 for others · fp4 128 · otherwise 0

    Source: moe_utils.get_align_size_for_quantization (Megatron main). The op fuser needs no grouped
    gemm for 256.
    """
    if config.use_transformer_engine_op_fuser or config.moe_use_grouped_tensor:
        return 256
    if config.fp8 is not None:
        return 32 if config.fp8_recipe == "mxfp8" else 16
    return 0 if config.fp4 is None else 128


def _needs_padding(config: MoEConfig) -> bool:
    return config.fp8 is not None or config.fp4 is not None or config.moe_use_grouped_tensor


def pads_expert_rows(config: MoEConfig, *, pad_permute: bool = True) -> bool:
    """Whether the experts pad each segment with rows of zeros themselves, and trim them afterwards.

    They do for fp8, fp4 and grouped tensors, unless an earlier stage is configured to: the router's
    map, the hybridep backend, or deepep's fused permutation for grouped tensors, if the library has
    one (`pad_permute`). A router that had too few tokens to pad leaves the rows unpadded.

    Source: moe_utils.skip_routed_expert_padding and experts.py (Megatron main).
    """
    needs = _needs_padding(config)
    backend = config.moe_flex_dispatcher_backend if config.moe_token_dispatcher_type == "flex" else None
    deepep = backend == "deepep" and config.moe_use_grouped_tensor and config.moe_permute_fusion and pad_permute
    return needs and not (config.moe_router_padding_for_quantization or backend == "hybridep" or deepep)
