"""Laws of round trips: several dispatches in flight, and nonlinear experts.

As in `laws`, every rank requests the same runs in the same order.
"""

import time
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from conformance.core.contract import Problem
from conformance.core.law import Law, Trial
from conformance.core.ranks import AtRank
from conformance.core.tensors import hashed
from conformance.families.dispatch import deepep as dispatch_deepep
from conformance.families.dispatch import low_latency as dispatch_slabs
from conformance.families.dispatch import maps as dispatch_maps
from conformance.families.dispatch.cases import DISPATCHERS, MAPPED, DispatchCase
from conformance.families.dispatch.dispatcher import row_tokens_of, sum_of_rows, together, tree_of
from conformance.families.dispatch.laws import FLOATS, fits, has_plain_slots, has_room, is_fine
from conformance.interface import Implementation, named_outputs
from conformance.judge import Exact, Expectation, Finding
from conformance.private_parts import available
from moe_ref.permutation.rows import PADDING

PAUSES = 4  # pauses per rank and law, each up to PAUSE_MS
PAUSE_MS = 4


def dispatches_of(case: DispatchCase) -> list[Problem]:
    """One dispatch per rank, without gradients."""
    if case.dispatcher in MAPPED:
        return dispatch_maps.dispatches(case)
    return (dispatch_deepep if case.dispatcher == "deepep" else dispatch_slabs).dispatches(case)


def outputs_of(function: str) -> tuple[str, ...]:
    """Output names of a dispatch, or of a combine with several outputs."""
    if function.endswith("combine"):
        return ("tokens", "probs")
    return {
        "deepep_dispatch": dispatch_deepep.DeepEPDispatch.outputs,
        "deepep_low_latency_dispatch": dispatch_slabs.OUTPUTS,
    }.get(function, dispatch_maps.OUTPUTS)


def named(call: Problem, mark: str) -> dict[str, Any]:
    """The call's arguments, with `mark` appended to their names."""
    return {f"{name}{mark}": x for name, x in (call.required | call.settings).items()}


def send(implementation: Implementation, call: Problem, arguments: dict[str, Any], mark: str) -> dict[str, Any]:
    """Dispatch the arguments whose names end with that mark."""
    settings = {name: arguments[f"{name}{mark}"] for name in call.settings}
    result = implementation.call(
        call.function, *(arguments[f"{name}{mark}"] for name in call.required), **settings, group=arguments["group"]
    )
    return named_outputs(result, outputs_of(call.function))


def send_back(
    implementation: Implementation,
    function: str,
    rows: Tensor,
    dispatched: dict[str, Any],
    arguments: dict[str, Any],
    mark: str,
) -> Tensor:
    """Combine rows through the handle of that dispatch. Weights are 1 unless they are given."""
    name = function.replace("dispatch", "combine")
    if name == "deepep_low_latency_combine":
        indices = arguments[f"indices{mark}"]
        weights = arguments.get(f"weights{mark}", torch.ones(indices.shape, device=indices.device))
        return implementation.call(name, rows, indices, weights, dispatched["handle"], group=arguments["group"])
    out = implementation.call(name, rows, dispatched["handle"], group=arguments["group"])
    tokens: Tensor = out if isinstance(out, Tensor) else named_outputs(out, outputs_of(name))["tokens"]
    return tokens


def _pause(seed: int, rank: int, turn: int, device: torch.device) -> None:
    """Delay this rank on the host and, if any, on the device."""
    length = int(hashed(seed, f"pause {rank}", PAUSES)[turn] % (PAUSE_MS * 1000))
    time.sleep(length / 1e6)
    sleep = available("torch.cuda._sleep")
    if device.type == "cuda" and sleep:
        sleep(length * 1000)


