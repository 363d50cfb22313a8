"""Defects of permutation that few inputs show: strange values, single values, large counts."""

from typing import Any

import torch
from torch import Tensor

from conformance.core.defect import Change, Defect, Wrapper, with_values

STRANGE = "a class of inputs: strange values at the ends of a row"
EVERY = "a class of inputs: every bit pattern of a dtype"
COUNTED = "a class of inputs: sizes past a power of two"
LOST_BITS, FOUND_BITS = 0x2B5A, 0x2B5B  # neither NaN nor infinity in bfloat16 and float16
COUNTER, SHORT, TOKENS = 2**8, 2**15, 2**16
ROOM, MOST_ALIGN, CHUNKS = 64, 128, 128


def _copied(change: Change) -> Wrapper:
    """Rows of at least two bytes per element are copied with this change."""

    def copy(base: Wrapper, x: Tensor, *rest: Any, **settings: Any) -> Any:
        out = base(x, *rest, **settings)
        return out if out.rows.element_size() == 1 else out._replace(rows=with_values(out.rows, change))

    return copy


def _flushed(rows: Tensor) -> Tensor:
    small = (rows != 0) & (rows.abs() < torch.finfo(rows.dtype).tiny)
    return torch.where(small, torch.zeros_like(rows), rows)


def _one_pattern(rows: Tensor) -> Tensor:
    if rows.element_size() != 2:
        return rows
    bits = rows.view(torch.int16)
    return torch.where(bits == LOST_BITS, torch.full_like(bits, FOUND_BITS), bits).view(rows.dtype)


def _expert_rows_below(most: int) -> Wrapper:
    """Rows past an expert's first `most` are stored over the first ones: the last are left out."""

    def permute(base: Wrapper, tokens: Tensor, routing_map: Tensor, **settings: Any) -> Any:
        out = base(tokens, routing_map, **settings)
        counts = (routing_map != 0).sum(0)
        if out.rows.element_size() == 1 or "capacity" in settings or not (counts > most).any():
            return out
        ends = out.tokens_per_expert.cumsum(0)
        starts = ends - out.tokens_per_expert
        place = torch.arange(len(out.rows), device=tokens.device)[:, None]
        lost = ((place >= starts + most) & (place < ends)).any(1, keepdim=True)
        return out._replace(rows=torch.where(lost, 0.0, out.rows))

    return permute


def _short_tokens(permute: Wrapper, tokens: Tensor, routing_map: Tensor, **settings: Any) -> Any:
    wrapped = torch.arange(len(tokens), device=tokens.device) % TOKENS
    return permute(tokens[wrapped] if len(tokens) > TOKENS else tokens, routing_map, **settings)


def _little_room(permute: Wrapper, tokens: Tensor, routing_map: Tensor, **settings: Any) -> Any:
    out = permute(tokens, routing_map, **settings)
    capacity = settings.get("capacity") or 0
    if capacity <= ROOM or out.rows.element_size() == 1:
        return out
    beyond = torch.arange(len(out.rows), device=tokens.device)[:, None] % capacity >= ROOM
    return out._replace(rows=torch.where(beyond, 0.0, out.rows))


def _least_align(function: Wrapper, *tensors: Tensor, **settings: Any) -> Any:
    align = settings.get("align") or 0
    return function(*tensors, **settings | ({"align": MOST_ALIGN} if align > MOST_ALIGN else {}))


def _few_chunks(sort_chunks: Wrapper, rows: Tensor, chunk_sizes: Tensor, order: Tensor, **settings: Any) -> Any:
    out = sort_chunks(rows, chunk_sizes, order, **settings)
    if len(order) <= CHUNKS or out.rows.element_size() == 1:
        return out
    done = int(chunk_sizes[order[:CHUNKS].long()].sum())
    return out._replace(rows=torch.cat([out.rows[:done], torch.zeros_like(out.rows[done:])]))


def _both(wrapper: Wrapper) -> dict[str, Wrapper]:
    return {"permute": wrapper, "sort_chunks": wrapper}


DEFECTS: tuple[Defect, ...] = (
    Defect("V01", "rows copied through a float32 unit that flushes subnormals", STRANGE, _both(_copied(_flushed))),
    Defect("V02", "one 16-bit pattern is copied as its neighbour", EVERY, _both(_copied(_one_pattern))),
    Defect("N01", "an 8-bit counter of an expert's rows", COUNTED, {"permute": _expert_rows_below(COUNTER)}),
    Defect("N02", "a signed 16-bit counter of an expert's rows", COUNTED, {"permute": _expert_rows_below(SHORT)}),
    Defect("N03", "16-bit token numbers", COUNTED, {"permute": _short_tokens}),
    Defect("N04", "a capacity's places beyond one block are not filled", COUNTED, {"permute": _little_room}),
    Defect(
        "N05",
        "an alignment above one block is that of the block",
        COUNTED,
        {"permute": _least_align, "pad_routing_map": _least_align},
    ),
    Defect("N06", "chunks beyond one block are not moved", COUNTED, {"sort_chunks": _few_chunks}),
)
