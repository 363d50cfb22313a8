"""Planted defects of permutation: those of other libraries, of calls that follow one another, and
those that few inputs show.
"""

from typing import Any

import torch
from torch import Tensor

from conformance.mutants.defect import Change, Defect, Wrapper, with_values
from conformance.mutants.kinds import calls
from conformance.mutants.kinds.gradients import read_as_contiguous

STRANGE = "a class of inputs: strange values at the ends of a row"
EVERY = "a class of inputs: every bit pattern of a dtype"
COUNTED = "a class of inputs: sizes past a power of two"
ILLEGAL = "illegal values that only the device sees"
LOST_BITS, FOUND_BITS = 0x2B5A, 0x2B5B  # neither NaN nor infinity in bfloat16 and float16
COUNTER, SHORT, TOKENS = 2**8, 2**15, 2**16
ROOM, MOST_ALIGN, CHUNKS = 64, 128, 128


def _prob_zero_not_stored(permute: Wrapper, tokens: Tensor, routing_map: Tensor, **settings: Any) -> Any:
    out = permute(tokens, routing_map, **settings)
    if out.probs is None:
        return out
    return out._replace(rows=_where_rows(out.probs != 0, out.rows, torch.empty_like(out.rows)))


def _where_rows(kept: Tensor, rows: Tensor, others: Tensor) -> Tensor:
    if rows.element_size() == 1:
        return torch.where(kept[:, None], rows.view(torch.uint8), others.view(torch.uint8)).view(rows.dtype)
    return torch.where(kept[:, None], rows, others)


def _negative_rows_allocated(permute: Wrapper, tokens: Tensor, routing_map: Tensor, **settings: Any) -> Any:
    num_rows = settings.get("num_rows")
    if num_rows is not None and num_rows < 0:
        return torch.empty(num_rows, tokens.shape[1])
    return permute(tokens, routing_map, **settings)


def _two_values_without_tokens(permute: Wrapper, tokens: Tensor, routing_map: Tensor, **settings: Any) -> Any:
    out = permute(tokens, routing_map, **settings)
    return (tokens, out.row_map) if tokens.shape[0] == 0 else out


def _empty_buffer_returned(unpermute: Wrapper, rows: Tensor, row_map: Any, **settings: Any) -> Any:
    return rows if rows.numel() == 0 else unpermute(rows, row_map, **settings)


_latched: dict[str, Any] = {}  # the first alignment, by function


def _first_align_for_ever(function: Wrapper, x: Tensor, *rest: Any, **settings: Any) -> Any:
    if settings.get("align") is not None:
        settings["align"] = _latched.setdefault(function.__name__, settings["align"])
    return function(x, *rest, **settings)


def _shortfall_not_told(pad_routing_map: Wrapper, routing_map: Tensor, **settings: Any) -> Any:
    out = pad_routing_map(routing_map, **settings)
    return out._replace(unreached=torch.zeros_like(out.unreached))


def _itself_where_nothing_moves(sort_chunks: Wrapper, rows: Tensor, *rest: Any, **settings: Any) -> Any:
    out = sort_chunks(rows, *rest, **settings)
    order = rest[-1]
    in_order = order.tolist() == list(range(len(order))) and out.rows.shape == rows.shape
    return out._replace(rows=rows) if in_order and not rows.requires_grad else out


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


def _sizes_within_the_rows(sort_chunks: Wrapper, rows: Tensor, sizes: Tensor, *rest: Any, **settings: Any) -> Any:
    ends = sizes.clamp(min=0).cumsum(0).clamp(max=len(rows))
    return sort_chunks(rows, ends.diff(prepend=ends.new_zeros(1)), *rest, **settings)


def _first_expert_for_none(
    indices_to_multihot: Wrapper, indices: Tensor, *rest: Any, num_experts: int, **settings: Any
) -> Any:
    inside = torch.where(indices < num_experts, indices, 0)
    return indices_to_multihot(inside, *rest, num_experts=num_experts, **settings)


def _both(wrapper: Wrapper) -> dict[str, Wrapper]:
    return {"permute": wrapper, "sort_chunks": wrapper}


LAYOUT = "a class of inputs: layouts"


def _order_read_flat(function: Wrapper, rows: Tensor, sizes: Tensor, order: Tensor, **settings: Any) -> Any:
    """Chunks are ranked by the numbers next to each other in memory, which are an order too."""
    flat = order if order.is_contiguous() else read_as_contiguous(order).argsort(stable=True).argsort()
    return function(rows, sizes, flat.to(order.dtype), **settings)


DEFECTS: tuple[Defect, ...] = (
    Defect(
        "P04",
        "slots of probability 0 and padding rows not stored",
        "TransformerEngine #2026, 2.6",
        {"permute": _prob_zero_not_stored},
    ),
    Defect(
        "P06",
        "num_rows = -1 reaches the allocator",
        "TransformerEngine #2876, 2.1 to 2.14.1",
        {"permute": _negative_rows_allocated},
    ),
    Defect(
        "P09",
        "two values instead of six when there are no tokens",
        "TransformerEngine #1468, before 2.2",
        {"permute": _two_values_without_tokens},
    ),
    Defect(
        "P12",
        "unpermute of no rows returns no tokens",
        "TransformerEngine 2.1 to 2.18",
        {"unpermute": _empty_buffer_returned},
    ),
    Defect(
        "D02",
        "the first alignment is cached forever",
        "TransformerEngine #1926, 2.3 to 2.5",
        {"permute": _first_align_for_ever, "pad_routing_map": _first_align_for_ever},
    ),
    Defect(
        "D05",
        "an unreachable multiple is not reported",
        "Megatron-LM #6086, 0.13 to 0.19",
        {"pad_routing_map": _shortfall_not_told},
    ),
    # how calls follow one another
    Defect(
        "C11", "the output is the input where nothing moves", calls.CALLS, {"sort_chunks": _itself_where_nothing_moves}
    ),
    Defect("X28", "the order of chunks is taken for contiguous", LAYOUT, {"sort_chunks": _order_read_flat}),
    # strange values, single values, large counts
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
    Defect("I01", "sizes past the rows are cut, silently", ILLEGAL, {"sort_chunks": _sizes_within_the_rows}),
    Defect("I02", "an index of no expert is the first", ILLEGAL, {"indices_to_multihot": _first_expert_for_none}),
    Defect("N06", "chunks beyond one block are not moved", COUNTED, {"sort_chunks": _few_chunks}),
)
