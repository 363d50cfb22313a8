"""Which copies a budget of rows keeps, and slabs of as many rows for each rank: so the host knows
all sizes without reading a count.

The host gives the sizes of a collective. So every rank sends `num_rows` rows to every rank; the
first of them are copies, and there are never more, because no rank keeps more of another's. From
the counts of all ranks each rank computes on the device which copies are kept.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_fast.dispatch.exchange import counts_of_all, size_and_rank
from moe_fast.permutation.permute import sort_chunks
from moe_ref.config import SortedChunks


class Kept(NamedTuple):
    """The copies that have a row, as far as this rank needs to know them."""

    map_TE: Tensor  # bool: the copies of this rank's tokens
    count_SE: Tensor  # how many copies each expert keeps of each source
    columns: slice  # this rank's experts
    length_L: Tensor  # rows of the segment of each of these experts, with padding
    overflow: Tensor  # [] bool: some copy that was routed to this rank has no row


def kept_copies(
    routing_map_TE: Tensor, num_rows: int, group: Any,
    *, shards: int = 1, align: int = 1, sources: Tensor | None = None,
) -> Kept:  # fmt: skip
    """What `num_rows` rows of each rank keep, asked[s, e] being the copies routed.

        start[e]   = Σ asked, rounded up to `align`, of the experts before e on its rank
        kept[s, e] = clamp(num_rows - start[e] - before[s, e], 0, asked[s, e])
        before     = Σ asked[s', e] of the sources s' before s

    Every rank computes the same, on the device. A collective tells the counts.

    Args:
        sources: the order of the sources in a segment; None: ascending.
    """
    ranks, rank = size_and_rank(group)
    routed_TE = routing_map_TE != 0
    asked_SE = counts_of_all(routed_TE.sum(0), group)
    local = asked_SE.shape[1] // (ranks // shards)
    whole_E = -(-asked_SE.sum(0) // align) * align
    start_E = whole_E.unflatten(0, (-1, local)).cumsum(1).flatten() - whole_E
    order = torch.arange(ranks, device=asked_SE.device) if sources is None else sources
    before_SE = (asked_SE[order].cumsum(0) - asked_SE[order])[order.argsort()]
    zero = torch.zeros_like(asked_SE)
    count_SE = torch.clamp(num_rows - start_E - before_SE, min=zero, max=asked_SE)
    length_E = torch.clamp(num_rows - start_E, min=zero[0], max=whole_E)
    columns = slice(rank // shards * local, (rank // shards + 1) * local)
    overflow = (asked_SE > count_SE)[:, columns].any()
    first_TE = routed_TE & (routed_TE.cumsum(0) <= count_SE[rank])
    return Kept(first_TE, count_SE, columns, length_E[columns], overflow)


def into_slabs(rows: Tensor, count_W: Tensor, num_rows: int, probs: Tensor | None = None) -> SortedChunks:
    """[W · num_rows,H]: rows by destination, each destination's from the front of its slab."""
    sizes, order = _chunks(count_W, num_rows)
    return sort_chunks(rows, sizes, order, probs=probs)


def out_of_slabs(rows: Tensor, count_W: Tensor, num_rows: int) -> Tensor:
    """The inverse of `into_slabs`."""
    sizes, order = _chunks(count_W, num_rows)
    return sort_chunks(rows, sizes[order], order.argsort()).rows


def _chunks(count_W: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """The sizes of the chunks of rows, and the order that puts them into slabs: the rows of each
    destination, and the free rows after them.
    """
    sizes = torch.cat([count_W, num_rows - count_W])
    return sizes, torch.arange(len(sizes), device=sizes.device).reshape(2, -1).T.flatten()
