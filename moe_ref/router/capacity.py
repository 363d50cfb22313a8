"""Capacity: no expert takes more than so many tokens.

Mirrors `get_capacity` and `apply_router_token_dropping` of megatron.core.transformer.moe.moe_utils.
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
    """Keep at most `capacity` tokens of each expert; drop the others.

        policy "probs"      the routed tokens of the largest probs; of equal ones the earlier
        policy "position"   the earliest routed tokens

        probs'[t, e] = probs[t, e] if kept and routed, else 0     (nothing is renormalised)

    With `pad_to_capacity`, an expert with fewer routed tokens gets the first unrouted ones beside them, of prob 0, until it
    has `capacity` (T, if that is less) of them. A routed token of prob 0 is routed like any other: it goes before every unrouted one.

    Args:
        probs_TE: floating point; entries that are not routed are not read.
        routing_map_TE: bool, or integers 0 and 1.
        capacity: rows an expert, at least 0.

    Raises:
        ValueError: see `moe_ref.config.check_drop_tokens`.

    Source: moe_utils.apply_router_token_dropping, which may drop a routed token of prob 0 in favour of an unrouted one, and
    whose "position" is that of a top-k among equal values, which is not the first.
    """
    check_drop_tokens(probs_TE, routing_map_TE, capacity, drop_policy)
    routed_TE = routing_map_TE != 0
    kept = []
    for routed_T, prob_T in zip(routed_TE.unbind(1), probs_TE.detach().unbind(1), strict=True):
        value_T = prob_T if drop_policy == "probs" else torch.zeros_like(prob_T)
        order = torch.where(routed_T, value_T.double(), -torch.inf).sort(descending=True, stable=True).indices
        order = torch.cat(
            [order[routed_T[order]], (~routed_T).nonzero().flatten()]
        )  # routed ones by rank, then the others as they come
        room = capacity if pad_to_capacity else min(capacity, int(routed_T.sum()))
        kept.append(torch.zeros_like(routed_T).scatter(0, order[:room], True))
    kept_TE = torch.stack(kept, dim=1)
    return Routed(torch.where(kept_TE & routed_TE, probs_TE, 0), kept_TE)
