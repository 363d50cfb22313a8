"""Permutations in the styles of other teams, from the routing map on.

Cumsum   int32 places by a running sum, capacity and budget too; a token's rows added from the last,
         each unrouted, padded or repeated entry found by sorting or scattering
OneHot   rows as integers, times a matrix of zeros and ones; a token's rows added as a tree of pairs
Narrow   sums in float32 of float64 values too (declared), in memory that all calls share
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from moe_ref import config
from tests.honest.strangers import refusing, wide_of

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


# ---- Cumsum


@dataclass
class Result:
    rows: Tensor
    probs: Tensor | None
    row_map: Any
    tokens_per_expert: Tensor
    pad_offsets: Tensor | None
    overflow: Tensor


def lengths_of(on: Tensor, align: int | None, capacity: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Each expert's rows, each pair's place in its expert's rows, and whether it has one."""
    count, rank = on.sum(0, dtype=torch.int32), on.cumsum(0, dtype=torch.int32) - 1
    if capacity is None:
        return count if align is None else (count + (align - 1)) // align * align, rank, on
    rank = torch.where(on, rank, (~on).cumsum(0, dtype=torch.int32) - 1 + count)
    return torch.full_like(count, capacity), rank, rank < capacity


class _Take(torch.autograd.Function):
    """x[source], zeros where the source is negative; the gradient row by row, from the last."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Tensor) -> Tensor:
        ctx.save_for_backward(source)
        ctx.rows = len(x)
        out = x.new_zeros(len(source), *x.shape[1:])
        out[source >= 0] = x[source[source >= 0].long()]
        return out

    @staticmethod
    @refusing
    def backward(ctx: Any, g: Tensor):
        (source,) = ctx.saved_tensors
        total = torch.zeros(ctx.rows, *g.shape[1:], dtype=wide_of(g))
        for i in (source >= 0).nonzero().flatten().flip(0).tolist():
            total[source[i]] += g[i].to(total.dtype)
        return total.to(g.dtype), None


def permute_by_cumsum(tokens, routing_map, /, *, num_rows=None, capacity=None, align=None, probs=None) -> Result:
    config.check_permute(tokens, routing_map, probs, align, capacity, num_rows)
    on, experts = routing_map != 0, routing_map.shape[1]
    length, rank, wanted = lengths_of(on, align, capacity)
    start = length.cumsum(0, dtype=torch.int32) - length
    size = int(length.sum()) if num_rows is None else num_rows
    stored = wanted & (start + rank < size)
    token, expert = stored.nonzero(as_tuple=True)
    cell = torch.full((size,), -1, dtype=torch.int32)
    cell[(start + rank)[token, expert].long()] = (token * experts + expert).int()
    padding = length - on.sum(0)
    return Result(
        _Take.apply(tokens, torch.where(cell < 0, -1, cell // experts)),
        None if probs is None else _Take.apply(probs.reshape(-1), cell),
        (cell, routing_map.shape),
        (start + length).clamp(max=size) - start.clamp(max=size),
        None if align is None else padding.cumsum(0) - padding,
        (on & ~stored).any(),
    )


def unpermute_from_the_last(rows, row_map, /, *, probs=None, restore_shape=None):
    cell, (tokens, experts) = row_map
    config.check_unpermute(rows, len(cell), tokens, experts, restore_shape, probs)
    real, dtype = (cell >= 0).nonzero().flatten().flip(0), wide_of(rows, probs)
    at, weighted = cell[real].long(), rows[real].to(dtype)
    if probs is not None:
        weighted = weighted * probs.reshape(-1)[at].to(dtype).unsqueeze(1)
    token = (at // experts).unsqueeze(1).expand_as(weighted)
    return torch.zeros(tokens, rows.shape[1], dtype=dtype).scatter_add(0, token, weighted).to(rows.dtype)


def sort_chunks(rows, chunk_sizes, order, *, probs=None):
    config.check_sort_chunks(rows, chunk_sizes, order, probs)
    sizes, order, chunks = chunk_sizes.long(), order.long(), len(order)
    config.require(
        bool((sizes >= 0).all()) and int(sizes.sum()) <= len(rows), "chunk_sizes", sizes, "≥ 0, at most the rows"
    )
    config.require(bool((order.sort().values == torch.arange(chunks)).all()), "order", order, "a permutation")
    key = torch.full((len(rows),), chunks)
    key[: int(sizes.sum())] = order.argsort().repeat_interleave(sizes)
    source = key.argsort(stable=True)
    return rows.index_select(0, source), None if probs is None else probs.index_select(0, source)


def pad_routing_map(routing_map, *, align):
    config.check_map(routing_map)
    config.require(align is not None, "align", align, "a positive integer")
    config.check_align(align)
    on = routing_map != 0
    added = ~on & ((~on).int().cumsum(0) <= -on.sum(0) % align)
    return {"routing_map": (on | added).to(torch.uint8), "unreached": ((on | added).sum(0) % align).bool()}


def indices_to_multihot(indices, probs, *, num_experts):
    config.check_indices(indices, probs, num_experts)
    at = indices.long()
    config.require(bool(((at >= -1) & (at < num_experts)).all()), "indices", "outside", f"from -1 to {num_experts - 1}")
    repeated = (at[:, :, None] == at[:, None, :]).triu(1).any(2)
    empty = (at < 0) | repeated
    at = torch.where(empty, num_experts, at)  # a column that is cut off
    weights = probs.new_zeros(len(at), num_experts + 1).scatter(1, at, torch.where(empty, 0, probs))
    chosen = torch.zeros(weights.shape, dtype=torch.bool).scatter(1, at, True)
    return chosen[:, :-1].clone(), weights[:, :-1].clone()


def multihot_to_indices(routing_map, probs, *, topk):
    config.check_multihot(routing_map, probs, topk)
    on, experts = routing_map != 0, routing_map.shape[1]
    key = torch.nn.functional.pad(torch.where(on, torch.arange(experts), experts), (0, topk), value=experts)
    at = key.sort(1).values[:, :topk]
    weights = torch.where(at == experts, 0, probs.gather(1, at.clamp(max=experts - 1)))
    return torch.where(at == experts, -1, at).int(), weights, (on.sum(1) > topk).any()


# ---- OneHot


def as_pairs(x: Tensor, token: Tensor, tokens: int) -> Tensor:
    """The rows of each token added as a tree of pairs."""
    x_wide = x.to(wide_of(x))
    if not len(token):
        return x_wide.new_zeros(tokens, x.shape[1]).to(x.dtype)
    counts = torch.bincount(token, minlength=tokens)
    slot = torch.arange(1 << (int(counts.max()) - 1).bit_length())
    at = ((counts.cumsum(0) - counts)[:, None] + slot).clamp(max=len(token) - 1)
    terms = torch.where((slot < counts[:, None])[..., None], x_wide[token.argsort(stable=True)[at]], 0)
    while terms.shape[1] > 1:
        terms = terms[:, 0::2] + terms[:, 1::2]
    return terms[:, 0].to(x.dtype)


class _TimesOneHot(torch.autograd.Function):
    """The bits of x as integers, times a matrix that picks rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Tensor) -> Tensor:
        ctx.save_for_backward(token)
        ctx.rows, kind = len(x), WORDS[x.element_size()]
        one_hot = token[:, None] == torch.arange(len(x))
        words = x.contiguous().resolve_neg().view(kind).long()
        return torch.einsum("pt,th->ph", one_hot.long(), words).to(kind).view(x.dtype)

    @staticmethod
    @refusing
    def backward(ctx: Any, g: Tensor):
        (token,) = ctx.saved_tensors
        return as_pairs(g[token >= 0], token[token >= 0], ctx.rows), None


