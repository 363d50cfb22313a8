"""Laws of worlds: splitting the tokens, using fewer ranks or fusing two steps keeps the copies of
every expert.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import moe_ref
from conformance.core import universal_laws as universal
from conformance.core.contract import Problem
from conformance.core.law import Law, Trial, same
from conformance.core.ranks import AtRank
from conformance.families.dispatch import laws, laws_journeys, laws_sequences
from conformance.families.dispatch.cases import MAPPED, DispatchCase, indices_of, slots_of
from conformance.families.dispatch.dispatcher import free_behind, together
from conformance.families.dispatch.laws import fits, has_room, is_fine
from conformance.families.dispatch.laws_journeys import at_experts, dispatches_of, first_expert, named, send, send_back
from conformance.families.dispatch.low_latency import in_order, judged, order_of
from conformance.families.permutation.laws import ROW_REVERSAL
from conformance.families.permutation.permute import Permute
from conformance.interface import Implementation, named_outputs
from conformance.judge import Finding
from moe_ref.config import Permuted
from moe_ref.permutation.rows import PADDING

MOST_EXPERTS, MOST_TOKENS = 16, 128  # of one rank that has the experts and tokens of all ranks


class Run(NamedTuple):
    """A dispatch of all ranks."""

    case: DispatchCase
    calls: list[Problem]
    numbers_G: Tensor  # each token's number in the law's case
    before: int = 0  # experts before the first of the law's case


def _forward_case(case: DispatchCase) -> DispatchCase:
    return replace(case, grads="", unused="", law="", layout="contiguous", layout_of="", biases=0)


def _played(trial: Trial, runs: dict[str, Run]) -> dict[str, Any] | None:
    """This rank's outputs by name and mark, with the result "layer" where it is exact. None if a
    call is not supported.
    """
    at: AtRank[DispatchCase] = trial.contract  # type: ignore[assignment]
    rank, group = at.place.rank, {"group": at.place.group}
    calls = [replace(call, settings=call.settings | group) for run in runs.values() for call in run.calls]
    if any(trial.extras["refusal"](call) for call in calls):  # the same answer on all ranks
        return None
    function = calls[0].function
    case = next(iter(runs.values())).case
    layer = fits(case) and not case.fp8 and trial.extras["offers"](function.replace("dispatch", "combine"))

    def script(implementation: Implementation, arguments: dict[str, Any]) -> dict[str, Any]:
        outputs: dict[str, Any] = {}
        for mark, run in runs.items():
            dispatched = send(implementation, run.calls[rank], arguments, mark)
            outputs |= {f"{name}{mark}": x for name, x in dispatched.items()}
            if layer:
                rows = at_experts(run.case, dispatched, first_expert(run.case, rank) - run.before)
                outputs[f"layer{mark}"] = send_back(implementation, function, rows, dispatched, arguments, mark)
        return outputs

    inputs = {name: x for mark, run in runs.items() for name, x in named(run.calls[rank], mark).items()}
    return trial.run(Problem(function, inputs, group, script=script, first=calls[rank].required | calls[rank].settings))


def _copies(
    law: str, trial: Trial, run: Run, outputs: dict[str, Any], mark: str
) -> tuple[dict[str, Tensor], Finding | None]:
    """This rank's copies by expert and token, with payload; or the finding that precludes them.

    DeepEP's rows count once per slot that names a local expert; a slab's rows are identified by
    `source_tokens`.
    """
    at: AtRank[DispatchCase] = trial.contract  # type: ignore[assignment]
    rank, case = at.place.rank, run.case
    out = together(run.calls)[rank]
    dispatched = {name.removesuffix(mark): x for name, x in outputs.items() if name.endswith(mark)}
    legible = {
        name: x for name in ("rows", "probs", "scales", "indices") if isinstance(x := getattr(out, name, None), Tensor)
    }
    expectations = {name: free_behind(name, x, torch.zeros(len(x), dtype=torch.bool)) for name, x in legible.items()}
    if case.dispatcher == "deepep_low_latency":
        expectations |= {name: judged(out)[name] for name in ("layout_range", "source_tokens")}
    finding = trial.judged(law, expectations, dispatched)
    if finding:
        return {}, finding
    moved = {
        name: _raw(dispatched[name])
        for name in legible
        if name != "indices" and isinstance(dispatched.get(name), Tensor)
    }
    token_P = out.handle.row_tokens[rank]
    if case.dispatcher == "deepep":
        local = dispatched["indices"].long()
        row, slot = (local >= 0).nonzero().unbind(1)
        expert = local[row, slot]
        copied = {name: x[row, slot] if name == "probs" else x[row] for name, x in moved.items()}
    else:
        if case.dispatcher == "deepep_low_latency":
            order = order_of(dispatched["layout_range"], dispatched["source_tokens"], out)
            assert order is not None  # as judged above
            moved = {name: in_order(x, order.argsort(1)).flatten(0, 1) for name, x in moved.items()}
        row = (token_P != PADDING).nonzero().flatten()
        expert = out.handle.plan.provenance(rank)[row, 2] % case.local_experts
        copied = {name: x[row] for name, x in moved.items()}
    first = first_expert(case, rank) - run.before
    tokens = trial.case.tokens
    return _ascending({"copies": (first + expert) * tokens + run.numbers_G[token_P[row]]} | copied), None


def _raw(x: Tensor) -> Tensor:
    """x, or its bytes for 1-byte dtypes: not every torch can index or send fp8."""
    return x.view(torch.uint8) if x.element_size() == 1 else x


def _ascending(copies: dict[str, Tensor]) -> dict[str, Tensor]:
    """Sorted by expert and token; repeated copies keep their order."""
    order = copies["copies"].argsort(stable=True)
    return {name: x[order] for name, x in copies.items()}


def _all_copies(copies_of_parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The copies of all parts."""
    return _ascending({name: torch.cat([copies[name] for copies in copies_of_parts]) for name in copies_of_parts[0]})


