"""The version matrix: the symbols, parameters and behaviour of releases of Transformer Engine.

From the sources of releases 1.11 to 2.20.2. `since` is the first release of a row; a later row of
the same symbol replaces an earlier one.
"""

from dataclasses import dataclass
from typing import Any

Version = tuple[int, int]


@dataclass(frozen=True)
class Row:
    """A symbol's parameters from a release on."""

    symbol: str  # a dotted path below transformer_engine.pytorch, or common.… below transformer_engine
    since: Version
    parameters: str
    rocm: bool = False  # only in the fork for ROCm


_TOPK = "logits, topk, use_pre_softmax, num_groups, group_topk, scaling_factor, score_function, expert_bias"
_GROUPED = "num_gemms, in_features, out_features, bias=True, params_dtype=None, device='cuda'"
_SINGLE = "delay_wgrad_compute=False, save_original_input=False, single_grouped_weight=False, single_grouped_bias=False"
_CACHE, _CLAMPED = "cache_quantized_input=False", "limit=7.0, alpha=1.702"
_CACHED = f"*, {_CACHE}"
_RECOMPUTE = "activation_recompute_in_mlp=False"
_FORWARD = "inp: Tensor, m_splits: list[int], is_first_microbatch=None"
_CHUNKS = "split_sizes, sorted_index"
_PERMUTE_AND_PAD = "inp, probs, routing_map, tokens_per_expert, align_size"

_OVERRIDE, _SQUARE = "backward_override=None", "enable_2d_quantization=False"
_NVFP4 = "disable_rht=False, disable_stochastic_rounding=False, disable_2d_quantization=False"
_DELAYED = "fp8_format=None, amax_history_len=1024, amax_compute_algo='max'"
_AUTOCAST = "enabled=True, calibrating=False"
_BLOCK = "use_f32_scales=False, fp8_format=None, x_block_scaling_dim=1, w_block_scaling_dim=2, grad_block_scaling_dim=1"

_OPS_GROUPED = (
    "num_groups, in_features, out_features, *, bias=True, device=None, dtype=None, "
    "rng_state_tracker_function=None, accumulate_into_main_grad=False"
)
_OPS_SINGLE = "single_grouped_weight=False, single_grouped_bias=False, delay_wgrad_compute=False"
_UNPERMUTE = "inp, row_id_map, merging_probs=None, restore_shape=None, map_type='mask', probs=None"
_EITHER_SPLITS = _FORWARD.replace("list[int]", "list[int] | Tensor")
_BLOCK_QUANTIZER = "amax_epsilon=0.0, force_pow_2_scales=True, block_scaling_dim=2"
_MXFP8_QUANTIZER = "fp8_dtype, *, rowwise=True, columnwise=True"
_INTERLEAVE, _OFFSET = "glu_interleave_size=None", "glu_linear_offset=1.0"
_ROW_SCALED = f"{_NVFP4}, row_scaled_activation=False"
_FOUR_OVER_SIX = "nvfp4_4over6='none', nvfp4_4over6_e4m3_use_256='all', nvfp4_4over6_err_mode='MAE'"
_TOPK_INDICES = f"{_TOPK}, routing_map_format='bytemap', topk_indices=None"
_HISTOGRAM = "qb_histogram=None, qb_bin_bounds=None, qb_histogram_mode=None"
_SCORES, _LOSS = "logits, topk, score_function", "probs, tokens_per_expert, total_num_tokens, num_experts, topk, coeff"

