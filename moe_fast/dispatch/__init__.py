"""The dispatchers of `moe_ref.dispatch` over `torch.distributed`, as one rank calls them.

Rows travel as bytes, because few backends know every dtype, and everything that belongs to a row
travels with it: one collective exchanges the counts, one the rows. `moe_fast.permutation` permutes
before and after. All dispatchers are differentiable and deterministic: they add in the order of the
reference. The host reads the counts, unless the call bounds them. It also reads the indices that it
may have to refuse, unless the policy trusts them.

Read `exchange` first, then `alltoall`, `allgather`, `deepep`, `hybridep`, `low_latency`. `overlap`
runs other work at the same time as any of them, and `CountsOnHost` copies counts without a wait.
"""

from typing import Any

from torch import Tensor

from moe_fast.declared import COMPUTED, COPY, SUM, TRAVELS, Family
from moe_fast.dispatch.allgather import allgather_combine, allgather_dispatch
from moe_fast.dispatch.alltoall import alltoall_combine, alltoall_dispatch
from moe_fast.dispatch.counts import CountsOnHost as CountsOnHost
from moe_fast.dispatch.deepep import deepep_cached_dispatch, deepep_combine, deepep_dispatch, deepep_layout
from moe_fast.dispatch.hybridep import hybridep_cached_dispatch, hybridep_combine, hybridep_dispatch
from moe_fast.dispatch.indices import flatten_experts
from moe_fast.dispatch.low_latency import deepep_low_latency_combine, deepep_low_latency_dispatch
from moe_fast.permutation.permute import check_merged

_COMBINE = SUM | TRAVELS
_UNPERMUTE = ("allgather_combine", "alltoall_combine", "hybridep_combine")  # first add a rank's rows


def _check(function: str, payload: Tensor, settings: dict[str, Any]) -> None:
    if function in _UNPERMUTE:
        check_merged(payload, None)


_family = Family(
    {
        allgather_dispatch: TRAVELS,
        allgather_combine: _COMBINE,
        alltoall_dispatch: TRAVELS,
        alltoall_combine: _COMBINE,
        flatten_experts: COMPUTED,
        deepep_layout: COPY,
        deepep_dispatch: TRAVELS,
        deepep_cached_dispatch: TRAVELS,
        deepep_combine: _COMBINE,
        deepep_low_latency_dispatch: TRAVELS,
        deepep_low_latency_combine: _COMBINE,
        hybridep_dispatch: TRAVELS,
        hybridep_cached_dispatch: TRAVELS,
        hybridep_combine: _COMBINE,
    },
    _check,
)
declares, supports = _family.declares, _family.supports
__all__ = _family.names
