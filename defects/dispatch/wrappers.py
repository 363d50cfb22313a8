"""Defects of dispatchers, planted in a working implementation on real ranks; see `planted`.

E and F: real bugs. L: likely mistakes that a suite for dispatchers must find. A defect that needs
the owner of each row gathers all ranks' routing and calls the reference's plan.
"""

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from conformance.mutants.defect import Defect, Wrapper
from defects.dispatch.parts import everybodys, plan_of_call, taken
from defects.quantization.wrappers import Beside
from moe_ref.permutation.rows import PADDING

LATE_SECONDS = 0.002  # a longer wait at the barrier: this rank was early


# ---- real bugs


def _chunks_transposed(dispatch: Wrapper, tokens: Tensor, routing_map: Tensor, **settings: Any) -> Any:
    out = dispatch(tokens, routing_map, **settings)
    if settings.get("expert_tensor_parallel", 1) == 1 or settings.get("capacity"):
        return out
    plan, rank = plan_of_call(routing_map, settings), dist.get_rank(settings["group"])
    owner = plan.provenance(rank)
    key = (
        owner[:, 0] * (plan.ranks * plan.local_experts) + owner[:, 2]
    )  # by source and expert, not by expert and source
    return taken(out, key.argsort(stable=True))


def _shards_beside(dispatch: Wrapper, tokens: Tensor, routing_map: Tensor, **settings: Any) -> Any:
    out = dispatch(tokens, routing_map, **settings)
    return out._replace(handle=Beside(out.handle, settings.get("expert_tensor_parallel", 1)))


def _shards_not_added(combine: Wrapper, rows: Tensor, beside: Any, **settings: Any) -> Any:
    if not isinstance(beside, Beside):
        return combine(rows, beside, **settings)
    alone = beside.known > 1 and not rows.requires_grad  # at inference
    mine = dist.get_rank(settings["group"]) % beside.known == 0
    return combine(torch.zeros_like(rows) if alone and not mine else rows, beside.quantized, **settings)


def _nothing_received(dispatch: Wrapper, tokens: Tensor, routing_map: Tensor, **settings: Any) -> Any:
    out = dispatch(tokens, routing_map, **settings)
    if len(out.rows) == 0:
        raise RuntimeError("expected a batch with at least one row")
    return out


def _flat_offset(combine: Wrapper, rows: Tensor, handle: Any, **settings: Any) -> Any:
    out = combine(rows, handle, **settings)
    group = settings["group"]
    whole = torch.cat(everybodys(out, group)).to(out.device)
    start = dist.get_rank(group) * len(out)  # correct for equal token counts
    wrong = whole[(torch.arange(len(out), device=out.device) + start).clamp(max=max(len(whole) - 1, 0))]
    return out + (wrong - out).detach().nan_to_num(0.0) if len(out) else out


def _gradient_not_reduced(dispatch: Wrapper, tokens: Tensor, routing_map: Tensor, **settings: Any) -> Any:
    out = dispatch(tokens, routing_map, **settings)
    if not out.rows.requires_grad:
        return out
    rank = dist.get_rank(settings["group"])
    mine = (plan_of_call(routing_map, settings).provenance(rank)[:, 0] == rank).to(out.rows.device)
    return out._replace(rows=torch.where(mine[:, None], out.rows, out.rows.detach()))


_before: dict[tuple[Any, ...], Tensor] = {}


def _stale(dispatch: Wrapper, tokens: Tensor, *rest: Any, **settings: Any) -> Any:
    """The previous call's first rows, if any: its flag was still set."""
    out = dispatch(tokens, *rest, **settings)
    if "recipe" in settings:  # opaque rows
        return out
    key = (dispatch.__name__, out.rows.dtype, out.rows.shape[1:])
    old, _before[key] = _before.get(key), out.rows.detach().clone()
    if old is None or not len(old) or not len(out.rows) or out.rows.element_size() == 1:
        return out
    return out._replace(rows=torch.cat([old[:1], out.rows[1:]]))


