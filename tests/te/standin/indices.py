"""Transformer Engine's index permutation as its sources document it.

Sums are in the dtype of the rows, slots ascending: each product and each sum is rounded.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

BYTES = 16  # a row is moved in whole vectors
MOST_SLOTS = 128


class _Permute(torch.autograd.Function):
    """rows[row_id_map[k, t]] = inp[t]."""

    @staticmethod
    def forward(ctx: Any, inp: Tensor, row_KN: Tensor, num_rows: int) -> Tensor:
        ctx.row_KN = row_KN
        out = inp.new_empty((num_rows, inp.shape[1]))
        slot, token = (row_KN >= 0).nonzero(as_tuple=True)
        return out.index_copy(0, row_KN[slot, token], inp[token])

    @staticmethod
    def backward(ctx: Any, d_rows: Tensor) -> tuple[Tensor, None, None]:
        return _reduced(d_rows, ctx.row_KN, None), None, None


def _reduced(rows: Tensor, row_KN: Tensor, probs_NK: Tensor | None) -> Tensor:
    """Each token's rows, times their probs in the rows' dtype, added in that dtype."""
    total = rows.new_zeros((row_KN.shape[1], rows.shape[1]))
    for k, row_N in enumerate(row_KN):
        x = torch.where((row_N >= 0)[:, None], rows[row_N.clamp(min=0)], 0)
        total = total + (x if probs_NK is None else x * probs_NK[:, k, None].to(rows.dtype))
    return total


class _Unpermute(torch.autograd.Function):
    """The reduction; probs get a gradient only if the rows want one."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, row_KN: Tensor, probs_NK: Tensor) -> Tensor:
        ctx.save_for_backward(rows, row_KN, probs_NK)
        return _reduced(rows, row_KN, probs_NK)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, None, Tensor | None]:
        rows, row_KN, probs_NK = ctx.saved_tensors
        if not ctx.needs_input_grad[0]:
            return None, None, None
        slot, token = (row_KN >= 0).nonzero(as_tuple=True)
        row = row_KN[slot, token]
        d_rows = torch.zeros_like(rows).index_copy(0, row, g[token] * probs_NK[token, slot, None].to(g.dtype))
        d_probs = torch.zeros_like(probs_NK)
        d_probs[token, slot] = (g[token] * rows[row]).float().sum(1)
        return d_rows, None, d_probs


class IndexPermutation:
    """The functions of releases without mask maps."""

    def __init__(self, behaviour: SimpleNamespace) -> None:
        self.behaviour = behaviour

    def moe_permute(
        self, inp: Tensor, indices: Tensor, num_out_tokens: int, max_token_num: int
    ) -> tuple[Tensor, Tensor]:
        """(rows, row_id_map [K·N]): by expert, then token; the last rows are dropped."""
        if inp.numel() == 0:
            return inp, torch.zeros(0, device=inp.device)
        self._check(inp, indices.shape[1])
        num_tokens, slots = indices.shape
        order = indices.flatten().argsort(stable=True)
        position = torch.empty_like(order)
        position[order] = torch.arange(len(order), device=order.device)
        num_rows = num_out_tokens if num_out_tokens > 0 else len(order)
        row_KN = torch.where(position < num_rows, position, -1).reshape(num_tokens, slots).T
        return _Permute.apply(inp, row_KN, num_rows), row_KN.flatten().int()

    def moe_unpermute(self, inp: Tensor, row_id_map: Tensor, probs: Tensor | None) -> Tensor:
        """[N,H]; without probs [K·N,H], slots outside, and no sum."""
        if inp.numel() == 0:
            return inp
        row_numbers = row_id_map.long()
        if probs is None:
            return _Unpermute.apply(inp, row_numbers[None], inp.new_ones((len(row_numbers), 1), dtype=torch.float32))
        self._check(inp, probs.shape[1])
        return _Unpermute.apply(inp, row_numbers.reshape(probs.shape[1], -1), probs.float())

    @staticmethod
    def _check(inp: Tensor, slots: int) -> None:
        """What the kernels read or write wrongly raises here."""
        if not inp.is_contiguous() or inp.shape[1] * inp.element_size() % BYTES or slots > MOST_SLOTS:
            raise IndexError(f"rows of {inp.shape[1]} columns in {slots} slots; contiguous ones of whole {BYTES} bytes")
