"""Defects of permutation at the edges of sizes, in gradients and in layouts; see `planted`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from conformance.families.permutation.permute import Permute
from conformance.mutants.defect import Change, Defect, Wrapper, with_values
from conformance.mutants.kinds.gradients import (
    read_as_contiguous,
    rounded_to,
    with_backward,
    with_gradient,
)

FORMS = ("indices_to_multihot", "multihot_to_indices")
EDGE = "a mistake that sizes at the edge of a block invite"
BACK = "a mistake that a backward of one's own invites"
LAYOUT = "a mistake that contiguous tensors do not show"
EMPTY = "a mistake that empty slots and empty experts invite"
TILE, SUMMED = 128, 8


def _moved(change: Callable[[Tensor, Tensor, Any], Tensor], needed: str = "") -> Wrapper:
    """Rows after change(rows, map, settings); of calls with one setting only, if it is named."""

    def wrapper(base: Wrapper, tokens: Tensor, routing_map: Tensor, **settings: Any) -> Any:
        out = base(tokens, routing_map, **settings)
        if out.rows.element_size() == 1 or (needed and not settings.get(needed)):
            return out
        return out._replace(rows=with_values(out.rows, lambda rows: change(rows, routing_map, settings)))

    return wrapper


def _past_the_tokens(rows: Tensor, routing_map: Tensor, settings: Any) -> Tensor:
    place, tokens = torch.arange(len(rows), device=rows.device), len(routing_map)
    over = place % settings["capacity"] - (tokens - 1)
    return rows[torch.where(over > 0, place - over, place)] if tokens else rows


def _last_of_a_tile(rows: Tensor, routing_map: Tensor, settings: Any) -> Tensor:
    counts = (routing_map != 0).sum(0)
    if settings.get("align") or settings.get("capacity") or settings.get("num_rows") is not None:
        return rows
    last = (counts.cumsum(0) - 1)[(counts == TILE)]
    return rows.index_fill(0, last, 0.0)


def _full_is_overflow(base: Wrapper, tokens: Tensor, routing_map: Tensor, **settings: Any) -> Any:
    out = base(tokens, routing_map, **settings)
    full = settings.get("num_rows") is not None and out.tokens_per_expert.sum() == settings["num_rows"]
    return out._replace(overflow=torch.ones_like(out.overflow)) if full else out


def _one_block_more(base: Wrapper, tokens: Tensor, routing_map: Tensor, **settings: Any) -> Any:
    out = base(tokens, routing_map, **settings)
    align, counts = settings.get("align") or 1, (routing_map != 0).sum(0)
    if align == 1 or settings.get("num_rows") is not None:
        return out
    whole = (counts % align == 0) & (counts > 0)
    return out._replace(tokens_per_expert=out.tokens_per_expert + whole * align)


def _unwritten_where_dropped(base: Wrapper, tokens: Tensor, routing_map: Tensor, **settings: Any) -> Any:
    probs = settings.get("probs")
    if probs is not None and settings.get("num_rows") is not None:
        settings["probs"] = with_gradient(probs, lambda g: torch.where((routing_map != 0) & (g == 0), 1.0, g))
    return base(tokens, routing_map, **settings)


def _nothing_where_filled(base: Wrapper, tokens: Tensor, routing_map: Tensor, **settings: Any) -> Any:
    probs = settings.get("probs")
    if probs is not None and settings.get("capacity"):
        settings["probs"] = with_gradient(probs, lambda g: torch.where(routing_map != 0, g, 0.0))
    return base(tokens, routing_map, **settings)


def _added_in_two_parts(base: Wrapper, tokens: Tensor, routing_map: Tensor, **settings: Any) -> Any:
    """Autograd adds the gradients of two uses in the dtype of the tokens."""
    out = base(tokens, routing_map, **settings)
    if not out.rows.requires_grad:
        return out
    even = torch.arange(len(out.rows), device=out.rows.device)[:, None] % 2 == 0
    again = base(tokens, routing_map, **settings)
    return out._replace(rows=torch.where(even, out.rows, again.rows))


def _odd_byte(base: Wrapper, tokens: Tensor, routing_map: Tensor, **settings: Any) -> Any:
    out = base(tokens, routing_map, **settings)
    if out.rows.element_size() > 1 or out.rows.shape[1] % 2 == 0:
        return out
    raw = out.rows.view(torch.uint8).clone()
    raw[:, -1] = 0
    return out._replace(rows=raw.view(out.rows.dtype))


def _stride_of_one_column(base: Wrapper, x: Tensor, *rest: Any, **settings: Any) -> Any:
    """Column stride 1 is taken for contiguous; of rows of one element it says nothing."""
    narrow = x.dim() == 2 and x.shape[1] == 1 and x.stride(0) != 1 and len(x) > 1
    return base(with_backward(x, read_as_contiguous(x), lambda g: g) if narrow else x, *rest, **settings)


# ---- unpermute


def _merged(change: Callable[[Tensor, Tensor], Tensor]) -> Wrapper:
    """unpermute with change(probs, rows)."""

    def wrapper(base: Wrapper, rows: Tensor, row_map: Any, **settings: Any) -> Any:
        if isinstance(settings.get("probs"), Tensor) and settings["probs"].is_floating_point():
            settings["probs"] = change(settings["probs"], rows)
        return base(rows, row_map, **settings)

    return wrapper


def _only_with_the_rows(probs: Tensor, rows: Tensor) -> Tensor:
    return probs if rows.requires_grad else with_gradient(probs, torch.zeros_like)


def _in_the_dtype_of_rows(probs: Tensor, rows: Tensor) -> Tensor:
    return with_values(probs, rounded_to(rows.dtype))


def _gradient_in_the_dtype_of_rows(probs: Tensor, rows: Tensor) -> Tensor:
    return with_gradient(probs, rounded_to(rows.dtype))


def _from_the_start(probs: Tensor, rows: Tensor) -> Tensor:
    shifted = probs.storage_offset() and probs.is_contiguous()
    return with_values(probs, lambda x: read_as_contiguous(probs, 0)) if shifted else probs


def _few_rows_of_a_token(base: Wrapper, rows: Tensor, row_map: Any, **settings: Any) -> Any:
    """A token's rows past the eighth are not added."""
    out = base(rows, row_map, **settings)
    if not rows.is_floating_point() or not len(rows):
        return out
    sums = base(torch.eye(len(rows), dtype=torch.float64, device=rows.device), row_map)  # [T,P] 1 where added
    late = ((sums.cumsum(1) > SUMMED) & (sums > 0)).any(0)
    return base(torch.where(late[:, None], 0.0, rows), row_map, **settings) if bool(late.any()) else out