def _concatenation(trial: Trial) -> Finding | None:
    """All tokens are dispatched in one run, or in two runs: each expert gets the same copies, and
    the layer has the same result.
    """
    case = _forward_case(trial.case)
    calls, numbers = dispatches_of(case), torch.arange(case.tokens).split(list(case.counts))
    cuts = [(case.seed + rank) % (count + 1) for rank, count in enumerate(case.counts)]
    ranges = {
        " whole": [slice(None) for _ in cuts],
        " first": [slice(cut) for cut in cuts],
        " rest": [slice(cut, None) for cut in cuts],
    }
    runs = {}
    for mark, token_masks in ranges.items():
        partial_calls = [
            call.with_tensors({name: x[token_mask] for name, x in call.tensors.items()})
            for call, token_mask in zip(calls, token_masks, strict=True)
        ]
        runs[mark] = Run(
            case,
            partial_calls,
            torch.cat([number[token_mask] for number, token_mask in zip(numbers, token_masks, strict=True)]),
        )
    outputs = _played(trial, runs)
    if outputs is None:
        return None
    copies = {}
    for mark, run in runs.items():
        copies[mark], finding = _copies("concatenation", trial, run, outputs, mark)
        if finding:
            return replace(finding, message=f"of{mark}: {finding.message}")
    finding = same("concatenation", copies[" whole"], _all_copies([copies[" first"], copies[" rest"]]))
    if finding or "layer whole" not in outputs:
        return finding
    layer_of_parts = torch.cat([outputs["layer first"], outputs["layer rest"]])
    return _same_layer("concatenation", outputs["layer whole"], layer_of_parts)


def _same_layer(law: str, layer: Tensor, second_layer: Tensor) -> Finding | None:
    """The layer has the same numbers in both runs; the sign of zero is ignored."""
    return same(law, {"layer": layer + 0.0}, {"layer": second_layer + 0.0})


def _refinement(trial: Trial) -> Finding | None:
    """All tokens and all requested experts are on one rank: it has the copies and tokens of all
    ranks, concatenated.
    """
    at: AtRank[DispatchCase] = trial.contract  # type: ignore[assignment]
    rank, case = at.place.rank, _forward_case(trial.case)
    host = case.seed % case.ranks
    calls, (lone_case, lone_calls) = dispatches_of(case), _on_one_rank(case, host)
    numbers = torch.arange(case.tokens)
    runs = {
        " spread": Run(case, calls, numbers),
        " alone": Run(lone_case, lone_calls, numbers, first_expert(lone_case, host)),
    }
    outputs = _played(trial, runs)
    if outputs is None:
        return None
    copies, finding = _copies("refinement", trial, runs[" spread"], outputs, " spread")
    if not finding:
        alone_copies, finding = _copies("refinement", trial, runs[" alone"], outputs, " alone")
    spread_result = None if finding else (copies, outputs.get("layer spread"))
    spread_results: list[Any] = [None] * case.ranks
    dist.all_gather_object(spread_results, spread_result, group=at.place.group)
    if finding or rank != host or None in spread_results:
        return finding
    finding = same(
        "refinement",
        _all_copies([copies_of_rank for copies_of_rank, _ in spread_results[:: case.shards]]),
        alone_copies,
    )
    if finding or "layer alone" not in outputs:
        return finding
    return _same_layer("refinement", torch.cat([layer for _, layer in spread_results]), outputs["layer alone"])


