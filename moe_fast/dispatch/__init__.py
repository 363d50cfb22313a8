"""The dispatchers of `moe_ref.dispatch` over `torch.distributed`, as one rank calls them: arguments and results are its own.

Rows travel as bytes, so that every dtype does, and whatever belongs to a row travels with it: one collective for the counts, one for the
rows. Permutations before and after are `moe_fast.permute`, `unpermute` and `sort_chunks`. All of it is differentiable, by the reduction
trees of the reference, and deterministic. The host reads the counts, and what indices it has to refuse.

Read `exchange` first, then `alltoall`, `allgather`, `deepep`, `hybridep`, `low_latency`; `overlap` runs other work beside any of them.
"""

from moe_fast.dispatch.allgather import allgather_combine, allgather_dispatch
from moe_fast.dispatch.alltoall import alltoall_combine, alltoall_dispatch
from moe_fast.dispatch.deepep import deepep_cached_dispatch, deepep_combine, deepep_dispatch, deepep_layout
from moe_fast.dispatch.hybridep import hybridep_cached_dispatch, hybridep_combine, hybridep_dispatch
from moe_fast.dispatch.low_latency import deepep_low_latency_combine, deepep_low_latency_dispatch

__all__ = [
    "allgather_combine",
    "allgather_dispatch",
    "alltoall_combine",
    "alltoall_dispatch",
    "deepep_cached_dispatch",
    "deepep_combine",
    "deepep_dispatch",
    "deepep_layout",
    "deepep_low_latency_combine",
    "deepep_low_latency_dispatch",
    "hybridep_cached_dispatch",
    "hybridep_combine",
    "hybridep_dispatch",
]
