"""The router: logits, choice, capacity, balancing losses, and one routing step."""

from moe_fast.router.balancing import attach_loss, aux_loss_scores, load_balancing_loss, update_expert_bias, z_loss
from moe_fast.router.capacity import drop_tokens, expert_capacity
from moe_fast.router.gating import gate, jitter
from moe_fast.router.route import finish_batch, new_state, route, state_from, state_tensors
from moe_fast.router.selection import topk_indices, topk_routing

__all__ = [
    "attach_loss",
    "aux_loss_scores",
    "drop_tokens",
    "expert_capacity",
    "finish_batch",
    "gate",
    "jitter",
    "load_balancing_loss",
    "new_state",
    "route",
    "state_from",
    "state_tensors",
    "topk_indices",
    "topk_routing",
    "update_expert_bias",
    "z_loss",
]
