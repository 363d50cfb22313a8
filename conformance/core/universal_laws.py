"""Laws of every function: results do not depend on history, memory or producers."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from conformance.core.autocast import AUTOCAST
from conformance.core.contract import Contract, Problem
from conformance.core.law import Law, Outputs, Trial, next_values, plain, same, upside_down
from conformance.core.scope import Scope
from conformance.core.space import Space
from conformance.core.tensors import SHARED
from conformance.judge import Exact, Expectation, Finding


def neighbours(contract: Contract[Any], case: Any) -> tuple[Any, Any]:
    """Cases that can run right after this one: with other settings, and with other values."""
    return Scope(contract, Space()).neighbour(case), replace(case, law="", before=(), seed=case.seed + 1)


def _history(trial: Trial) -> Finding | None:
    """Another case right after this one, with other settings and sizes where supported."""
    for neighbour in neighbours(trial.contract, trial.case):
        problem = trial.contract.problem(neighbour)
        if trial.inside(neighbour) and not trial.extras["refusal"](problem):
            finding = trial.judged("history", trial.reference(problem, neighbour), trial.run(problem))
            return replace(finding, message=f"after another case it {finding.message}") if finding else None
    return None


def _determinism(trial: Trial) -> Finding | None:
    """The same call again, with other contents of fresh memory and another generator state."""
    second_poison = {"nan": "zero", "zero": "max", "max": "nan"}[trial.case.poison]
    with torch.random.fork_rng():
        torch.manual_seed(trial.case.seed + 1)
        return trial.repeats("determinism", trial.run(trial.problem, poison=second_poison))


NOT_NEGATIVE = ("probs", "tokens_per_expert", "total_num_tokens")


def _other_values(problem: Problem) -> Problem:
    """Other values of the same shapes and counts: tensors are reversed and multiplied by -¼, as far
    as the call stays legal.
    """
    if problem.producer is not None:  # the row map fixes the places of the rows
        return problem.with_tensors({"rows": -problem.required["rows"] / 4})
    reversed_tensors = {
        name: upside_down(x) for name, x in problem.tensors.items() if name not in ("chunk_sizes", "order")
    }
    wide = {name: x for name, x in reversed_tensors.items() if x.is_floating_point() and x.element_size() > 1}
    signed = {name: -x / 4 for name, x in wide.items() if name not in NOT_NEGATIVE}
    return problem.with_tensors(reversed_tensors | signed)


def overwritten(trial: Trial, second: Problem, expectations: dict[str, Expectation]) -> Finding | None:
    """The caller overwrites the inputs and calls again: each call has its own results."""
    first, outputs = trial.run_both(trial.problem, second, reuse=True)
    finding = trial.judged("buffer_reuse", expectations, outputs)
    if finding:
        return replace(finding, message=f"of other values in the same memory it {finding.message}")
    finding = trial.repeats("buffer_reuse", first)
    return finding and replace(finding, message=f"when the inputs are overwritten after the call, it {finding.message}")


def _buffer_reuse(trial: Trial) -> Finding | None:
    """Other values in the memory of the inputs."""
    second = _other_values(trial.problem)
    return overwritten(trial, second, trial.reference(second))


def _interleaved(trial: Trial) -> Finding | None:
    """Another call's forward between this one's forward and backward, as in a pipeline."""
    next_call = next_values(trial)
    if not next_call:
        return None
    outputs, other_outputs = trial.run_both(trial.problem, next_call[1])
    finding = trial.repeats("interleaved", outputs)
    if finding:
        return replace(finding, message=f"with another call before its backward, it {finding.message}")
    finding = trial.judged("interleaved", trial.reference(next_call[1], next_call[0]), other_outputs)
    if not finding:
        return None
    return replace(finding, message=f"with another call's backward before its own, it {finding.message}")


def _repeated(trial: Trial) -> Finding | None:
    """Other values first, then the same call twice, the last time in tensors that held other values
    before. No call may depend on earlier calls, or reuse what it has derived from a tensor.
    """
    next_call = next_values(trial)
    if next_call:
        trial.run(next_call[1])
    finding = trial.repeats("repeated", trial.run(trial.problem))
    if finding:
        return replace(finding, message=f"when it is called again, it {finding.message}")
    earlier = next_call[1] if next_call and _may_overwrite(trial, next_call[1]) else None
    finding = trial.repeats("repeated", trial.run(trial.problem, earlier=earlier))
    condition = "when its inputs had other values before" if earlier else "when it is called again"
    return finding and replace(finding, message=f"{condition}, it {finding.message}")


def _may_overwrite(trial: Trial, second_problem: Problem) -> bool:
    """Whether the values of this call may take the place of another's, tensor by tensor."""

    def placed(problem: Problem) -> dict[str, tuple[torch.Size, torch.dtype]]:
        return {name: (x.shape, x.dtype) for name, x in problem.masters.items()}

    problem, own_memory = trial.problem, trial.case.layout not in SHARED and not trial.problem.producer
    return own_memory and problem.wanted == second_problem.wanted and placed(problem) == placed(second_problem)


