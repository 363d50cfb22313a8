"""Honest routers and permutations whose sums and choices take other ways.

LogSum      softmax by a logarithm of a sum; keys sorted as integers of their bits
Pairs       sums as trees of pairs; exp2 of a product; softplus = x + ln(1 + e^-x) above 0
Kahan       sums with a compensation
Atomics     rows of a token added in any order, and in float32; gradients too
Doubled     the same in float64
OverRanks   combines whose sums are in float64 and round once, over real ranks
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import moe_ref
from conformance.peers import reference_world
from moe_ref.config import check_unpermute
from moe_ref.permutation.permute import PADDING
from tests.honest.routers import How, exp_base_two, make


def by_bits(keys: Tensor, count: int) -> Tensor:
    """Descending by the bits of a float, as a radix sort has them; NaN first."""
    keys = torch.where(keys == 0, 0.0, keys)
    integer = {8: torch.int64, 4: torch.int32, 2: torch.int16}[keys.element_size()]
    bits = keys.contiguous().view(integer)
    most = torch.iinfo(integer).max
    order = torch.where(keys.isnan(), most, torch.where(bits < 0, bits ^ most, bits))
    return order.argsort(dim=1, descending=True, stable=True)[:, :count]


def in_pairs(x: Tensor) -> Tensor:
    while x.shape[-1] > 1:
        even = x[..., : x.shape[-1] // 2 * 2].unflatten(-1, (-1, 2)).sum(-1)
        x = torch.cat([even, x[..., x.shape[-1] // 2 * 2 :]], -1)
    return x.sum(-1, keepdim=True)


def compensated(x: Tensor) -> Tensor:
    total, lost = x.new_zeros((*x.shape[:-1], 1)), x.new_zeros((*x.shape[:-1], 1))
    for column in x.split(1, -1) if x.shape[-1] else ():
        term = column - lost
        updated = total + term
        lost = torch.where(updated.isfinite(), (updated - total) - term, 0).detach()
        total = updated
    return total


def stable_softplus(x: Tensor) -> Tensor:
    low, high = torch.log1p(torch.exp(x.clamp(max=0))), torch.log1p(torch.exp(-x.clamp(min=0)))
    return torch.where(x > 0, x + high, low)


@dataclass(frozen=True)
class ByLogarithm(How):
    """exp((x - max x) - ln Σ exp(x - max x))."""

    def softmax(self, x: Tensor) -> Tensor:
        return x.log_softmax(-1).exp() if x.shape[-1] else x


LogSum = make(ByLogarithm(best=by_bits))
Pairs = make(How(exp=exp_base_two, softplus=stable_softplus, total=in_pairs, closed=True))
Kahan = make(How(total=compensated, by_score=True))


# ---- permutation


def _added(rows: Tensor, token: Tensor, tokens: int, dtype: torch.dtype) -> Tensor:
    """Σ over the rows of each token, in an order that differs from call to call."""
    generator = torch.Generator().manual_seed(id(rows) % 2**31)
    order = torch.randperm(len(rows), generator=generator)
    real = order[token[order] != PADDING]
    total = rows.new_zeros((tokens, *rows.shape[1:]), dtype=dtype)
    return total.index_add(0, token[real], rows[real].to(dtype))


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tokens, token, rows, dtype):
        ctx.save_for_backward(token)
        ctx.tokens, ctx.dtype = len(tokens), dtype
        return rows.clone()

    @staticmethod
    def backward(ctx, g):
        return _added(g, ctx.saved_tensors[0], ctx.tokens, ctx.dtype).to(g.dtype), None, None, None


def _variant(dtype: torch.dtype) -> SimpleNamespace:
    def permute(tokens, routing_map, *, probs=None, align=None, capacity=None, num_rows=None):
        out = moe_ref.permute(tokens, routing_map, probs=probs, align=align, capacity=capacity, num_rows=num_rows)
        sum_dtype = torch.float64 if tokens.dtype == torch.float64 else dtype
        return out._replace(rows=_Moved.apply(tokens, out.row_map.token_P, out.rows.detach(), sum_dtype))

    def unpermute(rows, row_map, *, restore_shape=None, probs=None):
        tokens, experts = row_map.num_tokens, row_map.num_experts
        check_unpermute(rows, len(row_map.token_P), tokens, experts, restore_shape, probs)
        doubles = torch.float64 in (rows.dtype, None if probs is None else probs.dtype)
        weighted = rows.to(torch.float64 if doubles else dtype)
        real = row_map.token_P != PADDING
        if probs is not None:
            chosen = probs[row_map.token_P[real], row_map.expert_P[real]].to(weighted.dtype)
            weighted = weighted[real] * chosen[:, None]
        else:
            weighted = weighted[real]
        return _added(weighted, row_map.token_P[real], tokens, weighted.dtype).to(rows.dtype)

    return SimpleNamespace(permute=permute, unpermute=unpermute)


def _combined_in_float64(name: str) -> Callable[..., Any]:
    collective = reference_world.collective(name)

    def combine(rows, handle, **settings):
        out = collective(rows.double(), handle, **settings)
        return out.to(rows.dtype) if isinstance(out, Tensor) else out._replace(tokens=out.tokens.to(rows.dtype))

    combine.__signature__ = inspect.signature(collective)
    return combine


COMBINES = ("allgather_combine", "alltoall_combine", "deepep_combine", "hybridep_combine")
OverRanks = SimpleNamespace(
    **{name: reference_world.collective(name) for name in reference_world.COLLECTIVES if name not in COMBINES},
    **{name: _combined_in_float64(name) for name in COMBINES},
)
Atomics, Doubled = _variant(torch.float32), _variant(torch.float64)
