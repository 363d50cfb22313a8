"""The experts' indices in a token's slots, and the copies of columns that several ranks share."""

import torch
from torch import Tensor

from moe_fast.launch.operators import traceable
from moe_ref.config import IndexPolicy, check_flatten_experts, check_index_values, require

EMPTY = -1


@traceable
def flatten_experts(x_TE: Tensor, *, expert_parallel: int, expert_tensor_parallel: int) -> Tensor:
    """[T,EP·ETP·L]: the columns of each group of ranks, repeated for each of its ranks; in plain
    torch.
    """
    check_flatten_experts(x_TE, expert_parallel, expert_tensor_parallel)
    return columns_of_ranks(x_TE, expert_parallel, expert_tensor_parallel).flatten(1)


def columns_of_ranks(x_TE: Tensor, expert_parallel: int, expert_tensor_parallel: int) -> Tensor:
    """[T,EP·ETP,L]: for each token, the columns of each rank's experts."""
    return x_TE.unflatten(1, (expert_parallel, -1)).repeat_interleave(expert_tensor_parallel, 1)


def apply_index_policy(
    indices_TK: Tensor, probs_TK: Tensor | None, num_experts: int, policy: IndexPolicy | None
) -> tuple[Tensor, Tensor | None]:
    """Refuse, skip or keep the slots that libraries treat differently. A skipped slot becomes -1,
    with probability 0.

    Raises:
        ValueError: an index out of range, or one that the policy rejects. The host reads the
            indices for it, unless the policy trusts the values.
    """
    policy = policy or IndexPolicy()
    trusted = policy.values == "trusted"
    if not trusted:
        check_index_values(indices_TK, num_experts)
    indices_TK = indices_TK.long()  # 255 of uint8 equals -1, to torch
    empty_TK = indices_TK == EMPTY
    require(
        trusted or policy.empty == "skip" or not bool(empty_TK.any()),
        "indices",
        "-1 in some slot",
        "an expert in every slot, by the policy",
    )
    if policy.duplicates != "count each" and not (trusted and policy.duplicates == "reject"):
        same_TKK = (indices_TK[:, :, None] == indices_TK[:, None, :]).triu(1)
        again_TK = same_TKK.any(2) & ~empty_TK
        require(
            policy.duplicates != "reject" or not bool(again_TK.any()),
            "indices",
            "the same expert in two slots",
            "distinct in a token, by the policy",
        )
        empty_TK = empty_TK | again_TK
    if policy.zero_prob == "drop" and probs_TK is not None:
        empty_TK = empty_TK | (probs_TK == 0)
    accepted_TK = torch.where(empty_TK, EMPTY, indices_TK)
    return accepted_TK, None if probs_TK is None else torch.where(empty_TK, torch.zeros_like(probs_TK), probs_TK)
