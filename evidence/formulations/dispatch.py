"""Dispatchers a second time: for each row its token, found by walking over ranks, experts and
tokens; sums over the rows of a token, one after another.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from evidence.formulations.number_formats import encode
from evidence.formulations.quantization import quantize
from moe_ref.config import Combined, DeepEPDispatched, DeepEPLayout, Dispatched, LowLatencyDispatched

Copy = tuple[int, int, int]  # source rank, the token there, and its expert (or slot)


@dataclass
class Sent:
    """What a dispatch keeps for its combine: for each rank, the copy in each row, or None."""

    rank: int
    rows: list[list[Copy | None]]
    tokens: list[int]  # of each rank
    shards: int = 1
    width: int = 0  # of the probs
    slots: list[list[list[int]]] = field(default_factory=list)  # the experts of each token, by rank


def gathered(x: Sequence[Tensor], rows: Sequence[Copy | None]) -> Tensor:
    """x[source][token] of each row, zeros for None; any dtype."""
    like = x[0]
    if like.element_size() == 1 and like.dtype != torch.uint8:
        return gathered([rank_rows.view(torch.uint8) for rank_rows in x], rows).view(like.dtype)
    zeros = like.new_zeros(like.shape[1:])
    gathered_rows = [zeros if copy is None else x[copy[0]][copy[1]] for copy in rows]
    return torch.stack(gathered_rows) if gathered_rows else like.new_zeros((0, *like.shape[1:]))


def summed(rows: Sequence[Tensor], places: Sequence[Sequence[Copy | None]], tokens: Sequence[int]) -> list[Tensor]:
    """For each rank's tokens, the sum of their rows on all ranks."""
    totals: list[list[Any]] = [[None] * count for count in tokens]
    for buffer, copies in zip(rows, places, strict=True):
        for i, copy in enumerate(copies):
            if copy is not None:
                source, token, _ = copy
                subtotal = totals[source][token]
                totals[source][token] = buffer[i] if subtotal is None else subtotal + buffer[i]
    zeros = torch.zeros(rows[0].shape[1:], dtype=rows[0].dtype)
    empty = zeros.new_zeros((0, *zeros.shape))
    return [torch.stack([zeros if x is None else x for x in rank]) if rank else empty for rank in totals]


def flatten_experts(x_TE: Tensor, *, expert_parallel: int, expert_tensor_parallel: int) -> Tensor:
    """Column by column: the columns of each group, once for each shard."""
    local = x_TE.shape[1] // expert_parallel
    groups = [range(ep * local, (ep + 1) * local) for ep in range(expert_parallel)]
    order = [column for group in groups for _ in range(expert_tensor_parallel) for column in group]
    return torch.stack([x_TE[:, column] for column in order], 1) if order else x_TE


# ---- by a routing map


