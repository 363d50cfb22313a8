"""Defects of dispatchers that kernels of other libraries have had, or could have; see `planted`."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import moe_ref
from conformance.mutants.defect import Defect, Wrapper
from defects.dispatch.parts import taken
from defects.quantization.wrappers import Beside

FLAG = "a mistake that a flag of overflow invites"
WIRE = "a mistake that scales on the wire invite"
EMPTY = "a mistake that empty slots and empty ranks invite"
STATE = "a mistake that buffers of several calls invite"
SIGN, LARGEST = 0x80, 0x7E  # of E4M3
TINY = torch.finfo(torch.float32).tiny


def _no_bias_without_rows(combine: Wrapper, rows: Tensor, handle: Any, **settings: Any) -> Any:
    out, biases = combine(rows, handle, **settings), settings.get("biases", ())
    one = torch.ones(len(rows), 1, dtype=torch.float64, device=rows.device)
    some = combine(one, handle, group=settings["group"]).tokens > 0
    return out._replace(tokens=torch.where(some, out.tokens, 0)) if len(biases) else out


def _whole_blocks_have_one_more(dispatch: Wrapper, tokens: Tensor, *rest: Any, **settings: Any) -> Any:
    out, align = dispatch(tokens, *rest, **settings), settings.get("expert_alignment", 1)
    if align == 1 or out.tokens_per_expert is None:
        return out
    exact = dispatch(tokens, *rest, **settings | {"expert_alignment": 1}).tokens_per_expert
    whole = (exact % align == 0) & (exact > 0)
    return out._replace(tokens_per_expert=out.tokens_per_expert + whole * align)


def _later_scales_of_another_row(dispatch: Wrapper, *inputs: Any, **settings: Any) -> Any:
    out = dispatch(*inputs, **settings)
    if out.scales is None or out.scales.shape[1] < 2:
        return out
    return out._replace(scales=torch.cat([out.scales[:, :1], out.scales[:, 1:].roll(1, 0)], 1))


def _scales_as_numbers(dispatch: Wrapper, *inputs: Any, **settings: Any) -> Any:
    """Scales, which may be packed codes, pass through a float unit that flushes subnormals."""
    out = dispatch(*inputs, **settings)
    if out.scales is None:
        return out
    return out._replace(scales=torch.where(out.scales.abs() < TINY, 0.0, out.scales))


def _codes_by_the_exact_scale(dispatch: Wrapper, *inputs: Any, **settings: Any) -> Any:
    out = dispatch(*inputs, **settings)
    return (
        out._replace(rows=dispatch(*inputs, **settings | {"round_scale": False}).rows)
        if settings.get("round_scale")
        else out
    )


def _powers_rounded_up(dispatch: Wrapper, *inputs: Any, **settings: Any) -> Any:
    out = dispatch(*inputs, **settings)
    if not settings.get("round_scale"):
        return out
    exact = dispatch(*inputs, **settings | {"round_scale": False}).scales
    return out._replace(scales=torch.where(exact == out.scales, 2 * out.scales, out.scales))


def _empty_slots_read(
    combine: Wrapper, rows: Tensor, indices: Tensor, probs: Tensor, *rest: Any, **settings: Any
) -> Any:
    out = combine(rows, indices, probs, *rest, **settings)
    read = (0 * torch.where(indices < 0, probs.detach(), 0.0)).sum(1, keepdim=True)
    return out + read.to(out.dtype)


def _fillers_without_probs(dispatch: Wrapper, tokens: Tensor, routing_map: Tensor, **settings: Any) -> Any:
    out, probs = dispatch(tokens, routing_map, **settings), settings.get("probs")
    routed = dispatch(tokens, routing_map, **settings | {"probs": (routing_map != 0).double()}).probs
    if not settings.get("capacity") or probs is None:
        return out
    return out._replace(probs=torch.where(routed != 0, out.probs, 0))


def _overflow_of_ones_own_tokens(dispatch: Wrapper, tokens: Tensor, routing_map: Tensor, **settings: Any) -> Any:
    out, num_rows = dispatch(tokens, routing_map, **settings), settings.get("num_rows")
    if num_rows is None or settings.get("expert_tensor_parallel", 1) > 1:
        return out
    group = settings["group"]
    mine = (routing_map != 0).chunk(dist.get_world_size(group), 1)[dist.get_rank(group)]
    return out._replace(overflow=torch.full_like(out.overflow, bool(mine.sum() > num_rows)))


def _full_is_overflow(dispatch: Wrapper, tokens: Tensor, routing_map: Tensor, **settings: Any) -> Any:
    out, num_rows = dispatch(tokens, routing_map, **settings), settings.get("num_rows")
    full = num_rows is not None and bool(out.tokens_per_expert.sum() == num_rows)
    return out._replace(overflow=torch.ones_like(out.overflow)) if full else out


def _of_the_wire(**change: Callable[[Tensor, Tensor], Tensor]) -> dict[str, Wrapper]:
    """Readers of rows that travelled as codes, with change(scales) or change(codes, scales)."""

    def dispatch(base: Wrapper, *tensors: Tensor, **settings: Any) -> Any:
        out = base(*tensors, **settings)
        return out if settings.get("recipe") is None else out._replace(rows=Beside(out.rows, None))

    def reading(name: str) -> Wrapper:
        def read(base: Wrapper, quantized: Any, /, **how: Any) -> Any:
            if not isinstance(quantized, Beside):
                return base(quantized, **how)
            out = base(quantized.quantized, **how)
            return change[name](out, moe_ref.scales(quantized.quantized)) if name in change else out

        return read

    return {"hybridep_dispatch": dispatch} | {name: reading(name) for name in ("scales", "codes", "dequantize")}


def _flushed(scale: Tensor, _: Tensor) -> Tensor:
    return torch.where(scale < TINY, 0.0, scale)


def _by_an_infinite_factor(codes: Tensor, scale: Tensor) -> Tensor:
    lost = (scale < TINY).repeat_interleave(128, 1)[:, : codes.shape[1]]
    whole = torch.cat([lost, lost.new_zeros(len(codes) - len(lost), codes.shape[1])])
    return torch.where(whole & (codes & ~SIGN != 0), codes & SIGN | LARGEST, codes)


_older: dict[tuple[Any, ...], list[Tensor]] = {}


def _two_buffers_by_turns(dispatch: Wrapper, tokens: Tensor, *rest: Any, **settings: Any) -> Any:
    """The last rank keeps the rows of the last call but one, where it received more."""
    out, group = dispatch(tokens, *rest, **settings), settings["group"]
    if out.rows.element_size() == 1 or dist.get_rank(group) + 1 < dist.get_world_size(group):
        return out
    kept = _older.setdefault((dispatch.__name__, out.rows.dtype, out.rows.shape[1:]), [])
    kept.append(out.rows.detach().clone())
    stale = len(kept) > 2 and len(kept[-3]) > len(out.rows) > 0
    return out._replace(rows=torch.cat([out.rows[:-1], kept[-3][-1:]])) if stale else out


def _turned(dispatch: Wrapper, tokens: Tensor, routing_map: Tensor, **settings: Any) -> Any:
    """Where all ranks receive equally many rows, chunks come in the order of the receiver."""
    out = dispatch(tokens, routing_map, **settings)
    counts, ranks = out.tokens_per_expert, dist.get_world_size(settings["group"])
    even = len(counts) == 1 and ranks > 1 and len(out.rows) % ranks == 0 and len(out.rows) > 0
    plain = (
        not any(settings.get(name) for name in ("num_rows", "capacity"))
        and settings.get("expert_tensor_parallel", 1) == 1
    )
    equal = torch.tensor([len(out.rows) if even and plain else -1])
    every: list[Any] = [None] * ranks
    dist.all_gather_object(every, int(equal), group=settings["group"])
    if len(set(every)) > 1 or every[0] < 0:
        return out
    return taken(out, torch.arange(len(out.rows)).roll(len(out.rows) // ranks * dist.get_rank(settings["group"])))


DEFECTS: tuple[Defect, ...] = (
    Defect("AD65", "a token without rows has no bias", EMPTY, {"deepep_combine": _no_bias_without_rows}),
    Defect("AD66", "a count of whole blocks has one more", EMPTY, {"deepep_dispatch": _whole_blocks_have_one_more}),
    Defect("AD67", "scales past the first are another row's", WIRE, {"deepep_dispatch": _later_scales_of_another_row}),
    Defect(
        "AD68",
        "codes are made with the scale before it is rounded",
        WIRE,
        {"deepep_low_latency_dispatch": _codes_by_the_exact_scale},
    ),
    Defect(
        "AD69",
        "a scale that is a power of two is rounded up",
        WIRE,
        {"deepep_low_latency_dispatch": _powers_rounded_up},
    ),
    Defect("AD70", "probs of empty slots are read", EMPTY, {"deepep_low_latency_combine": _empty_slots_read}),
    Defect("AD71", "tokens that fill a capacity have no probs", EMPTY, {"alltoall_dispatch": _fillers_without_probs}),
    Defect(
        "AD72", "a rank tells of its own tokens' overflow", FLAG, {"allgather_dispatch": _overflow_of_ones_own_tokens}
    ),
    Defect("AD73", "a buffer that is exactly full has overflowed", FLAG, {"hybridep_dispatch": _full_is_overflow}),
    Defect("AD74", "subnormal scales are flushed on the wire", WIRE, _of_the_wire(scales=_flushed)),
    Defect("AD75", "a factor that overflows is infinite", WIRE, _of_the_wire(codes=_by_an_infinite_factor)),
    Defect("AD76", "scales travel as numbers", WIRE, {"deepep_dispatch": _scales_as_numbers}),
    Defect("AD77", "a buffer is that of the last call but one", STATE, {"alltoall_dispatch": _two_buffers_by_turns}),
    Defect("AD78", "chunks of equal size come in another order", WIRE, {"alltoall_dispatch": _turned}),
)
