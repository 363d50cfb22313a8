"""Real defects, planted in a working implementation.

Each is a namespace like any other: the functions of a base implementation, some of them wrapped so that they have a defect
that public code had. `conformance.mutants.planted:P12.my_kernels.moe` is my_kernels.moe with the defect P12.

A defect that needs more than 2³¹ elements is planted as the address arithmetic that causes it: offsets are computed as 32-bit
integers, which a strided view of a few rows shows.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from conformance.families.dispatch import defects as planted_dispatch
from conformance.families.dispatch import defects_wire as planted_wire
from conformance.families.experts import defects as planted_experts
from conformance.families.quantization import defects as planted_quantization
from conformance.families.router import defects as planted_router
from conformance.families.router import defects_ranks as planted_ranks
from conformance.interface import imported

Wrapper = Callable[..., Any]


@dataclass(frozen=True)
class Defect:
    """One defect: what it is, where it was seen, and the functions that have it here."""

    name: str
    title: str
    origin: str
    wrappers: dict[str, Wrapper]  # by function: called as wrapper(base function, *args, **settings)


class Planted:
    """A base implementation with a defect."""

    def __init__(self, defect: Defect, base: ModuleType | None = None) -> None:
        self._defect, self._base = defect, base

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        base = self.__dict__["_base"]
        if base is None:
            return Planted(self._defect, imported(name))
        wrapper = self._defect.wrappers.get(name)
        if wrapper is None:
            found = getattr(base, name)
            return Planted(self._defect, found) if isinstance(found, ModuleType) else found
        original = getattr(base, name)
        return functools.wraps(original)(functools.partial(wrapper, original))


def _int32_view(x: Tensor) -> Tensor:
    """What a kernel reads that computes row · stride + column · stride in 32 bits: the wrapped address, or nothing useful."""
    offsets = torch.zeros((), dtype=torch.int64)
    for dim, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
        offsets = offsets + (torch.arange(size) * stride).reshape([size if d == dim else 1 for d in range(x.dim())])
    wrapped = (offsets + 2**31) % 2**32 - 2**31
    if x.numel() == 0 or torch.equal(wrapped, offsets):
        return x
    raw = x.detach().view(torch.uint8) if x.element_size() == 1 else x.detach()
    length = raw.untyped_storage().nbytes() // raw.element_size()
    flat = raw.as_strided((length,), (1,), 0)
    address = wrapped.add(x.storage_offset()).to(x.device)
    inside = (address >= 0) & (address < length)
    out = torch.where(inside, flat[torch.where(inside, address, 0)], torch.zeros((), dtype=raw.dtype, device=x.device))
    return out.view(x.dtype).requires_grad_(x.requires_grad)


def _first_in_32_bits(function: Wrapper, x: Tensor, *rest: Any, **settings: Any) -> Any:
    return function(_int32_view(x), *rest, **settings)


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


_latched: dict[str, Any] = {}


def _first_align_for_ever(function: Wrapper, x: Tensor, *rest: Any, **settings: Any) -> Any:
    if settings.get("align") is not None:
        settings["align"] = _latched.setdefault(function.__name__, settings["align"])
    return function(x, *rest, **settings)


def _shortfall_not_told(pad_routing_map: Wrapper, routing_map: Tensor, **settings: Any) -> Any:
    out = pad_routing_map(routing_map, **settings)
    return out._replace(unreached=torch.zeros_like(out.unreached))


def _counted_for_each_expert(deepep_layout: Wrapper, indices: Tensor, **settings: Any) -> Any:
    """Where a token names two experts of a rank, that rank is told of two tokens."""
    out = deepep_layout(indices, **settings)
    named = (indices[:, :, None] == torch.arange(settings["num_experts"], device=indices.device)).any(1)
    return out._replace(num_tokens_per_rank=named.unflatten(1, (settings["ranks"], -1)).sum((0, 2)))


DEFECTS = {
    defect.name: defect
    for defect in (
        Defect(
            "P01",
            "32-bit row · stride in permute",
            "TransformerEngine #2196, 2.1 to 2.8",
            {"permute": _first_in_32_bits},
        ),
        Defect(
            "P02",
            "32-bit row · columns in the index form",
            "TransformerEngine #2907, 2.0 to 2.15",
            {"indices_to_multihot": _first_in_32_bits},
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
            "probability 0 taken for padding: the row is zeroed",
            "TransformerEngine 2.6 to 2.18",
            {"permute": _prob_zero_is_padding},
        ),
        Defect("P19", "32-bit addresses in a row-copy kernel", "torchtitan #3969", {"sort_chunks": _first_in_32_bits}),
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
            {"unpermute": _first_in_32_bits},
        ),
        Defect(
            "D02",
            "the first alignment is kept for ever",
            "TransformerEngine #1926, 2.3 to 2.5",
            {"permute": _first_align_for_ever, "pad_routing_map": _first_align_for_ever},
        ),
        Defect(
            "D05",
            "a multiple that cannot be reached is not told",
            "Megatron-LM #6086, 0.13 to 0.19",
            {"pad_routing_map": _shortfall_not_told},
        ),
        Defect("Q08", "32-bit offsets in gated kernels", "TransformerEngine #1988, to 2.6", {"glu": _first_in_32_bits}),
        Defect("Q08q", "32-bit offsets in casts", "TransformerEngine #2034, to 2.6", {"quantize": _first_in_32_bits}),
        Defect(
            "L17",
            "32-bit row · stride in dispatch",
            "a mistake that dispatchers invite",
            {"hybridep_dispatch": _first_in_32_bits},
        ),
        Defect(
            "L18",
            "a token counts once for each expert of a rank",
            "a mistake that dispatchers invite",
            {"deepep_layout": _counted_for_each_expert},
        ),
        *(
            Defect(*listed)
            for listed in planted_router.LISTED
            + planted_experts.LISTED
            + planted_quantization.LISTED
            + planted_dispatch.LISTED
        ),
        *(Defect(*listed) for listed in planted_ranks.LISTED + planted_wire.LISTED),
    )
}


def __getattr__(name: str) -> Planted:
    """The defect of that name, waiting for a base implementation."""
    if name not in DEFECTS:
        raise AttributeError(f"there is no planted defect {name!r}; there are {', '.join(DEFECTS)}")
    return Planted(DEFECTS[name])
