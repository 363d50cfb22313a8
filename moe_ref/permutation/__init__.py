"""Permutation: rows by expert, chunks, and forms of the routing map."""

from moe_ref.permutation.permute import permute, sort_chunks, unpermute
from moe_ref.permutation.routing_map import indices_to_multihot, multihot_to_indices, pad_routing_map

__all__ = ["indices_to_multihot", "multihot_to_indices", "pad_routing_map", "permute", "sort_chunks", "unpermute"]
