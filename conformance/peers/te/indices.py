"""Routing maps as lists of experts, for a release whose permutation takes nothing else.

Each token lists its experts, ascending. An empty slot lists expert E, which does not exist: its
rows are sorted behind all others, and `num_out_tokens` drops them. (-1 would be sorted first before
2.16.)
"""

import torch
from torch import Tensor

VECTOR = 16  # bytes: rows are moved in whole vectors
MOST_SLOTS = 128


def slots_of(routing_map: Tensor) -> Tensor:
    """[N,K] int32, K the most experts of a token; the host waits for K."""
    routed = routing_map != 0
    count = routed.sum(1, keepdim=True)
    most = int(count.max())
    expert = routed.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :most]
    slot = torch.arange(most, device=expert.device)
    return torch.where(slot < count, expert, routing_map.shape[1]).int()


def in_slots(indices: Tensor, probs: Tensor | None, num_experts: int) -> Tensor:
    """[N,K] float32: the probs of the listed experts, or ones; 0 in empty slots."""
    real = indices < num_experts
    if probs is None:
        return real.float()
    return torch.where(real, probs.gather(1, indices.clamp(max=num_experts - 1).long()), 0).float()


def in_vectors(x: Tensor) -> Tensor:
    """Contiguous rows with columns of zeros up to a whole number of vectors."""
    missing = -(x.shape[1] * x.element_size()) % VECTOR // x.element_size()
    return torch.nn.functional.pad(x, (0, missing)) if missing else x.contiguous()
