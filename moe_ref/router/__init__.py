"""The router: logits, choice, capacity, balancing losses, and one routing step."""

from moe_ref.config.router import expert_capacity
from moe_ref.config.state import new_state, state_from, state_tensors
from moe_ref.router.balancing import attach_loss, aux_loss_scores, load_balancing_loss, update_expert_bias, z_loss
from moe_ref.router.capacity import drop_tokens
from moe_ref.router.gating import gate, jitter
from moe_ref.router.route import route
from moe_ref.router.selection import topk_indices, topk_routing
from moe_ref.router.sinkhorn import sinkhorn_routing
from moe_ref.router.state import finish_batch

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
    "sinkhorn_routing",
    "state_from",
    "state_tensors",
    "topk_indices",
    "topk_routing",
    "update_expert_bias",
    "z_loss",
]
