"""Laws of dispatchers: relations between calls of all ranks, whatever the reference says.

Every rank asks for the same runs in the same order, or all of them wait for each other.
"""

import time
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from conformance.contracts import dispatch_deepep, dispatch_maps, dispatch_slabs
from conformance.contracts.base import Problem
from conformance.contracts.collective import AtRank
from conformance.contracts.dispatch_base import row_tokens_of, sum_of_rows, together, tree_of
from conformance.contracts.dispatching import DISPATCHERS, MAPPED, DispatchCase
from conformance.interface import Implementation, named_outputs
from conformance.judge import Bounded, Exact, Expectation, Finding
from conformance.laws.base import Law, Trial, same, upside_down
from conformance.values import hashed
from moe_ref.route_plan import NOWHERE

FLOATS = ("float32", "bfloat16", "float16")
PAUSES = 4  # of one rank during a law, each up to PAUSE_MS
PAUSE_MS = 4


def _repeats(trial: Trial, law: str, outputs: dict[str, Any]) -> Finding | None:
    """The second run against the first; where an output is free, both are judged by themselves."""
    finding = trial.judged(law, trial.expected, outputs)
    if finding or not trial.declared.get("deterministic"):
        return finding
    sums = [name for name, x in trial.expected.items() if isinstance(x, (Bounded, Exact))]
    return same(law, {name: trial.first.get(name) for name in sums}, outputs)


def _determinism(trial: Trial) -> Finding | None:
    """The same call on memory that held something else."""
    other = {"nan": "zero", "zero": "max", "max": "nan"}[trial.case.poison]
    return _repeats(trial, "determinism", trial.run(trial.problem, poison=other))


def _other(trial: Trial, case: DispatchCase) -> tuple[Problem, dict[str, Expectation]]:
    """Another case's call of this rank, and what is right of it."""
    at: AtRank[DispatchCase] = trial.contract  # type: ignore[assignment]
    calls = at.whole.calls(case)
    return at.own(calls), at.whole.right(case, calls, trial.declared)[at.place.rank]


def _other_values(trial: Trial) -> tuple[Problem, dict[str, Expectation]]:
    """The same shapes: of a dispatch with another routing, of what comes after one with other rows."""
    at: AtRank[DispatchCase] = trial.contract  # type: ignore[assignment]
    if not trial.problem.producer:
        return _other(trial, replace(trial.case, seed=trial.case.seed + 1, law="", slots=None))
    name = next(iter(trial.problem.required))
    calls = [
        call.with_tensors({name: -call.required[name] if call.required[name].element_size() > 1 else upside_down(call.required[name], 1)})
        for call in at.calls(trial.case)
    ]
    return at.own(calls), at.whole.right(trial.case, calls, trial.declared)[at.place.rank]


def _elsewhere(trial: Trial) -> tuple[Problem, dict[str, Expectation]]:
    """Every rank's tokens in the opposite order, each wanting other experts: another routing, with other counts, that needs no more room.

    The experts of a rank stay together, so the fullest rank holds as much as before, though it is another one. Where that leaves the counts as they
    were, the first token of every rank wants nobody.
    """
    at: AtRank[DispatchCase] = trial.contract  # type: ignore[assignment]
    before = at.calls(trial.case)
    calls = [call.with_tensors({name: _next_experts(trial.case, name, upside_down(x)) for name, x in call.tensors.items()}) for call in before]
    if torch.equal(_wanted(trial.case, calls), _wanted(trial.case, before)):
        name, nobody = ("routing_map", 0) if trial.case.dispatcher in MAPPED else ("indices", NOWHERE)
        calls = [call.with_tensors({name: call.required[name].index_fill(0, torch.arange(min(len(call.required[name]), 1)), nobody)}) for call in calls]
    return at.own(calls), at.whole.right(trial.case, calls, trial.declared)[at.place.rank]