def _cotangent_taken_for_contiguous(base: Wrapper, *inputs: Any, **settings: Any) -> Any:
    out = base(*inputs, **settings)
    return with_gradient(out, lambda g: g if g.is_contiguous() else read_as_contiguous(g))


# ---- chunks


def _chunk_end(chunk_sizes: Tensor) -> int:
    return int(chunk_sizes.sum())


def _same_order_back(sort_chunks: Wrapper, rows: Tensor, sizes: Tensor, order: Tensor, **settings: Any) -> Any:
    out = sort_chunks(rows, sizes, order, **settings)
    if not rows.requires_grad:
        return out
    back: Change = lambda g: sort_chunks(g, sizes, order).rows  # noqa: E731
    return out._replace(rows=with_backward(rows, out.rows.detach(), back))


def _no_probs_in_the_tail(sort_chunks: Wrapper, rows: Tensor, sizes: Tensor, order: Tensor, **settings: Any) -> Any:
    out = sort_chunks(rows, sizes, order, **settings)
    if out.probs is None:
        return out
    end = _chunk_end(sizes)
    return out._replace(probs=torch.cat([out.probs[:end], torch.zeros_like(out.probs[end:])]))


def _no_gradient_in_the_tail(sort_chunks: Wrapper, rows: Tensor, sizes: Tensor, order: Tensor, **settings: Any) -> Any:
    def change(g: Tensor) -> Tensor:
        end = _chunk_end(sizes)
        return torch.cat([g[:end], torch.zeros_like(g[end:])])

    return sort_chunks(with_gradient(rows, change), sizes, order, **settings)


# ---- indices


def _gradient_of_an_empty_slot(to_map: Wrapper, indices: Tensor, probs: Tensor, **settings: Any) -> Any:
    """Slot -1 reads the gradient of the last expert, as numpy's index does."""
    seen: dict[str, Tensor] = {}

    def noted(g: Tensor) -> Tensor:
        seen["last"] = g[:, -1:]
        return g

    back: Change = lambda g: torch.where(indices < 0, seen["last"].expand_as(g).to(g.dtype), g)  # noqa: E731
    out = to_map(indices, with_gradient(probs, back), **settings)
    return out._replace(probs=with_gradient(out.probs, noted))


def _gradient_of_every_duplicate(to_map: Wrapper, indices: Tensor, probs: Tensor, **settings: Any) -> Any:
    seen: dict[str, Tensor] = {}

    def noted(g: Tensor) -> Tensor:
        seen["all"] = g
        return g

    def back(g: Tensor) -> Tensor:
        found = seen["all"].gather(1, indices.clamp(min=0).long())
        return torch.where(indices < 0, 0.0, found).to(g.dtype)

    out = to_map(indices, with_gradient(probs, back), **settings)
    return out._replace(probs=with_gradient(out.probs, noted))


def _empty_row_is_the_first_expert(to_map: Wrapper, indices: Tensor, probs: Tensor, **settings: Any) -> Any:
    out = to_map(indices, probs, **settings)
    found = out.routing_map.clone()
    found[:, 0] |= ~out.routing_map.any(1)
    return out._replace(routing_map=found)


