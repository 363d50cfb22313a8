"""The reference with all sums in descending row order, in two halves."""

import torch
from torch import Tensor

from moe_ref import indices_to_multihot, multihot_to_indices, pad_routing_map, sort_chunks
from moe_ref.config import Permuted
from moe_ref.permutation.permute import PADDING, RowMap
from moe_ref.permutation.permute import permute as ascending_permute

__all__ = ["indices_to_multihot", "multihot_to_indices", "pad_routing_map", "permute", "sort_chunks", "unpermute"]


def _descending_sum(rows: Tensor, source: Tensor, num_tokens: int) -> Tensor:
    """out[t] = Σ over the rows of t in float32: odd rows, then even rows, each descending."""
    real = (source != PADDING).nonzero().flatten().flip(0)
    halves = [
        rows.new_zeros((num_tokens, *rows.shape[1:]), dtype=torch.float32).index_add(
            0, source[half], rows[half].float()
        )
        for half in (real[::2], real[1::2])
    ]
    return halves[1] + halves[0]


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tokens, source, rows):
        ctx.save_for_backward(source)
        ctx.num_tokens = len(tokens)
        return rows.clone()

    @staticmethod
    def backward(ctx, dout):
        return _descending_sum(dout, ctx.saved_tensors[0], ctx.num_tokens).to(dout.dtype), None, None


def permute(tokens: Tensor, routing_map: Tensor, *, probs=None, align=None, capacity=None, num_rows=None) -> Permuted:
    out = ascending_permute(tokens, routing_map, probs=probs, align=align, capacity=capacity, num_rows=num_rows)
    return out._replace(rows=_Take.apply(tokens, out.row_map.token_P, out.rows.detach()))


def unpermute(rows: Tensor, row_map: RowMap, *, restore_shape=None, probs=None) -> Tensor:
    if len(rows) != len(row_map.token_P):
        raise ValueError(f"rows has {len(rows)} rows; the row_map has {len(row_map.token_P)}")
    if restore_shape is not None and tuple(restore_shape) != (row_map.num_tokens, rows.shape[1]):
        raise ValueError(f"restore_shape is {restore_shape}; it must be {(row_map.num_tokens, rows.shape[1])}")
    weighted = rows.float()
    if probs is not None:
        real = row_map.token_P != PADDING
        weight = torch.zeros(len(rows), device=rows.device).masked_scatter(
            real, probs[row_map.token_P[real], row_map.expert_P[real]].float()
        )
        weighted = torch.where(real[:, None], weighted, 0.0) * weight[:, None]
    return _descending_sum(weighted, row_map.token_P, row_map.num_tokens).to(rows.dtype)
