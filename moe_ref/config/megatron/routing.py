"""The rules of `MoEConfig`: sizes, router, capacity, dispatcher.

Tables of one rule per row, read in order. A row may rely on those before it: kinds and sizes come
before combinations.
"""

from moe_ref.config.megatron.rule import Rule, flex, listed, needs, not_negative, positive, sinkhorn, swiglu
from moe_ref.config.rules import MAX_EXPERTS

# fmt: off
SIZES = (
    *positive("V", "num_moe_experts", f"None or from 1 to {MAX_EXPERTS}"),
    Rule("our", "num_moe_experts", "", lambda c: (c.num_moe_experts or 1) > MAX_EXPERTS,
         f"None or from 1 to {MAX_EXPERTS}"),
    *not_negative("num_layers hidden_size ffn_hidden_size moe_ffn_hidden_size mtp_num_layers recompute_num_layers "
                  "moe_z_loss_coeff"),
    *not_negative("moe_router_bias_update_rate"),
    *positive("our",
              "tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size "
              "context_parallel_size"),
    *positive("our",
              "expert_model_parallel_size expert_tensor_parallel_size moe_router_topk moe_router_num_groups "
              "moe_router_group_topk"),
    *positive("our", "moe_flex_dispatcher_num_sms moe_hybridep_num_sms_preprocessing moe_hybridep_num_blocks_permute"),
    *positive("our", "moe_hybridep_num_blocks_unpermute moe_expert_rank_capacity_factor moe_paged_stash_page_size"),
    *positive("our", "moe_mlp_glu_interleave_size moe_shared_expert_glu_interleave_size"),
    *positive("our", "moe_router_topk_scaling_factor",
              "None, for no scaling, or positive (Megatron takes 0.0 for none, Transformer Engine for zero)"),
    *positive("our", "moe_expert_capacity_factor", "None, to drop no token, or positive"),
    *positive("run", "moe_input_jitter_eps", "None, for no jitter, or positive"),
    *positive("V", "moe_shared_expert_intermediate_size",
              "None, for no shared experts, or positive: their number times the width of one"),
    *positive("args", "moe_latent_size", "None, for no projection, or positive"),
    Rule("V", "activation_func_clamp_value", "activation_func gated_linear_unit",
         lambda c: swiglu(c) and c.activation_func_clamp_value is not None and c.activation_func_clamp_value <= 0,
         "None, for no bound, or positive"),
    *positive("our", "activation_func_clamp_value", "None, for no bound, or positive"),
    Rule("V", "num_moe_experts", "expert_model_parallel_size",
         lambda c: c.num_moe_experts is None and c.expert_model_parallel_size > 1,
         "set, or expert_model_parallel_size be 1"),
    Rule("run", "num_moe_experts", "expert_model_parallel_size",
         lambda c: c.num_moe_experts and c.num_moe_experts % c.expert_model_parallel_size,
         "a multiple of expert_model_parallel_size {expert_model_parallel_size}: each rank has as many experts"),
    Rule("V", "moe_ffn_hidden_size", "num_moe_experts",
         lambda c: c.num_moe_experts is None and c.moe_ffn_hidden_size is not None, "None, or num_moe_experts be set"),
    Rule("run", "moe_ffn_hidden_size", "expert_tensor_parallel_size",
         lambda c: (c.moe_ffn_hidden_size or 0) % (c.expert_tensor_parallel_size or 1),
         "a multiple of expert_tensor_parallel_size {expert_tensor_parallel_size}"),
    Rule("args", "moe_latent_size", "num_moe_experts",
         lambda c: c.moe_latent_size is not None and c.num_moe_experts is None, "None, or num_moe_experts be set"),
    Rule("run", "moe_layer_freq", "", lambda c: isinstance(c.moe_layer_freq, int) and c.moe_layer_freq < 1,
         "positive, or a list of 0 and 1"),
    Rule("run", "moe_layer_freq", "",
         lambda c: isinstance(c.moe_layer_freq, tuple) and not {0, 1} >= set(c.moe_layer_freq),
         "of nothing but 0 (dense) and 1 (MoE)"),
    Rule("run", "moe_layer_freq", "num_layers",
         lambda c: c.num_layers and isinstance(c.moe_layer_freq, tuple) and len(c.moe_layer_freq) != c.num_layers,
         "a list of {num_layers} entries, one a layer"),
    Rule("V", "sequence_parallel", "tensor_model_parallel_size",
         lambda c: c.sequence_parallel and c.tensor_model_parallel_size == 1,
         "False, or tensor_model_parallel_size be above 1"),
)