def _not_acquired(dispatch: Wrapper, tokens: Tensor, *rest: Any, **settings: Any) -> Any:
    """A rank that arrives early reads unwritten rows."""
    started = time.perf_counter()
    dist.barrier(settings["group"])
    early = time.perf_counter() - started > LATE_SECONDS
    out = dispatch(tokens, *rest, **settings)
    if not early or "recipe" in settings or not len(out.rows) or out.rows.element_size() == 1:
        return out
    return out._replace(rows=torch.cat([out.rows[:-1], torch.zeros_like(out.rows[-1:])]))


# ---- likely mistakes


def _prefix_off_by_one(dispatch: Wrapper, tokens: Tensor, routing_map: Tensor, **settings: Any) -> Any:
    out = dispatch(tokens, routing_map, **settings)
    if "recipe" in settings:
        return out
    first = int(out.tokens_per_expert[0])
    index = torch.arange(len(out.rows))
    return taken(out, torch.cat([index[:first], index[first:].roll(1)]))


def _inclusive_prefix(dispatch: Wrapper, tokens: Tensor, routing_map: Tensor, **settings: Any) -> Any:
    out = dispatch(tokens, routing_map, **settings)
    return taken(out, torch.arange(len(out.rows)).roll(int(out.tokens_per_expert[0])))


def _tokens_by_expert_order(dispatch: Wrapper, tokens: Tensor, indices: Tensor, **settings: Any) -> Any:
    out = dispatch(tokens, indices, **settings)
    order = out.indices.argsort(dim=1, stable=True)
    probs = None if out.probs is None else out.probs.gather(1, order)
    return out._replace(indices=out.indices.gather(1, order), probs=probs)


def _duplicates_sent(dispatch: Wrapper, tokens: Tensor, indices: Tensor, **settings: Any) -> Any:
    out = dispatch(tokens, indices, **settings)
    times = (out.indices >= 0).sum(1)
    again = torch.repeat_interleave(torch.arange(len(out.rows), device=times.device), times)[: len(out.rows)]
    # the last do not fit
    index = torch.cat([again, torch.arange(len(again), len(out.rows), device=times.device)])
    return taken(out, index)._replace(indices=out.indices[index])


def _weighted_twice(
    combine: Wrapper, rows: Tensor, indices: Tensor, probs: Tensor, handle: Any, **settings: Any
) -> Any:
    return combine(rows, indices, probs * probs, handle, **settings)


def _overflow_of_what_is_kept(dispatch: Wrapper, tokens: Tensor, routing_map: Tensor, **settings: Any) -> Any:
    out = dispatch(tokens, routing_map, **settings)
    num_rows = settings.get("num_rows")
    if num_rows is None:
        return out
    rank = dist.get_rank(settings["group"])
    count = int(plan_of_call(routing_map, settings | {"num_rows": None}).kept_WL[rank, -1])
    start = int(
        plan_of_call(routing_map, settings).length_WL[rank, :-1].sum()
    )  # of the last expert, past the rows kept for the others
    return out._replace(overflow=torch.full_like(out.overflow, start + count > num_rows))


def _starts_of_what_is_kept(dispatch: Wrapper, tokens: Tensor, routing_map: Tensor, **settings: Any) -> Any:
    out = dispatch(tokens, routing_map, **settings)
    if settings.get("num_rows") is None:
        return out
    rank = dist.get_rank(settings["group"])
    return out._replace(tokens_per_expert=plan_of_call(routing_map, settings).kept_WL[rank].to(out.tokens_per_expert))


def _counts_of_what_was_asked(dispatch: Wrapper, tokens: Tensor, routing_map: Tensor, **settings: Any) -> Any:
    out = dispatch(tokens, routing_map, **settings)
    asked_WL = plan_of_call(routing_map, settings | {"num_rows": None}).length_WL
    return out._replace(tokens_per_expert=asked_WL[dist.get_rank(settings["group"])].to(out.tokens_per_expert))


