"""Capacity: an upper bound on the tokens of each expert.

Mirrors `get_capacity` and `apply_router_token_dropping` of megatron.core.transformer.moe.moe_utils.
Differs: docs/differences.md#router.
"""

import torch
from torch import Tensor

from moe_ref.config import Routed, check_drop_tokens


def drop_tokens(
    probs_TE: Tensor,
    routing_map_TE: Tensor,
    *,
    capacity: int,
    drop_policy: str = "probs",
    pad_to_capacity: bool = False,
) -> Routed:
    """Keep at most `capacity` tokens per expert; drop the others.

        policy "probs"      the routed tokens of the largest probs; of equal ones the earlier
        policy "position"   the earliest routed tokens

        probs'[t, e] = probs[t, e] if kept and routed, else 0     (not renormalised)

    With `pad_to_capacity`, an expert with fewer routed tokens also gets the first unrouted ones, of
    prob 0, until it has `capacity` (at most T) of them. A routed token of prob 0 comes before every
    unrouted one.

    Args:
        probs_TE: floating point; entries that are not routed are not read.
        routing_map_TE: bool, or integers 0 and 1.
        capacity: rows per expert, at least 0.
        drop_policy: "probs" or "position".

    Raises:
        ValueError: see `moe_ref.config.check_drop_tokens`.
    """
    check_drop_tokens(probs_TE, routing_map_TE, capacity, drop_policy)
    routed_TE = routing_map_TE != 0
    expert_masks = []
    for routed_T, prob_T in zip(routed_TE.unbind(1), probs_TE.detach().unbind(1), strict=True):
        value_T = prob_T if drop_policy == "probs" else torch.zeros_like(prob_T)
        order = torch.where(routed_T, value_T.double(), -torch.inf).sort(descending=True, stable=True).indices
        order = torch.cat(
            [order[routed_T[order]], (~routed_T).nonzero().flatten()]
        )  # routed ones by rank, then the others as they come
        room = capacity if pad_to_capacity else min(capacity, int(routed_T.sum()))
        expert_masks.append(torch.zeros_like(routed_T).scatter(0, order[:room], True))
    kept_TE = torch.stack(expert_masks, dim=1)
    return Routed(torch.where(kept_TE & routed_TE, probs_TE, 0), kept_TE)