def permute_by_one_hot(tokens, routing_map, *, probs=None, align=None):
    config.check_permute(tokens, routing_map, probs, align, None, None)
    lists = [column.nonzero()[:, 0] for column in routing_map.unbind(1)]
    padding = [0 if align is None else -len(tokens_of_expert) % align for tokens_of_expert in lists]
    token = torch.cat(
        [
            torch.cat([tokens_of_expert, tokens_of_expert.new_full((n,), -1)])
            for tokens_of_expert, n in zip(lists, padding, strict=True)
        ]
    )
    counts = torch.tensor([len(tokens_of_expert) + n for tokens_of_expert, n in zip(lists, padding, strict=True)])
    expert, padding_counts = torch.arange(len(lists)).repeat_interleave(counts), torch.tensor(padding)
    row_probs = None
    if probs is not None:
        at = torch.where(token < 0, -1, token * len(lists) + expert)
        row_probs = _TimesOneHot.apply(probs.reshape(-1, 1), at)[:, 0].clone()
    offsets = None if align is None else padding_counts.cumsum(0) - padding_counts
    row_map = (token, expert, *routing_map.shape)
    return _TimesOneHot.apply(tokens, token), row_probs, row_map, counts, offsets, None


def weighted_rows(rows, row_map, probs, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The real rows from the last, times their probs, and their tokens."""
    token, expert, tokens, experts = row_map
    config.check_unpermute(rows, len(token), tokens, experts, None, probs)
    real = (token >= 0).nonzero()[:, 0].flip(0)
    weighted = rows[real].to(dtype)
    if probs is not None:
        weighted = weighted * probs[token[real], expert[real]].to(dtype)[:, None]
    return weighted, token[real]


def unpermute_as_pairs(rows, row_map, *, probs=None):
    weighted, token = weighted_rows(rows, row_map, probs, wide_of(rows, probs))
    return as_pairs(weighted, token, row_map[2]).to(rows.dtype)


# ---- Narrow


class _Added(torch.autograd.Function):
    """Float32 sums in memory that all calls share; the result is a copy."""

    shared = torch.empty(0)

    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Tensor, tokens: int) -> Tensor:
        ctx.save_for_backward(token)
        size = tokens * x.shape[1]
        if len(_Added.shared) < size:
            _Added.shared = torch.empty(size)
        return _Added.shared[:size].view(tokens, x.shape[1]).zero_().index_add_(0, token, x).clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor):
        return g[ctx.saved_tensors[0]], None, None


def unpermute_in_float32(rows, row_map, *, probs=None):
    return _Added.apply(*weighted_rows(rows, row_map, probs, torch.float32), row_map[2]).to(rows.dtype)


def linear_in_float32(rows, weight, tokens_per_expert, *, bias=None):
    config.check_grouped_linear(rows, weight, tokens_per_expert, bias)
    counts = tokens_per_expert.tolist()
    config.check_count_values(counts, len(rows))
    biases = [None] * len(counts) if bias is None else bias.float().unbind(0)
    rows_of_experts = rows[: sum(counts)].float().split(counts)
    y = [linear(x, w, b) for x, w, b in zip(rows_of_experts, weight.float(), biases, strict=True)]
    return torch.cat([*y, y[0].new_zeros(len(rows) - sum(counts), weight.shape[1])]).to(rows.dtype)


def in_float32(function: str) -> dict[str, Any]:
    return {} if function == "permute" else {"accumulator": "float32_only"}


MAPS = (sort_chunks, pad_routing_map, indices_to_multihot, multihot_to_indices)
Cumsum = SimpleNamespace(permute=permute_by_cumsum, unpermute=unpermute_from_the_last, **{f.__name__: f for f in MAPS})
OneHot = SimpleNamespace(permute=permute_by_one_hot, unpermute=unpermute_as_pairs)
Narrow = SimpleNamespace(
    permute=permute_by_one_hot, unpermute=unpermute_in_float32, grouped_linear=linear_in_float32, declares=in_float32
)
