"""Parameters of experts in checkpoints: their names, their shards, and experts of a dense layer."""

from moe_ref.parameters.extra_state import merge_extra_state, split_extra_state
from moe_ref.parameters.names import convert_experts, normalize_master_parameters, normalize_parameters
from moe_ref.parameters.shards import expand_shard, shard_parameters
from moe_ref.parameters.upcycling import upcycle

__all__ = [
    "convert_experts",
    "expand_shard",
    "merge_extra_state",
    "normalize_master_parameters",
    "normalize_parameters",
    "shard_parameters",
    "split_extra_state",
    "upcycle",
]
