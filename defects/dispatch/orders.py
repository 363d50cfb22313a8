"""Defects of dispatchers: orders of sources, sums, empty slots, handles; see `planted`."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from conformance.mutants.defect import Defect, Wrapper, with_values
from conformance.mutants.kinds.gradients import rounded_to, with_gradient
from defects.dispatch.parts import plan_of_call, taken
from defects.quantization.wrappers import Beside

ORDER = "a mistake that two ranks do not show"
EMPTY = "a mistake that empty slots and empty ranks invite"
SUM = "a mistake that a combine in 16 bits invites"
HANDLE = "a mistake that handles invite"


def _sources_by(key: Callable[[Tensor, int, int], Tensor]) -> Wrapper:
    """Rows of an expert by key(source, rank, ranks), not by source."""

    def dispatch(base: Wrapper, tokens: Tensor, routing_map: Tensor, **settings: Any) -> Any:
        out = base(tokens, routing_map, **settings)
        if settings.get("capacity") or settings.get("expert_tensor_parallel", 1) > 1:
            return out
        plan, rank = plan_of_call(routing_map, settings), dist.get_rank(settings["group"])
        owner = plan.provenance(rank)
        order = owner[:, 2] * plan.ranks + key(owner[:, 0], rank, plan.ranks)
        return taken(out, order.argsort(stable=True))

    return dispatch


def _ring(source: Tensor, rank: int, ranks: int) -> Tensor:
    return (source - rank) % ranks


def _tree(source: Tensor, rank: int, ranks: int) -> Tensor:
    """Right for two ranks; of four 0 2 1 3."""
    return source if ranks < 3 else source % 2 * ranks + source // 2


def _in_two_uses(base: Wrapper, tokens: Tensor, routing_map: Tensor, **settings: Any) -> Any:
    """Autograd adds the gradients of two uses in the dtype of the tokens."""
    out = base(tokens, routing_map, **settings)
    if not out.rows.requires_grad:
        return out
    even = torch.arange(len(out.rows), device=out.rows.device)[:, None] % 2 == 0
    return out._replace(rows=torch.where(even, out.rows, base(tokens, routing_map, **settings).rows))


def _no_columns_where_nothing_arrives(base: Wrapper, tokens: Tensor, *rest: Any, **settings: Any) -> Any:
    out = base(tokens, *rest, **settings)
    return out if len(out.rows) else out._replace(rows=out.rows[:, :0])


def _two_sums_added(base: Wrapper, rows: Tensor, handle: Any, **settings: Any) -> Any:
    """Sums of every second row, added in the rows' dtype."""
    out = base(rows, handle, **settings)
    even = torch.arange(len(rows), device=rows.device)[:, None] % 2 == 0
    parts = [base(torch.where(mask, rows, 0), handle, **settings) for mask in (even, ~even)]
    return parts[0] + parts[1] if isinstance(out, Tensor) else out._replace(tokens=parts[0].tokens + parts[1].tokens)


def _biases_after_rounding(base: Wrapper, rows: Tensor, handle: Any, **settings: Any) -> Any:
    out, biases = base(rows, handle, **settings), settings.get("biases", ())
    if not len(biases):
        return out
    tokens = base(rows, handle, **settings | {"biases": ()}).tokens
    for bias in biases:
        tokens = tokens + bias.to(tokens.dtype)
    return out._replace(tokens=tokens)


def _one_bias(base: Wrapper, rows: Tensor, handle: Any, **settings: Any) -> Any:
    out, biases = base(rows, handle, **settings), settings.get("biases", ())
    return base(rows, handle, **settings | {"biases": biases[:1]}) if len(biases) > 1 else out


def _expert_0_past_the_rows(base: Wrapper, tokens: Tensor, indices: Tensor, **settings: Any) -> Any:
    out = base(tokens, indices, **settings)
    return out._replace(indices=torch.where((out.indices < 0).all(1, keepdim=True), 0, out.indices))


def _block_of_an_empty_expert(base: Wrapper, tokens: Tensor, indices: Tensor, **settings: Any) -> Any:
    out, align = base(tokens, indices, **settings), settings.get("expert_alignment", 1)
    if out.tokens_per_expert is None or align == 1:
        return out
    return out._replace(tokens_per_expert=out.tokens_per_expert.clamp(min=align))