ROUTER = (
    Rule("run", "moe_router_topk", "num_moe_experts",
         lambda c: c.num_moe_experts is not None and c.moe_router_topk > c.num_moe_experts,
         "from 1 to {num_moe_experts}, the experts"),
    Rule("V", "moe_router_topk", "moe_router_score_function moe_router_pre_softmax",
         lambda c: c.moe_router_topk == 1 and c.moe_router_score_function == "softmax" and not c.moe_router_pre_softmax
         and c.moe_router_load_balancing_type != "sinkhorn",
         "above 1, or moe_router_pre_softmax be set: softmax over the one chosen expert is 1 and has no gradient"),
    Rule("V", "moe_router_enable_expert_bias", "moe_router_score_function",
         lambda c: c.moe_router_enable_expert_bias and c.moe_router_score_function == "softmax",
         "False, or moe_router_score_function be 'sigmoid' or 'sqrtsoftplus'"),
    Rule("V", "moe_router_num_groups", "moe_router_group_topk",
         lambda c: c.moe_router_num_groups is None and c.moe_router_group_topk is not None,
         "set with moe_router_group_topk, or both be None"),
    Rule("our", "moe_router_group_topk", "moe_router_num_groups",
         lambda c: c.moe_router_group_topk is None and c.moe_router_num_groups is not None,
         "set with moe_router_num_groups, or both be None"),
    Rule("A", "moe_router_num_groups", "num_moe_experts",
         lambda c: c.num_moe_experts is not None and c.moe_router_num_groups is not None
         and c.num_moe_experts % c.moe_router_num_groups, "a divisor of num_moe_experts {num_moe_experts}"),
    Rule("A", "moe_router_group_topk", "moe_router_num_groups",
         lambda c: c.moe_router_group_topk is not None and c.moe_router_num_groups is not None
         and c.moe_router_group_topk > c.moe_router_num_groups,
         "at most moe_router_num_groups {moe_router_num_groups}"),
    Rule("our", "moe_router_group_topk", "moe_router_topk",
         lambda c: c.moe_router_group_topk is not None and c.moe_router_group_topk > c.moe_router_topk,
         "at most moe_router_topk {moe_router_topk}: a group is judged by its K // g best experts, which would be "
         "none"),
    Rule("our", "moe_router_group_topk", "moe_router_topk moe_router_num_groups num_moe_experts",
         lambda c: c.num_moe_experts and c.moe_router_num_groups and c.moe_router_group_topk
         and c.moe_router_group_topk * (c.num_moe_experts // c.moe_router_num_groups) < c.moe_router_topk,
         "so large that the groups kept have moe_router_topk {moe_router_topk} experts: raise it, or lower "
         "moe_router_topk or moe_router_num_groups"),
    Rule("our", "moe_router_load_balancing_type", "",
         lambda c: isinstance(c.moe_router_load_balancing_type, tuple)
         and "sinkhorn" in c.moe_router_load_balancing_type,
         "a list of losses, or 'sinkhorn' alone and not in a list"),
    Rule("our", "moe_router_load_balancing_type", "",
         lambda c: isinstance(c.moe_router_load_balancing_type, tuple)
         and len(set(c.moe_router_load_balancing_type)) < len(c.moe_router_load_balancing_type),
         "without repetition: a second coefficient of the same loss is never read"),
    Rule("A", "moe_aux_loss_coeff", "moe_router_load_balancing_type",
         lambda c: isinstance(c.moe_router_load_balancing_type, tuple)
         and not (isinstance(c.moe_aux_loss_coeff, tuple)
         and len(c.moe_aux_loss_coeff) == len(c.moe_router_load_balancing_type)),
         "a list of as many coefficients as moe_router_load_balancing_type has losses"),
    Rule("run", "moe_aux_loss_coeff", "moe_router_load_balancing_type",
         lambda c: isinstance(c.moe_router_load_balancing_type, str) and isinstance(c.moe_aux_loss_coeff, tuple),
         "one number, or moe_router_load_balancing_type be a list too"),
    Rule("our", "moe_aux_loss_coeff", "", lambda c: any(coeff < 0 for coeff in listed(c.moe_aux_loss_coeff)),
         "0 or more"),
    Rule("run", "moe_aux_loss_coeff", "moe_router_load_balancing_type",
         lambda c: sinkhorn(c) and c.moe_aux_loss_coeff != 0,
         "0, or moe_router_load_balancing_type be a loss: {moe_router_load_balancing_type} balances without one"),
    Rule("our", "moe_enable_routing_replay", "moe_router_fusion",
         lambda c: c.moe_enable_routing_replay and c.moe_router_fusion,
         "False, or moe_router_fusion be off: the fused choice is neither recorded nor replayed"),
    Rule("our", "moe_enable_routing_replay", "moe_router_load_balancing_type",
         lambda c: c.moe_enable_routing_replay and sinkhorn(c),
         "False, or moe_router_load_balancing_type be a loss or 'none': only the top-k choice is recorded and "
         "replayed"),
)

CAPACITY = (
    *needs("V", "moe_pad_expert_input_to_capacity", "moe_expert_capacity_factor"),
    Rule("V", "moe_pad_expert_input_to_capacity", "moe_flex_dispatcher_backend",
         lambda c: c.moe_pad_expert_input_to_capacity and flex(c, "deepep"),
         "False, or the backend be 'hybridep', or the dispatcher not 'flex'"),
    Rule("V", "moe_expert_capacity_factor", "moe_router_load_balancing_type",
         lambda c: c.moe_expert_capacity_factor is not None and sinkhorn(c),
         "None, or moe_router_load_balancing_type be a loss or 'none'"),
    Rule("our", "moe_token_dropping", "", lambda c: c.moe_token_dropping,
         "False, it has no effect: tokens are dropped by moe_expert_capacity_factor"),
    Rule("V", "moe_router_padding_for_quantization", "fp8 fp4",
         lambda c: c.moe_router_padding_for_quantization and c.fp8 is None and c.fp4 is None,
         "False, or fp8 or fp4 be set"),
    Rule("V", "moe_router_padding_for_quantization", "moe_token_dispatcher_type",
         lambda c: c.moe_router_padding_for_quantization and c.moe_token_dispatcher_type == "allgather",
         "False, or the dispatcher be 'alltoall' or 'flex'"),
)

DISPATCHER = (
    Rule("V", "variable_seq_lengths", "moe_token_dispatcher_type",
         lambda c: c.variable_seq_lengths and c.moe_token_dispatcher_type == "allgather",
         "False, or the dispatcher be 'alltoall' or 'flex': all-gather needs as many tokens on every rank"),
    Rule("V", "moe_expert_rank_capacity_factor", "moe_flex_dispatcher_backend",
         lambda c: c.moe_expert_rank_capacity_factor is not None and c.moe_flex_dispatcher_backend == "deepep",
         "None, or the backend be 'hybridep'"),
    Rule("our", "moe_expert_rank_capacity_factor", "moe_token_dispatcher_type",
         lambda c: c.moe_expert_rank_capacity_factor is not None and c.moe_token_dispatcher_type != "flex",
         "None, or moe_token_dispatcher_type be 'flex'"),
    Rule("V", "moe_expert_rank_capacity_factor",
         "moe_flex_dispatcher_backend use_transformer_engine_op_fuser moe_use_grouped_tensor",
         lambda c: c.moe_expert_rank_capacity_factor is not None and flex(c, "hybridep")
         and not (c.use_transformer_engine_op_fuser or c.moe_use_grouped_tensor),
         "None, or use_transformer_engine_op_fuser or moe_use_grouped_tensor be set"),
)
# fmt: on

ROUTING = (*SIZES, *ROUTER, *CAPACITY, *DISPATCHER)
