"""The installed megatron-core's permutation and router: megatron.core.transformer.moe, unfused.

    pip install --no-deps megatron-core==0.16.1

Releases from 0.17 on are published for Python 3.12 and later. Unpacked from its wheel, such a
release is judged by an earlier Python too, if it comes first in the search path:

    pip download --python-version 3.12 --no-deps --only-binary=:all: megatron-core==0.19.2
    python -m zipfile -e megatron_core-0.19.2-*.whl .evidence/megatron-0.19.2
    PYTHONPATH=.evidence/megatron-0.19.2 moe-conformance run --impl conformance.peers.megatron

Only names, orders and result shapes are translated; results and errors pass through unchanged.
Settings that the package lacks (`align`, `num_rows`) are missing from the signatures, and what a
release lacks is not offered: `megatron_features` probes it. This module holds the permutation;
`megatron_router` and `megatron_route` document the workarounds for calls of the router's functions
and of the whole router.
"""

import warnings
from typing import Any, NamedTuple

from torch import Tensor

from moe_ref.config import PaddedMap, Permuted, SortedChunks

KNOWN = ("0.14.", "0.15.", "0.16.", "0.17.", "0.18.", "0.19.")  # releases that were judged

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # four warnings about missing Transformer Engine and Apex
        from megatron.core import __version__ as version
        from megatron.core.transformer.moe import moe_utils

        from conformance.peers import megatron_route, megatron_router
        from conformance.peers.megatron_features import offered
except ImportError as error:
    raise ImportError(
        f"megatron-core cannot be imported ({error}); pip install --no-deps megatron-core==0.16.1"
    ) from None
notes = (
    ()
    if version.startswith(KNOWN)
    else (f"megatron-core {version} is judged by an adapter of {', '.join(f'{start}x' for start in KNOWN)}",)
)

gate, jitter = megatron_router.gate, megatron_router.jitter
topk_indices, topk_routing = megatron_router.topk_indices, megatron_router.topk_routing
sinkhorn_routing, drop_tokens = megatron_router.sinkhorn_routing, megatron_router.drop_tokens
aux_loss_scores, load_balancing_loss, z_loss = (
    megatron_router.aux_loss_scores,
    megatron_router.load_balancing_loss,
    megatron_router.z_loss,
)
attach_loss, update_expert_bias = megatron_router.attach_loss, megatron_router.update_expert_bias
route, finish_batch = megatron_route.route, megatron_route.finish_batch
scope = {"route": megatron_route.SCOPE}
new_state, state_tensors, state_from = megatron_route.new_state, megatron_route.state_tensors, megatron_route.state_from


class RowMap(NamedTuple):
    """The arguments of the package's unpermute that permute determines."""

    sorted_indices: Tensor  # from its permute
    routing_map: Tensor  # the caller's, as it was given
    drop_and_pad: bool


def supports(function: str, **arguments: Any) -> str | None:
    """drop_and_pad is documented for maps with exactly `capacity` ≤ T non-zeros per column."""
    if (
        function == "permute"
        and arguments.get("capacity") is not None
        and arguments["capacity"] > len(arguments["tokens"])
    ):
        return "capacity above the number of tokens: drop_and_pad takes exactly capacity tokens from each column"
    return (
        megatron_route.supports(**arguments) if function == "route" else megatron_router.supports(function, **arguments)
    )


def declares(function: str) -> dict[str, Any]:
    """The package checks almost no argument, and leaves the counting of tokens to its
    dispatcher.
    """
    return DECLARED.get(function) or megatron_router.declares(function)


DECLARED: dict[str, dict[str, Any]] = {
    # drop_and_pad's documented input has no column above `capacity` non-zeros: nothing overflows
    "permute": {"omits": ("tokens_per_expert", "overflow"), "unchecked": ("routing_map", "probs", "capacity")},
    "unpermute": {"reduction_order": "that of scatter_add_", "unchecked": ("rows", "restore_shape")},
    "sort_chunks": {"unchecked": ("chunk_sizes", "order")},
    "pad_routing_map": {"unchecked": ("align",)},
    "route": megatron_route.DECLARED,
}


@offered
def permute(
    tokens: Tensor, routing_map: Tensor, *, probs: Tensor | None = None, capacity: int | None = None
) -> Permuted:
    """moe_utils.permute; a capacity is its drop_and_pad with `capacity` rows per expert."""
    count = int((routing_map != 0).sum()) if capacity is None else routing_map.shape[1] * capacity
    drop_settings = {} if capacity is None else {"drop_and_pad": True}
    rows, permuted_probs, sorted_indices, *_ = moe_utils.permute(
        tokens, routing_map, probs=probs, num_out_tokens=count, **drop_settings
    )
    row_map = RowMap(sorted_indices, routing_map, capacity is not None)
    return Permuted(rows, permuted_probs, row_map, None, None, None)  # type: ignore[arg-type]


@offered
def unpermute(rows: Tensor, row_map: RowMap, *, restore_shape: tuple[int, int], probs: Tensor | None = None) -> Tensor:
    """moe_utils.unpermute."""
    indices, routing_map, drop_and_pad = row_map
    return moe_utils.unpermute(
        rows, indices, restore_shape, probs=probs, routing_map=routing_map, drop_and_pad=drop_and_pad
    )


@offered
def sort_chunks(rows: Tensor, chunk_sizes: Tensor, order: Tensor, *, probs: Tensor | None = None) -> SortedChunks:
    """moe_utils.sort_chunks_by_idxs."""
    return SortedChunks(*moe_utils.sort_chunks_by_idxs(rows, chunk_sizes, order, probs=probs))


@offered
def pad_routing_map(routing_map: Tensor, *, align: int) -> PaddedMap:
    """moe_utils.pad_routing_map, which returns the map without `unreached`."""
    return PaddedMap(moe_utils.pad_routing_map(routing_map, align), None)  # type: ignore[arg-type]
