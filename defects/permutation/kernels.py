"""Defects of permutation that kernels of other libraries have had, or could have; see `planted`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from conformance.mutants.defect import Defect, Wrapper, with_values
from conformance.mutants.kinds.addresses import int32_view
from conformance.mutants.kinds.gradients import rounded_to, with_backward, with_gradient

PADDED = "a mistake that an index of padding invites"
MASK = "a mistake that reading a mask or a map invites"
BACK = "a mistake that a backward of one's own invites"
ORDER = "a mistake that one order of tokens invites"
WIDE = "a mistake that 32-bit addresses of small inputs invite"


def _numbered(permute: Wrapper, tokens: Tensor, routing_map: Tensor, settings: dict[str, Any]) -> Tensor:
    """The token of each row; -1 for rows of zeros."""
    sizes = {name: x for name, x in settings.items() if name != "probs"}
    number = torch.arange(1, len(tokens) + 1, dtype=torch.float64, device=tokens.device)[:, None]
    found: Tensor = permute(number, routing_map, **sizes).rows[:, 0].long() - 1
    return found


def _last_padding_holds_a_token(permute: Wrapper, tokens: Tensor, routing_map: Tensor, **settings: Any) -> Any:
    out = permute(tokens, routing_map, **settings)
    padded = settings.get("align") and settings.get("num_rows") is None
    if not padded or out.rows.element_size() == 1 or not len(tokens):
        return out
    index = _numbered(permute, tokens, routing_map, settings)
    start = len(index) - int(out.tokens_per_expert[-1])
    late = (index < 0) & (torch.arange(len(index), device=index.device) >= start)
    return out._replace(rows=with_values(out.rows, lambda rows: torch.where(late[:, None], tokens[-1:], rows)))


def _square_map_is_turned(permute: Wrapper, tokens: Tensor, routing_map: Tensor, **settings: Any) -> Any:
    out = permute(tokens, routing_map, **settings)
    square = routing_map.shape[0] == routing_map.shape[1]
    return permute(tokens, routing_map.T, **settings) if square else out


def _map_in_32_bits(permute: Wrapper, tokens: Tensor, routing_map: Tensor, **settings: Any) -> Any:
    permute(tokens, routing_map, **settings)
    return permute(tokens, int32_view(routing_map), **settings)


def _probs_in_32_bits(permute: Wrapper, tokens: Tensor, *rest: Any, **settings: Any) -> Any:
    out, probs = permute(tokens, *rest, **settings), settings.get("probs")
    if probs is None:
        return out
    seen = with_backward(probs, int32_view(probs.detach()), lambda g: g)
    return permute(tokens, *rest, **settings | {"probs": seen})


def _padding_is_the_last_token(permute: Wrapper, tokens: Tensor, routing_map: Tensor, **settings: Any) -> Any:
    """The gradient of a row of zeros goes to token -1."""
    out = permute(tokens, routing_map, **settings)
    if not out.rows.requires_grad or not len(tokens):
        return out
    seen: dict[str, Tensor] = {}
    padding = _numbered(permute, tokens, routing_map, settings) < 0

    def noted(g: Tensor) -> Tensor:
        seen["rows"] = g[padding].double().sum(0)
        return g

    def back(g: Tensor) -> Tensor:
        return torch.cat([g[:-1], (g[-1].double() + seen["rows"])[None].to(g.dtype)])

    again = permute(with_gradient(tokens, back), routing_map, **settings)
    return again._replace(rows=with_gradient(again.rows, noted))


def _filled_from_the_end(permute: Wrapper, tokens: Tensor, routing_map: Tensor, **settings: Any) -> Any:
    """Unrouted tokens fill a capacity from the last one on."""
    out, capacity = permute(tokens, routing_map, **settings), settings.get("capacity")
    if not capacity or out.rows.element_size() == 1 or not len(tokens):
        return out
    index = _numbered(permute, tokens, routing_map, settings).reshape(-1, capacity).clone()
    for e, own in enumerate(index):
        free = (routing_map[:, e] == 0).nonzero().flatten()
        filled = (own >= 0) & (routing_map[own.clamp(min=0), e] == 0)
        own[filled] = free.flip(0)[: int(filled.sum())]
    flat = index.flatten()
    rows = torch.where(flat[:, None] < 0, 0.0, tokens[flat.clamp(min=0)]).to(tokens.dtype)
    return out._replace(rows=with_values(out.rows, lambda _: rows.detach()))


def _without_rows_unwritten(unpermute: Wrapper, rows: Tensor, row_map: Any, **settings: Any) -> Any:
    out = unpermute(rows, row_map, **settings)
    ones = torch.ones(len(rows), 1, dtype=torch.float64, device=rows.device)
    some = unpermute(ones, row_map) > 0
    return torch.where(some, out, torch.empty_like(out))


def _padding_gradient_unwritten(unpermute: Wrapper, rows: Tensor, row_map: Any, **settings: Any) -> Any:
    out = unpermute(rows, row_map, **settings)
    if not rows.requires_grad:
        return out
    taken = torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
    number = torch.eye(len(rows), dtype=torch.float64, device=rows.device)
    taken |= (unpermute(number, row_map) > 0).any(0)
    change = lambda g: torch.where(taken[:, None], g, torch.empty_like(g))  # noqa: E731
    return unpermute(with_gradient(rows, change), row_map, **settings)


def _prob(change: Callable[[Tensor, Tensor], Tensor]) -> Wrapper:
    """unpermute with change(gradient, probs) as the gradient of merging probs."""

    def wrapper(unpermute: Wrapper, rows: Tensor, row_map: Any, **settings: Any) -> Any:
        out, probs = unpermute(rows, row_map, **settings), settings.get("probs")
        if probs is None or not probs.requires_grad:
            return out
        changed = with_gradient(probs, lambda g: change(g, probs.detach()))
        return unpermute(rows, row_map, **settings | {"probs": changed})

    return wrapper


def _behind_two_empty_chunks(sort_chunks: Wrapper, rows: Tensor, sizes: Tensor, order: Tensor, **settings: Any) -> Any:
    """The first row of a chunk is searched past one empty chunk, and not past two."""
    out = sort_chunks(rows, sizes, order, **settings)
    found, ends = sizes.tolist(), sizes.cumsum(0).tolist()
    if out.rows.element_size() == 1 or not len(rows):
        return out
    lost = [end - n for i, (n, end) in enumerate(zip(found, ends, strict=True)) if n and found[i - 2 : i] == [0, 0]]
    return sort_chunks(
        with_values(rows, lambda x: x.index_fill(0, torch.tensor(lost, dtype=torch.int64), 0)), sizes, order, **settings
    )


def _probs_in_the_dtype_of_rows(sort_chunks: Wrapper, rows: Tensor, *rest: Any, **settings: Any) -> Any:
    out, probs = sort_chunks(rows, *rest, **settings), settings.get("probs")
    if probs is None or not rows.is_floating_point() or rows.element_size() == 1:
        return out
    return sort_chunks(rows, *rest, **settings | {"probs": with_values(probs, rounded_to(rows.dtype))})


def _zero_is_not_routed(to_indices: Wrapper, routing_map: Tensor, probs: Tensor, **settings: Any) -> Any:
    """The map is read from the probs."""
    to_indices(routing_map, probs, **settings)
    return to_indices((routing_map != 0) & (probs.detach() != 0), probs, **settings)


def _duplicates_added(to_map: Wrapper, indices: Tensor, probs: Tensor, **settings: Any) -> Any:
    out = to_map(indices, probs, **settings)
    hit = indices[:, :, None] == torch.arange(settings["num_experts"], device=indices.device)
    total = torch.where(hit, probs.detach()[:, :, None], 0).sum(1).to(probs.dtype)
    return out._replace(probs=with_values(out.probs, lambda x: torch.where(hit.sum(1) > 1, total, x)))


def _padded_from_the_end(pad: Wrapper, routing_map: Tensor, *, align: int) -> Any:
    pad(routing_map, align=align)
    out = pad(routing_map.flip(0), align=align)
    return out._replace(routing_map=out.routing_map.flip(0))


PERMUTE, UNPERMUTE, CHUNKS = "permute", "unpermute", "sort_chunks"
DEFECTS: tuple[Defect, ...] = (
    Defect("AD01", "padding of the last expert holds a token", PADDED, {PERMUTE: _last_padding_holds_a_token}),
    Defect("AD02", "a map of as many tokens as experts is read turned", MASK, {PERMUTE: _square_map_is_turned}),
    Defect("AD03", "32-bit row · stride of the map", WIDE, {PERMUTE: _map_in_32_bits}),
    Defect("AD04", "32-bit row · stride of the probs", WIDE, {PERMUTE: _probs_in_32_bits}),
    Defect("AD05", "the gradient of padding is the last token's", PADDED, {PERMUTE: _padding_is_the_last_token}),
    Defect("AD06", "a capacity is filled from the last token on", ORDER, {PERMUTE: _filled_from_the_end}),
    Defect("AD07", "a token without rows is not written", PADDED, {UNPERMUTE: _without_rows_unwritten}),
    Defect("AD08", "the gradient of padding is not written", PADDED, {UNPERMUTE: _padding_gradient_unwritten}),
    Defect(
        "AD09",
        "a merging prob of 0 has no gradient",
        BACK,
        {UNPERMUTE: _prob(lambda g, probs: torch.where(probs == 0, 0, g))},
    ),
    Defect(
        "AD10",
        "a merging prob of 1 has no gradient",
        BACK,
        {UNPERMUTE: _prob(lambda g, probs: torch.where(probs == 1, 0, g))},
    ),
    Defect("AD11", "rows past two empty chunks lose the first", MASK, {CHUNKS: _behind_two_empty_chunks}),
    Defect("AD12", "probs are rounded to the dtype of their rows", BACK, {CHUNKS: _probs_in_the_dtype_of_rows}),
    Defect("AD13", "a prob of 0 is not listed", MASK, {"multihot_to_indices": _zero_is_not_routed}),
    Defect("AD14", "probs of one expert's slots are added", MASK, {"indices_to_multihot": _duplicates_added}),
    Defect("AD15", "the last tokens pad", ORDER, {"pad_routing_map": _padded_from_the_end}),
)
