"""What an installed Transformer Engine can do: one table, each row probed by a signature.

A version number decides nothing: packages are patched, and forks keep the numbers. A row holds if
its symbol exists, takes every keyword that the adapter passes, and requires no others. A symbol
whose signature cannot be read, or that requires an unknown keyword, counts as missing.
"""

import inspect
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

_MASK = ("inp", "routing_map", "num_out_tokens", "map_type")
_MERGED = ("inp", "row_id_map", "merging_probs", "restore_shape", "map_type")
_SPLITS = ("inp", "m_splits")
_CHUNKS = ("split_sizes", "sorted_index")
_GROUPED = ("num_gemms", "in_features", "out_features", "bias", "params_dtype", "device")
_OPS_GROUPED = ("num_groups", "in_features", "out_features", "bias", "device", "dtype")
_TOPK = (
    *("logits", "topk", "use_pre_softmax", "num_groups", "group_topk"),
    *("scaling_factor", "score_function", "expert_bias"),
)
_CLAMPED = ("limit", "alpha")
_NVFP4 = ("disable_rht", "disable_stochastic_rounding", "disable_2d_quantization")


@dataclass(frozen=True)
class Feature:
    """A symbol of `transformer_engine`, the keywords passed to it, and the path without it."""

    name: str
    symbol: str  # a dotted path below transformer_engine
    passes: tuple[str, ...]
    fallback: str
    takes_tensor: str = ""  # a parameter whose annotation must name a tensor
    needless_with: str = ""  # a feature that does the same


