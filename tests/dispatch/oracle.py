"""A second opinion on the dispatchers: loops over ranks, tokens and experts, no code of `moe_ref`.

Layouts are lists by rank of segments by local expert of cells (source rank, token, expert), None
for a row without a token. The expert is that of the flat world, rank · L + l. Trees walk over the
cells and add one row at a time.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

Cell = tuple[int, int, int]
Segments = list[list[Cell | None]]
# per rank, per token: one number per expert (map), or one expert per slot (indices)
Routing = list[list[list[int]]]


def nested(maps: Sequence[Tensor]) -> Routing:
    return [own.int().tolist() for own in maps]


def allgather(maps: Routing, num_experts: int, shards: int = 1) -> list[Segments]:
    """Every rank looks at all tokens in the order of the ranks."""
    local = num_experts // (len(maps) // shards)
    return [
        [
            [
                (s, t, w * local + l_)
                for s, own in enumerate(maps)
                for t, row in enumerate(own)
                if row[w // shards * local + l_]
            ]
            for l_ in range(local)
        ]
        for w in range(len(maps))
    ]


def alltoall(maps: Routing, num_experts: int, shards: int = 1, capacity: int | None = None) -> list[Segments]:
    """Each source cuts its copies into chunks by expert; rank (ep, tp) hears from the ranks (0,
    tp), (1, tp), …; then its shards tell each other.
    """
    groups = len(maps) // shards
    local = num_experts // groups
    chunks: dict[tuple[int, int], list[tuple[int, int] | None]] = {}
    for s, own in enumerate(maps):
        for e in range(num_experts):
            chosen: list[tuple[int, int] | None] = [(s, t) for t, row in enumerate(own) if row[e]]
            if capacity is not None:
                chosen += [(s, t) for t, row in enumerate(own) if not row[e]]
                chosen = (chosen + [None] * capacity)[:capacity]
            chunks[s, e] = chosen
    arrived = []
    for w in range(len(maps)):
        segments: Segments = []
        for l_ in range(local):
            segment: list[Cell | None] = []
            for tp in range(shards):
                for ep in range(groups):
                    for origin in chunks[ep * shards + tp, w // shards * local + l_]:
                        segment.append(None if origin is None else (*origin, w * local + l_))
            segments.append(segment)
        arrived.append(segments)
    return arrived


def hybridep(
    maps: Routing, num_experts: int, align: int = 1, num_rows: int | None = None
) -> tuple[list[Segments], list[bool]]:
    """Write copies down one after the other, pad each expert, and stop where the buffer ends; and
    whether something was lost.
    """
    local = num_experts // len(maps)
    arrived, lost = [], []
    for w in range(len(maps)):
        segments: Segments = []
        written, dropped = 0, False
        for l_ in range(local):
            segment: list[Cell | None] = []
            for s, own in enumerate(maps):
                for t, row in enumerate(own):
                    if row[w * local + l_]:
                        segment.append((s, t, w * local + l_))
            while len(segment) % align:
                segment.append(None)
            kept: list[Cell | None] = []
            for cell in segment:
                if num_rows is None or written < num_rows:
                    kept.append(cell)
                elif cell is not None:
                    dropped = True
                written += 1
            segments.append(kept)
        arrived.append(segments)
        lost.append(dropped)
    return arrived, lost


def deepep(indices: Routing, num_experts: int) -> tuple[list[list[tuple[int, int]]], list[list[list[int]]]]:
    """Of each rank: the tokens that arrive, once each, and their slots as local experts."""
    local = num_experts // len(indices)
    rows: list[list[tuple[int, int]]] = [[] for _ in indices]
    slots: list[list[list[int]]] = [[] for _ in indices]
    for w in range(len(indices)):
        for s, own in enumerate(indices):
            for t, experts in enumerate(own):
                mine = [e - w * local if e // local == w and e >= 0 else -1 for e in experts]
                if any(e != -1 for e in mine):
                    rows[w].append((s, t))
                    slots[w].append(mine)
    return rows, slots


def low_latency(indices: Routing, num_experts: int) -> list[list[list[list[tuple[int, int, int]]]]]:
    """Of each rank, of each of its experts, of each source: (source, token, slot) of the copies."""
    local = num_experts // len(indices)
    return [
        [
            [
                [(s, t, k) for t, experts in enumerate(own) for k, e in enumerate(experts) if e == w * local + l_]
                for s, own in enumerate(indices)
            ]
            for l_ in range(local)
        ]
        for w in range(len(indices))
    ]


def joined(segments: Segments, num_rows: int | None = None) -> list[Cell | None]:
    """The rows of a buffer, one segment behind the other."""
    rows = [cell for segment in segments for cell in segment]
    return rows if num_rows is None else rows + [None] * (num_rows - len(rows))


Rows = Sequence[
    Sequence[tuple[int, ...] | None]
]  # of each rank: what stands in each row, the source rank and the token first


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def two_levels(rows: Sequence[Tensor], cells: Rows, tokens: Sequence[int], between: torch.dtype) -> list[Tensor]:
    """For each token: add its rows on each rank, round; add the ranks in `between`, round."""
    combined = []
    for s, count in enumerate(tokens):
        own = []
        for t in range(count):
            parts = [add_up(rows[w], cells[w], (s, t)).to(between) for w in range(len(rows))]
            total = parts[0]
            for part in parts[1:]:
                total = total + part
            own.append(total.to(rows[0].dtype))
        combined.append(stacked(own, rows[0]))
    return combined


def flat(
    rows: Sequence[Tensor], cells: Rows, tokens: Sequence[int], biases: Sequence[Sequence[Tensor]] = ()
) -> list[Tensor]:
    """For each token: add its biases, then its rows of all ranks, round once."""
    every, every_cell = torch.cat(list(rows)), [cell for own in cells for cell in own]
    combined = []
    for s, count in enumerate(tokens):
        own = []
        for t in range(count):
            start = every.new_zeros(every.shape[1:], dtype=wide(every.dtype))
            for bias in biases:
                start = start + bias[s][t].to(start.dtype)
            own.append(add_up(every, every_cell, (s, t), start))
        combined.append(stacked(own, rows[0]))
    return combined


def shards_then_experts(
    rows: Sequence[Tensor], cells: Rows, tokens: Sequence[int], shards: int, between: torch.dtype
) -> list[Tensor]:
    """Add the rows of neighbouring ranks that are shards of one another, in `between`, round; then
    add each token's rows, round.
    """
    if shards == 1:
        return flat(rows, cells, tokens)
    sums = []
    for first in range(0, len(rows), shards):
        total = rows[first].to(between)
        for tp in range(1, shards):
            total = total + rows[first + tp].to(between)
        sums.append(total.to(rows[0].dtype))
    return flat(sums, cells[::shards], tokens)


def weighted(
    rows: Sequence[Tensor], slots: Sequence, indices: Routing, probs: Sequence[Tensor], num_experts: int
) -> list[Tensor]:
    """For each token: add prob · row over its slots, ascending, and round once; of an expert named
    twice the later row counts.
    """
    combined = []
    for s, own in enumerate(indices):
        out = []
        for t, experts in enumerate(own):
            total = rows[0].new_zeros(rows[0].shape[2:], dtype=wide(torch.promote_types(rows[0].dtype, probs[0].dtype)))
            for k, e in enumerate(experts):
                if e == -1:
                    continue
                w, l_ = divmod(e, num_experts // len(indices))
                copies = [copy for source in slots[w][l_] for copy in source]
                (place,) = [i for i, copy in enumerate(copies) if copy[:2] == (s, t)][-1:]
                total = total + probs[s][t, k].to(total.dtype) * rows[w][l_, place].to(total.dtype)
            out.append(total.to(rows[0].dtype))
        combined.append(stacked(out, rows[0][0]))
    return combined


def add_up(rows: Tensor, cells: Sequence, token: tuple[int, int], start: Tensor | None = None) -> Tensor:
    total = rows.new_zeros(rows.shape[1:], dtype=wide(rows.dtype)) if start is None else start
    for i, cell in enumerate(cells):
        if cell is not None and cell[:2] == token:
            total = total + rows[i].to(total.dtype)
    return total.to(rows.dtype)


def stacked(rows: list[Tensor], like: Tensor) -> Tensor:
    return torch.stack(rows) if rows else like.new_zeros((0, *like.shape[1:]))