def _full_row_is_overflow(to_indices: Wrapper, routing_map: Tensor, probs: Tensor, **settings: Any) -> Any:
    out = to_indices(routing_map, probs, **settings)
    return out._replace(overflow=out.overflow | ((routing_map != 0).sum(1) == settings["topk"]).any())


def _more_slots_than_experts(to_indices: Wrapper, routing_map: Tensor, probs: Tensor, **settings: Any) -> Any:
    out = to_indices(routing_map, probs, **settings)
    index = out.indices.clone()
    index[:, routing_map.shape[1] :] = 0
    return out._replace(indices=index)


def _block_of_an_empty_expert(pad: Wrapper, routing_map: Tensor, *, align: int) -> Any:
    out = pad(routing_map, align=align)
    found, empty = out.routing_map.clone(), ~(routing_map != 0).any(0)
    found[:align] |= empty
    return out._replace(routing_map=found)


def _no_block_of_64(pad: Wrapper, routing_map: Tensor, *, align: int) -> Any:
    return pad(routing_map, align=32 if align == 64 else align)


BOTH = (Permute.function, "unpermute")


def _no_minus_zero(form: Wrapper, *inputs: Tensor, **settings: Any) -> Any:
    out = form(*inputs, **settings)
    return out._replace(probs=with_values(out.probs, lambda x: torch.where(x == 0, 0, x)))


DEFECTS: tuple[Defect, ...] = (
    Defect("X01", "room beyond the tokens repeats the last one", EDGE, {BOTH[0]: _moved(_past_the_tokens, "capacity")}),
    Defect("X02", "the last row of exactly one tile is left out", EDGE, {BOTH[0]: _moved(_last_of_a_tile)}),
    Defect("X03", "a buffer that is exactly full has overflowed", EDGE, {BOTH[0]: _full_is_overflow}),
    Defect("X04", "a count of whole blocks is padded by one more", EDGE, {BOTH[0]: _one_block_more}),
    Defect("X05", "the gradient of a dropped row's prob is not written", BACK, {BOTH[0]: _unwritten_where_dropped}),
    Defect("X06", "the prob of a row that fills a capacity has no gradient", BACK, {BOTH[0]: _nothing_where_filled}),
    Defect("X07", "gradients of a token are added in 16 bits", BACK, {BOTH[0]: _added_in_two_parts}),
    Defect("X08", "rows of an odd number of bytes lose the last", EDGE, {BOTH[0]: _odd_byte}),
    Defect("X09", "rows of one column are taken for contiguous", LAYOUT, dict.fromkeys(BOTH, _stride_of_one_column)),
    Defect("X10", "probs have a gradient only if rows have one", BACK, {BOTH[1]: _merged(_only_with_the_rows)}),
    Defect("X11", "merging probs are rounded to the rows' dtype", BACK, {BOTH[1]: _merged(_in_the_dtype_of_rows)}),
    Defect(
        "X12",
        "the gradient of merging probs is rounded to the rows' dtype",
        BACK,
        {BOTH[1]: _merged(_gradient_in_the_dtype_of_rows)},
    ),
    Defect("X13", "the storage offset of merging probs is forgotten", LAYOUT, {BOTH[1]: _merged(_from_the_start)}),
    Defect("X14", "a token's rows past the eighth are not added", EDGE, {BOTH[1]: _few_rows_of_a_token}),
    Defect("X15", "a cotangent is taken for contiguous", LAYOUT, {BOTH[1]: _cotangent_taken_for_contiguous}),
    Defect("X16", "the backward moves chunks as the forward does", BACK, {"sort_chunks": _same_order_back}),
    Defect("X17", "probs past the last chunk are lost", EDGE, {"sort_chunks": _no_probs_in_the_tail}),
    Defect("X18", "rows past the last chunk get no gradient", BACK, {"sort_chunks": _no_gradient_in_the_tail}),
    Defect(
        "X19",
        "an empty slot gets the gradient of the last expert",
        EMPTY,
        {"indices_to_multihot": _gradient_of_an_empty_slot},
    ),
    Defect("X20", "each duplicate gets the gradient", EMPTY, {"indices_to_multihot": _gradient_of_every_duplicate}),
    Defect(
        "X21",
        "a row of empty slots names the first expert",
        EMPTY,
        {"indices_to_multihot": _empty_row_is_the_first_expert},
    ),
    Defect("X22", "a row that is exactly full has overflowed", EDGE, {"multihot_to_indices": _full_row_is_overflow}),
    Defect(
        "X23",
        "slots past the number of experts hold expert 0",
        EMPTY,
        {"multihot_to_indices": _more_slots_than_experts},
    ),
    Defect("X24", "an empty expert is padded to a block", EMPTY, {"pad_routing_map": _block_of_an_empty_expert}),
    Defect("X26", "an alignment of 64 is that of 32", EDGE, {"pad_routing_map": _no_block_of_64}),
    Defect("X27", "a probability of -0 becomes 0", EMPTY, dict.fromkeys(FORMS, _no_minus_zero)),
)
