"""Parameters of experts in checkpoints: names, shards, and experts made of a dense layer.

No kernel runs here. A packed parameter is one tensor, and each expert's part is a view of it; what
needs new memory is written by one operation of torch. The reference's functions go expert by
expert, and share with these only the checks of arguments.
"""

from moe_fast.declared import COMPUTED, COPY, Family
from moe_fast.parameters.names import convert_experts, normalize_master_parameters, normalize_parameters
from moe_fast.parameters.shards import expand_shard, merge_extra_state, shard_parameters, split_extra_state
from moe_fast.parameters.upcycling import upcycle

_family = Family(
    {
        normalize_parameters: COPY,
        normalize_master_parameters: COPY,
        convert_experts: COPY,
        shard_parameters: COPY,
        expand_shard: COPY,
        split_extra_state: COPY,
        merge_extra_state: COPY,
        upcycle: COMPUTED,
    }
)
declares, supports = _family.declares, _family.supports
__all__ = _family.names