def _in_flight(trial: Trial) -> Finding | None:
    """Two dispatches before the first combine, with random delays, and the first dispatch again:
    rows of different dispatches must not mix.
    """
    at: AtRank[DispatchCase] = trial.contract  # type: ignore[assignment]
    rank, plain_case = (
        at.place.rank,
        replace(trial.case, grads="", unused="", law="", layout="contiguous", layout_of=""),
    )
    if plain_case.values == "reciprocals":  # this law adds up rows, and a GPU's atomics flush subnormal numbers
        plain_case = replace(plain_case, values="dyadic")
    cases = {" a": plain_case, " b": replace(plain_case, seed=plain_case.seed + 1, slots=None)}
    calls = {mark: dispatches_of(case) for mark, case in cases.items()}
    function = calls[" a"][0].function

    def script(implementation: Implementation, arguments: dict[str, Any]) -> dict[str, Any]:
        device = arguments["tokens a"].device
        dispatched: dict[str, Any] = {}
        for turn, mark in enumerate((" a", " b")):
            _pause(plain_case.seed, rank, turn, device)
            dispatched[mark] = send(implementation, calls[mark][rank], arguments, mark)
        combined = {}
        for turn, mark in enumerate((" b", " a")):
            _pause(plain_case.seed, rank, 2 + turn, device)
            combined[mark] = send_back(
                implementation, function, dispatched[mark]["rows"], dispatched[mark], arguments, mark
            )
        dispatched[" again"] = send(implementation, calls[" a"][rank], arguments, " a")
        outputs = {f"{name}{mark}": x for mark, outputs in dispatched.items() for name, x in outputs.items()}
        return outputs | {f"tokens back{mark}": x for mark, x in combined.items()}

    inputs = {name: x for mark, rank_calls in calls.items() for name, x in named(rank_calls[rank], mark).items()}
    first = calls[" a"][rank]
    problem = Problem(function, inputs, {"group": at.place.group}, script=script, first=first.required | first.settings)
    outputs = trial.run(problem)
    for mark in (" a", " b", " again"):
        case = cases.get(mark, plain_case)
        dispatch_calls = calls.get(mark, calls[" a"])
        results = together(dispatch_calls)
        expectations = {"rows": rows_right(case, results[rank])}
        rank_calls = {name.removesuffix(mark): x for name, x in outputs.items() if name.endswith(mark)}
        if mark != " again" and case.dtype in FLOATS:
            rows = [out.rows.flatten(0, -2) for out in results]
            kind, tree = tree_of(case, rows[0].dtype, trial.declared, reduce_dtype(case, rows[0].dtype))
            expectations["tokens back"] = sum_of_rows(
                case, rows, row_tokens_of([out.handle for out in results]), kind, tree
            )[rank]
        finding = trial.judged("in_flight", expectations, rank_calls)
        if finding:
            return finding
    return None


def reduce_dtype(case: DispatchCase, dtype: torch.dtype) -> torch.dtype:
    """The dtype of the cross-rank sum, if a choice."""
    return getattr(torch, case.probs) if case.probs else torch.promote_types(dtype, torch.float32)


def rows_right(case: DispatchCase, out: Any) -> Expectation:
    if case.dispatcher == "deepep_low_latency":
        return dispatch_slabs.judged(out)["rows"]
    specified_rows = (
        dispatch_maps.specified(case, out)
        if case.dispatcher in MAPPED
        else out.handle.row_tokens[out.handle.rank] != PADDING
    )
    return dispatch_maps.free_behind("rows", out.rows, specified_rows)


# ---- nonlinear experts


def _expert(x: Tensor, expert: Tensor) -> Tensor:
    """(1 + e mod 3)·|x| - (e mod 2)·x: integer, and different per expert."""
    e = expert.reshape(*expert.shape, *(1,) * (x.dim() - expert.dim()))
    return (1 + e % 3).to(x.dtype) * x.abs() - (e % 2).to(x.dtype) * x


def first_expert(case: DispatchCase, rank: int) -> int:
    """A rank's first expert; ranks of one group of shards hold the same experts."""
    return rank // case.shards * case.local_experts


