"""The router: logits, choice, capacity, balancing losses, and one routing step."""

from typing import Any

from torch import Tensor

from moe_fast.declared import COMPUTED, COPY, READ, Family
from moe_fast.router.balancing import attach_loss, aux_loss_scores, load_balancing_loss, update_expert_bias, z_loss
from moe_fast.router.capacity import drop_tokens
from moe_fast.router.gating import gate, jitter
from moe_fast.router.route import finish_batch, route
from moe_fast.router.selection import check_computed, check_rows, sinkhorn_routing, topk_indices, topk_routing
from moe_ref.config.router import expert_capacity
from moe_ref.config.state import new_state, state_from, state_tensors

_CHOICE = COMPUTED | {"tie_rule": "lowest_index"}


def _check(function: str, payload: Tensor, settings: dict[str, Any]) -> None:
    if function == "load_balancing_loss":
        check_computed("scores", payload)
    if function in ("topk_indices", "topk_routing", "aux_loss_scores", "z_loss"):
        check_rows(payload, settings.get("topk", 1), settings.get("expert_bias"))


_family = Family(
    {
        gate: COMPUTED,
        jitter: COPY | {"deterministic": False},
        topk_indices: _CHOICE,
        topk_routing: _CHOICE,
        sinkhorn_routing: _CHOICE | READ,
        expert_capacity: COPY,
        drop_tokens: _CHOICE,
        aux_loss_scores: _CHOICE,
        load_balancing_loss: COMPUTED,
        z_loss: COMPUTED,
        attach_loss: COPY,
        update_expert_bias: COPY,
        new_state: COPY,
        state_tensors: COPY,
        state_from: COPY,
        route: COMPUTED,
        finish_batch: COPY,
    },
    _check,
)
declares, supports = _family.declares, _family.supports
__all__ = _family.names