def by_map(
    tokens: Sequence[Tensor], routing_map: Sequence[Tensor], probs: Sequence[Tensor] | None, *, shards: int = 1,
    sources: Sequence[int] | None = None, capacity: int | None = None, align: int = 1, num_rows: int | None = None,
) -> list[Dispatched]:  # fmt: skip
    """The rows of each rank, for each of its experts, each source and each token."""
    ranks = len(tokens)
    local = routing_map[0].shape[1] * shards // ranks
    order = range(ranks) if sources is None else sources
    wants = [rank_map.bool().tolist() for rank_map in routing_map]
    results, copies_of_ranks = [], []
    for rank in range(ranks):
        copies: list[Copy | None] = []
        counts, lost = [], False
        for expert in range(rank // shards * local, (rank // shards + 1) * local):
            begin = len(copies)
            for s in order:
                mine: list[Copy] = [(s, t, expert) for t, row in enumerate(wants[s]) if row[expert]]
                if capacity is not None:
                    lost |= len(mine) > capacity
                    mine += [(s, t, expert) for t, row in enumerate(wants[s]) if not row[expert]]
                    mine = mine[:capacity]
                padding: list[Copy | None] = [None] * ((capacity or len(mine)) - len(mine))
                copies += [*mine, *padding]
            copies += [None] * (-(len(copies) - begin) % align)
            num_kept = len(copies) if num_rows is None else min(len(copies), num_rows)
            counts.append(max(num_kept - begin, 0))
        if num_rows is not None:
            lost |= any(copy is not None for copy in copies[num_rows:])
            copies = (copies + [None] * num_rows)[:num_rows]
        copies_of_ranks.append(copies)
        row_probs = None
        if probs is not None:
            # a slice of one tensor, so that a gradient, zeros if there is none, reaches the probs
            # of every source
            flat = torch.cat([probs[0].new_zeros(1), *(p.flatten() for p in probs)])
            begins = [1 + sum(p.numel() for p in probs[:s]) for s in range(ranks)]
            width = probs[0].shape[1]
            row_probs = flat[[0 if c is None else begins[c[0]] + c[1] * width + c[2] for c in copies]]
        results.append((gathered(tokens, copies), row_probs, torch.tensor(counts), torch.tensor(lost)))
    handles = [
        Sent(rank, copies_of_ranks, [*map(len, tokens)], shards, routing_map[0].shape[1]) for rank in range(ranks)
    ]
    return [Dispatched(*fields[:3], rank_map, fields[3]) for fields, rank_map in zip(results, handles, strict=True)]


def allgather_dispatch(
    tokens: Any, routing_map: Any, *, probs: Any = None, expert_tensor_parallel: int = 1, num_rows: int | None = None
) -> list[Dispatched]:
    """The sources are in the order of the ranks."""
    return by_map(tokens, routing_map, probs, shards=expert_tensor_parallel, num_rows=num_rows)


def alltoall_dispatch(
    tokens: Any, routing_map: Any, *, probs: Any = None, expert_tensor_parallel: int = 1,
    capacity: int | None = None, num_rows: int | None = None,
) -> list[Dispatched]:  # fmt: skip
    """The sources are in the order (tensor rank, group)."""
    sources = sorted(range(len(tokens)), key=lambda rank: (rank % expert_tensor_parallel, rank))
    options: dict[str, Any] = {"sources": sources, "capacity": capacity, "num_rows": num_rows}
    return by_map(tokens, routing_map, probs, shards=expert_tensor_parallel, **options)


def combine(rows: Any, handles: Sequence[Sent]) -> list[Tensor]:
    """The sum of all rows of a token, from every shard of its experts."""
    return summed(rows, handles[0].rows, handles[0].tokens)


allgather_combine = alltoall_combine = combine


def hybridep_dispatch(
    tokens: Any, routing_map: Any, *, probs: Any = None, align: int | None = None, num_rows: int | None = None,
    recipe: Any = None, num_sms: int | None = None, num_blocks: int | None = None,
) -> list[Dispatched]:  # fmt: skip
    """The segments are padded, and rows are sent as they are or quantised."""
    dispatched = by_map(tokens, routing_map, probs, align=align or 1, num_rows=num_rows)
    if recipe is None:
        return dispatched
    return [out._replace(rows=quantize(out.rows, recipe, splits=out.tokens_per_expert).quantized) for out in dispatched]


def hybridep_cached_dispatch(tokens: Any, handles: Sequence[Sent]) -> list[Tensor]:
    """The rows of other tokens, in the same places."""
    return [gathered(tokens, copies) for copies in handles[0].rows]


def hybridep_combine(rows: Any, handles: Sequence[Sent], *, probs: Any = None, **programs: int) -> list[Combined]:
    """Rows are added, and each probability returns to its cell."""
    out = combine(rows, handles)
    if probs is None:
        return [Combined(rank_tokens, None) for rank_tokens in out]
    first = handles[0]
    cells = {c: p[i] for copies, p in zip(first.rows, probs, strict=True) for i, c in enumerate(copies) if c}
    zero = probs[0].new_zeros(())
    cell_probs = [
        torch.stack([cells.get((s, t, e), zero) for t in range(count) for e in range(first.width)]).reshape(count, -1)
        if count
        else probs[0].new_zeros(0, first.width)
        for s, count in enumerate(first.tokens)
    ]
    return [Combined(*fields) for fields in zip(out, cell_probs, strict=True)]


# ---- by indices


def kept_slots(indices: Sequence[Tensor], probs: Sequence[Tensor] | None, policy: Any) -> list[list[list[int]]]:
    """The expert of each slot of each token; -1 where the policy leaves it out."""
    slots_of_ranks = []
    for rank, rank_indices in enumerate(indices):
        out = rank_indices.tolist()
        for t, slots in enumerate(out):
            for k, expert in enumerate(list(slots)):
                repeated = policy is not None and policy.duplicates == "last slot" and expert in slots[k + 1 :]
                drops = policy is not None and policy.zero_prob == "drop" and probs is not None
                if repeated or (drops and probs is not None and float(probs[rank].detach()[t, k]) == 0):
                    slots[k] = -1
        slots_of_ranks.append(out)
    return slots_of_ranks


def deepep_layout(indices_TK: Tensor, *, num_experts: int, ranks: int) -> DeepEPLayout:
    """Token by token, slot by slot."""
    local = num_experts // ranks
    to_rank, to_expert = [0] * ranks, [0] * num_experts
    is_in_rank = torch.zeros(len(indices_TK), ranks, dtype=torch.bool)
    for t, slots in enumerate(indices_TK.tolist()):
        named = [expert for expert in slots if expert >= 0]
        for expert in named:
            to_expert[expert] += 1
        for rank in {expert // local for expert in named}:
            to_rank[rank] += 1
            is_in_rank[t, rank] = True
    return DeepEPLayout(torch.tensor(to_rank), torch.tensor(to_expert), is_in_rank)


def deepep_dispatch(
    tokens: Any, indices: Any, *, num_experts: int, probs: Any = None, scales: Any = None, policy: Any = None,
    expert_alignment: int = 1, num_worst_tokens: int | None = None,
) -> list[DeepEPDispatched]:  # fmt: skip
    """The rows of each rank, for each source and each token that names one of its experts."""
    ranks, local, topk = len(tokens), num_experts // len(tokens), indices[0].shape[1]
    slots, copies_of_ranks, results = kept_slots(indices, probs, policy), [], []
    for rank in range(ranks):
        mine = range(rank * local, (rank + 1) * local)
        copies: list[Copy | None] = [
            (s, t, 0) for s in range(ranks) for t, row in enumerate(slots[s]) if any(e in mine for e in row)
        ]
        named = [[e - mine.start if e in mine else -1 for e in slots[c[0]][c[1]]] for c in copies if c]
        counts = [sum(row.count(e) for row in named) for e in range(local)]
        aligned: Any = torch.tensor([-(-n // expert_alignment) * expert_alignment for n in counts])
        if num_worst_tokens is not None:
            aligned, num_padding = None, num_worst_tokens - len(copies)
            copies, named = copies + [None] * num_padding, named + [[-1] * topk] * num_padding
        local_indices = torch.tensor(named, dtype=torch.int64).reshape(-1, topk)
        row_probs = None if probs is None else torch.where(local_indices >= 0, gathered(probs, copies), 0.0)
        row_scales = None if scales is None else gathered(scales, copies).detach()
        copies_of_ranks.append(copies)
        results.append((gathered(tokens, copies), row_scales, local_indices, row_probs, aligned))
    handles = [Sent(rank, copies_of_ranks, [*map(len, tokens)], slots=slots) for rank in range(ranks)]
    return [DeepEPDispatched(*fields, local_indices) for fields, local_indices in zip(results, handles, strict=True)]


deepep_cached_dispatch = hybridep_cached_dispatch


def deepep_combine(rows: Any, handles: Sequence[Sent], *, probs: Any = None, biases: Any = ()) -> list[Combined]:
    """Rows are added, then the biases. Probabilities are added slot by slot."""
    out = combine(rows, handles)
    for bias in biases:
        out = [rank_tokens + rank_bias for rank_tokens, rank_bias in zip(out, bias, strict=True)]
    slot_probs = [None] * len(out) if probs is None else combine(probs, handles)
    return [Combined(*fields) for fields in zip(out, slot_probs, strict=True)]


def deepep_low_latency_dispatch(
    tokens: Any, indices: Any, *, num_experts: int, max_tokens_per_rank: int, use_fp8: bool = False,
    round_scale: bool = False, policy: Any = None,
) -> list[LowLatencyDispatched]:  # fmt: skip
    """A slab for each expert, filled by source, token and slot."""
    ranks, local = len(tokens), num_experts // len(tokens)
    length, slots = ranks * max_tokens_per_rank, kept_slots(indices, None, policy)
    wire = [fp8(x, round_scale) for x in tokens] if use_fp8 else []
    slabs_of_ranks, results = [], []
    for rank in range(ranks):
        slabs: list[Copy | None] = []
        counts, ranges = [], []
        for expert in range(rank * local, (rank + 1) * local):
            slab: list[Copy | None] = []
            for s in range(ranks):
                mine = [(s, t, k) for t, row in enumerate(slots[s]) for k, e in enumerate(row) if e == expert]
                ranges.append(len(slab) * 2**32 + len(mine))
                slab += mine
            counts.append(len(slab))
            slabs += slab + [None] * (length - len(slab))
        rows = gathered([codes for codes, _ in wire] if use_fp8 else tokens, slabs)
        scales = gathered([scale for _, scale in wire], slabs).unflatten(0, (local, length)) if use_fp8 else None
        source = torch.tensor([-1 if copy is None else copy[1] for copy in slabs]).reshape(local, length)
        places = torch.tensor(ranges).reshape(local, ranks)
        slabs_of_ranks.append(slabs)
        results.append((rows.unflatten(0, (local, length)), scales, torch.tensor(counts), source, places))
    handles = [Sent(rank, slabs_of_ranks, [*map(len, tokens)], slots=slots) for rank in range(ranks)]
    return [LowLatencyDispatched(*fields, handle) for fields, handle in zip(results, handles, strict=True)]


def fp8(x_TH: Tensor, powers: bool) -> tuple[Tensor, Tensor]:
    """E4M3 codes and scales of each block of 128 columns."""
    x = x_TH.detach().float().numpy().reshape(len(x_TH), x_TH.shape[1] // 128, 128)
    amax = np.fmax(np.fmax.reduce(np.abs(x), axis=2, initial=0), np.float32(1e-4))
    scale, inverse = amax * np.float32(1 / 448), np.float32(448) / amax
    if powers:
        exponent = np.ceil(np.log2(scale.astype(np.float64))).astype(int)
        scale, inverse = np.ldexp(np.float32(1), exponent), np.ldexp(np.float32(1), -exponent)
    with np.errstate(all="ignore"):
        codes = encode((x * inverse[:, :, None]).astype(np.float64), "e4m3")
    return torch.from_numpy(codes.reshape(x_TH.shape)).view(torch.float8_e4m3fn), torch.from_numpy(scale)


def deepep_low_latency_combine(rows: Any, indices: Any, probs: Any, handles: Sequence[Sent]) -> list[Tensor]:
    """For each slot, the last row of the token that its expert has, times the probability."""
    first, last = handles[0], {}
    for rank, slabs in enumerate(first.rows):
        flat = rows[rank].flatten(0, 1)
        for i, copy in enumerate(slabs):
            if copy is not None:
                s, t, k = copy
                last[s, t, first.slots[s][t][k]] = flat[i]
    out = []
    for s, count in enumerate(first.tokens):
        rank_totals = []
        for t in range(count):
            total = rows[0].new_zeros(rows[0].shape[2])
            for k, expert in enumerate(first.slots[s][t]):
                if expert >= 0 and k < probs[s].shape[1]:
                    total = total + probs[s][t, k] * last[s, t, expert]
            rank_totals.append(total)
        out.append(torch.stack(rank_totals) if rank_totals else rows[0].new_zeros(0, rows[0].shape[2]))
    return out
