"""Transformer Engine's padding modules: each expert's rows to a multiple, by host lists."""

import torch
from torch import Tensor, nn


def as_contiguous(x: Tensor) -> Tensor:
    """The memory as the kernels read it, whatever the strides are. Raises an error past its end."""
    return x if x.is_contiguous() else x.as_strided(x.shape, (x.shape[1], 1))


class _Module(nn.Module):
    """The alignment is kept from the constructor, or 16."""

    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        self.num_gemms, self.align_size = num_gemms, align_size or 16

    def padded(self, m_splits: list[int]) -> list[int]:
        if not isinstance(m_splits, list) or len(m_splits) != self.num_gemms:
            raise ValueError(f"m_splits is {m_splits}; it must be a list of {self.num_gemms} integers")
        return [-(-count // self.align_size) * self.align_size for count in m_splits]


class Fp8Padding(_Module):
    """Rows of zeros after each expert's rows."""

    def forward(self, inp: Tensor, m_splits: list[int]) -> tuple[Tensor, list[int]]:
        """(rows with padding, their number by expert)."""
        padded = self.padded(m_splits)
        if padded == m_splits:
            return inp, padded
        chunks = as_contiguous(inp).split(m_splits)
        padding_rows = [inp.new_zeros((n - len(x), inp.shape[-1])) for n, x in zip(padded, chunks, strict=True)]
        return torch.cat([x for pair in zip(chunks, padding_rows, strict=True) for x in pair]), padded


class Fp8Unpadding(_Module):
    """The inverse."""

    def forward(self, inp: Tensor, m_splits: list[int]) -> Tensor:
        """Rows without padding; `m_splits` are the numbers without padding."""
        padded = self.padded(m_splits)
        if padded == m_splits:
            return inp
        chunks = as_contiguous(inp).split(padded)
        return torch.cat([x[:n] for x, n in zip(chunks, m_splits, strict=True)])
