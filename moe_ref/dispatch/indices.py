"""Between a router and a dispatcher: experts of all ranks as a flat list, and the values that slots
may hold.
"""

import torch
from torch import Tensor

from moe_ref.config import IndexPolicy, check_flatten_experts, check_index_values, check_indices, require
from moe_ref.permutation.routing_map import EMPTY


def flatten_experts(x_TE: Tensor, *, expert_parallel: int, expert_tensor_parallel: int) -> Tensor:
    """Repeat the columns of a routing map or of its probs, so that each rank has experts of its
    own.

        out[t, (ep·ETP + tp)·L + l] = x[t, ep·L + l]        for every tp < ETP

    With expert tensor parallelism an expert is cut into ETP shards on the ranks r = ep·ETP + tp,
    and each shard needs all of the expert's tokens. A shard counts as an expert whose output is a
    part of a sum. The gradient is the sum over shards.

    Args:
        x_TE: any dtype; E = EP·L.
        expert_parallel, expert_tensor_parallel: EP and ETP, at least 1.

    Returns:
        [T,EP·ETP·L].

    Raises:
        ValueError: see `moe_ref.config.check_flatten_experts`.

    Source: MoEFlexTokenDispatcher's _initialize_metadata.
    """
    check_flatten_experts(x_TE, expert_parallel, expert_tensor_parallel)
    groups = x_TE.unflatten(1, (expert_parallel, 1, -1))
    copies = groups.expand(-1, -1, expert_tensor_parallel, -1).clone(memory_format=torch.contiguous_format)
    return copies.flatten(1)


def apply_index_policy(
    indices_TK: Tensor, probs_TK: Tensor | None, *, num_experts: int, policy: IndexPolicy
) -> tuple[Tensor, Tensor | None]:
    """Refuse, skip or keep the slots on which libraries differ; a skipped slot holds -1, with
    probability 0.

    Args:
        indices_TK: integers from -1 to E - 1.
        probs_TK: floating point, or None: then no probability is 0, and none is returned.

    Returns:
        (indices, probs), the indices as int64.

    Raises:
        ValueError: an index outside, or one that the policy rejects. Both read the device; an
            implementation may declare them unchecked.
    """
    shaped = torch.zeros_like(indices_TK, dtype=torch.float32) if probs_TK is None else probs_TK
    check_indices(indices_TK, shaped, num_experts)
    check_index_values(indices_TK, num_experts)
    indices_TK = indices_TK.long()  # 255 of uint8 equals -1, to torch
    empty_TK = indices_TK == EMPTY
    requirement = "an expert in every slot, by the policy"
    require(policy.empty == "skip" or not bool(empty_TK.any()), "indices", "-1 in some slot", requirement)
    repeats_TK = _named_again(indices_TK)
    legal = policy.duplicates != "reject" or not bool(repeats_TK.any())
    require(legal, "indices", "the same expert in two slots", "distinct in a token, by the policy")
    if policy.duplicates == "last slot":
        empty_TK = empty_TK | repeats_TK
    if policy.zero_prob == "drop" and probs_TK is not None:
        empty_TK = empty_TK | (probs_TK == 0)
    retained_TK = None if probs_TK is None else torch.where(empty_TK, torch.zeros_like(probs_TK), probs_TK)
    return torch.where(empty_TK, EMPTY, indices_TK), retained_TK


def _named_again(indices_TK: Tensor) -> Tensor:
    """True in a slot whose expert is also in a later slot of the same token."""
    slots = indices_TK.shape[1]
    later_KK = torch.ones((slots, slots), dtype=torch.bool, device=indices_TK.device).triu(1)
    same_TKK = indices_TK[:, :, None] == indices_TK[:, None, :]
    return (same_TKK & later_KK).any(2) & (indices_TK != EMPTY)
