"""Illegal calls of the router."""

import torch

from conformance.core.illegal import Rule, added, flat, in_dtype, one_more, setting, together

# two tokens, two experts, one slot
TOPK: dict[str, Rule] = {
    "no_slots": setting("topk", 0),
    "more_slots_than_experts": setting("topk", 3),
    "logits_flat": flat("logits"),
    "unknown_scores": setting("score_function", "relu"),
    "groups_without_group_topk": setting("num_groups", 2),
    "group_topk_without_groups": setting("group_topk", 1),
    "groups_no_divisor": together("num_groups", num_groups=3, group_topk=1),
    "more_groups_kept_than_slots": together("group_topk", num_groups=2, group_topk=2),
    "too_few_experts_in_groups": together("group_topk", topk=2, num_groups=2, group_topk=1),
    "scaling_zero": setting("scaling_factor", 0.0),
    "bias_with_softmax": added("expert_bias", torch.zeros(2)),
    "bias_too_long": together("expert_bias", score_function="sigmoid", expert_bias=torch.zeros(3)),
    "indices_too_wide": added("precomputed_indices", torch.zeros(2, 2, dtype=torch.int64)),
    "index_too_large": added("precomputed_indices", torch.full((2, 1), 2)),
}


RULES: dict[str, dict[str, Rule]] = {
    "gate": {
        "weight_wider": one_more("weight", 1),
        "x_flat": flat("x"),
        "unknown_dtype": setting("router_dtype", "fp8"),
    },
    "jitter": {"eps_negative": setting("eps", -0.5), "eps_one": setting("eps", 1.0)},
    "topk_indices": TOPK,
    "topk_routing": TOPK,
    "sinkhorn_routing": {"no_slots": setting("topk", 0), "more_slots_than_experts": setting("topk", 3)},
    "drop_tokens": {
        "capacity_negative": setting("capacity", -1),
        "unknown_policy": setting("drop_policy", "random"),
        "map_longer_than_probs": one_more("routing_map"),
    },
    "aux_loss_scores": {
        "no_slots": setting("topk", 0),
        "more_slots_than_experts": setting("topk", 3),
        "unknown_scores": setting("score_function", "relu"),
        "mask_too_long": added("padding_mask", torch.zeros(3, dtype=torch.bool)),
    },
    "load_balancing_loss": {
        "columns_no_multiple": setting("num_experts", 5),
        "counts_too_many": one_more("tokens_per_expert"),
        "coeff_negative": setting("coeff", -1.0),
        "tokens_negative": setting("total_num_tokens", -1),
    },
    "z_loss": {
        "coeff_negative": setting("coeff", -1.0),
        "logits_flat": flat("logits"),
        "mask_too_long": added("padding_mask", torch.zeros(3, dtype=torch.bool)),
    },
    "attach_loss": {"scale_infinite": setting("scale", float("inf"))},
    "update_expert_bias": {
        "counts_too_many": one_more("tokens_per_expert"),
        "bias_in_half": in_dtype("expert_bias", torch.bfloat16),
        "rate_negative": setting("update_rate", -0.5),
    },
    "route": {
        "batch_size_no_divisor": setting("batch_size", 3),
        "mask_too_long": added("padding_mask", torch.zeros(3, dtype=torch.bool)),
    },
}
