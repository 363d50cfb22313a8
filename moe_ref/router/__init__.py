"""The router: logits, choice, capacity, balancing losses, and one routing step."""

from moe_ref.router.balancing import (
    attach_loss,
    aux_loss_scores,
    load_balancing_loss,
    quantile_routing,
    sinkhorn_routing,
    update_expert_bias,
    update_quantile_bias,
    z_loss,
)
from moe_ref.router.capacity import drop_tokens, expert_capacity
from moe_ref.router.gating import gate, jitter
from moe_ref.router.route import finish_batch, hash_routing, new_state, route, state_from, state_tensors
from moe_ref.router.selection import topk_indices, topk_routing

__all__ = [
    "attach_loss",
    "aux_loss_scores",
    "drop_tokens",
    "expert_capacity",
    "finish_batch",
    "gate",
    "hash_routing",
    "jitter",
    "load_balancing_loss",
    "new_state",
    "quantile_routing",
    "route",
    "sinkhorn_routing",
    "state_from",
    "state_tensors",
    "topk_indices",
    "topk_routing",
    "update_expert_bias",
    "update_quantile_bias",
    "z_loss",
]