TABLE = (
    Feature("permute", "pytorch.moe_permute", _MASK, "our permute"),
    Feature(
        "permute_indices",
        "pytorch.moe_permute",
        ("inp", "indices", "num_out_tokens"),
        "our permute",
        needless_with="permute",
    ),
    Feature(
        "unpermute_indices",
        "pytorch.moe_unpermute",
        ("inp", "row_id_map", "probs"),
        "our unpermute",
        needless_with="unpermute",
    ),
    Feature(
        "permute_with_probs",
        "pytorch.moe_permute_with_probs",
        ("inp", "probs", "routing_map", "num_out_tokens"),
        "permute, then gather the probs",
    ),
    Feature(
        "permute_and_pad",
        "pytorch.moe_permute_and_pad_with_probs",
        ("inp", "probs", "routing_map", "tokens_per_expert", "align_size"),
        "permute, then pad",
    ),
    Feature("unpermute", "pytorch.moe_unpermute", _MERGED, "our unpermute"),
    Feature("unpermute_pad_offsets", "pytorch.moe_unpermute", (*_MERGED, "pad_offsets"), "unpad, then unpermute"),
    Feature("sort_chunks", "pytorch.moe_sort_chunks_by_index", ("inp", *_CHUNKS), "our sort_chunks"),
    Feature(
        "sort_chunks_with_probs",
        "pytorch.moe_sort_chunks_by_index_with_probs",
        ("inp", "probs", *_CHUNKS),
        "sort the rows, then the probs as rows of one column",
    ),
    Feature("padding", "pytorch.Fp8Padding", ("num_gemms", "align_size"), "pad by an index"),
    Feature("unpadding", "pytorch.Fp8Unpadding", ("num_gemms", "align_size"), "unpad by an index"),
    Feature("fused_topk", "pytorch.router.fused_topk_with_score_function", _TOPK, "our topk_routing"),
    Feature(
        "fused_topk_indices",
        "pytorch.router.fused_topk_with_score_function",
        (*_TOPK, "topk_indices"),
        "our topk_indices",
    ),
    Feature(
        "fused_scores",
        "pytorch.router.fused_compute_score_for_moe_aux_loss",
        ("logits", "topk", "score_function"),
        "our aux_loss_scores",
    ),
    Feature(
        "fused_aux_loss",
        "pytorch.router.fused_moe_aux_loss",
        ("probs", "tokens_per_expert", "total_num_tokens", "num_experts", "topk", "coeff"),
        "our load_balancing_loss",
    ),
    Feature(
        "grouped_linear",
        "pytorch.GroupedLinear",
        _GROUPED,
        "our grouped_linear",
    ),
    Feature("splits", "pytorch.GroupedLinear.forward", _SPLITS, "our grouped_linear"),
    Feature(
        "tensor_splits",
        "pytorch.GroupedLinear.forward",
        _SPLITS,
        "a list of splits on the host",
        takes_tensor="m_splits",
    ),
    Feature(
        "splits_on_device",
        "pytorch.GroupedLinear.forward",
        (*_SPLITS, "m_splits_tensor"),
        "the list alone (the parameter is ROCm's)",
        needless_with="tensor_splits",
    ),
    Feature("scaled_swiglu", "pytorch.ops.ScaledSwiGLU", ("glu_interleave_size",), "our glu"),
    Feature(
        "scaled_clamped_geglu",
        "pytorch.ops.ScaledClampedQGeGLU",
        ("glu_interleave_size", "limit", "alpha"),
        "our glu",
    ),
    Feature("scaled_srelu", "pytorch.ops.ScaledSReLU", (), "our activation"),
    Feature("swiglu", "pytorch.ops.SwiGLU", (), "our glu"),
    Feature("interleaved_swiglu", "pytorch.ops.SwiGLU", ("glu_interleave_size",), "our glu"),
    Feature("clamped_swiglu", "pytorch.ops.ClampedSwiGLU", _CLAMPED, "our glu"),
    Feature(
        "clamped_swiglu_offset",
        "pytorch.ops.ClampedSwiGLU",
        (*_CLAMPED, "glu_linear_offset", "glu_interleave_size"),
        "our glu",
    ),
    Feature("geglu", "pytorch.ops.GEGLU", (), "our glu"),
    Feature("quick_geglu", "pytorch.ops.QGEGLU", (), "our glu"),
    Feature("reglu", "pytorch.ops.ReGLU", (), "our glu"),
    Feature("silu", "pytorch.ops.SiLU", (), "our activation"),
    Feature("gelu_tanh", "pytorch.ops.GELU", (), "our activation"),
    Feature("quick_gelu", "pytorch.ops.QGELU", (), "our activation"),
    Feature("relu", "pytorch.ops.ReLU", (), "our activation"),
    Feature("squared_relu", "pytorch.ops.SReLU", (), "our activation"),
    Feature(
        "block_quantizer",
        "pytorch.tensor.float8_blockwise_tensor.Float8BlockQuantizer",
        ("fp8_dtype", "rowwise", "columnwise", "amax_epsilon", "force_pow_2_scales", "block_scaling_dim"),
        "our permute_and_quantize",
    ),
    Feature(
        "mxfp8_quantizer",
        "pytorch.tensor.mxfp8_tensor.MXFP8Quantizer",
        ("fp8_dtype", "rowwise", "columnwise"),
        "our permute_and_quantize",
    ),
    Feature("fp8_dtype", "pytorch.fp8.get_fp8_te_dtype", ("fp8_recipe", "fprop_tensor"), "our permute_and_quantize"),
    Feature("ops_grouped_linear", "pytorch.ops.GroupedLinear", _OPS_GROUPED, "our grouped_mlp"),
    Feature("ops_scale_bias", "pytorch.ops.GroupedLinear", (*_OPS_GROUPED, "scale_bias"), "our grouped_mlp"),
    Feature("ops_sequential", "pytorch.ops.Sequential", (), "our grouped_mlp"),
    Feature("autocast", "pytorch.autocast", ("enabled", "recipe"), "fp8_autocast"),
    Feature(
        "fp8_autocast",
        "pytorch.fp8_autocast",
        ("enabled", "fp8_recipe"),
        "our grouped_linear of recipes",
        needless_with="autocast",
    ),
    Feature("scales", "pytorch.GroupedLinear.init_fp8_metadata", ("num_gemms",), "our delayed scaling"),
    Feature("grouped_recipes", "pytorch.GroupedLinear", (*_GROUPED, "delay_wgrad_compute"), "delayed scaling alone"),
    Feature(
        "delayed",
        "common.recipe.DelayedScaling",
        ("margin", "fp8_format", "amax_history_len", "amax_compute_algo", "reduce_amax"),
        "our delayed scaling",
    ),
    Feature("current", "common.recipe.Float8CurrentScaling", ("fp8_format",), "our current scaling"),
    Feature("block", "common.recipe.Float8BlockScaling", ("fp8_format", "w_block_scaling_dim"), "our block scaling"),
    Feature("quantizer_parameters", "common.recipe.QParams", ("power_2_scale", "amax_epsilon"), "our scales"),
    Feature("mxfp8", "common.recipe.MXFP8BlockScaling", ("fp8_format",), "our MXFP8"),
    Feature(
        "mxfp8_square",
        "common.recipe.MXFP8BlockScaling",
        ("fp8_format", "enable_2d_quantization"),
        "our MXFP8 of square blocks",
    ),
    Feature("nvfp4", "common.recipe.NVFP4BlockScaling", _NVFP4, "our NVFP4"),
    Feature(
        "nvfp4_row_scaled", "common.recipe.NVFP4BlockScaling", (*_NVFP4, "row_scaled_activation"), "our row scaling"
    ),
    Feature(
        "nvfp4_four_over_six",
        "common.recipe.NVFP4BlockScaling",
        (*_NVFP4, "nvfp4_4over6", "nvfp4_4over6_e4m3_use_256", "nvfp4_4over6_err_mode"),
        "our four over six",
    ),
    Feature(
        "backward_override",
        "common.recipe.Float8CurrentScaling",
        ("fp8_format", "backward_override"),
        "our backward_override",
    ),
)
FEATURES = {feature.name: feature for feature in TABLE}


