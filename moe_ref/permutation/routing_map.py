"""The routing map in its other forms: padded to a multiple, and as expert indices.

Mirrors `pad_routing_map` of megatron.core.transformer.moe.moe_utils, `fused_pad_routing_map` and
`fused_indices_to_multihot` of megatron.core.fusions. Differs: docs/differences.md#permutation.
"""

import torch
from torch import Tensor

from moe_ref.config import (
    Indices,
    Multihot,
    PaddedMap,
    check_align,
    check_index_values,
    check_indices,
    check_map,
    check_multihot,
    require,
)

EMPTY = -1  # the index of a slot without an expert


def pad_routing_map(routing_map_TE: Tensor, *, align: int) -> PaddedMap:
    """Route more tokens to each expert until its count is a multiple of `align`.

        missing[e] = (-count[e]) mod align
        the first missing[e] tokens, ascending, that are not routed to e become routed to it

    If fewer than missing[e] tokens are unrouted, all of them become routed, the count is T, and
    `unreached[e]` is set. The caller's map is not modified.

    Args:
        routing_map_TE: bool, or integers 0 and 1.
        align: rows; a positive integer.

    Raises:
        ValueError: see `moe_ref.config.check_map` and `check_align`.
    """
    check_map(routing_map_TE)
    require(align is not None, "align", align, "a positive integer")
    check_align(align)
    columns = []
    for routed_T in (routing_map_TE != 0).unbind(1):
        missing = -int(routed_T.sum()) % align
        rank_T = (~routed_T).cumsum(0)  # 1 for the first unrouted token, 2 for the second, …
        columns.append(routed_T | (rank_T <= missing))
    padded_TE = torch.stack(columns, dim=1)
    return PaddedMap(padded_TE, padded_TE.sum(0) % align != 0)


def indices_to_multihot(indices_TK: Tensor, probs_TK: Tensor, *, num_experts: int) -> Multihot:
    """Turn each token's list of experts into a row of the routing map.

        routing_map[t, e] = e ∈ indices[t]
        probs[t, e]       = probs[t, k] of the last slot k with indices[t, k] = e, else 0

    A slot that holds -1 has no expert. Of several slots with the same expert the last counts, and
    the others get gradient 0.

    Args:
        indices_TK: integers from -1 to E - 1.
        probs_TK: floating point.
        num_experts: E.

    Returns:
        `Multihot`, probs in the dtype of `probs_TK`.

    Raises:
        ValueError: see `moe_ref.config.check_indices`; also if an index is below -1 or at least E.
            An implementation that must not read the device may declare that unchecked; it then
            treats such a slot as empty.
    """
    check_indices(indices_TK, probs_TK, num_experts)
    check_index_values(indices_TK, num_experts)
    expert_E = torch.arange(num_experts, device=indices_TK.device)
    map_TE = torch.zeros((indices_TK.shape[0], num_experts), dtype=torch.bool, device=indices_TK.device)
    out_TE = probs_TK.new_zeros(map_TE.shape)
    # E may be more than a narrow dtype holds
    for index_T, prob_T in zip(indices_TK.long().unbind(1), probs_TK.unbind(1), strict=True):
        hit_TE = index_T[:, None] == expert_E
        map_TE = map_TE | hit_TE
        out_TE = torch.where(hit_TE, prob_T[:, None], out_TE)
    return Multihot(map_TE, out_TE)


def multihot_to_indices(routing_map_TE: Tensor, probs_TE: Tensor, *, topk: int) -> Indices:
    """List each token's experts, ascending, in K slots.

        indices[t] = [e for e in experts if routing_map[t, e]][:K], then -1
        probs[t]   = the same experts' probs, then 0

    Experts past the K-th are left out, and `overflow` is set.

    Args:
        routing_map_TE: bool, or integers 0 and 1.
        probs_TE: floating point; entries that are not listed are never read and get gradient 0.
        topk: K, slots; a positive integer, possibly more than E.

    Raises:
        ValueError: see `moe_ref.config.check_multihot`.
    """
    check_multihot(routing_map_TE, probs_TE, topk)
    routed_TE = routing_map_TE != 0
    num_experts = routed_TE.shape[1]
    slot_TE = torch.where(routed_TE, routed_TE.cumsum(1) - 1, topk)  # topk: in no slot
    expert_E = torch.arange(num_experts, device=routed_TE.device)
    indices, probs = [], []
    for k in range(topk):
        here_TE = slot_TE == k
        indices.append(torch.where(here_TE, expert_E, 0).sum(1) + torch.where(here_TE.any(1), 0, EMPTY))
        probs.append(_only(probs_TE, here_TE))
    return Indices(torch.stack(indices, dim=1), torch.stack(probs, dim=1), (routed_TE.sum(1) > topk).any())


def _only(values_TE: Tensor, here_TE: Tensor) -> Tensor:
    """Each row's value where `here_TE` is set, bit by bit, or 0 without one."""
    column_T = here_TE.to(torch.int8).argmax(1)
    row_T = torch.arange(len(column_T), device=column_T.device)
    return torch.where(
        here_TE.any(1),
        values_TE[row_T, column_T],  # torch's gather changes the bits of some NaNs on a CPU
        torch.zeros((), dtype=values_TE.dtype, device=values_TE.device),
    )
