"""Permutation and the routing map in a second formulation: `permute` by index arithmetic, the other
functions by loops.

The functions validate nothing, and leave every gradient to autograd, which adds in the storage
dtype: gradients are compared in float64.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_ref.config import Indices, Multihot, PaddedMap, Permuted, SortedChunks


@dataclass(frozen=True)
class Table:
    """The (token, expert) of each permuted row; None for a row of zeros."""

    cells: tuple[tuple[int, int] | None, ...]
    num_tokens: int


def permute(
    tokens_TH: Tensor,
    routing_map_TE: Tensor,
    *,
    probs: Tensor | None = None,
    align: int | None = None,
    capacity: int | None = None,
    num_rows: int | None = None,
) -> Permuted:
    """Compute each row's place from running sums over the routing map.

    place[t, e] = start[e] + number of tokens before t that come first in e's segment,   start[e] =
    Σ_{j<e} length[j]

    length[e] = count[e], rounded up to `align`, or `capacity`. A place past its segment or
    `num_rows` is no row.
    """
    routed_TE = routing_map_TE != 0
    count_E = routed_TE.sum(0)
    length_E = (
        torch.full_like(count_E, capacity) if capacity is not None else -(-count_E // (align or 1)) * (align or 1)
    )
    start_E = length_E.cumsum(0) - length_E
    buffer = int(length_E.sum()) if num_rows is None else num_rows

    rank_TE = torch.where(routed_TE, routed_TE.cumsum(0), count_E + (~routed_TE).cumsum(0)) - 1  # routed tokens first
    place_TE = start_E + rank_TE
    stays_TE = (rank_TE < length_E) & (place_TE < buffer)
    if capacity is None:
        stays_TE = stays_TE & routed_TE
    token_R, expert_R = stays_TE.nonzero().unbind(1)
    cells: list[tuple[int, int] | None] = [None] * buffer
    for row, t, e in zip(place_TE[stays_TE].tolist(), token_R.tolist(), expert_R.tolist(), strict=True):
        cells[row] = (t, e)

    zeros_H, hidden = tokens_TH.new_zeros(tokens_TH.shape[1]), tokens_TH.shape[1]
    rows = [zeros_H if cell is None else tokens_TH[cell[0]] for cell in cells]
    row_probs = None
    if probs is not None:
        row_probs = _stack([probs.new_zeros(()) if cell is None else probs[cell] for cell in cells], (buffer,), probs)
    return Permuted(
        rows=_stack(rows, (buffer, hidden), tokens_TH),
        probs=row_probs,
        row_map=Table(tuple(cells), len(routed_TE)),
        tokens_per_expert=torch.clamp(buffer - start_E, min=torch.zeros_like(length_E), max=length_E),
        pad_offsets=None if align is None else start_E - (count_E.cumsum(0) - count_E),
        overflow=(routed_TE & ~stays_TE).any(),
    )


def unpermute(
    rows_PH: Tensor, row_map: Table, *, restore_shape: tuple[int, int] | None = None, probs: Tensor | None = None
) -> Tensor:
    """Add each token's rows in ascending order, in float32, or in float64 if an input is, and round
    once.

    for t in tokens:
        out[t] = 0
        for i, (token, e) in enumerate(table):
            if token is t: out[t] += rows[i] · probs[t, e]
    """
    inputs = [rows_PH] if probs is None else [rows_PH, probs]
    accumulator = torch.float64 if any(x.dtype == torch.float64 for x in inputs) else torch.float32
    hidden = rows_PH.shape[1]
    out = []
    for t in range(row_map.num_tokens):
        total_H = rows_PH.new_zeros(hidden, dtype=accumulator)
        for i, cell in enumerate(row_map.cells):
            if cell is None or cell[0] != t:
                continue
            row_H = rows_PH[i].to(accumulator)
            total_H = total_H + (row_H if probs is None else row_H * probs[cell].to(accumulator))
        out.append(total_H.to(rows_PH.dtype))
    return _stack(out, (row_map.num_tokens, hidden), rows_PH)


def sort_chunks(rows_RH: Tensor, chunk_sizes: Tensor, order: Tensor, *, probs: Tensor | None = None) -> SortedChunks:
    """Walk over the chunks in their new order, and inside each over its rows.

    for s in order:
        for r in rows of chunk s: write r
    write the rows past the last chunk
    """
    sizes = chunk_sizes.tolist()
    written = []
    for s in order.tolist():
        begin = 0
        for earlier in range(s):
            begin += sizes[earlier]
        for r in range(sizes[s]):
            written.append(begin + r)
    for r in range(len(written), len(rows_RH)):
        written.append(r)
    return SortedChunks(
        _stack([rows_RH[r] for r in written], tuple(rows_RH.shape), rows_RH),
        None if probs is None else _stack([probs[r] for r in written], tuple(probs.shape), probs),
    )


def pad_routing_map(routing_map_TE: Tensor, *, align: int) -> PaddedMap:
    """Hand each expert unrouted tokens, the first ones first, until its count is a multiple or none
    is left.

    for e in experts:
        for t in tokens:
            if count[e] mod align = 0: stop
            if not routing_map[t, e]: routing_map[t, e] = 1
    """
    num_tokens, num_experts = routing_map_TE.shape
    padded = [[bool(cell) for cell in row] for row in routing_map_TE.tolist()]
    unreached = []
    for e in range(num_experts):
        count = sum(padded[t][e] for t in range(num_tokens))
        for t in range(num_tokens):
            if count % align == 0:
                break
            if not padded[t][e]:
                padded[t][e] = True
                count += 1
        unreached.append(count % align != 0)
    device = routing_map_TE.device
    return PaddedMap(
        torch.tensor(padded, dtype=torch.bool, device=device).reshape(num_tokens, num_experts),
        torch.tensor(unreached, device=device),
    )


def indices_to_multihot(indices_TK: Tensor, probs_TK: Tensor, *, num_experts: int) -> Multihot:
    """Write each slot into its expert's column; a later slot overwrites an earlier one.

    for t in tokens:
        for k in slots:
            e = indices[t, k]
            if e is not -1: routing_map[t, e], probs'[t, e] = 1, probs[t, k]
    """
    shape = (len(indices_TK), num_experts)
    nothing = probs_TK.new_zeros(())
    chosen, moved = [], []
    for t, experts in enumerate(indices_TK.tolist()):
        slot_of: dict[int, int] = {}
        for k, e in enumerate(experts):
            if e != -1:
                slot_of[e] = k
        for e in range(num_experts):
            chosen.append(e in slot_of)
            moved.append(probs_TK[t, slot_of[e]] if e in slot_of else nothing)
    routing_map = torch.tensor(chosen, dtype=torch.bool, device=indices_TK.device).reshape(shape)
    return Multihot(routing_map, _stack(moved, shape, probs_TK))


def multihot_to_indices(routing_map_TE: Tensor, probs_TE: Tensor, *, topk: int) -> Indices:
    """Give each routed expert the next free slot of its token, while there is one.

    for t in tokens:
        for e in experts:
            if routing_map[t, e]: write e and probs[t, e]; if all K slots are taken, set overflow
        write -1 and 0 into the slots that are left
    """
    shape = (len(routing_map_TE), topk)
    nothing = probs_TE.new_zeros(())
    indices, moved, overflow = [], [], False
    for t, row in enumerate(routing_map_TE.tolist()):
        used = 0
        for e, routed in enumerate(row):
            if routed and used == topk:
                overflow = True
            elif routed:
                indices.append(e)
                moved.append(probs_TE[t, e])
                used += 1
        indices += [-1] * (topk - used)
        moved += [nothing] * (topk - used)
    return Indices(
        _integers(indices, probs_TE).reshape(shape),
        _stack(moved, shape, probs_TE),
        torch.tensor(overflow, device=probs_TE.device),
    )


def _stack(values: Sequence[Tensor], shape: tuple[int, ...], like: Tensor) -> Tensor:
    """The values one after the other, in the given shape; there may be none."""
    return torch.stack(list(values)).reshape(shape) if values else like.new_zeros(shape)


def _integers(values: list[int], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=like.device)
