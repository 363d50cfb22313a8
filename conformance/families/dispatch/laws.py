"""Laws of dispatchers: relations between calls of all ranks; for round trips see `laws_journeys`.

Every rank requests the same runs in the same order; otherwise the ranks deadlock.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from conformance.core.contract import Problem
from conformance.core.law import Law, Trial, same, upside_down
from conformance.core.ranks import AtRank
from conformance.core.universal_laws import overwritten, taken_before
from conformance.families.dispatch.cases import CACHED, MAPPED, DispatchCase
from conformance.families.dispatch.dispatcher import together
from conformance.judge import Bounded, Exact, Expectation, Finding
from moe_ref.permutation.rows import PADDING

FLOATS = ("float32", "bfloat16", "float16")


def _repeats(trial: Trial, law: str, outputs: dict[str, Any]) -> Finding | None:
    """Compare the second run with the first.

    Outputs whose order is free are judged by themselves.
    """
    finding = trial.judged(law, trial.expected, outputs)
    if finding or not trial.declared.get("deterministic"):
        return finding
    sums = [name for name, x in trial.expected.items() if isinstance(x, (Bounded, Exact))]
    return same(law, {name: trial.first.get(name) for name in sums}, outputs)


def _determinism(trial: Trial) -> Finding | None:
    """The same call on memory with other contents."""
    second_poison = {"nan": "zero", "zero": "max", "max": "nan"}[trial.case.poison]
    return _repeats(trial, "determinism", trial.run(trial.problem, poison=second_poison))


def _call_of(trial: Trial, case: DispatchCase) -> tuple[Problem, dict[str, Expectation]]:
    """This rank's call of another case, and its expectations."""
    at: AtRank[DispatchCase] = trial.contract  # type: ignore[assignment]
    calls = at.whole.calls(case)
    return at.own(calls), at.whole.right(case, calls, trial.declared)[at.place.rank]


def _other_values(trial: Trial) -> tuple[Problem, dict[str, Expectation]]:
    """Other values of the same shapes: for a dispatch another routing, for a combine other rows."""
    at: AtRank[DispatchCase] = trial.contract  # type: ignore[assignment]
    if not trial.problem.producer:
        return _call_of(trial, replace(trial.case, seed=trial.case.seed + 1, law="", slots=None))
    name = next(iter(trial.problem.required))
    calls = [
        call.with_tensors(
            {
                name: -call.required[name]
                if call.required[name].element_size() > 1
                else upside_down(call.required[name], 1)
            }
        )
        for call in at.calls(trial.case)
    ]
    return at.own(calls), at.whole.right(trial.case, calls, trial.declared)[at.place.rank]


def _rerouted(trial: Trial) -> tuple[Problem, dict[str, Expectation]]:
    """Every rank's tokens reversed, each for other experts: new counts, no more room needed.

    The experts of a rank stay together, so the fullest rank (now another one) holds as many rows.
    Where the counts would not change, the first token of every rank is unrouted.
    """
    at: AtRank[DispatchCase] = trial.contract  # type: ignore[assignment]
    first_calls = at.calls(trial.case)
    calls = [
        call.with_tensors({name: _next_experts(trial.case, name, upside_down(x)) for name, x in call.tensors.items()})
        for call in first_calls
    ]
    if torch.equal(_requests_per_expert(trial.case, calls), _requests_per_expert(trial.case, first_calls)):
        name, nobody = ("routing_map", 0) if trial.case.dispatcher in MAPPED else ("indices", PADDING)
        calls = [
            call.with_tensors(
                {name: call.required[name].index_fill(0, torch.arange(min(len(call.required[name]), 1)), nobody)}
            )
            for call in calls
        ]
    return at.own(calls), at.whole.right(trial.case, calls, trial.declared)[at.place.rank]