def _powers_of_two(base: Wrapper, tokens: Tensor, indices: Tensor, **settings: Any) -> Any:
    out = base(tokens, indices, **settings)
    if not settings.get("use_fp8") or settings.get("round_scale"):
        return out
    return base(tokens, indices, **settings | {"round_scale": True})


def _gradient_of_empty_slots(
    base: Wrapper, rows: Tensor, indices: Tensor, probs: Tensor, handle: Any, **settings: Any
) -> Any:
    given = with_gradient(probs, lambda g: torch.where(indices < 0, 1.0, g))
    return base(rows, indices, given, handle, **settings)


def _probs_in_the_dtype_of_rows(
    base: Wrapper, rows: Tensor, indices: Tensor, probs: Tensor, handle: Any, **settings: Any
) -> Any:
    return base(rows, indices, with_values(probs, rounded_to(rows.dtype)), handle, **settings)


def _one_flag_for_all(base: Wrapper, tokens: Tensor, routing_map: Tensor, **settings: Any) -> Any:
    """A budget that one rank exceeds has overflowed on every rank."""
    out = base(tokens, routing_map, **settings)
    every: list[Any] = [None] * dist.get_world_size(settings["group"])
    dist.all_gather_object(every, bool(out.overflow), group=settings["group"])
    return out._replace(overflow=torch.full_like(out.overflow, any(every)))


def _halves_of_ranks(base: Wrapper, rows: Tensor, handle: Any, **settings: Any) -> Any:
    """The sums of the first two ranks, and of the others, are rounded before they are added."""
    first = dist.get_rank(settings["group"]) < 2
    nothing = torch.zeros_like(rows)
    out = base(rows if first else nothing, handle, **settings)
    others = base(nothing if first else rows, handle, **settings)
    return out._replace(tokens=out.tokens + others.tokens)


def _halves_of_shards(base: Wrapper, rows: Tensor, handle: Any, **settings: Any) -> Any:
    """Sums of the first two shards, and of the others, are rounded before they are added."""
    shards = handle[0].shards
    if shards < 3:
        return base(rows, handle, **settings)
    first = dist.get_rank(settings["group"]) % shards < 2
    nothing = torch.zeros_like(rows)
    return base(rows if first else nothing, handle, **settings) + base(nothing if first else rows, handle, **settings)


def _zeros_kept(dispatch: Wrapper, *tensors: Tensor, **settings: Any) -> Any:
    """A slot of probability 0 is sent whatever the policy says."""
    policy = settings.get("policy")
    return dispatch(*tensors, **settings | ({"policy": replace(policy, zero_prob="keep")} if policy else {}))


def _local_columns(base: Wrapper, rows: Tensor, handle: Any, **settings: Any) -> Any:
    """Probs come back without the number of the rank's first expert."""
    out = base(rows, handle, **settings)
    if out.probs is None:
        return out
    shift = out.probs.shape[1] // dist.get_world_size(settings["group"]) * dist.get_rank(settings["group"])
    return out._replace(probs=out.probs.roll(shift, 1))


def _last_expert_for_none(layout: Wrapper, indices: Tensor, **settings: Any) -> Any:
    out = layout(indices, **settings)
    counts = out.num_tokens_per_expert.clone()
    counts[-1] += (indices < 0).sum()
    return out._replace(num_tokens_per_expert=counts)


def _first_rank_for_no_slot(layout: Wrapper, indices: Tensor, **settings: Any) -> Any:
    out = layout(indices, **settings)
    there = out.is_token_in_rank.clone()
    there[:, 0] |= (indices < 0).all(1)
    return out._replace(is_token_in_rank=there)


def _once_for_each_token(layout: Wrapper, indices: Tensor, **settings: Any) -> Any:
    """An expert that a token names twice counts once."""
    out = layout(indices, **settings)
    named = (indices[:, :, None] == torch.arange(settings["num_experts"], device=indices.device)).any(1)
    return out._replace(num_tokens_per_expert=named.sum(0))


# ---- a handle with the width of the dispatch