def at_experts(case: DispatchCase, dispatched: dict[str, Any], first: int) -> Tensor:
    """The results of the experts on dispatched rows, counting experts from `first`.

    For DeepEP, the results of a row's slots are added.
    """
    rows = dispatched["rows"]
    device = rows.device
    if case.dispatcher == "deepep":
        local = dispatched["indices"].long()
        slot_results = [
            torch.where((local[:, k] >= 0)[:, None], _expert(rows, first + local[:, k]), 0.0) for k in range(case.topk)
        ]
        return torch.stack(slot_results).sum(0)
    if case.dispatcher == "deepep_low_latency":
        return _expert(rows, first + torch.arange(case.local_experts, device=device)[:, None].expand(rows.shape[:2]))
    owner = torch.repeat_interleave(
        torch.arange(case.local_experts, device=device), dispatched["tokens_per_expert"].to(device).long()
    )
    row_experts = torch.zeros(len(rows), dtype=torch.long, device=device)
    row_experts[: len(owner)] = first + owner[: len(rows)]
    return _expert(rows, row_experts)


def _dense(trial: Trial) -> Finding | None:
    """Dispatch, nonlinear experts and combine give the result of one process, for every dispatcher
    that is offered.
    """
    at: AtRank[DispatchCase] = trial.contract  # type: ignore[assignment]
    rank = at.place.rank
    plain_case = replace(
        trial.case,
        law="",
        grads="",
        unused="",
        layout="contiguous",
        layout_of="",
        probs="",
        align=0,
        slack=None,
        scales=0,
        biases=0,
    )
    own_case = replace(
        trial.case, law="", grads="", unused="", layout="contiguous", layout_of="", probs="", scales=0, biases=0
    )
    for dispatcher in dict.fromkeys((trial.case.dispatcher, *(DISPATCHERS if trial.case.shards == 1 else ()))):
        is_own_dispatcher = dispatcher == trial.case.dispatcher
        case = own_case if is_own_dispatcher else replace(plain_case, function=f"{dispatcher}_dispatch")
        function = f"{dispatcher}_dispatch"
        calls = dispatches_of(case)
        group = {"group": at.place.group}
        combine_call = Problem(function.replace("dispatch", "combine"), calls[rank].required, group)
        call_with_group = replace(calls[rank], settings=calls[rank].settings | group)
        if trial.extras["refusal"](call_with_group) or not trial.extras["offers"](combine_call.function):
            continue

        def script(
            implementation: Implementation,
            arguments: dict[str, Any],
            case: DispatchCase = case,
            call: Problem = calls[rank],
        ) -> dict[str, Any]:
            dispatched = send(implementation, call, arguments, "")
            return {
                "layer": send_back(
                    implementation,
                    call.function,
                    at_experts(case, dispatched, first_expert(case, rank)),
                    dispatched,
                    arguments,
                    "",
                )
            }

        problem = replace(
            call_with_group, script=script, first=call_with_group.required, settings=call_with_group.settings
        )
        finding = trial.judged(
            "dense", {"layer": Exact(_by_one_process(case, calls[rank]), "values")}, trial.run(problem)
        )
        if finding:
            return replace(finding, message=f"{dispatcher}: {finding.message}")
    return None


def _by_one_process(case: DispatchCase, call: Problem) -> Tensor:
    """The layer's result [T,H] in one process, without a dispatcher."""
    tokens = call.required["tokens"]
    chosen = call.required["routing_map"] != 0 if case.dispatcher in MAPPED else None
    total = torch.zeros_like(tokens)
    for expert in range(case.experts):
        times = chosen[:, expert] if chosen is not None else (call.required["indices"] == expert).sum(1)
        total += times[:, None] * _expert(tokens, torch.tensor(expert))
    return total * case.shards


IN_FLIGHT = Law("in_flight", _in_flight, lambda case: is_fine(case) and not case.fp8 and case.dtype in FLOATS)
DENSE = Law("dense", _dense, lambda case: fits(case) and has_room(case) and has_plain_slots(case))