def _same_in(manner: str, law: str, applies: Callable[[Any], bool]) -> Law:
    """The law that the same call gives the same results in this manner."""
    return Law(law, lambda trial: trial.repeats(law, trial.run(trial.problem, manner=manner)), applies)


def _no_grad(trial: Trial) -> Finding | None:
    """The same call under `torch.no_grad`, with inputs that require gradients: no graph."""
    gradients = {f"d_{name}" for name in trial.problem.wanted}
    results = {name: x for name, x in trial.expected.items() if name not in gradients}
    outputs = trial.run(trial.problem, manner="no_grad")
    return replace(trial, expected=results).repeats("no_grad", outputs)


def _accumulated(trial: Trial) -> Finding | None:
    """Two backward passes add gradients of views to a `.grad` of zeros, with equal numbers."""
    numbers = {
        name: replace(x, kind="values") if isinstance(x, Exact) and x.kind == "bits" and name[:2] == "d_" else x
        for name, x in trial.expected.items()
    }
    return trial.judged("accumulated", numbers, trial.run(trial.problem, manner="accumulated"))


def _own_memory(trial: Trial) -> Finding | None:
    """The caller overwrites the results before the backward pass, which must then give the right
    gradients or an error.
    """
    gradients = {name: x for name, x in trial.expected.items() if name.startswith("d_")}
    finding = trial.judged("own_memory", gradients, trial.run(trial.problem, manner="overwritten"))
    return finding and replace(finding, message=f"when the results are overwritten before it, it {finding.message}")


def _late_producer(trial: Trial) -> Finding | None:
    """Writes to the inputs are still pending on the current stream when the function is called."""
    return trial.repeats("late_producer", trial.run(trial.problem, late=True))


def _host_sync(trial: Trial) -> Finding | None:
    """No host synchronisation happens where `host_sync_free` is declared, unless the transport
    between ranks needs one.
    """
    context = getattr(trial.contract, "place", None)  # of ranks
    if (context and context.shares_gpu) or not trial.declared.get("host_sync_free"):
        return None
    try:
        return trial.repeats("host_sync", trial.run(trial.problem, forbid_sync=True))
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        return Finding("call", "host_sync", f"waits for the device, although host_sync_free is declared: {error}")


def _graph_capture(trial: Trial) -> Finding | None:
    """A captured graph is replayed with other values, where that is declared."""
    if not trial.declared.get("graph_capturable"):
        return None
    second = _other_values(trial.problem)
    return trial.judged("graph_capture", trial.reference(second), trial.run(trial.problem, replay=second))


def _is_drawn(case) -> bool:
    return not case.golden and not case.illegal


def _static(case) -> bool:
    """Whether the host knows all sizes, and no gradients are wanted."""
    return bool(plain(case) and case.sized and not case.grads and case.layout == "contiguous")