def _next_experts(case: DispatchCase, name: str, x: Tensor) -> Tensor:
    """The input with each expert e replaced by e + 1 on the next rank, cyclically."""
    held = case.local_experts
    if name == "indices":
        there = (x // held + 1) % (case.experts // held) * held + (x + 1) % held
        return torch.where(x < 0, x, there)
    if name == "routing_map" or (name == "probs" and case.dispatcher in MAPPED):
        return x.unflatten(1, (-1, held)).roll((1, 1), (1, 2)).flatten(1)
    return x


def _requests_per_expert(case: DispatchCase, calls: list[Problem]) -> Tensor:
    """[E]: requests per expert by all ranks' tokens."""
    if case.dispatcher in MAPPED:
        return torch.cat([call.required["routing_map"] for call in calls]).long().sum(0)
    indices = torch.cat([call.required["indices"] for call in calls]).flatten().long()
    return torch.bincount(indices[indices >= 0], minlength=case.experts)


def _buffer_reuse(trial: Trial) -> Finding | None:
    """Other values in the memory of the first call's inputs."""
    return overwritten(trial, *_other_values(trial))


def _handle_again(trial: Trial) -> Finding | None:
    """A second combine with the same handle."""
    return _repeats(trial, "handle_again", taken_before(trial))


def _late_producer(trial: Trial) -> Finding | None:
    """Writes to the inputs are still pending on the current stream when the function is called."""
    return _repeats(trial, "late_producer", trial.run(trial.problem, late=True))


def _host_sync(trial: Trial) -> Finding | None:
    """No host synchronisation happens where `host_sync_free` is declared, unless the transport
    between ranks needs one.
    """
    at: AtRank[DispatchCase] = trial.contract  # type: ignore[assignment]
    if at.place.shares_gpu or not trial.declared.get("host_sync_free"):
        return None
    try:
        return _repeats(trial, "host_sync", trial.run(trial.problem, forbid_sync=True))
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        return Finding("call", "host_sync", f"waits for the device, although host_sync_free is declared: {error}")


def _graph_capture(trial: Trial) -> Finding | None:
    """A graph is captured with one routing and replayed with another, where this is declared."""
    if not trial.declared.get("graph_capturable"):
        return None
    second, expectations = _other_values(trial) if trial.problem.producer else _rerouted(trial)
    return trial.judged("graph_capture", expectations, trial.run(trial.problem, replay=second))


def _adjointness(trial: Trial) -> Finding | None:
    """Σ_ranks ⟨dy, A x⟩ = Σ_ranks ⟨Aᵀ dy, x⟩; small integers make both sides exact."""
    at: AtRank[DispatchCase] = trial.contract  # type: ignore[assignment]
    into = trial.problem.wanted[0]
    out = {"tokens": "rows", "rows": "tokens"}[into]
    forward_product = _inner(trial.problem.cotangents[out], trial.first[out])
    backward_product = _inner(trial.first[f"d_{into}"], trial.problem.required[into])
    both = torch.tensor([forward_product, backward_product], dtype=torch.float64)
    dist.all_reduce(both, group=at.place.group)
    if both[0] == both[1]:
        return None
    return Finding(
        f"d_{into}",
        "adjointness",
        f"⟨d_{out}, {out}⟩ = {both[0]:.9g}, but ⟨d_{into}, {into}⟩ = {both[1]:.9g}, added over the ranks",
    )


def _inner(a: Tensor, b: Tensor) -> float:
    """⟨a, b⟩ without NaN entries, which are garbage no kernel may read."""
    return float(torch.where(b.double().isfinite(), a.double() * b.double(), 0.0).sum())


# ---- relabelling


def _relabelling(trial: Trial) -> Finding | None:
    """Every rank's tokens and experts are reversed: the same rows arrive at other positions."""
    at: AtRank[DispatchCase] = trial.contract  # type: ignore[assignment]
    rank, case = at.place.rank, replace(trial.case, grads="", unused="", law="", layout="contiguous", layout_of="")
    calls_before = at.calls(trial.case)
    relabelled_calls = [replace(_turned(case, call), wanted=(), cotangents={}, layouts={}) for call in calls_before]
    first_results, second_results = (together(calls) for calls in (calls_before, relabelled_calls))
    outputs = trial.run(at.own(relabelled_calls))
    places = _places(
        first_results[rank].handle.plan.provenance(rank), second_results[rank].handle.plan.provenance(rank), case
    )
    moved = {}
    for name in ("rows", "probs"):
        x = trial.first.get(name)
        if isinstance(x, Tensor):
            raw = x.view(torch.uint8) if x.element_size() == 1 else x
            moved[name] = raw[places].view(x.dtype)
            got = outputs.get(name)
            if isinstance(got, Tensor) and len(got) == second_results[rank].handle.plan.num_rows[rank]:
                real = second_results[rank].handle.plan.copies(rank) != PADDING
                outputs[name] = (got.view(torch.uint8) if got.element_size() == 1 else got)[real].view(got.dtype)
    return same("relabelling", moved, outputs)


def _turned(case: DispatchCase, call: Problem) -> Problem:
    """The call with tokens reversed, and each rank's expert columns."""
    turned = {}
    for name, x in call.tensors.items():
        raw = upside_down(x)
        if name in ("routing_map", "probs"):
            raw = raw.unflatten(1, (-1, case.local_experts)).flip(2).flatten(1)
        turned[name] = raw
    return call.with_tensors(turned)


def _places(before_P3: Tensor, after_P3: Tensor, case: DispatchCase) -> Tensor:
    """The row of the first run for each row of the second run."""
    where = {tuple(key): row for row, key in enumerate(before_P3.tolist())}
    counts, held = case.counts, case.local_experts
    out = []
    for source, token, expert in after_P3.tolist():
        if source != PADDING:
            out.append(where[source, counts[source] - 1 - token, expert // held * held + held - 1 - expert % held])
    return torch.tensor(out, dtype=torch.long)


def is_fine(case: DispatchCase) -> bool:
    return not case.golden and not case.illegal


def _whole_numbers(case: DispatchCase) -> bool:
    return is_fine(case) and case.values == "integers" and case.dtype == "float32"


def fits(case: DispatchCase) -> bool:
    """Whether experts' results of small integers (at most 32 each) sum exactly in every dtype."""
    return is_fine(case) and case.values == "integers" and case.dtype in FLOATS and case.topk * case.shards <= 8


def has_room(case: DispatchCase) -> bool:
    return not case.capacity and (case.slack is None or case.slack >= 0)


def has_plain_slots(case: DispatchCase) -> bool:
    return not case.repeats and not case.drop_zeros and not case.fp8


def _linear(case: DispatchCase) -> bool:
    """Whether the only output is linear in the first input, with its gradient requested."""
    gradient_wanted = case.grads.split("+")[0] in ("tokens", "rows") and not case.unused and not case.biases
    return _whole_numbers(case) and gradient_wanted and case.slack is None


def _static(case: DispatchCase) -> bool:
    """Whether the host knows all sizes, and no gradients are wanted."""
    sized = case.capacity or case.slack is not None or case.dispatcher == "deepep_low_latency"
    return bool(is_fine(case) and sized and not case.grads and case.layout == "contiguous")


def _unread(case: DispatchCase) -> bool:
    """Whether, in addition, no value need be read on the host.

    An implementation may read indices in order to refuse wrong ones.
    """
    read = case.dispatcher not in MAPPED and case.function.endswith("_dispatch") and case.function not in CACHED
    return _static(case) and (case.trusted or not read)


DETERMINISM = Law("determinism", _determinism, is_fine)
BUFFER_REUSE = Law("buffer_reuse", _buffer_reuse, lambda case: is_fine(case) and not case.grads)
HANDLE_AGAIN = Law("handle_again", _handle_again, is_fine)
LATE_PRODUCER = Law("late_producer", _late_producer, is_fine, device="cuda")
HOST_SYNC = Law("host_sync", _host_sync, _unread, device="cuda")
GRAPH_CAPTURE = Law("graph_capture", _graph_capture, _static, device="cuda")
ADJOINTNESS = Law("adjointness", _adjointness, _linear)
RELABELLING = Law(
    "relabelling", _relabelling, lambda case: is_fine(case) and has_room(case) and case.layout == "contiguous"
)
