"""Each expert's rows extended by zeros to a multiple, and trimmed again, without a host wait."""

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_fast.permutation.permute import sort_chunks


@dataclass(frozen=True)
class Padding:
    """Rows of zeros before the rows, and the order of chunks that moves some of them after each
    segment.

    before  zeros_0 … zeros_{L-1}, spare zeros, segment_0 … segment_{L-1}, rows past the last
    segment padded  segment_0, zeros_0, …, segment_{L-1}, zeros_{L-1}, spare zeros, rows past the
    last
    """

    spare: int  # rows of zeros: L · (align - 1) are enough for any counts
    counts_L: Tensor  # of the padded segments; -1 where the counts are illegal
    before: Tensor  # sizes of the chunks, in either order
    padded: Tensor
    order: Tensor  # of the chunks before, one after the other as they stand when padded
    back: Tensor  # and the other way

    @classmethod
    def of(cls, counts_L: Tensor, rows: int, align: int) -> "Padding":
        """The padding of `rows` rows in segments of these sizes."""
        experts, device = len(counts_L), counts_L.device
        counts = counts_L.long()
        missing = -counts % align
        spare = experts * (align - 1)
        over, rest = spare - missing.sum(0, keepdim=True), rows - counts.sum(0, keepdim=True)
        number = torch.arange(experts, device=device)
        order = torch.cat(
            [
                torch.stack([experts + 1 + number, number], 1).flatten(),
                torch.arange(experts, experts + 1, device=device),
            ]
        )
        order = torch.cat([order, torch.arange(2 * experts + 1, 2 * experts + 2, device=device)])
        before = torch.cat([missing, over, counts, rest])
        padded = torch.where((counts < 0).any() | (rest < 0), -1, counts + missing)
        return cls(spare, padded, before, before[order], order, order.argsort())

    def pad(self, rows: Tensor, probs: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Rows, and their probs, with zeros after each segment."""
        rows = torch.cat([rows.new_zeros(self.spare, rows.shape[1]), rows])
        probs = None if probs is None else torch.cat([probs.new_zeros(self.spare), probs])
        moved = sort_chunks(rows, self.before, self.order, probs=probs)
        return moved.rows, moved.probs

    def trim(self, rows: Tensor) -> Tensor:
        """The rows that were there before."""
        return sort_chunks(rows, self.padded, self.back).rows[self.spare :]
