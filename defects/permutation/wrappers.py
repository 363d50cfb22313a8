"""Planted defects of permutation: those of other libraries, of calls that follow one another, and
those that few inputs show.
"""

from typing import Any

import torch
from torch import Tensor

from conformance.mutants.defect import Defect, Wrapper
from conformance.mutants.kinds.gradients import read_as_contiguous

COUNTED = "a class of inputs: sizes past a power of two"
COUNTER, SHORT, TOKENS = 2**8, 2**15, 2**16


def _prob_zero_not_stored(permute: Wrapper, tokens: Tensor, routing_map: Tensor, **settings: Any) -> Any:
    out = permute(tokens, routing_map, **settings)
    if out.probs is None:
        return out
    return out._replace(rows=_where_rows(out.probs != 0, out.rows, torch.empty_like(out.rows)))


def _where_rows(kept: Tensor, rows: Tensor, others: Tensor) -> Tensor:
    if rows.element_size() == 1:
        return torch.where(kept[:, None], rows.view(torch.uint8), others.view(torch.uint8)).view(rows.dtype)
    return torch.where(kept[:, None], rows, others)


_latched: dict[str, Any] = {}  # the first alignment, by function


def _first_align_for_ever(function: Wrapper, x: Tensor, *rest: Any, **settings: Any) -> Any:
    if settings.get("align") is not None:
        settings["align"] = _latched.setdefault(function.__name__, settings["align"])
    return function(x, *rest, **settings)


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
        "D02",
        "the first alignment is cached forever",
        "TransformerEngine #1926, 2.3 to 2.5",
        {"permute": _first_align_for_ever, "pad_routing_map": _first_align_for_ever},
    ),
    # how calls follow one another
    Defect("X28", "the order of chunks is taken for contiguous", LAYOUT, {"sort_chunks": _order_read_flat}),
    # strange values, single values, large counts
    Defect("N02", "a signed 16-bit counter of an expert's rows", COUNTED, {"permute": _expert_rows_below(SHORT)}),
    Defect("N03", "16-bit token numbers", COUNTED, {"permute": _short_tokens}),
)