def _noted_width(base: Wrapper, tokens: Tensor, *rest: Any, **settings: Any) -> Any:
    out = base(tokens, *rest, **settings)
    return out._replace(handle=Beside(out.handle, tokens.shape[1]))


def _width_of_the_handle(base: Wrapper, tokens: Tensor, handle: Any, **settings: Any) -> Any:
    if not isinstance(handle, Beside):
        return base(tokens, handle, **settings)
    out = base(tokens, handle.quantized, **settings)
    past = torch.arange(tokens.shape[1], device=out.device) >= handle.known
    raw = out.element_size() == 1
    return out if raw or not bool(past.any()) else torch.where(past, 0.0, out)


def _as_it_is(base: Wrapper, rows: Tensor, handle: Any, **settings: Any) -> Any:
    return base(rows, handle.quantized if isinstance(handle, Beside) else handle, **settings)


def _handle_of(dispatcher: str) -> dict[str, Wrapper]:
    return {
        f"{dispatcher}_cached_dispatch": _width_of_the_handle,
        f"{dispatcher}_dispatch": _noted_width,
        f"{dispatcher}_combine": _as_it_is,
    }


SLAB = "deepep_low_latency"
DEFECTS: tuple[Defect, ...] = (
    Defect("M01", "sources in the order of a ring", ORDER, {"allgather_dispatch": _sources_by(_ring)}),
    Defect(
        "M02", "sources in the order of a tree, from three ranks on", ORDER, {"alltoall_dispatch": _sources_by(_tree)}
    ),
    Defect(
        "M03",
        "gradients of a token's copies are added in 16 bits",
        SUM,
        dict.fromkeys(("allgather_dispatch", "alltoall_dispatch"), _in_two_uses),
    ),
    Defect(
        "M04",
        "a rank that receives nothing has rows without columns",
        EMPTY,
        {"alltoall_dispatch": _no_columns_where_nothing_arrives},
    ),
    Defect(
        "M05",
        "two sums are added in the dtype of the rows",
        SUM,
        dict.fromkeys(("allgather_combine", "alltoall_combine"), _two_sums_added),
    ),
    Defect("M21", "sums of two halves of the ranks are rounded", SUM, {"hybridep_combine": _halves_of_ranks}),
    Defect("M22", "sums of two halves of four shards are rounded", SUM, {"alltoall_combine": _halves_of_shards}),
    Defect("M23", "slots of probability 0 are sent", EMPTY, {"deepep_dispatch": _zeros_kept}),
    Defect("M06", "biases are added after the sum is rounded", SUM, {"deepep_combine": _biases_after_rounding}),
    Defect("M07", "the second bias is ignored", SUM, {"deepep_combine": _one_bias}),
    Defect("M08", "rows past the received ones are for expert 0", EMPTY, {"deepep_dispatch": _expert_0_past_the_rows}),
    Defect("M09", "an empty expert counts as one block", EMPTY, {"deepep_dispatch": _block_of_an_empty_expert}),
    Defect("M11", "scales on the wire are powers of two, unasked", ORDER, {f"{SLAB}_dispatch": _powers_of_two}),
    Defect("M12", "empty slots have a gradient", EMPTY, {f"{SLAB}_combine": _gradient_of_empty_slots}),
    Defect("M13", "probs are rounded to the dtype of the rows", SUM, {f"{SLAB}_combine": _probs_in_the_dtype_of_rows}),
    Defect("M14", "one rank's overflow is everyone's", ORDER, {"hybridep_dispatch": _one_flag_for_all}),
    Defect("M15", "probs come back in the columns of the first rank", ORDER, {"hybridep_combine": _local_columns}),
    Defect("M16", "an empty slot counts for the last expert", EMPTY, {"deepep_layout": _last_expert_for_none}),
    Defect("M17", "a token without experts goes to the first rank", EMPTY, {"deepep_layout": _first_rank_for_no_slot}),
    Defect("M18", "an expert named twice counts once", EMPTY, {"deepep_layout": _once_for_each_token}),
    Defect("M19", "a cached dispatch has the width of its handle", HANDLE, _handle_of("hybridep")),
    Defect("M20", "a cached dispatch has the width of its handle", HANDLE, _handle_of("deepep")),
)