def _next_experts(case: DispatchCase, name: str, x: Tensor) -> Tensor:
    """The input when every token wants, instead of an expert, the one after it on the next rank; after the last comes the first."""
    held = case.local_experts
    if name == "indices":
        there = (x // held + 1) % (case.experts // held) * held + (x + 1) % held
        return torch.where(x < 0, x, there)
    if name == "routing_map" or (name == "probs" and case.dispatcher in MAPPED):
        return x.unflatten(1, (-1, held)).roll((1, 1), (1, 2)).flatten(1)
    return x


def _wanted(case: DispatchCase, calls: list[Problem]) -> Tensor:
    """[E]: how often the tokens of all ranks want each expert."""
    if case.dispatcher in MAPPED:
        return torch.cat([call.required["routing_map"] for call in calls]).long().sum(0)
    indices = torch.cat([call.required["indices"] for call in calls]).flatten().long()
    return torch.bincount(indices[indices >= 0], minlength=case.experts)


def _buffer_reuse(trial: Trial) -> Finding | None:
    """Other values in the very storage that the first run read."""
    second, right = _other_values(trial)
    return trial.judged("buffer_reuse", right, trial.run(second, storage=trial.extras["placed"]))


def _late_producer(trial: Trial) -> Finding | None:
    """Inputs that are still being written, on the current stream, when the call is made."""
    return _repeats(trial, "late_producer", trial.run(trial.problem, late=True))


def _host_sync(trial: Trial) -> Finding | None:
    """No wait for the device where it is declared that there is none."""
    if not trial.declared.get("host_sync_free"):
        return None
    try:
        return _repeats(trial, "host_sync", trial.run(trial.problem, forbid_sync=True))
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        return Finding("call", "host_sync", f"waits for the device, although host_sync_free is declared: {error}")


def _graph_capture(trial: Trial) -> Finding | None:
    """Captured with one routing and replayed with another, where it is declared that this works."""
    if not trial.declared.get("graph_capturable"):
        return None
    second, right = _other_values(trial) if trial.problem.producer else _elsewhere(trial)
    return trial.judged("graph_capture", right, trial.run(trial.problem, replay=second))


def _adjointness(trial: Trial) -> Finding | None:
    """Σ over ranks ⟨dy, A x⟩ = Σ over ranks ⟨Aᵀ dy, x⟩: forward and backward are the same matrix. Small integers make both sides exact."""
    at: AtRank[DispatchCase] = trial.contract  # type: ignore[assignment]
    into = trial.problem.wanted[0]
    out = {"tokens": "rows", "rows": "tokens"}[into]
    left = _inner(trial.problem.cotangents[out], trial.first[out])
    right = _inner(trial.first[f"d_{into}"], trial.problem.required[into])
    both = torch.tensor([left, right], dtype=torch.float64)
    dist.all_reduce(both, group=at.place.group)
    if both[0] == both[1]:
        return None
    return Finding(f"d_{into}", "adjointness", f"⟨d_{out}, {out}⟩ = {both[0]:.9g}, but ⟨d_{into}, {into}⟩ = {both[1]:.9g}, added over the ranks")


def _inner(a: Tensor, b: Tensor) -> float:
    """The product; what is no number is garbage that nothing may read."""
    return float(torch.where(b.double().isfinite(), a.double() * b.double(), 0.0).sum())


# ---- several calls


def dispatches_of(case: DispatchCase) -> list[Problem]:
    """The dispatch of each rank, without gradients."""
    if case.dispatcher in MAPPED:
        return dispatch_maps.dispatches(case)
    return (dispatch_deepep if case.dispatcher == "deepep" else dispatch_slabs).dispatches(case)


def outputs_of(function: str) -> tuple[str, ...]:
    """What a dispatch, or a combine with several outputs, returns."""
    if function.endswith("combine"):
        return ("tokens", "probs")
    return {"deepep_dispatch": dispatch_deepep.DeepEPDispatch.outputs, "deepep_low_latency_dispatch": dispatch_slabs.OUTPUTS}.get(
        function, dispatch_maps.OUTPUTS
    )


def named(call: Problem, mark: str) -> dict[str, Any]:
    """The call's arguments under names of their own."""
    return {f"{name}{mark}": x for name, x in (call.required | call.settings).items()}


def send(implementation: Implementation, call: Problem, given: dict[str, Any], mark: str) -> dict[str, Any]:
    """Dispatch what stands in `given` under those names."""
    settings = {name: given[f"{name}{mark}"] for name in call.settings}
    result = implementation.call(call.function, *(given[f"{name}{mark}"] for name in call.required), **settings, group=given["group"])
    return named_outputs(result, outputs_of(call.function))


def send_back(implementation: Implementation, function: str, rows: Tensor, made: dict[str, Any], given: dict[str, Any], mark: str) -> Tensor:
    """Combine rows of that dispatch; a combine with weights is given ones."""
    name = function.replace("dispatch", "combine")
    if name == "deepep_low_latency_combine":
        indices = given[f"indices{mark}"]
        weights = given.get(f"weights{mark}", torch.ones(indices.shape, device=indices.device))
        return implementation.call(name, rows, indices, weights, made["handle"], group=given["group"])
    out = implementation.call(name, rows, made["handle"], group=given["group"])
    tokens: Tensor = out if isinstance(out, Tensor) else named_outputs(out, outputs_of(name))["tokens"]
    return tokens


def _pause(seed: int, rank: int, turn: int, device: torch.device) -> None:
    """Hold this rank up: now, and where there is a device, there too."""
    length = int(hashed(seed, f"pause {rank}", PAUSES)[turn] % (PAUSE_MS * 1000))
    time.sleep(length / 1e6)
    if device.type == "cuda":
        torch.cuda._sleep(length * 1000)


def _in_flight(trial: Trial) -> Finding | None:
    """Two dispatches before the first combine, ranks held up here and there, and the first dispatch once more: none reads another's rows."""
    at: AtRank[DispatchCase] = trial.contract  # type: ignore[assignment]
    rank, plain = at.place.rank, replace(trial.case, grads="", unused="", law="", layout="contiguous", layout_of="")
    cases = {" a": plain, " b": replace(plain, seed=plain.seed + 1, slots=None)}
    calls = {mark: dispatches_of(case) for mark, case in cases.items()}
    function = calls[" a"][0].function

    def script(implementation: Implementation, given: dict[str, Any]) -> dict[str, Any]:
        device = given["tokens a"].device
        made: dict[str, Any] = {}
        for turn, mark in enumerate((" a", " b")):
            _pause(plain.seed, rank, turn, device)
            made[mark] = send(implementation, calls[mark][rank], given, mark)
        back = {}
        for turn, mark in enumerate((" b", " a")):
            _pause(plain.seed, rank, 2 + turn, device)
            back[mark] = send_back(implementation, function, made[mark]["rows"], made[mark], given, mark)
        made[" again"] = send(implementation, calls[" a"][rank], given, " a")
        every = {f"{name}{mark}": x for mark, outputs in made.items() for name, x in outputs.items()}
        return every | {f"tokens back{mark}": x for mark, x in back.items()}

    inputs = {name: x for mark, own in calls.items() for name, x in named(own[rank], mark).items()}
    first = calls[" a"][rank]
    problem = Problem(function, inputs, {"group": at.place.group}, script=script, first=first.required | first.settings)
    outputs = trial.run(problem)
    for mark in (" a", " b", " again"):
        case = cases.get(mark, plain)
        sent = calls.get(mark, calls[" a"])
        every = together(sent)
        right = {"rows": _rows_right(case, every[rank])}
        own = {name.removesuffix(mark): x for name, x in outputs.items() if name.endswith(mark)}
        if mark != " again" and case.dtype in FLOATS:
            rows = [out.rows.flatten(0, -2) for out in every]
            kind, tree = tree_of(case, rows[0].dtype, trial.declared, _reduce(case, rows[0].dtype))
            right["tokens back"] = sum_of_rows(case, rows, row_tokens_of([out.handle for out in every]), kind, tree)[rank]
        finding = trial.judged("in_flight", right, own)
        if finding:
            return finding
    return None


def _reduce(case: DispatchCase, dtype: torch.dtype) -> torch.dtype:
    """What ranks add in, where the dispatcher has a choice."""
    return getattr(torch, case.probs) if case.probs else torch.promote_types(dtype, torch.float32)


def _rows_right(case: DispatchCase, out: Any) -> Expectation:
    if case.dispatcher == "deepep_low_latency":
        return dispatch_slabs.judged(out)["rows"]
    said = dispatch_maps.specified(case, out) if case.dispatcher in MAPPED else out.handle.row_tokens[out.handle.rank] != NOWHERE
    return dispatch_maps.free_behind("rows", out.rows, said)


# ---- experts that are not linear


def _expert(x: Tensor, expert: Tensor) -> Tensor:
    """(1 + e mod 3)·|x| - (e mod 2)·x: whole numbers, and another of every expert."""
    e = expert.reshape(*expert.shape, *(1,) * (x.dim() - expert.dim()))
    return (1 + e % 3).to(x.dtype) * x.abs() - (e % 2).to(x.dtype) * x


def first_expert(case: DispatchCase, rank: int) -> int:
    """The first of the experts that a rank holds; with expert tensor parallelism some ranks hold the same."""
    return rank // case.shards * case.local_experts


def at_experts(case: DispatchCase, made: dict[str, Any], first: int) -> Tensor:
    """What experts, of whom this is a rank's first, make of the rows of a dispatch; of DeepEP's, added up over the slots."""
    rows = made["rows"]
    device = rows.device
    if case.dispatcher == "deepep":
        local = made["indices"].long()
        parts = [torch.where((local[:, k] >= 0)[:, None], _expert(rows, first + local[:, k]), 0.0) for k in range(case.topk)]
        return torch.stack(parts).sum(0)
    if case.dispatcher == "deepep_low_latency":
        return _expert(rows, first + torch.arange(case.local_experts, device=device)[:, None].expand(rows.shape[:2]))
    owner = torch.repeat_interleave(torch.arange(case.local_experts, device=device), made["tokens_per_expert"].to(device).long())
    whole = torch.zeros(len(rows), dtype=torch.long, device=device)
    whole[: len(owner)] = first + owner[: len(rows)]
    return _expert(rows, whole)


def _dense(trial: Trial) -> Finding | None:
    """Dispatch, experts that are not linear, combine: by every dispatcher that is offered the very numbers that one process gets."""
    at: AtRank[DispatchCase] = trial.contract  # type: ignore[assignment]
    rank = at.place.rank
    plain = replace(trial.case, law="", grads="", unused="", layout="contiguous", layout_of="", probs="", align=0, slack=None, scales=0, biases=0)
    own_case = replace(trial.case, law="", grads="", unused="", layout="contiguous", layout_of="", probs="", scales=0, biases=0)
    for dispatcher in dict.fromkeys((trial.case.dispatcher, *(DISPATCHERS if trial.case.shards == 1 else ()))):
        own = dispatcher == trial.case.dispatcher
        case = own_case if own else replace(plain, function=f"{dispatcher}_dispatch")
        function = f"{dispatcher}_dispatch"
        calls = dispatches_of(case)
        group = {"group": at.place.group}
        back = Problem(function.replace("dispatch", "combine"), calls[rank].required, group)
        asked = replace(calls[rank], settings=calls[rank].settings | group)
        if trial.extras["refusal"](asked) or not trial.extras["offers"](back.function):
            continue

        def script(implementation: Implementation, given: dict[str, Any], case: DispatchCase = case, call: Problem = calls[rank]) -> dict[str, Any]:
            made = send(implementation, call, given, "")
            return {"layer": send_back(implementation, call.function, at_experts(case, made, first_expert(case, rank)), made, given, "")}

        problem = replace(asked, script=script, first=asked.required, settings=asked.settings)
        finding = trial.judged("dense", {"layer": Exact(_by_one_process(case, calls[rank]), "values")}, trial.run(problem))
        if finding:
            return replace(finding, message=f"{dispatcher}: {finding.message}")
    return None


def _by_one_process(case: DispatchCase, call: Problem) -> Tensor:
    """[T,H]: the layer without a dispatcher."""
    tokens = call.required["tokens"]
    chosen = call.required["routing_map"] != 0 if case.dispatcher in MAPPED else None
    total = torch.zeros_like(tokens)
    for expert in range(case.experts):
        times = chosen[:, expert] if chosen is not None else (call.required["indices"] == expert).sum(1)
        total += times[:, None] * _expert(tokens, torch.tensor(expert))
    return total * case.shards


# ---- other names for the same


def _relabelling(trial: Trial) -> Finding | None:
    """Every rank's tokens and experts in the opposite order: the same rows in other places."""
    at: AtRank[DispatchCase] = trial.contract  # type: ignore[assignment]
    rank, case = at.place.rank, replace(trial.case, grads="", unused="", law="", layout="contiguous", layout_of="")
    before = at.calls(trial.case)
    after = [replace(_turned(case, call), wanted=(), cotangents={}, layouts={}) for call in before]
    one, two = (together(calls) for calls in (before, after))
    outputs = trial.run(at.own(after))
    places = _places(one[rank].handle.plan.provenance(rank), two[rank].handle.plan.provenance(rank), case)
    moved = {}
    for name in ("rows", "probs"):
        x = trial.first.get(name)
        if isinstance(x, Tensor):
            raw = x.view(torch.uint8) if x.element_size() == 1 else x
            moved[name] = raw[places].view(x.dtype)
            got = outputs.get(name)
            if isinstance(got, Tensor) and len(got) == two[rank].handle.plan.num_rows[rank]:
                real = two[rank].handle.plan.copies(rank) != NOWHERE
                outputs[name] = (got.view(torch.uint8) if got.element_size() == 1 else got)[real].view(got.dtype)
    return same("relabelling", moved, outputs)


def _turned(case: DispatchCase, call: Problem) -> Problem:
    """Tokens upside down, and the columns of each rank's experts."""
    turned = {}
    for name, x in call.tensors.items():
        raw = upside_down(x)
        if name in ("routing_map", "probs"):
            raw = raw.unflatten(1, (-1, case.local_experts)).flip(2).flatten(1)
        turned[name] = raw
    return call.with_tensors(turned)


def _places(before_P3: Tensor, after_P3: Tensor, case: DispatchCase) -> Tensor:
    """Where the rows of the second run stood in the first."""
    where = {tuple(key): row for row, key in enumerate(before_P3.tolist())}
    counts, held = case.counts, case.local_experts
    out = []
    for source, token, expert in after_P3.tolist():
        if source != NOWHERE:
            out.append(where[source, counts[source] - 1 - token, expert // held * held + held - 1 - expert % held])
    return torch.tensor(out, dtype=torch.long)


def is_fine(case: DispatchCase) -> bool:
    return not case.golden and not case.illegal


def _whole_numbers(case: DispatchCase) -> bool:
    return is_fine(case) and case.values == "integers" and case.dtype == "float32"


def fits(case: DispatchCase) -> bool:
    """Whether what experts make of small integers, at most 32 each, adds up exactly in every dtype."""
    return is_fine(case) and case.values == "integers" and case.dtype in FLOATS and case.topk * case.shards <= 8


def has_room(case: DispatchCase) -> bool:
    return not case.capacity and (case.slack is None or case.slack >= 0)


def has_plain_slots(case: DispatchCase) -> bool:
    return not case.repeats and not case.drop_zeros and not case.fp8


def _linear(case: DispatchCase) -> bool:
    """Whether the only output that counts is a linear map of the first input, whose gradient was asked for."""
    asked = case.grads.split("+")[0] in ("tokens", "rows") and not case.unused and not case.biases
    return _whole_numbers(case) and asked and case.slack is None


def _static(case: DispatchCase) -> bool:
    """Whether all sizes are known beforehand, and only the forward is asked for."""
    sized = case.capacity or case.slack is not None or case.dispatcher == "deepep_low_latency"
    return bool(is_fine(case) and sized and not case.grads and case.layout == "contiguous")


DETERMINISM = Law("determinism", _determinism, is_fine)
BUFFER_REUSE = Law("buffer_reuse", _buffer_reuse, lambda case: is_fine(case) and not case.grads)
LATE_PRODUCER = Law("late_producer", _late_producer, is_fine, device="cuda")
HOST_SYNC = Law("host_sync", _host_sync, _static, device="cuda")
GRAPH_CAPTURE = Law("graph_capture", _graph_capture, _static, device="cuda")
ADJOINTNESS = Law("adjointness", _adjointness, _linear)
IN_FLIGHT = Law("in_flight", _in_flight, lambda case: is_fine(case) and not case.fp8 and case.dtype in FLOATS)
DENSE = Law("dense", _dense, lambda case: fits(case) and has_room(case) and has_plain_slots(case))
RELABELLING = Law("relabelling", _relabelling, lambda case: is_fine(case) and has_room(case) and case.layout == "contiguous")