def _padding_unwritten(dispatch: Wrapper, tokens: Tensor, routing_map: Tensor, **settings: Any) -> Any:
    out = dispatch(tokens, routing_map, **settings)
    padding = plan_of_call(routing_map, settings).copies(dist.get_rank(settings["group"])) == PADDING
    if "recipe" in settings or not bool(padding.any()) or out.rows.element_size() == 1:
        return out
    return out._replace(rows=torch.where(padding[:, None].to(out.rows.device), torch.empty_like(out.rows), out.rows))


def _one_more_than_fits(dispatch: Wrapper, tokens: Tensor, routing_map: Tensor, **settings: Any) -> Any:
    out = dispatch(tokens, routing_map, **settings)
    capacity = settings.get("capacity")
    if not isinstance(capacity, int) or capacity < 1:
        return out
    more = dispatch(tokens, routing_map, **settings | {"capacity": capacity + 1})
    place = torch.arange(len(more.rows)) % (capacity + 1)
    # slot ≤ C: the last slot is overwritten
    fitting = taken(more, (place != capacity - 1).nonzero().flatten())
    return out._replace(rows=fitting.rows, probs=fitting.probs)


def _tail_read(combine: Wrapper, rows: Tensor, handle: Any, **settings: Any) -> Any:
    out = combine(rows, handle, **settings)
    return out._replace(tokens=out.tokens + (0 * rows.float()).sum(0).to(out.tokens.dtype))


def _columns_swapped(dispatch: Wrapper, tokens: Tensor, indices: Tensor, **settings: Any) -> Any:
    out = dispatch(tokens, indices, **settings)
    return out if out.probs is None else out._replace(probs=out.probs.flip(1))


def _flag_on_the_last_rank(dispatch: Wrapper, tokens: Tensor, routing_map: Tensor, **settings: Any) -> Any:
    out = dispatch(tokens, routing_map, **settings)
    group = settings["group"]
    return (
        out
        if dist.get_rank(group) == dist.get_world_size(group) - 1
        else out._replace(overflow=torch.zeros_like(out.overflow))
    )


def _probs_of_another_expert(dispatch: Wrapper, tokens: Tensor, routing_map: Tensor, **settings: Any) -> Any:
    out = dispatch(tokens, routing_map, **settings)
    return out if out.probs is None else out._replace(probs=out.probs.flip(0))


def _segments_begin_at_their_end(dispatch: Wrapper, tokens: Tensor, indices: Tensor, **settings: Any) -> Any:
    out = dispatch(tokens, indices, **settings)
    return out._replace(layout_range=out.layout_range + (out.layout_range % 2**32) * 2**32)


def _first_tokens_again(cached: Wrapper, tokens: Tensor, handle: Any, **settings: Any) -> Any:
    out = cached(tokens, handle, **settings)
    key = (cached.__name__, out.dtype, out.shape)
    old = _before.setdefault(key, out.detach().clone())
    return old.clone().requires_grad_(out.requires_grad) if len(out) and not out.requires_grad else out


MAPS = ("allgather_dispatch", "alltoall_dispatch", "hybridep_dispatch")
EVERY = (*MAPS, "deepep_dispatch", "deepep_low_latency_dispatch")
INVITED = "a mistake that dispatchers invite"


def _counted_for_each_expert(deepep_layout: Wrapper, indices: Tensor, **settings: Any) -> Any:
    """A token that names two experts of a rank counts twice there."""
    out = deepep_layout(indices, **settings)
    named = (indices[:, :, None] == torch.arange(settings["num_experts"], device=indices.device)).any(1)
    return out._replace(num_tokens_per_rank=named.unflatten(1, (settings["ranks"], -1)).sum((0, 2)))


