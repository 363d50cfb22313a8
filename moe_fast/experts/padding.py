"""Extend each expert's rows by zeros to a multiple, and trim them again, without a wait of the
host.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_fast.permutation.permute import sort_chunks


@dataclass(frozen=True)
class Padding:
    """Rows of zeros before the rows, and the order of chunks that moves some of them after each
    segment.

    unpadded  zeros_0 … zeros_{L-1}, spare zeros, segment_0 … segment_{L-1}, tail rows
    padded    segment_0, zeros_0, …, segment_{L-1}, zeros_{L-1}, spare zeros, tail rows

    where the tail rows are those past the last segment.
    """

    spare: int  # rows of zeros: L · (align - 1) are enough for any counts
    counts_L: Tensor  # the sizes of the padded segments; -1 if the counts are illegal
    unpadded: Tensor  # the sizes of the chunks, in this order
    padded: Tensor
    order: Tensor  # for each chunk of the padded order, its number in the unpadded order
    inverse_order: Tensor

    @classmethod
    def of(cls, counts_L: Tensor, rows: int, align: int) -> "Padding":
        """The padding of `rows` rows in segments of these sizes, each to a multiple of `align`."""
        experts, device = len(counts_L), counts_L.device
        counts = counts_L.long()
        missing = -counts % align
        spare = experts * (align - 1)
        unused_spare, tail_rows = spare - missing.sum(0, keepdim=True), rows - counts.sum(0, keepdim=True)
        number = torch.arange(experts, device=device)
        order = torch.cat(
            [
                torch.stack([experts + 1 + number, number], 1).flatten(),
                torch.arange(experts, experts + 1, device=device),
            ]
        )
        order = torch.cat([order, torch.arange(2 * experts + 1, 2 * experts + 2, device=device)])
        unpadded = torch.cat([missing, unused_spare, counts, tail_rows])
        padded = torch.where((counts < 0).any() | (tail_rows < 0), -1, counts + missing)
        return cls(spare, padded, unpadded, unpadded[order], order, order.argsort())

    def pad(self, rows: Tensor, probs: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The rows and their probs, with zeros after each segment."""
        rows = torch.cat([rows.new_zeros(self.spare, rows.shape[1]), rows])
        probs = None if probs is None else torch.cat([probs.new_zeros(self.spare), probs])
        moved = sort_chunks(rows, self.unpadded, self.order, probs=probs)
        return moved.rows, moved.probs

    def trim(self, rows: Tensor) -> Tensor:
        """The rows without the zeros."""
        return sort_chunks(rows, self.padded, self.inverse_order).rows[self.spare :]
