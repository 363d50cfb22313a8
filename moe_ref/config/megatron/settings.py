"""Megatron's options of an MoE layer, with its names and defaults, checked when a `MoEConfig` is
made.

The rules are tables, in `routing` and `running`; `stages` makes of the options
what each stage reads. Every option is read by a stage, given by the call, or without effect on
results (`GIVEN_BY_THE_CALL`, `SAME_RESULT`). Options of Megatron without an implementation are
refused by name (`refused`): other load balancing than losses and Sinkhorn, forced balance, the
NCCL-EP backend, low precision on the wire of other backends, inference, and batch invariance.

Source: megatron/core/transformer/transformer_config.py and model_parallel_config.py, main
d98e8a64ddf3 and release 0.16.1. Differs: docs/differences.md#configuration.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

from moe_ref.config.megatron.refused import check_offered
from moe_ref.config.megatron.routing import ROUTING
from moe_ref.config.megatron.rule import check_kinds, some_dense
from moe_ref.config.megatron.running import RUNNING, WARNINGS
from moe_ref.config.rules import require

Balancing = Literal["aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"]
Recomputed = Literal[
    "core_attn",
    "moe_act",
    "layernorm",
    "mla_up_proj",
    "mlp",
    "moe",
    "shared_experts",
    "gdn_norm_out",
    "gdp_in_proj",
    "gdp_qkv",
    "mhc",
]
Offloaded = Literal[
    "attn_norm",
    "qkv_linear",
    "core_attn",
    "attn_proj",
    "mlp_norm",
    "expert_fc1",
    "moe_act",
    "fused_group_mlp",
    "gdp_qkv",
]
Graphed = Literal["attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba"]


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Settings of an MoE layer, and of its surroundings as far as rules depend on them.

    Raises:
        ValueError: with the option, its value and the right values: a value of the wrong kind or
            size, or a combination that a rule refuses.

    Warns:
        DeprecationWarning: a deprecated name. UserWarning: legal, but seldom meant (see
            `running.WARNINGS`).
    """

    # The model
    num_layers: int = 0  # transformer layers
    hidden_size: int = 0  # H
    ffn_hidden_size: int | None = None  # width of a dense layer; None: 4 · H
    num_moe_experts: int | None = None  # E; None: no MoE layers
    moe_ffn_hidden_size: int | None = None  # F, width of an expert; None: ffn_hidden_size
    moe_layer_freq: int | Sequence[int] = (
        1  # N: each Nth layer is MoE; a list: 1 for MoE, 0 for dense, an entry a layer
    )
    moe_latent_size: int | None = None  # width that tokens are projected to before dispatch; None: H
    mtp_num_layers: int | None = None  # multi-token prediction depth
    mtp_use_repeated_layer: bool = False  # one MTP layer is called that often, instead of as many layers
    add_bias_linear: bool = True  # every linear layer has a bias, the router too
    gated_linear_unit: bool = False  # fc1 is twice as wide: gate and value
    activation_func: Literal["gelu", "silu", "quick_gelu", "relu", "squared_relu"] = "gelu"  # gated silu is SwiGLU
    glu_linear_offset: float = 0.0  # o of act(u) · (v + o)
    activation_func_clamp_value: float | None = None  # bound on fc1's output, before a gated activation
    calculate_per_token_loss: bool = False  # the loss is summed over tokens and divided once, by the global count
    variable_seq_lengths: bool = False  # sequence lengths differ between micro-batches
    transformer_impl: Literal["local", "transformer_engine"] = "transformer_engine"

    # Ranks
    tensor_model_parallel_size: int = 1  # TP, of attention and shared experts
    pipeline_model_parallel_size: int = 1  # PP
    virtual_pipeline_model_parallel_size: int | None = None  # model chunks a pipeline rank
    context_parallel_size: int = 1  # CP
    expert_model_parallel_size: int = 1  # EP
    expert_tensor_parallel_size: int | None = None  # ETP; None: TP
    sequence_parallel: bool = False  # activations between layers are split over TP along the sequence
    use_megatron_fsdp: bool = False  # parameters sharded by Megatron-FSDP

    # Precision
    fp16: bool = False
    bf16: bool = False
    params_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    fp8: Literal["e4m3", "hybrid"] | None = None  # format; hybrid: gradients in e5m2
    fp8_recipe: Literal["tensorwise", "delayed", "mxfp8", "blockwise", "custom"] = "delayed"  # used if fp8 is set
    fp8_param: bool = False  # parameters are kept in fp8
    fp4: Literal["e2m1"] | None = None
    fp4_recipe: Literal["nvfp4", "custom"] = "nvfp4"  # used if fp4 is set
    fp4_param: bool = False

    # Router
    moe_router_topk: int = 2  # K
    moe_router_score_function: Literal["softmax", "sigmoid", "sqrtsoftplus"] = "softmax"
    moe_router_pre_softmax: bool = False  # softmax over all experts, before the choice
    moe_router_topk_scaling_factor: float | None = None  # weights are multiplied by it
    moe_router_num_groups: int | None = None  # G groups of E/G experts
    moe_router_group_topk: int | None = None  # g groups that a token may choose from
    moe_router_topk_limited_devices: int | None = None  # deprecated: moe_router_group_topk, with EP groups
    moe_router_dtype: Literal["fp32", "fp64"] | None = None  # of gating and scores; None: the activations'
    moe_router_enable_expert_bias: bool = False  # a bias of each expert has part in the choice, not in the weights
    moe_router_bias_update_rate: float = 1e-3  # step of that bias a global batch
    moe_router_load_balancing_type: Balancing | Sequence[Balancing] = "aux_loss"  # a list combines losses
    moe_aux_loss_coeff: float | Sequence[float] = 0.0  # a list with a list of types
    moe_z_loss_coeff: float | None = None
    moe_input_jitter_eps: float | None = None  # router inputs are multiplied by U(1 - ε, 1 + ε)
    moe_router_fusion: bool = False  # fused kernels for the choice and the losses
    moe_enable_routing_replay: bool = False  # choices can be recorded and replayed
    moe_per_layer_logging: bool = False

    # Capacity and padding
    moe_expert_capacity_factor: float | None = None  # cf: an expert takes ⌈T·K/E·cf⌉ of T tokens; None: all
    moe_pad_expert_input_to_capacity: bool = False  # an expert takes exactly that many
    moe_token_drop_policy: Literal["probs", "position"] = "probs"  # keep the most probable, or the first
    moe_token_dropping: bool = False  # no meaning
    moe_router_padding_for_quantization: bool = (
        False  # routing map padded, so that counts are multiples of the alignment
    )
    moe_router_padding_for_fp8: bool = False  # deprecated: moe_router_padding_for_quantization

    # Dispatcher
    moe_token_dispatcher_type: Literal["allgather", "alltoall", "flex"] = "allgather"
    moe_flex_dispatcher_backend: Literal["deepep", "hybridep"] = "deepep"
    moe_enable_deepep: bool = False  # deprecated: moe_flex_dispatcher_backend
    moe_flex_dispatcher_num_sms: int | None = None  # multiprocessors that communicate; None: the backend's default
    moe_deepep_num_sms: int | None = None  # deprecated: moe_flex_dispatcher_num_sms
    moe_hybridep_num_sms: int | None = None  # deprecated: moe_flex_dispatcher_num_sms
    moe_hybridep_num_sms_preprocessing: int = 108  # multiprocessors that scan the metadata
    moe_hybridep_num_blocks_permute: int | None = None  # thread blocks
    moe_hybridep_num_blocks_unpermute: int | None = None  # thread blocks
    moe_hybridep_pad_uneven_dispatch_inputs: bool = False  # ranks with fewer tokens pad to the most, in multiples of 64
    moe_expert_rank_capacity_factor: float | None = None  # a rank receives at most T·K times this many rows; None: all
    moe_permute_fusion: bool = False
    moe_permute_fusion_into_hybridep: bool = False

    # Experts
    moe_grouped_gemm: bool = False  # one grouped product for a rank's experts, instead of one after another
    moe_use_grouped_tensor: bool = False  # counts stay on the device; set by grouped gemm with the op fuser
    moe_single_grouped_weight: bool = False  # a weight [L,out,in] instead of L weights
    moe_single_grouped_bias: bool = False
    moe_apply_probs_on_input: bool = False  # weights multiply what experts read instead of their activations
    moe_mlp_glu_interleave_size: int | None = (
        None  # fc1 columns alternate between gate and value in blocks of this size
    )
    use_transformer_engine_op_fuser: bool = False  # fc1, activation and fc2 as one fused operation
    bias_activation_fusion: bool = False
    use_te_activation_func: bool = False
    use_fused_weighted_squared_relu: bool = False
    activation_func_fp8_input_store: bool = False  # the activation's input is kept in fp8 for backward
    moe_shared_expert_intermediate_size: int | None = None  # width of all shared experts together; None: there are none
    moe_shared_expert_gate: bool = False
    moe_shared_expert_overlap: bool = False  # computed while tokens travel
    use_grouped_gemm_for_shared_expert: bool = False
    moe_shared_expert_glu_interleave_size: int | None = None

    # Memory and overlap
    recompute_granularity: Literal["full", "selective"] | None = None
    recompute_method: Literal["uniform", "block"] | None = None
    recompute_num_layers: int | None = None
    recompute_modules: Sequence[Recomputed] | None = None  # with selective granularity; None: core_attn
    moe_layer_recompute: bool = False  # deprecated: selective granularity with "moe" in recompute_modules
    cpu_offloading: bool = False
    fine_grained_activation_offloading: bool = False
    offload_modules: Sequence[Offloaded] = ()
    moe_paged_stash: bool = False  # experts' saved activations move to pages
    moe_paged_stash_page_size: int = 64  # tokens
    moe_paged_stash_buffer_size_factor_cuda: float = 1.10  # positive: of the average need; negative: of the largest
    moe_paged_stash_buffer_size_factor_cpu: float = 0.0  # as above; 0: nothing moves to the host
    cuda_graph_impl: Literal["none", "local", "transformer_engine", "full_iteration"] = "none"
    cuda_graph_modules: Sequence[Graphed] = ()  # with local and transformer_engine; none: whole layers
    overlap_moe_expert_parallel_comm: bool = False  # one micro-batch's dispatch during another's computation
    ep_overlap_early_attn_memory_release: bool = False
    delay_wgrad_compute: bool = False  # weight gradients later than data gradients
    overlap_dispatch_backward_with_experts_wgrad: bool = False

    deprecated: ClassVar[dict[str, Callable[["MoEConfig", Any], dict[str, Any]]]] = {
        "moe_router_topk_limited_devices": lambda c, g: {
            "moe_router_num_groups": c.expert_model_parallel_size,
            "moe_router_group_topk": g,
        },
        "moe_router_padding_for_fp8": lambda c, _: {"moe_router_padding_for_quantization": True},
        "moe_enable_deepep": lambda c, _: {"moe_flex_dispatcher_backend": "deepep"},
        "moe_deepep_num_sms": lambda c, count: {"moe_flex_dispatcher_num_sms": count},
        "moe_hybridep_num_sms": lambda c, count: {"moe_flex_dispatcher_num_sms": count},
        "moe_layer_recompute": lambda c, _: {
            "recompute_granularity": "selective",
            "recompute_modules": ("core_attn", "moe"),
        },
    }

    def __new__(cls, *_: Any, **options: Any) -> "MoEConfig":
        check_offered(options.items())
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, list):
                self._set(name, tuple(value))
        check_kinds(self)
        self._use_new_names()
        self._derive()
        for rule in (*ROUTING, *RUNNING):
            rule.check(self)
        self._warn_of_unusual()

    def _use_new_names(self) -> None:
        """Deprecated names set the new ones and are unset, so that `dataclasses.replace` changes
        nothing.
        """
        default = {field.name: field.default for field in fields(self)}
        for old, means in self.deprecated.items():
            value = getattr(self, old)
            if value is default[old]:
                continue
            meant = means(self, value)
            words = ", ".join(f"{new}={what!r}" for new, what in meant.items())
            for new in meant:
                both = f"{value!r} with {new} {getattr(self, new)!r}"
                require(
                    getattr(self, new) == default[new], old, both, f"left out: it is the deprecated name of {words}"
                )
            flex = old != "moe_enable_deepep" or self.moe_token_dispatcher_type == "flex"
            require(
                flex,
                old,
                f"{value!r} with moe_token_dispatcher_type {self.moe_token_dispatcher_type!r}",
                "False, or the dispatcher 'flex'",
            )
            self._warn(f"{old} is deprecated; say {words}", DeprecationWarning)
            self._set(old, default[old])
            for new, what in meant.items():
                self._set(new, what)

    def _derive(self) -> None:
        """Fill in options that follow from others."""
        if self.expert_tensor_parallel_size is None:
            self._set("expert_tensor_parallel_size", self.tensor_model_parallel_size)
        if self.ffn_hidden_size is None:
            self._set("ffn_hidden_size", 4 * self.hidden_size)
        if self.num_moe_experts is not None and self.moe_ffn_hidden_size is None:
            self._warn(f"moe_ffn_hidden_size is None; ffn_hidden_size, {self.ffn_hidden_size}, is taken")
            self._set("moe_ffn_hidden_size", self.ffn_hidden_size)
        if self.num_moe_experts is None and self.moe_ffn_hidden_size is not None and some_dense(self):
            value = f"moe_ffn_hidden_size is {self.moe_ffn_hidden_size} without num_moe_experts"
            self._warn(f"{value}; as for a dense layer among MoE layers, it is dropped")
            self._set("moe_ffn_hidden_size", None)
        if self.recompute_modules is None:
            self._set("recompute_modules", ("core_attn",))
        if self.use_transformer_engine_op_fuser and self.moe_grouped_gemm:
            self._set("moe_use_grouped_tensor", True)
        if self.cuda_graph_impl == "local" and {"moe_router", "moe_preprocess"} & set(self.cuda_graph_modules):
            self._set(
                "cuda_graph_modules", tuple(dict.fromkeys([*self.cuda_graph_modules, "moe_router", "moe_preprocess"]))
            )

    def _warn_of_unusual(self) -> None:
        for condition, message in WARNINGS:
            if condition(self):
                self._warn(message.format_map(vars(self)))

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _warn(self, message: str, category: type[Warning] = UserWarning) -> None:
        # the caller of the constructor, over __init__, __post_init__ and one step of it
        warnings.warn(message, category, stacklevel=5)