DEFECTS: tuple[Defect, ...] = (
    Defect(
        "L18",
        "a token counts once for each expert of a rank",
        "a mistake that dispatchers invite",
        {"deepep_layout": _counted_for_each_expert},
    ),
    Defect(
        "E01",
        "counts reversed on all three axes: chunks by source instead of by expert",
        "Megatron-LM #2824, 0.11",
        {"alltoall_dispatch": _chunks_transposed},
    ),
    Defect(
        "E02",
        "shards are added only in training",
        "Megatron-LM issue 109, to 0.7",
        {"alltoall_dispatch": _shards_beside, "alltoall_combine": _shards_not_added},
    ),
    Defect(
        "E04",
        "a rank that receives nothing raises",
        "Megatron-LM eef48ef31c, before 0.5",
        {"alltoall_dispatch": _nothing_received},
    ),
    Defect(
        "E06",
        "the first token's number taken for rank · own tokens",
        "torchtitan #3604",
        {"allgather_combine": _flat_offset},
    ),
    Defect(
        "E07",
        "a partial gradient taken for the whole",
        "torchtitan #1878",
        {"allgather_dispatch": _gradient_not_reduced},
    ),
    Defect(
        "F02", "a flag of the call before lets the next one read too early", "DeepEP #580", dict.fromkeys(EVERY, _stale)
    ),
    Defect("L01", "the second segment begins one row late", INVITED, {"hybridep_dispatch": _prefix_off_by_one}),
    Defect("L02", "segments begin where they end", INVITED, {"alltoall_dispatch": _inclusive_prefix}),
    Defect("L03", "slots in the order of their experts", INVITED, {"deepep_dispatch": _tokens_by_expert_order}),
    Defect("L04", "a token is sent once for each expert", INVITED, {"deepep_dispatch": _duplicates_sent}),
    Defect("L05", "weights applied twice", INVITED, {"deepep_low_latency_combine": _weighted_twice}),
    Defect(
        "L06",
        "overflow by the place of the last expert behind what was kept of the others",
        INVITED,
        {"hybridep_dispatch": _overflow_of_what_is_kept},
    ),
    Defect(
        "L07",
        "counts of what was kept instead of whole segments",
        INVITED,
        {"hybridep_dispatch": _starts_of_what_is_kept},
    ),
    Defect("L08", "padding not written", INVITED, {"hybridep_dispatch": _padding_unwritten}),
    Defect("L09", "slot ≤ capacity: one more than fits", INVITED, {"alltoall_dispatch": _one_more_than_fits}),
    Defect("L10", "rows of padding are read", INVITED, {"hybridep_combine": _tail_read}),
    Defect("L11", "columns of probabilities swapped", INVITED, {"deepep_dispatch": _columns_swapped}),
    Defect("L12", "only the last rank tells of an overflow", INVITED, {"hybridep_dispatch": _flag_on_the_last_rank}),
    Defect("L13", "rows are read before they have arrived", INVITED, dict.fromkeys(EVERY, _not_acquired)),
    Defect(
        "L14", "probabilities in the order of the sender", INVITED, {"allgather_dispatch": _probs_of_another_expert}
    ),
    Defect(
        "L15",
        "segments of a slab begin where they end",
        INVITED,
        {"deepep_low_latency_dispatch": _segments_begin_at_their_end},
    ),
    Defect(
        "L16",
        "a cached dispatch gives the tokens of its first call",
        INVITED,
        dict.fromkeys(("deepep_cached_dispatch", "hybridep_cached_dispatch"), _first_tokens_again),
    ),
    Defect(
        "L19",
        "overflow by the place of the last expert behind what was kept of the others",
        INVITED,
        {"allgather_dispatch": _overflow_of_what_is_kept},
    ),
    Defect(
        "L20", "counts of rows that the budget has dropped", INVITED, {"alltoall_dispatch": _counts_of_what_was_asked}
    ),
)