_BLOCKWISE = "tensor.float8_blockwise_tensor.Float8BlockQuantizer"
_MXFP8 = "tensor.mxfp8_tensor.MXFP8Quantizer"
_FUSED_TOPK = "router.fused_topk_with_score_function"
_FUSED_SCORES = "router.fused_compute_score_for_moe_aux_loss"
_FUSED_LOSS = "router.fused_moe_aux_loss"
SYMBOLS = (
    Row("moe_permute", (1, 11), "inp, indices, num_out_tokens=-1, max_token_num=-1"),
    Row("moe_permute", (2, 1), "inp, routing_map, num_out_tokens=-1, max_token_num=-1, map_type='mask'"),
    Row("moe_permute", (2, 15), "inp, routing_map, num_out_tokens, max_token_num=-1, map_type='mask'"),
    Row("moe_permute_with_probs", (2, 1), "inp, probs, routing_map, num_out_tokens=-1"),
    Row("moe_permute_with_probs", (2, 15), "inp, probs, routing_map, num_out_tokens"),
    Row("moe_permute_and_pad_with_probs", (2, 12), _PERMUTE_AND_PAD),
    Row("moe_unpermute", (1, 11), "inp, row_id_map, probs=None"),
    Row("moe_unpermute", (2, 1), _UNPERMUTE),
    Row("moe_unpermute", (2, 12), f"{_UNPERMUTE}, pad_offsets=None"),
    Row("moe_sort_chunks_by_index", (2, 1), f"inp, {_CHUNKS}"),
    Row("moe_sort_chunks_by_index_with_probs", (2, 1), f"inp, probs, {_CHUNKS}"),
    Row("Fp8Padding", (1, 11), "num_gemms"),
    Row("Fp8Padding", (2, 3), "num_gemms, align_size=None"),
    Row("Fp8Unpadding", (1, 11), "num_gemms"),
    Row("Fp8Unpadding", (2, 3), "num_gemms, align_size=None"),
    Row("GroupedLinear", (1, 11), _GROUPED),
    Row("GroupedLinear", (2, 3), f"{_GROUPED}, delay_wgrad_compute=False"),
    Row("GroupedLinear", (2, 6), f"{_GROUPED}, delay_wgrad_compute=False, save_original_input=False"),
    Row("GroupedLinear", (2, 14), f"{_GROUPED}, {_SINGLE}"),
    Row("GroupedLinear", (2, 19), f"{_GROUPED}, {_SINGLE}, use_grouped_tensor=None"),
    Row("GroupedLinear.forward", (1, 11), _FORWARD),
    Row("GroupedLinear.forward", (2, 1), f"{_FORWARD}, m_splits_tensor=None", rocm=True),
    Row("GroupedLinear.forward", (2, 17), _EITHER_SPLITS),
    Row("GroupedLinear.forward", (2, 18), f"{_EITHER_SPLITS}, out=None, dgrad_out=None"),
    Row("fp8.get_fp8_te_dtype", (1, 11), "fp8_recipe, fprop_tensor=True"),
    Row(_BLOCKWISE, (2, 3), f"fp8_dtype, *, rowwise, columnwise, {_BLOCK_QUANTIZER}"),
    Row(_MXFP8, (2, 1), _MXFP8_QUANTIZER),
    Row(_MXFP8, (2, 19), f"{_MXFP8_QUANTIZER}, with_2d_quantization=False"),
    Row("ops.GroupedLinear", (2, 13), _OPS_GROUPED),
    Row("ops.GroupedLinear", (2, 14), f"{_OPS_GROUPED}, {_OPS_SINGLE}"),
    Row("ops.GroupedLinear", (2, 15), f"{_OPS_GROUPED}, {_OPS_SINGLE}, scale_bias=False"),
    Row("ops.Sequential", (1, 12), "*args"),
    Row("GroupedLinear.init_fp8_metadata", (1, 11), "num_gemms=1"),
    Row("fp8_autocast", (1, 11), f"{_AUTOCAST}, fp8_recipe=None, fp8_group=None, _graph=False"),
    Row("autocast", (2, 9), f"{_AUTOCAST}, recipe=None, amax_reduction_group=None, _graph=False"),
    Row("common.recipe.DelayedScaling", (1, 11), f"margin=0, interval=-1, {_DELAYED}, reduce_amax=True"),
    Row("common.recipe.DelayedScaling", (2, 2), f"margin=0, {_DELAYED}, reduce_amax=True"),
    Row("common.recipe.DelayedScaling", (2, 15), f"margin=0, {_DELAYED}, reduce_amax=True, {_OVERRIDE}"),
    Row("common.recipe.Float8CurrentScaling", (2, 2), "fp8_format=None"),
    Row("common.recipe.Float8CurrentScaling", (2, 8), "use_power_2_scales=False, fp8_format=None"),
    Row("common.recipe.Float8CurrentScaling", (2, 15), f"use_power_2_scales=False, fp8_format=None, {_OVERRIDE}"),
    Row("common.recipe.Float8BlockScaling", (2, 3), _BLOCK),
    Row("common.recipe.Float8BlockScaling", (2, 15), f"{_BLOCK}, {_OVERRIDE}"),
    Row("common.recipe.QParams", (2, 2), "power_2_scale=False, amax_epsilon=0.0"),
    Row("common.recipe.MXFP8BlockScaling", (2, 1), "margin=0, fp8_format=None"),
    Row("common.recipe.MXFP8BlockScaling", (2, 15), f"margin=0, fp8_format=None, {_OVERRIDE}"),
    Row("common.recipe.MXFP8BlockScaling", (2, 19), f"margin=0, fp8_format=None, {_OVERRIDE}, {_SQUARE}"),
    Row("common.recipe.NVFP4BlockScaling", (2, 8), _NVFP4),
    Row("common.recipe.NVFP4BlockScaling", (2, 15), f"{_NVFP4}, {_OVERRIDE}"),
    Row("common.recipe.NVFP4BlockScaling", (2, 16), f"{_ROW_SCALED}, {_OVERRIDE}"),
    Row("common.recipe.NVFP4BlockScaling", (2, 17), f"{_ROW_SCALED}, {_FOUR_OVER_SIX}, {_OVERRIDE}"),
    Row("ops.ScaledSwiGLU", (2, 13), _INTERLEAVE),
    Row("ops.ScaledSwiGLU", (2, 17), f"{_INTERLEAVE}, *, {_RECOMPUTE}"),
    Row("ops.ScaledClampedQGeGLU", (2, 15), f"{_INTERLEAVE}, *, {_CLAMPED}"),
    Row("ops.ScaledClampedQGeGLU", (2, 17), f"{_INTERLEAVE}, *, {_RECOMPUTE}, {_CLAMPED}, {_OFFSET}"),
    Row("ops.ScaledSReLU", (2, 17), f"*, {_RECOMPUTE}"),
    *(Row(f"ops.{name}", (1, 13), _CACHED) for name in ("SwiGLU", "GEGLU", "ReGLU", "GELU", "ReLU")),
    *(Row(f"ops.{name}", (2, 8), _CACHED) for name in ("QGEGLU", "QGELU", "SReLU", "SiLU")),
    Row("ops.SwiGLU", (2, 13), f"{_CACHED}, glu_interleave_size=None"),
    Row("ops.ClampedSwiGLU", (2, 9), f"*, {_CLAMPED}, cache_quantized_input=False"),
    Row("ops.ClampedSwiGLU", (2, 13), f"*, {_CLAMPED}, {_CACHE}, glu_interleave_size=None"),
    Row("ops.ClampedSwiGLU", (2, 17), f"*, {_CLAMPED}, {_OFFSET}, {_CACHE}, {_INTERLEAVE}"),
    Row(_FUSED_TOPK, (2, 6), _TOPK),
    Row(_FUSED_TOPK, (2, 17), f"{_TOPK}, routing_map_format='bytemap'"),
    Row(_FUSED_TOPK, (2, 18), _TOPK_INDICES),
    Row(_FUSED_TOPK, (2, 20), f"{_TOPK_INDICES}, {_HISTOGRAM}"),
    Row(_FUSED_SCORES, (2, 6), _SCORES),
    Row(_FUSED_SCORES, (2, 17), f"{_SCORES}, routing_map_format='bytemap'"),
    Row(_FUSED_LOSS, (2, 6), _LOSS),
)