HISTORY = Law("history", _history, _is_drawn, recompiles=True)
DETERMINISM = Law("determinism", _determinism, _is_drawn)
REPEATED = Law("repeated", _repeated, _is_drawn)
INTERLEAVED = Law("interleaved", _interleaved, _is_drawn)
OTHER_THREAD = _same_in("thread", "other_thread", _is_drawn)  # a thread that has made no call before
INFERENCE_MODE = _same_in("inference", "inference_mode", lambda case: _is_drawn(case) and not case.grads)
NO_GRAD = Law("no_grad", _no_grad, lambda case: _is_drawn(case) and bool(case.grads), gradients=True)
ACCUMULATED = Law("accumulated", _accumulated, lambda case: _is_drawn(case) and bool(case.grads), gradients=True)
OWN_MEMORY = Law(
    "own_memory", _own_memory, lambda case: _is_drawn(case) and bool(case.grads), gradients=True, may_raise=True
)
BUFFER_REUSE = Law("buffer_reuse", _buffer_reuse, lambda case: plain(case) and not case.grads)
LATE_PRODUCER = Law("late_producer", _late_producer, plain, device="cuda")
HOST_SYNC = Law("host_sync", _host_sync, _static, device="cuda")
GRAPH_CAPTURE = Law("graph_capture", _graph_capture, _static, device="cuda")
CALLS = (
    *(HISTORY, DETERMINISM, REPEATED, INTERLEAVED, OTHER_THREAD),
    *(INFERENCE_MODE, NO_GRAD, ACCUMULATED, AUTOCAST, OWN_MEMORY),
)
EVERYWHERE = (*CALLS, BUFFER_REUSE, LATE_PRODUCER)
STATIC = (HOST_SYNC, GRAPH_CAPTURE)


# ---- functions that take the result of another


def taken_before(trial: Trial) -> Outputs:
    """The results of a call whose handle or row map another call has used, with other rows."""
    rows = trial.problem.required["rows"]
    earlier_call = replace(trial.problem.with_tensors({"rows": -rows}), wanted=(), cotangents={}, layouts={})
    return trial.run(trial.problem, before=earlier_call)


def _handle_again(trial: Trial) -> Finding | None:
    """A second call with the same handle or row map."""
    return trial.repeats("handle_again", taken_before(trial))


HANDLE_AGAIN = Law("handle_again", _handle_again, _is_drawn)


# ---- functions linear in an input


def _linear(trial: Trial) -> tuple[str, str]:
    """The (input, output) of the linear map."""
    return trial.contract.signature.linear


def _scaling(trial: Trial) -> Finding | None:
    """f(2x) = 2f(x) bit by bit if runs repeat: every rounding commutes with powers of two."""
    into, out = _linear(trial)
    x = trial.problem.tensors[into]
    twice = replace(trial.problem.with_tensors({into: x * 2}), wanted=(), cotangents={})
    outputs = trial.run(twice)
    if not isinstance(trial.expected[out], Exact) and not trial.declared.get("deterministic"):
        # summation order may differ between runs
        return trial.judged("scaling", {out: trial.reference(twice)[out]}, outputs)
    return same("scaling", {out: trial.first[out] * 2}, {out: outputs.get(out)})


def _adjointness(trial: Trial) -> Finding | None:
    """⟨dy, A x⟩ = ⟨Aᵀ dy, x⟩: the backward is the transpose. Exact on dyadic values."""
    into, out = _linear(trial)
    cotangent, x = trial.problem.cotangents.get(out), trial.problem.tensors[into]
    gradient = trial.first.get(f"d_{into}")
    if cotangent is None or gradient is None:
        return None
    forward_product, backward_product = _inner(cotangent, trial.first[out]), _inner(gradient, x)
    if forward_product == backward_product:
        return None
    products = f"⟨d_{out}, {out}⟩ = {forward_product:.9g}, but ⟨d_{into}, {into}⟩ = {backward_product:.9g}"
    return Finding(f"d_{into}", "adjointness", products)


def _inner(a: Tensor, b: Tensor) -> float:
    """The inner product ⟨a, b⟩.

    Terms with a = 0 count as zero, because b may hold garbage there.
    """
    product = a.double() * b.double()
    return float(torch.where(a == 0, 0.0, product).sum())


def _doubles(case) -> bool:
    is_special = getattr(case, "values", "dyadic") == "special"
    return plain(case) and case.dtype in ("float32", "bfloat16", "float16") and not is_special


SCALING = Law("scaling", _scaling, _doubles)


def adjointness(applies: Callable[[Any], bool]) -> Law:
    """The law that the backward is the transpose, for cases with exact sums."""
    return Law("adjointness", _adjointness, lambda case: applies(case) and bool(case.grads) and not case.unused)
