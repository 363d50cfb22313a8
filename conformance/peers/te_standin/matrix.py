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

    symbol: str  # a dotted path below transformer_engine.pytorch
    since: Version
    parameters: str
    rocm: bool = False  # only in the fork for ROCm


_TOPK = "logits, topk, use_pre_softmax, num_groups, group_topk, scaling_factor, score_function, expert_bias"
_GROUPED = "num_gemms, in_features, out_features, bias=True, params_dtype=None, device='cuda'"
_SINGLE = "delay_wgrad_compute=False, save_original_input=False, single_grouped_weight=False, single_grouped_bias=False"
_RECOMPUTE = "activation_recompute_in_mlp=False"
_FORWARD = "inp: Tensor, m_splits: list[int], is_first_microbatch=None"
_CHUNKS = "split_sizes, sorted_index"
_PERMUTE_AND_PAD = "inp, probs, routing_map, tokens_per_expert, align_size"

SYMBOLS = (
    Row("moe_permute", (1, 11), "inp, indices, num_out_tokens=-1, max_token_num=-1"),
    Row("moe_permute", (2, 1), "inp, routing_map, num_out_tokens=-1, max_token_num=-1, map_type='mask'"),
    Row("moe_permute", (2, 15), "inp, routing_map, num_out_tokens, max_token_num=-1, map_type='mask'"),
    Row("moe_permute_with_probs", (2, 1), "inp, probs, routing_map, num_out_tokens=-1"),
    Row("moe_permute_with_probs", (2, 15), "inp, probs, routing_map, num_out_tokens"),
    Row("moe_permute_and_pad_with_probs", (2, 12), _PERMUTE_AND_PAD),
    Row("moe_unpermute", (1, 11), "inp, row_id_map, probs=None"),
    Row(
        "moe_unpermute",
        (2, 1),
        "inp, row_id_map, merging_probs=None, restore_shape=None, map_type='mask', probs=None",
    ),
    Row(
        "moe_unpermute",
        (2, 12),
        "inp, row_id_map, merging_probs=None, restore_shape=None, map_type='mask', probs=None, pad_offsets=None",
    ),
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
    Row("GroupedLinear.forward", (2, 17), _FORWARD.replace("list[int]", "list[int] | Tensor")),
    Row(
        "GroupedLinear.forward",
        (2, 18),
        _FORWARD.replace("list[int]", "list[int] | Tensor") + ", out=None, dgrad_out=None",
    ),
    Row("ops.ScaledSwiGLU", (2, 13), "glu_interleave_size=None"),
    Row("ops.ScaledSwiGLU", (2, 17), f"glu_interleave_size=None, *, {_RECOMPUTE}"),
    Row("ops.ScaledClampedQGeGLU", (2, 15), "glu_interleave_size=None, *, limit=7.0, alpha=1.702"),
    Row(
        "ops.ScaledClampedQGeGLU",
        (2, 17),
        f"glu_interleave_size=None, *, {_RECOMPUTE}, limit=7.0, alpha=1.702, glu_linear_offset=1.0",
    ),
    Row("ops.ScaledSReLU", (2, 17), f"*, {_RECOMPUTE}"),
    Row("router.fused_topk_with_score_function", (2, 6), _TOPK),
    Row("router.fused_topk_with_score_function", (2, 17), f"{_TOPK}, routing_map_format='bytemap'"),
    Row("router.fused_topk_with_score_function", (2, 18), f"{_TOPK}, routing_map_format='bytemap', topk_indices=None"),
    Row(
        "router.fused_topk_with_score_function",
        (2, 20),
        f"{_TOPK}, routing_map_format='bytemap', topk_indices=None, "
        "qb_histogram=None, qb_bin_bounds=None, qb_histogram_mode=None",
    ),
    Row("router.fused_compute_score_for_moe_aux_loss", (2, 6), "logits, topk, score_function"),
    Row(
        "router.fused_compute_score_for_moe_aux_loss",
        (2, 17),
        "logits, topk, score_function, routing_map_format='bytemap'",
    ),
    Row(
        "router.fused_moe_aux_loss",
        (2, 6),
        "probs, tokens_per_expert, total_num_tokens, num_experts, topk, coeff",
    ),
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
