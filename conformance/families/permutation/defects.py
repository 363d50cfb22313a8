"""Planted defects of permutation."""

from typing import Any

import torch
from torch import Tensor

from conformance.core.defect import Defect, Wrapper, first_in_32_bits


def _prob_zero_not_stored(permute: Wrapper, tokens: Tensor, routing_map: Tensor, **settings: Any) -> Any:
    out = permute(tokens, routing_map, **settings)
    if out.probs is None:
        return out
    return out._replace(rows=_where_rows(out.probs != 0, out.rows, torch.empty_like(out.rows)))


def _prob_zero_is_padding(permute: Wrapper, tokens: Tensor, routing_map: Tensor, **settings: Any) -> Any:
    out = permute(tokens, routing_map, **settings)
    if out.probs is None:
        return out
    return out._replace(rows=_where_rows(out.probs != 0, out.rows, torch.zeros_like(out.rows)))


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


def _one_expert_a_token(permute: Wrapper, tokens: Tensor, routing_map: Tensor, **settings: Any) -> Any:
    first = ((routing_map != 0).long().cumsum(1) == 1) & (routing_map != 0)
    return permute(tokens, first, **settings)


def _empty_buffer_returned(unpermute: Wrapper, rows: Tensor, row_map: Any, **settings: Any) -> Any:
    return rows if rows.numel() == 0 else unpermute(rows, row_map, **settings)


def _tail_columns_unwritten(permute: Wrapper, tokens: Tensor, routing_map: Tensor, **settings: Any) -> Any:
    out = permute(tokens, routing_map, **settings)
    whole = tokens.shape[1] // 16 * 16
    if whole in (0, tokens.shape[1]) or out.rows.element_size() == 1:
        return out
    return out._replace(rows=torch.cat([out.rows[:, :whole], torch.empty_like(out.rows)[:, whole:]], 1))


_latched: dict[str, Any] = {}  # the first alignment, by function


def _first_align_for_ever(function: Wrapper, x: Tensor, *rest: Any, **settings: Any) -> Any:
    if settings.get("align") is not None:
        settings["align"] = _latched.setdefault(function.__name__, settings["align"])
    return function(x, *rest, **settings)


def _shortfall_not_told(pad_routing_map: Wrapper, routing_map: Tensor, **settings: Any) -> Any:
    out = pad_routing_map(routing_map, **settings)
    return out._replace(unreached=torch.zeros_like(out.unreached))


DEFECTS: tuple[Defect, ...] = (
    Defect(
        "P01",
        "32-bit row · stride in permute",
        "TransformerEngine #2196, 2.1 to 2.8",
        {"permute": first_in_32_bits},
    ),
    Defect(
        "P02",
        "32-bit row · columns in the index form",
        "TransformerEngine #2907, 2.0 to 2.15",
        {"indices_to_multihot": first_in_32_bits},
    ),
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
        "P10",
        "a token with several experts gets one row",
        "Megatron-LM a98c5ba19c, before 0.5",
        {"permute": _one_expert_a_token},
    ),
    Defect(
        "P12",
        "unpermute of no rows returns no tokens",
        "TransformerEngine 2.1 to 2.18",
        {"unpermute": _empty_buffer_returned},
    ),
    Defect(
        "P13",
        "probability 0 mistaken for padding: the row is zeroed",
        "TransformerEngine 2.6 to 2.18",
        {"permute": _prob_zero_is_padding},
    ),
    Defect("P19", "32-bit addresses in a row-copy kernel", "torchtitan #3969", {"sort_chunks": first_in_32_bits}),
    Defect(
        "P21",
        "tail mask: columns past the last whole block not written",
        "scattermoe 1b3dfa4",
        {"permute": _tail_columns_unwritten},
    ),
    Defect(
        "D01",
        "32-bit row · columns in unpadding",
        "TransformerEngine #2548, 2.0 to 2.11",
        {"unpermute": first_in_32_bits},
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
)
