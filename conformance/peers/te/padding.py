"""Padding of each expert's rows to a multiple, for a release that cannot do it itself."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from conformance.peers.te.counts import Counts


class Segments(NamedTuple):
    """The rows of each expert, without and with padding."""

    counts: Tensor  # [E] int64, on the device
    padded: Tensor  # [E] int64: counts rounded up to a multiple of `align`
    host_counts: list[int]
    align: int

    @property
    def num_rows(self) -> int:
        """R: rows without padding."""
        return sum(self.host_counts)

    @property
    def num_padded(self) -> int:
        """P: rows with padding."""
        return sum(self.host_padded)

    @property
    def host_padded(self) -> list[int]:
        """`padded` on the host."""
        return [-(-count // self.align) * self.align for count in self.host_counts]

    @property
    def pad_offsets(self) -> Tensor:
        """[E]: padding rows before each expert's rows."""
        padding = self.padded - self.counts
        return padding.cumsum(0) - padding


def segments(routing_map: Tensor, align: int) -> Segments:
    """The segments of a routing map; the host waits for the counts once."""
    return segments_of(Counts(None, (routing_map != 0).sum(0)), align)


def segments_of(counts: Counts, align: int) -> Segments:
    """The segments of these counts; the host waits once for those that it does not have."""
    padded = torch.div(counts.device + align - 1, align, rounding_mode="floor") * align
    return Segments(counts.device, padded, counts.tolist(), align)


def padded_places(cut: Segments) -> Tensor:
    """[R] int64: the place of each row among the padded rows.

    place[i] = i + pad_offsets[expert of row i]
    """
    rows = torch.arange(cut.num_rows, device=cut.counts.device)
    return rows + cut.pad_offsets.repeat_interleave(cut.counts, output_size=cut.num_rows)


class _Pad(torch.autograd.Function):
    """out[place[i]] = x[i], zeros elsewhere; dx[i] = dout[place[i]]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, position: Tensor, length: int) -> Tensor:
        ctx.save_for_backward(position)
        return x.new_zeros((length, *x.shape[1:])).index_copy(0, position, x)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None, None]:
        return dout.index_select(0, ctx.saved_tensors[0]), None, None


def pad(x: Tensor, cut: Segments) -> Tensor:
    """[R,…] to [P,…]: zeros after each expert's rows."""
    return _Pad.apply(x, padded_places(cut), cut.num_padded)


class _Unpad(torch.autograd.Function):
    """out[i] = x[place[i]]; dx[place[i]] = dout[i], zeros elsewhere."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, position: Tensor) -> Tensor:
        ctx.save_for_backward(position)
        ctx.length = len(x)
        return x.index_select(0, position)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None]:
        return dout.new_zeros((ctx.length, *dout.shape[1:])).index_copy(0, ctx.saved_tensors[0], dout), None


def unpad(x: Tensor, cut: Segments) -> Tensor:
    """[P,…] to [R,…]: padding rows are never read."""
    return _Unpad.apply(x, padded_places(cut))


class _ZeroRows(torch.autograd.Function):
    """Zeros where the probability is 0; the gradient is a copy's."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, zero: Tensor) -> Tensor:
        raw = rows.view(torch.uint8) if rows.element_size() == 1 else rows
        return raw.masked_fill(zero[:, None], 0).view(rows.dtype)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None]:
        return dout, None


def zero_rows(rows: Tensor, probs: Tensor) -> Tensor:
    """Rows as Transformer Engine 2.6 writes them: zeros where probs is 0."""
    return _ZeroRows.apply(rows, probs.detach() == 0)