def _on_one_rank(case: DispatchCase, host: int) -> tuple[DispatchCase, list[Problem]]:
    """The case with all tokens on rank `host`, which holds every requested expert, and its
    dispatch.
    """
    counts = tuple(case.tokens if rank == host else 0 for rank in range(case.ranks))
    slots_GK = torch.from_numpy(slots_of(case)) if case.dispatcher in MAPPED else torch.cat(indices_of(case)).long()
    lone_case = replace(case, counts=counts, local_experts=case.experts)
    first = first_expert(lone_case, host)
    lone_case = replace(
        lone_case,
        slots=tuple(torch.where(slots_GK < 0, PADDING, slots_GK + first).flatten().tolist()),
        spread="uniform",
    )
    lone_calls = dispatches_of(lone_case)
    if case.probs and case.dispatcher in MAPPED:  # [T,E] covers all experts
        probs = torch.cat([call.settings["probs"] for call in dispatches_of(case)])
        wide_probs = torch.full_like(lone_calls[host].settings["probs"], torch.nan)
        wide_probs[:, first : first + case.experts] = probs
        lone_calls[host] = lone_calls[host].with_tensors({"probs": wide_probs})
    return lone_case, lone_calls


# ---- one step in place of two


def _fused(trial: Trial) -> Finding | None:
    """HybridEP's results equal two steps': one copy of a token per rank, then `permute` there.

    Both steps are the implementation's if offered, else the reference's.
    """
    at: AtRank[DispatchCase] = trial.contract  # type: ignore[assignment]
    rank, group = at.place.rank, {"group": at.place.group}
    calls = at.calls(trial.case)
    sizes = {name: calls[rank].settings[name] for name in ("align", "num_rows") if name in calls[rank].settings}
    arrived = _arrived(trial.case, calls, rank)
    slots = _with_slots(calls)
    sends = not any(trial.extras["refusal"](replace(call, settings=call.settings | group)) for call in slots)
    probs = {"probs": arrived["probs"]} if "probs" in arrived else {}
    second = Problem(Permute.function, {name: arrived[name] for name in ("tokens", "routing_map")}, probs | sizes)
    permutes = not trial.extras["refusal"](second)

    def script(implementation: Implementation, tensors: dict[str, Any]) -> dict[str, Any]:
        received = (
            _local(send(implementation, slots[rank], tensors, " sent"), trial.case.local_experts) if sends else tensors
        )
        settings = sizes | ({"probs": received["probs"]} if probs else {})
        arguments = (received["tokens"], received["routing_map"])
        result = (
            implementation.call(Permute.function, *arguments, **settings)
            if permutes
            else moe_ref.permute(*arguments, **settings)
        )
        return named_outputs(result, Permuted._fields)

    inputs = named(slots[rank], " sent") if sends else arrived
    steps = trial.run(
        Problem(calls[rank].function, inputs, group, script=script, first=calls[rank].required | calls[rank].settings)
    )
    rows = int(trial.first["tokens_per_expert"].sum())
    return same("fused", _specified_outputs(steps, rows), _specified_outputs(trial.first, rows))


def _specified_outputs(outputs: dict[str, Any], rows: int) -> dict[str, Tensor]:
    """The specified outputs: rows of the segments, counts and the flag."""
    specified_outputs = {name: x[:rows] for name in ("rows", "probs") if isinstance(x := outputs.get(name), Tensor)}
    overflow = outputs.get("overflow")
    return specified_outputs | {
        "tokens_per_expert": outputs["tokens_per_expert"].long(),
        "overflow": torch.tensor(overflow is not None and bool(overflow)),
    }


def _arrived(case: DispatchCase, calls: list[Problem], rank: int) -> dict[str, Tensor]:
    """The distinct tokens for this rank's experts, with their columns of the map and probs."""
    token = together(calls)[rank].handle.plan.distinct_tokens(rank)
    local_columns = slice(rank * case.local_experts, (rank + 1) * case.local_experts)
    tokens = [call.required["tokens"] for call in calls]
    there = {"tokens": torch.cat([_raw(local_columns) for local_columns in tokens])[token].view(tokens[rank].dtype)}
    there["routing_map"] = torch.cat([call.required["routing_map"] for call in calls])[token, local_columns] != 0
    return there | (
        {"probs": torch.cat([call.settings["probs"] for call in calls])[token, local_columns]} if case.probs else {}
    )