@dataclass(frozen=True)
class Gate:
    """An environment variable that changes the kernels that Transformer Engine runs."""

    variable: str
    of: str  # the symbol whose kernels it changes
    effect: str
    feature: str = ""  # only releases with this feature read it


TRITON_GROUPED_GEMM = "NVTE_USE_GROUPED_GEMM_TRITON"
FUSED_GROUPED_MLP = "NVTE_CUTEDSL_FUSED_GROUPED_MLP"
GATES = (
    Gate(
        TRITON_GROUPED_GEMM,
        "pytorch.GroupedLinear",
        "ROCm: Triton's grouped GEMM, without FP8",
        feature="splits_on_device",
    ),
    Gate("NVTE_USE_CUTLASS_GROUPED_GEMM", "pytorch.GroupedLinear", "Hopper: CUTLASS, 16-bit, without bias"),
    Gate(
        "NVTE_GROUPED_LINEAR_USE_FUSED_GROUPED_GEMM", "pytorch.GroupedLinear", "2.17 to 2.18: splits stay on the device"
    ),
    Gate(FUSED_GROUPED_MLP, "pytorch.ops.Sequential", "Blackwell: two grouped linear layers and a GLU as one kernel"),
    Gate("NVTE_RADIX_TOPK_THRESHOLD", "pytorch.router.fused_topk_with_score_function", "K from which ties go by index"),
)


def switched_on(variable: str) -> bool:
    """Whether the environment variable is a number above 0, which is how Transformer Engine and
    Megatron read theirs.
    """
    return int(os.environ.get(variable, "0")) > 0


def found(te: Any, symbol: str) -> Any:
    """The object at a dotted path below `te`, or None."""
    for name in symbol.split("."):
        te = getattr(te, name, None)
        if te is None:
            return None
    return te


def parameters(function: Any) -> Mapping[str, inspect.Parameter] | None:
    """The parameters without `self`; None if they cannot be read."""
    try:
        named = dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return None
    named.pop("self", None)
    return named


def usable(function: Any, passes: tuple[str, ...], takes_tensor: str = "") -> bool:
    """Whether the function takes these keywords, and requires no others."""
    named = parameters(function) if callable(function) else None
    if named is None:
        return False
    open_ended = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    required = {name for name, p in named.items() if p.default is p.empty and p.kind not in open_ended}
    by_name = {name for name, p in named.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    if takes_tensor and "Tensor" not in str(named.get(takes_tensor, "")):
        return False
    return set(passes) <= by_name and required <= set(passes)


class Features:
    """The rows of TABLE that hold for one Transformer Engine."""

    def __init__(self, te: Any) -> None:
        self.te = te

    @cached_property
    def present(self) -> dict[str, bool]:
        """Each feature's name, and whether it is there."""
        return {x.name: usable(found(self.te, x.symbol), x.passes, x.takes_tensor) for x in TABLE}

    def __getitem__(self, name: str) -> bool:
        return self.present[name]

    def get(self, name: str) -> Any:
        """The symbol of a feature."""
        return found(self.te, FEATURES[name].symbol)

    @property
    def gates(self) -> dict[str, str]:
        """The environment variables of GATES that are set, and the symbols that they concern."""
        read = [x for x in GATES if not x.feature or self[x.feature]]
        present = [x for x in read if x.variable in os.environ and found(self.te, x.of)]
        return {f"{x.variable}={os.environ[x.variable]}": x.of.rpartition(".")[2] for x in present}

    @cached_property
    def unknown(self) -> dict[str, list[str]]:
        """Keywords that no row passes, by symbol: they keep their defaults."""
        passed: dict[str, set[str]] = {}
        for feature in TABLE:
            passed.setdefault(feature.symbol, set()).update(feature.passes)
        keywords = {symbol: parameters(found(self.te, symbol)) or {} for symbol in passed}
        return {symbol: new for symbol, named in keywords.items() if (new := sorted({*named} - passed[symbol]))}

    def report(self) -> list[str]:
        """A line per missing feature, with the path taken instead, and per gate that is set."""
        wanted = [x for x in TABLE if not (x.needless_with and self[x.needless_with])]
        lacking = [f"{x.symbol}({', '.join(x.passes)}): missing; {x.fallback}" for x in wanted if not self[x.name]]
        return [*lacking, *self.gates]
