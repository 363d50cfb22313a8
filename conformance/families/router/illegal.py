"""Illegal calls of the router."""

import torch

from conformance.core.illegal import Rule, flat, in_dtype, on_device, one_more, setting, together

# two tokens, two experts, one slot
TOPK_INDICES: dict[str, Rule] = {
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
    "bias_with_softmax": setting("expert_bias", torch.zeros(2)),
    "bias_too_long": together("expert_bias", score_function="sigmoid", expert_bias=torch.zeros(3)),
    "indices_too_wide": setting("precomputed_indices", torch.zeros(2, 2, dtype=torch.int64)),
    "index_too_large": on_device(setting("precomputed_indices", torch.full((2, 1), 2))),
}


GATE: dict[str, Rule] = {
    "weight_wider": one_more("weight", 1),
    "x_flat": flat("x"),
    "unknown_dtype": setting("router_dtype", "fp8"),
}
TOPK_ROUTING = TOPK_INDICES
JITTER: dict[str, Rule] = {"eps_negative": setting("eps", -0.5), "eps_one": setting("eps", 1.0)}
SINKHORN_ROUTING: dict[str, Rule] = {"no_slots": setting("topk", 0), "more_slots_than_experts": setting("topk", 3)}
DROP_TOKENS: dict[str, Rule] = {
    "capacity_negative": setting("capacity", -1),
    "unknown_policy": setting("drop_policy", "random"),
    "map_longer_than_probs": one_more("routing_map"),
}
AUX_LOSS_SCORES: dict[str, Rule] = {
    "no_slots": setting("topk", 0),
    "more_slots_than_experts": setting("topk", 3),
    "unknown_scores": setting("score_function", "relu"),
    "mask_too_long": setting("padding_mask", torch.zeros(3, dtype=torch.bool)),
}
LOAD_BALANCING_LOSS: dict[str, Rule] = {
    "columns_no_multiple": setting("num_experts", 5),
    "counts_too_many": one_more("tokens_per_expert"),
    "coeff_negative": setting("coeff", -1.0),
    "tokens_negative": setting("total_num_tokens", -1),
}
Z_LOSS: dict[str, Rule] = {
    "coeff_negative": setting("coeff", -1.0),
    "logits_flat": flat("logits"),
    "mask_too_long": setting("padding_mask", torch.zeros(3, dtype=torch.bool)),
}
ATTACH_LOSS: dict[str, Rule] = {"scale_infinite": setting("scale", float("inf"))}
UPDATE_EXPERT_BIAS: dict[str, Rule] = {
    "counts_too_many": one_more("tokens_per_expert"),
    "bias_in_half": in_dtype("expert_bias", torch.bfloat16),
    "rate_negative": setting("update_rate", -0.5),
}
ROUTE: dict[str, Rule] = {
    "batch_size_no_divisor": setting("batch_size", 3),
    "mask_too_long": setting("padding_mask", torch.zeros(3, dtype=torch.bool)),
}