def _with_slots(calls: list[Problem]) -> list[Problem]:
    """The same calls as DeepEP dispatches: indices in ascending order in place of routing maps."""
    maps = [call.required["routing_map"] != 0 for call in calls]
    most, num_experts = max(1, *(int(rank_map.sum(1).max()) for rank_map in maps if len(rank_map)), 1), maps[0].shape[1]
    out = []
    for call, rank_map in zip(calls, maps, strict=True):
        slots = torch.where(rank_map, torch.arange(num_experts), num_experts).sort(1).values[:, :most]
        settings: dict[str, Any] = {"num_experts": num_experts}
        if "probs" in call.settings:
            probs = call.settings["probs"]
            wider = torch.cat([probs, torch.full_like(probs[:, :1], torch.nan)], 1)
            # by index: torch's gather and scatter change the bits of some NaNs on a CPU
            settings["probs"] = wider[torch.arange(len(probs))[:, None], slots]
        indices = torch.where(slots == num_experts, PADDING, slots)
        out.append(Problem("deepep_dispatch", {"tokens": call.required["tokens"], "indices": indices}, settings))
    return out


def _local(dispatched: dict[str, Any], local_experts: int) -> dict[str, Tensor]:
    """The received slots as routing maps of this rank's experts."""
    indices = dispatched["indices"].long()
    column = torch.where(indices < 0, local_experts, indices)
    routing_map = torch.zeros((len(column), local_experts + 1), dtype=torch.bool, device=column.device).scatter_(
        1, column, True
    )
    out = {"tokens": dispatched["rows"], "routing_map": routing_map[:, :-1]}
    if dispatched["probs"] is None:
        return out
    probs = dispatched["probs"].new_full(routing_map.shape, torch.nan)
    probs[torch.arange(len(column), device=column.device)[:, None], column] = dispatched["probs"]  # bit by bit
    return out | {"probs": probs[:, :-1]}


def _shows(case: DispatchCase) -> bool:
    """Whether copies, or a combine's tokens, are identifiable."""
    return is_fine(case) and has_room(case) and (case.function.endswith("dispatch") or fits(case))


def _fits_one_rank(case: DispatchCase) -> bool:
    return case.ranks > 1 and case.experts <= MOST_EXPERTS and case.tokens <= MOST_TOKENS


CONCATENATION = Law("concatenation", _concatenation, _shows)
REFINEMENT = Law("refinement", _refinement, lambda case: _shows(case) and _fits_one_rank(case))
FUSED = Law("fused", _fused, is_fine)

_RANKS = (
    *(universal.HISTORY, laws.DETERMINISM, laws.BUFFER_REUSE, laws.LATE_PRODUCER, laws.HOST_SYNC, laws.GRAPH_CAPTURE),
    *(laws_journeys.IN_FLIGHT, laws_journeys.DENSE),
)
_WORLDS = (*_RANKS, CONCATENATION, REFINEMENT)


def _of_rows(*of: Law) -> tuple[Law, ...]:
    """Laws of plain rows, for cases without codes and scales."""
    return tuple(replace(law, applies=lambda case, law=law: not case.fp8 and law.applies(case)) for law in of)  # type: ignore[misc]


_COMBINE = (*_WORLDS, laws.ADJOINTNESS)
FLATTEN_EXPERTS = (*universal.EVERYWHERE, *universal.STATIC)
DEEPEP_LAYOUT = (*universal.EVERYWHERE, *universal.STATIC, ROW_REVERSAL)
ALLGATHER_DISPATCH = ALLTOALL_DISPATCH = (*_COMBINE, laws.RELABELLING, laws_sequences.SEQUENCE)
DEEPEP_DISPATCH = (*_COMBINE, laws_sequences.SEQUENCE)
DEEPEP_COMBINE = ALLGATHER_COMBINE = ALLTOALL_COMBINE = HYBRIDEP_COMBINE = (*_COMBINE, laws.HANDLE_AGAIN)
DEEPEP_CACHED_DISPATCH = HYBRIDEP_CACHED_DISPATCH = (*_RANKS, laws.ADJOINTNESS)
DEEPEP_LOW_LATENCY_DISPATCH = DEEPEP_LOW_LATENCY_COMBINE = _WORLDS
HYBRIDEP_DISPATCH = (
    *_RANKS,
    laws_sequences.SEQUENCE,
    *_of_rows(CONCATENATION, REFINEMENT, laws.ADJOINTNESS, laws.RELABELLING, FUSED),
)
