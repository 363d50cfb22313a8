"""Permutation: rows ordered by expert, chunks of rows, and forms of the routing map."""

from typing import Any

from torch import Tensor

from moe_fast.declared import COPY, SUM, Family
from moe_fast.permutation.permute import check_merged, check_movable, check_summable, permute, sort_chunks, unpermute
from moe_fast.permutation.routing_map import indices_to_multihot, multihot_to_indices, pad_routing_map


def _check(function: str, payload: Tensor, settings: dict[str, Any]) -> None:
    if function == "unpermute":
        check_merged(payload, settings.get("probs"))
    if function == "permute":
        check_summable(payload)
    if function in ("permute", "sort_chunks"):
        check_movable("tokens" if function == "permute" else "rows", payload)


_family = Family(
    {
        permute: SUM,  # the gradient is a sum; the host does not wait if num_rows or capacity is given
        unpermute: SUM,
        sort_chunks: COPY | {"unchecked": ("order",)},
        pad_routing_map: COPY,
        indices_to_multihot: COPY,
        multihot_to_indices: COPY,
    },
    _check,
)
declares, supports = _family.declares, _family.supports
__all__ = _family.names
