"""Calls that break a rule: each must raise, or be declared unchecked.

A rule's name says what is wrong; `blame` in the problem it makes is the argument at fault.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from conformance.core.contract import Problem
from moe_ref.config import Recipe
from moe_ref.quantization.recipes import new_quantizer_state

Rule = Callable[[Problem], Problem]


def _setting(name: str, value: object) -> Rule:
    return lambda problem: replace(_bare(problem), settings=problem.settings | {name: value}, blame=name)


def _bare(problem: Problem) -> Problem:
    """Without gradients, and without settings that exclude each other."""
    return replace(problem, wanted=(), cotangents={}, layouts={})


def _only_setting(name: str, value: object) -> Rule:
    return lambda problem: replace(_bare(problem), settings={name: value}, blame=name)


def _one_more(name: str, dim: int = 0) -> Rule:
    """The input with one entry more than the others go with."""

    def break_it(problem: Problem) -> Problem:
        x = problem.tensors[name]
        extra = torch.zeros([1 if d == dim else n for d, n in enumerate(x.shape)], dtype=x.dtype)
        return replace(_bare(problem).with_tensors({name: torch.cat([x, extra], dim)}), blame=name)

    return break_it


def _flat(name: str) -> Rule:
    return lambda problem: replace(_bare(problem).with_tensors({name: problem.tensors[name].reshape(-1)}), blame=name)


def _restore_one_more(problem: Problem) -> Problem:
    tokens, hidden = problem.settings["restore_shape"]
    return replace(
        _bare(problem), settings=problem.settings | {"restore_shape": (tokens + 1, hidden)}, blame="restore_shape"
    )


def _wrong_probs(problem: Problem) -> Problem:
    shape = problem.required["routing_map"].shape
    return replace(
        _bare(problem), settings=problem.settings | {"probs": torch.ones(shape[0] + 1, shape[1])}, blame="probs"
    )


def _sizes_too_large(problem: Problem) -> Problem:
    return replace(
        _bare(problem).with_tensors(
            {"chunk_sizes": problem.required["chunk_sizes"] + 1 + len(problem.required["rows"])}
        ),
        blame="chunk_sizes",
    )


def _index_too_large(problem: Problem) -> Problem:
    too_large = torch.full_like(problem.required["indices"], problem.settings["num_experts"])
    return replace(_bare(problem).with_tensors({"indices": too_large}), blame="indices")


def _added(name: str, value: torch.Tensor) -> Rule:
    return lambda problem: replace(_bare(problem), settings=problem.settings | {name: value}, blame=name)


def _in(name: str, dtype: torch.dtype) -> Rule:
    return lambda problem: replace(_bare(problem).with_tensors({name: problem.tensors[name].to(dtype)}), blame=name)


def _with_values(name: str, value: torch.Tensor) -> Rule:
    return lambda problem: replace(_bare(problem).with_tensors({name: value}), blame=name)


def _together(blame: str, **settings: object) -> Rule:
    """Settings that are illegal together."""
    return lambda problem: replace(_bare(problem), settings=problem.settings | settings, blame=blame)


# two tokens, two experts, one slot
_TOPK: dict[str, Rule] = {
    "no_slots": _setting("topk", 0),
    "more_slots_than_experts": _setting("topk", 3),
    "logits_flat": _flat("logits"),
    "unknown_scores": _setting("score_function", "relu"),
    "groups_without_group_topk": _setting("num_groups", 2),
    "group_topk_without_groups": _setting("group_topk", 1),
    "groups_no_divisor": _together("num_groups", num_groups=3, group_topk=1),
    "more_groups_kept_than_slots": _together("group_topk", num_groups=2, group_topk=2),
    "too_few_experts_in_groups": _together("group_topk", topk=2, num_groups=2, group_topk=1),
    "scaling_zero": _setting("scaling_factor", 0.0),
    "bias_with_softmax": _added("expert_bias", torch.zeros(2)),
    "bias_too_long": _together("expert_bias", score_function="sigmoid", expert_bias=torch.zeros(3)),
    "indices_too_wide": _added("precomputed_indices", torch.zeros(2, 2, dtype=torch.int64)),
    "index_too_large": _added("precomputed_indices", torch.full((2, 1), 2)),
}

# two rows, one for each of two experts
_COUNTS: dict[str, Rule] = {
    "count_negative": _with_values("tokens_per_expert", torch.tensor([-1, 2])),
    "counts_beyond_the_rows": _with_values("tokens_per_expert", torch.tensor([2, 1])),
    "counts_of_floats": _in("tokens_per_expert", torch.float32),
    "accumulator_unknown": _setting("accumulator", "bfloat16"),
}
# two rows
_ACTIVATION: dict[str, Rule] = {
    "h_flat": _flat("h"),
    "h_of_integers": _in("h", torch.int32),
    "kind_unknown": _setting("kind", "softmax"),
    "probs_too_long": _added("probs", torch.ones(3)),
    "probs_of_integers": _added("probs", torch.ones(2, dtype=torch.int64)),
}


def _quantizing(blame: str, recipe: Recipe, x: torch.Tensor, **settings: object) -> Rule:
    """Another recipe, tensor and settings."""
    return lambda problem: replace(_bare(problem), required={"x": x, "recipe": recipe}, settings=settings, blame=blame)


_SQUARE = torch.zeros(16, 16, dtype=torch.bfloat16)
_CURRENT, _GRADIENT = Recipe("current"), {"role": "grad_output", "columnwise": True}
# two rows, one for each of two groups
_QUANTIZE: dict[str, Rule] = {
    "x_flat": _flat("x"),
    "x_of_integers": _in("x", torch.int32),
    "recipe_a_word": lambda problem: replace(
        _bare(problem), required=problem.required | {"recipe": "mxfp8"}, blame="recipe"
    ),
    "role_unknown": _setting("role", "activation"),
    "no_direction": _setting("rowwise", False),
    "splits_negative": _with_values("splits", torch.tensor([-1, 2])),
    "splits_beyond_the_rows": _with_values("splits", torch.tensor([2, 1])),
    "splits_of_floats": _in("splits", torch.float32),
    "splits_empty": _with_values("splits", torch.zeros(0, dtype=torch.int64)),
    "state_of_nothing": _quantizing("state", _CURRENT, torch.zeros(2, 1), state=new_quantizer_state(Recipe("delayed"))),
    "state_missing": _quantizing("state", Recipe("delayed"), torch.zeros(2, 1), state=None),
    "state_of_other_groups": _quantizing(
        "state", Recipe("delayed"), torch.zeros(2, 1), state=new_quantizer_state(Recipe("delayed"), num_groups=2)
    ),
    "columns_no_multiple": _quantizing("x", Recipe("mxfp8"), torch.zeros(32, 33)),
    "rows_no_multiple": _quantizing("splits", Recipe("mxfp8"), torch.zeros(64, 32), splits=torch.tensor([16, 48])),
    "transform_of_floats": _quantizing("x", Recipe("nvfp4"), _SQUARE.float(), columnwise=True),
    "noise_unasked": _added("noise", torch.zeros(2, 2, 1)),
    "noise_of_one_direction": _quantizing("noise", Recipe("nvfp4"), _SQUARE, **_GRADIENT, noise=torch.zeros(1, 16, 16)),
}

_PERMUTE: dict[str, Rule] = {
    "num_rows_negative": _only_setting("num_rows", -1),
    "align_zero": _only_setting("align", 0),
    "capacity_negative": _only_setting("capacity", -4),
    "map_longer_than_tokens": _one_more("routing_map"),
    "map_flat": _flat("routing_map"),
    "probs_longer_than_map": _wrong_probs,
}


def _by_recipe(blame: str, recipe: Recipe, hidden: int = 16, **settings: object) -> Rule:
    """Another recipe, for two tokens of so many bfloat16, and other settings."""
    tokens = torch.zeros(2, hidden, dtype=torch.bfloat16)
    return lambda problem: replace(
        _bare(problem), required=problem.required | {"tokens": tokens, "recipe": recipe}, settings=settings, blame=blame
    )


# two tokens for two experts
_PERMUTE_AND_QUANTIZE: dict[str, Rule] = _PERMUTE | {
    "tokens_of_integers": _in("tokens", torch.int32),
    "recipe_a_word": lambda problem: replace(
        _bare(problem), required=problem.required | {"recipe": "mxfp8"}, blame="recipe"
    ),
    "role_unknown": _setting("role", "activation"),
    "no_direction": _setting("rowwise", False),
    "state_of_nothing": _by_recipe("state", _CURRENT, state=new_quantizer_state(Recipe("delayed"), num_groups=2)),
    "state_missing": _by_recipe("state", Recipe("delayed"), state=None),
    "state_of_one_expert": _by_recipe("state", Recipe("delayed"), state=new_quantizer_state(Recipe("delayed"))),
    "columns_no_multiple": _by_recipe("tokens", Recipe("mxfp8"), 33, align=32),
    "no_whole_blocks": _by_recipe("align", Recipe("mxfp8"), 32),
    "align_no_whole_blocks": _by_recipe("align", Recipe("mxfp8"), 32, align=16),
    "capacity_no_whole_blocks": _by_recipe("capacity", Recipe("nvfp4"), capacity=24),
    "noise_missing": _by_recipe("recipe", Recipe("nvfp4"), role="grad_output", align=16),
}


def _activating(
    blame: str, recipe: Recipe, rows: int, columns: int, dtype: torch.dtype = torch.bfloat16, **settings: object
) -> Rule:
    """Another recipe, zeros in the place of h (and of the cotangent, as wide), and settings."""
    h = torch.zeros(rows, columns, dtype=dtype)

    def break_it(problem: Problem) -> Problem:
        halves = "glu" in problem.function
        d_out = {"d_out": h[:, : columns // 2] if halves else h} if "d_out" in problem.required else {}
        return replace(_bare(problem), required=d_out | {"h": h, "recipe": recipe}, settings=settings, blame=blame)

    return break_it


# two rows, one for each of two groups
_QUANTIZED_ACTIVATION: dict[str, Rule] = _ACTIVATION | {
    "recipe_a_word": lambda problem: replace(
        _bare(problem), required=problem.required | {"recipe": "mxfp8"}, blame="recipe"
    ),
    "no_direction": _setting("rowwise", False),
    "splits_negative": _with_values("splits", torch.tensor([-1, 2])),
    "splits_beyond_the_rows": _with_values("splits", torch.tensor([2, 1])),
    "splits_of_floats": _in("splits", torch.float32),
    "state_of_nothing": _activating("state", _CURRENT, 2, 2, state=new_quantizer_state(Recipe("delayed"))),
    "state_missing": _activating("state", Recipe("delayed"), 2, 2, state=None),
    "state_of_other_groups": _activating(
        "state", Recipe("delayed"), 2, 2, state=new_quantizer_state(Recipe("delayed"), num_groups=2)
    ),
    "columns_no_multiple": _activating("h", Recipe("mxfp8"), 32, 34),
    "rows_no_multiple": _activating("splits", Recipe("mxfp8"), 64, 64, splits=torch.tensor([16, 48])),
    "rounding_a_word": _setting("round_before_quantize", "bfloat16"),
}
_TRANSFORM_NOT_ROUNDED: dict[str, Rule] = {
    "transform_not_rounded": _activating(
        "round_before_quantize", Recipe("nvfp4", stochastic_rounding=False), 16, 32, columnwise=True
    ),
}
_QUANTIZED_BACKWARD: dict[str, Rule] = _TRANSFORM_NOT_ROUNDED | {
    "cotangent_too_long": _one_more("d_out"),
    "cotangent_in_another_dtype": _in("d_out", torch.float16),
    "noise_unasked": _added("noise", torch.zeros(2, 2, 2)),
}
_OF_GATES: dict[str, Rule] = {
    "width_odd": _one_more("h", 1),
    "kind_without_a_gate": _setting("kind", "silu"),
    "clamp_zero": _setting("clamp", 0.0),
    "alpha_of_a_tanh": _together("alpha", kind="geglu", alpha=1.0),
    "interleave_no_divisor": _setting("interleave", 3),
}

# two rows, one for each of two experts, or two tokens; all widths are 1
_MLP: dict[str, Rule] = {
    "fc1_weight_wider_than_rows": _one_more("fc1_weight", -1),
    "fc1_width_odd": _one_more("fc1_weight", -2),
    "fc2_weight_wider_than_activations": _one_more("fc2_weight", -1),
    "fc2_weight_taller_than_rows": _one_more("fc2_weight", -2),
    "weight_in_another_dtype": _in("fc2_weight", torch.float16),
    "kind_unknown": _setting("kind", "softmax"),
    "clamp_zero": _setting("clamp", 0.0),
    "alpha_of_a_tanh": _together("alpha", kind="geglu", alpha=1.0),
    "stored_input_of_another_gate": _together("fp8_input_store", kind="geglu", fp8_input_store=True),
    "offset_without_a_gate": _together("offset", kind="relu", offset=1.0),
    "interleave_no_divisor": _setting("interleave", 3),
}
_EXPERTS: dict[str, Rule] = (
    {name: rule for name, rule in _COUNTS.items() if name.startswith("count")}
    | _MLP
    | {
        "rows_flat": _flat("rows"),
        "more_weights_than_counts": _one_more("fc1_weight"),
        "fc2_of_more_experts": _one_more("fc2_weight"),
        "fc1_bias_too_wide": _added("fc1_bias", torch.zeros(2, 3)),
        "fc2_bias_of_one_expert": _added("fc2_bias", torch.zeros(1, 1)),
        "fc2_bias_of_integers": _added("fc2_bias", torch.zeros(2, 1, dtype=torch.int64)),
        "probs_too_long": _added("probs", torch.ones(3)),
        "probs_of_integers": _added("probs", torch.ones(2, dtype=torch.int64)),
        "probs_on_input_without_probs": _setting("probs_on_input", True),
        "align_zero": _setting("align", 0),
        "recompute_unknown": _setting("recompute", "fc1"),
    }
)
_SHARED: dict[str, Rule] = _MLP | {
    "x_flat": _flat("x"),
    "gate_of_two_rows": _added("gate_weight", torch.zeros(2, 1)),
    "gate_wider_than_x": _added("gate_weight", torch.zeros(1, 2)),
    "gate_in_another_dtype": _added("gate_weight", torch.zeros(1, 1, dtype=torch.float16)),
}

RULES: dict[str, dict[str, Rule]] = {
    "glu_and_quantize": _QUANTIZED_ACTIVATION | _OF_GATES | _TRANSFORM_NOT_ROUNDED,
    "activation_and_quantize": _QUANTIZED_ACTIVATION
    | _TRANSFORM_NOT_ROUNDED
    | {"kind_with_a_gate": _setting("kind", "swiglu")},
    "glu_backward_and_quantize": _QUANTIZED_ACTIVATION | _OF_GATES | _QUANTIZED_BACKWARD,
    "activation_backward_and_quantize": _QUANTIZED_ACTIVATION
    | _QUANTIZED_BACKWARD
    | {"kind_with_a_gate": _setting("kind", "swiglu")},
    "permute": _PERMUTE,
    "unpermute": {"rows_too_many": _one_more("rows"), "restore_shape_wrong": _restore_one_more},
    "sort_chunks": {"order_longer_than_sizes": _one_more("order"), "sizes_beyond_rows": _sizes_too_large},
    "pad_routing_map": {"align_zero": _setting("align", 0), "align_negative": _setting("align", -16)},
    "indices_to_multihot": {
        "no_experts": _setting("num_experts", 0),
        "probs_longer_than_indices": _one_more("probs"),
        "index_too_large": _index_too_large,
    },
    "deepep_layout": {
        "no_experts": _setting("num_experts", 0),
        "experts_no_multiple": _together("num_experts", num_experts=3, ranks=2),
        "index_too_large": _index_too_large,
    },
    "multihot_to_indices": {"no_slots": _setting("topk", 0), "probs_longer_than_map": _one_more("probs")},
    "gate": {
        "weight_wider": _one_more("weight", 1),
        "x_flat": _flat("x"),
        "unknown_dtype": _setting("router_dtype", "fp8"),
    },
    "jitter": {"eps_negative": _setting("eps", -0.5), "eps_one": _setting("eps", 1.0)},
    "topk_indices": _TOPK,
    "topk_routing": _TOPK,
    "sinkhorn_routing": {"no_slots": _setting("topk", 0), "more_slots_than_experts": _setting("topk", 3)},
    "drop_tokens": {
        "capacity_negative": _setting("capacity", -1),
        "unknown_policy": _setting("drop_policy", "random"),
        "map_longer_than_probs": _one_more("routing_map"),
    },
    "aux_loss_scores": {
        "no_slots": _setting("topk", 0),
        "more_slots_than_experts": _setting("topk", 3),
        "unknown_scores": _setting("score_function", "relu"),
        "mask_too_long": _added("padding_mask", torch.zeros(3, dtype=torch.bool)),
    },
    "load_balancing_loss": {
        "columns_no_multiple": _setting("num_experts", 5),
        "counts_too_many": _one_more("tokens_per_expert"),
        "coeff_negative": _setting("coeff", -1.0),
        "tokens_negative": _setting("total_num_tokens", -1),
    },
    "z_loss": {
        "coeff_negative": _setting("coeff", -1.0),
        "logits_flat": _flat("logits"),
        "mask_too_long": _added("padding_mask", torch.zeros(3, dtype=torch.bool)),
    },
    "attach_loss": {"scale_infinite": _setting("scale", float("inf"))},
    "route": {
        "batch_size_no_divisor": _setting("batch_size", 3),
        "mask_too_long": _added("padding_mask", torch.zeros(3, dtype=torch.bool)),
    },
    "glu": _ACTIVATION
    | {
        "width_odd": _one_more("h", 1),
        "kind_without_a_gate": _setting("kind", "silu"),
        "offset_infinite": _setting("offset", float("inf")),
        "clamp_zero": _setting("clamp", 0.0),
        "clamp_negative": _setting("clamp", -7.0),
        "alpha_zero": _setting("alpha", 0.0),
        "alpha_of_a_tanh": _together("alpha", kind="geglu", alpha=1.0),
        "interleave_zero": _setting("interleave", 0),
        "interleave_no_divisor": _setting("interleave", 3),
        "stored_input_of_another_gate": _together("fp8_input_store", kind="geglu", fp8_input_store=True),
    },
    "activation": _ACTIVATION | {"kind_with_a_gate": _setting("kind", "swiglu")},
    "grouped_linear": _COUNTS
    | {
        "weight_wider_than_rows": _one_more("weight", 2),
        "more_weights_than_counts": _one_more("weight"),
        "weight_in_another_dtype": _in("weight", torch.float16),
        "rows_flat": _flat("rows"),
        "bias_wider_than_weight": _added("bias", torch.zeros(2, 2)),
        "bias_of_integers": _added("bias", torch.zeros(2, 1, dtype=torch.int64)),
    },
    "grouped_dgrad": _COUNTS
    | {
        "weight_taller_than_cotangent": _one_more("weight", 1),
        "more_weights_than_counts": _one_more("weight"),
        "weight_in_another_dtype": _in("weight", torch.float16),
        "cotangent_flat": _flat("d_out"),
    },
    "grouped_wgrad": _COUNTS
    | {
        "rows_more_than_cotangents": _one_more("rows"),
        "cotangent_in_another_dtype": _in("d_out", torch.float16),
        "rows_flat": _flat("rows"),
        "into_of_another_shape": _added("accumulate_into", torch.zeros(2, 1, 2)),
        "into_in_half": _added("accumulate_into", torch.zeros(2, 1, 1, dtype=torch.bfloat16)),
    },
    "grouped_mlp": _EXPERTS,
    "sequential_mlp": _EXPERTS,
    "shared_experts": _SHARED,
    "latent_projection": {
        "x_flat": _flat("x"),
        "x_of_integers": _in("x", torch.int32),
        "weight_flat": _flat("weight"),
        "weight_wider_than_x": _one_more("weight", 1),
        "weight_in_another_dtype": _in("weight", torch.float16),
        "bias_wider_than_weight": _added("bias", torch.zeros(2)),
        "bias_of_integers": _added("bias", torch.zeros(1, dtype=torch.int64)),
    },
    "quantize": _QUANTIZE,
    "permute_and_quantize": _PERMUTE_AND_QUANTIZE,
    "update_expert_bias": {
        "counts_too_many": _one_more("tokens_per_expert"),
        "bias_in_half": _in("expert_bias", torch.bfloat16),
        "rate_negative": _setting("update_rate", -0.5),
    },
}
