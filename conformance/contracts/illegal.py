"""Calls that break a rule: each must raise, or be declared unchecked.

A rule's name says what is wrong; `blame` in the problem it makes is the argument at fault.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from conformance.contracts.base import Problem

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
    return replace(_bare(problem), settings=problem.settings | {"restore_shape": (tokens + 1, hidden)}, blame="restore_shape")


def _wrong_probs(problem: Problem) -> Problem:
    shape = problem.required["routing_map"].shape
    return replace(_bare(problem), settings=problem.settings | {"probs": torch.ones(shape[0] + 1, shape[1])}, blame="probs")


def _sizes_too_large(problem: Problem) -> Problem:
    return replace(_bare(problem).with_tensors({"chunk_sizes": problem.required["chunk_sizes"] + 1 + len(problem.required["rows"])}), blame="chunk_sizes")


def _index_too_large(problem: Problem) -> Problem:
    too_large = torch.full_like(problem.required["indices"], problem.settings["num_experts"])
    return replace(_bare(problem).with_tensors({"indices": too_large}), blame="indices")


def _added(name: str, value: torch.Tensor) -> Rule:
    return lambda problem: replace(_bare(problem), settings=problem.settings | {name: value}, blame=name)


def _in_half(name: str) -> Rule:
    return lambda problem: replace(_bare(problem).with_tensors({name: problem.tensors[name].bfloat16()}), blame=name)


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

RULES: dict[str, dict[str, Rule]] = {
    "permute": {
        "num_rows_negative": _only_setting("num_rows", -1),
        "align_zero": _only_setting("align", 0),
        "capacity_negative": _only_setting("capacity", -4),
        "map_longer_than_tokens": _one_more("routing_map"),
        "map_flat": _flat("routing_map"),
        "probs_longer_than_map": _wrong_probs,
    },
    "unpermute": {"rows_too_many": _one_more("rows"), "restore_shape_wrong": _restore_one_more},
    "sort_chunks": {"order_longer_than_sizes": _one_more("order"), "sizes_beyond_rows": _sizes_too_large},
    "pad_routing_map": {"align_zero": _setting("align", 0), "align_negative": _setting("align", -16)},
    "indices_to_multihot": {"no_experts": _setting("num_experts", 0), "probs_longer_than_indices": _one_more("probs"), "index_too_large": _index_too_large},
    "multihot_to_indices": {"no_slots": _setting("topk", 0), "probs_longer_than_map": _one_more("probs")},
    "gate": {"weight_wider": _one_more("weight", 1), "x_flat": _flat("x"), "unknown_dtype": _setting("router_dtype", "fp8")},
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
    "update_expert_bias": {
        "counts_too_many": _one_more("tokens_per_expert"),
        "bias_in_half": _in_half("expert_bias"),
        "rate_negative": _setting("update_rate", -0.5),
    },
}