NEVER = (99, 0)
BEHAVIOUR: dict[str, Version] = {
    "mask_maps": (2, 1),  # permutation by routing maps; before by lists of experts
    "wide_row_id_map": (2, 6),  # int32 [N, 2E+1], sums by descending expert; before int64 [E, N], ascending
    "zero_prob_rows": (2, 6),  # a routed token of probability 0 becomes a row of zeros
    "keeps_tail": (2, 13),  # rows past the last chunk stay in their place
    "asserts_rows": (2, 15),  # a mask permute of no row raises
    "probs_gradient_alone": (2, 15),  # probs have a gradient where inp wants none
    "float32_router": (2, 13),  # computes 16-bit logits in float32; before in their dtype
    "sqrtsoftplus": (2, 13),  # the score function exists
    "normalises_one": (2, 14),  # scores for the balancing loss sum to 1 also where topk is 1
    "radix": (2, 15),  # 16 experts or more are chosen by another algorithm
    "checks_groups": (2, 17),  # refuses more experts of a group than it has
    "scale_alone": (2, 0),  # delayed scaling's scale_inv is no part of the state
    "tensor_splits": (2, 17),  # a grouped linear layer takes its splits as a tensor
    "tensor_total": (2, 18),  # total_num_tokens may be a tensor
    "rounds_once": (2, 19),  # a scaled activation rounds after the product with its scale alone
    "typed_empty_maps": (2, 19),  # of no tokens: int32 [0, 2E+1]; before float32 [0]
    "bias_gradient_alone": NEVER,  # a bias has a gradient where the weight wants none; seen in 2.20.2
}

BUCKETS: dict[str, tuple[Version, bool]] = {  # a release of each, and whether it is ROCm's
    "1.11": ((1, 13), False),
    "2.1": ((2, 5), False),
    "2.6": ((2, 11), False),
    "2.12": ((2, 14), False),
    "2.15": ((2, 18), False),
    "2.19": ((2, 19), False),
    "2.20": ((2, 20), False),
    "rocm": ((2, 10), True),
}


def parameters_of(version: Version, rocm: bool) -> dict[str, str]:
    """The parameters of every symbol of a release."""
    return {row.symbol: row.parameters for row in SYMBOLS if row.since <= version and rocm >= row.rocm}


def behaviour_of(version: Version) -> dict[str, Any]:
    """The names of BEHAVIOUR that hold for a release."""
    return {name: since <= version for name, since in BEHAVIOUR.items()}
