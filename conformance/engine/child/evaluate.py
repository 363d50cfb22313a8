"""Runs one case and judges it, in the process that the implementation may kill."""

import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch

from conformance.catalogue import CONTRACTS
from conformance.core.case import Case
from conformance.core.contract import Contract, Problem
from conformance.core.law import Trial
from conformance.core.ranks import AtRank, RankContext
from conformance.engine.child import configurations, judged, relations
from conformance.engine.child.line_coverage import LineCoverage
from conformance.engine.child.outcome import Outcome
from conformance.engine.child.runner import Blocked, Misbehaved, Runner
from conformance.engine.child.scopes import scope_of_function
from conformance.engine.child.tuning import Tuning
from conformance.interface import Implementation
from conformance.judge import Expectation, Finding, Resolved, gives_nan
from conformance.judge.exact import bits
from conformance.texts import described, message
from fast_interpreter import mended

WORDS = 512  # of a digest
CLEAR_ERRORS = (ValueError, TypeError, AssertionError, IndexError, NotImplementedError)


class Inapplicable(Exception):
    """A law needs a call that the implementation does not offer."""


def evaluate(
    case: Case,
    implementation: Implementation,
    device: str = "cpu",
    rank: RankContext | None = None,
    *,
    scores: bool = False,
    lines: bool = False,
    ring: bool = False,
) -> Outcome:
    """Judge one case, or one rank's part of it: values, then its law, then the controls.

    The cases before it run first, and whatever they do is no part of the outcome.

    Args:
        scores, lines: also measure `Outcome.scores` and `Outcome.lines`.
        ring: floats are a ring, so that identities are judged, not values (see `relations`).
    """
    for earlier in case.before:
        evaluate(earlier, implementation, device, ring=ring)
    outcome, reached = Outcome("PASS"), LineCoverage(implementation, case.function) if lines else None
    try:
        with Tuning(implementation, case, outcome, single_process=not rank or rank.ranks == 1) as tuning:
            if ring:
                _related(case, implementation, device, outcome)
            else:
                _evaluate(case, implementation, device, outcome, rank, reached, scores, tuning)
    except Misbehaved as wrong:
        _fail(outcome, wrong.finding)
    except Blocked as blocked:
        outcome.status, outcome.reason = "BLOCKED", str(blocked)
    except (torch.OutOfMemoryError, MemoryError) as error:
        outcome.status, outcome.reason = "OOM", described(error)
    outcome.lines = sorted(reached.lines) if reached else []
    return outcome


def _fail(outcome: Outcome, finding: Finding) -> None:
    outcome.status, outcome.finding = "FAIL", asdict(finding)


def _evaluate(
    case: Case,
    implementation: Implementation,
    device: str,
    outcome: Outcome,
    rank: RankContext | None,
    reached: LineCoverage | None,
    scores: bool,
    tuning: Tuning,
) -> None:
    contract = AtRank(CONTRACTS[case.function], rank) if rank else CONTRACTS[case.function]  # type: ignore[arg-type]
    problem = contract.problem(case)
    function = problem.function  # of one stage, if the case names one
    declared = implementation.declares(function) if implementation.offers(function) else {}
    refusal = _refusal(case, problem, implementation, declared)
    if refusal:
        outcome.status, outcome.reason = refusal
    if rank and not rank.agree(not refusal):  # either all ranks make the call, or none does
        return
    if refusal:
        return
    runner = Runner(implementation, device, case.poison, outcome)
    if reached:
        runner.recording = reached.recording
    if problem.blame:
        _must_not_pass(runner, contract, case, problem, declared)
        outcome.evaluations += 1
        return
    started = time.perf_counter()
    expected = contract.golden[case.golden][1] if case.golden else contract.expected(case, problem, declared)
    expected = {name: x for name, x in expected.items() if name not in declared.get("omits", ())}
    outcome.seconds_reference += time.perf_counter() - started
    called = [call.function for call in (problem.producer, problem) if call]
    outputs, resolved, finding = tuning.each(called, lambda: _judged_call(runner, contract, case, problem, expected))
    if finding:
        _fail(outcome, finding if rank else _with_nan(finding, runner, problem, expected, outputs))
    if scores:
        outcome.scores = judged.excess(finding, resolved, outputs) if finding else judged.scores(resolved, outputs)
    if rank and not rank.agree(not finding):  # either all ranks check the law, or none does
        return
    if finding:
        return
    if case.law and contract.laws[case.law].applies(case):
        trial = _trial(case, contract, problem, expected, outputs, runner, declared, implementation)
        finding = _judged_law(contract.laws[case.law], trial)
        if finding:
            _fail(outcome, tuning.named(finding))
            return
    _need_informative(contract, problem, resolved, outcome)


def _judged_call(
    runner: Runner, contract: Contract[Any], case: Case, problem: Problem, expected: dict[str, Expectation]
) -> tuple[dict[str, Any], dict[str, Resolved], Finding | None]:
    """The outputs of one call, the expectations resolved with them, and the finding about the
    outputs or about memory.
    """
    digest_before = _digest(expected)
    configurations.take()
    outputs = _guarded(runner, problem)
    runner.outcome.configurations = sorted({*runner.outcome.configurations, *configurations.take()})
    changed, shared = runner.changed, runner.alias if _owns_its_results(contract, case) else None
    if _digest(expected) != digest_before:
        raise Misbehaved("memory", "memory", "overwrote memory that belongs to the test")
    resolved, unresolved = judged.resolved(expected, outputs)
    finding = judged.first_wrong(contract, problem, resolved, outputs)
    if changed and not finding:
        finding = Finding(changed, "input", f"changed its input {changed}")
    if shared and not finding:
        finding = Finding(shared[0], "memory", shared[1])
    if unresolved and not finding:
        raise unresolved
    without = ", ".join(runner.implementation.with_default(problem.function, problem.omitted))
    if finding and without:
        finding = replace(finding, message=f"{finding.message}; called without {without}")
    return outputs, resolved, finding


def _need_informative(
    contract: Contract[Any], problem: Problem, resolved: dict[str, Resolved], outcome: Outcome
) -> None:
    if not judged.is_informative(contract, problem, resolved):
        outcome.status, outcome.reason = "UNINFORMATIVE", "no corruption of the expected output would change it"


def _owns_its_results(contract: Contract[Any], case: Case) -> bool:
    """Whether the caller may overwrite the inputs and keep the results, as the law `buffer_reuse`
    does.
    """
    law = contract.laws.get("buffer_reuse")
    return law is not None and law.applies(case)


def _related(case: Case, implementation: Implementation, device: str, outcome: Outcome) -> None:
    """Check bit by bit every algebraic law of the function that applies to the case."""
    contract = CONTRACTS[case.function]
    laws = relations.laws_of(contract, case, device)
    if not laws:
        outcome.status, outcome.reason = "UNINFORMATIVE", "it has no algebraic law"
        return
    problem = contract.problem(case)
    declared = implementation.declares(problem.function) if implementation.offers(problem.function) else {}
    refusal = _refusal(case, problem, implementation, declared)
    if refusal:
        outcome.status, outcome.reason = refusal
        return
    declared = declared | {"deterministic": True}  # in a ring the order of a sum does not matter
    runner = Runner(implementation, device, case.poison, outcome)
    expected = contract.expected(case, problem, declared)
    outputs = _guarded(runner, problem)
    returned_expectations = {name: x for name, x in expected.items() if name not in declared.get("omits", ())}
    resolved, unresolved = judged.resolved(relations.another_run(returned_expectations, outputs), outputs)
    finding = judged.first_wrong(contract, problem, resolved, outputs)
    if unresolved and not finding:
        raise unresolved
    trial = _trial(case, contract, problem, resolved, outputs, runner, declared, implementation)
    for law in laws:
        finding = finding or _judged_law(law, trial)
    if finding:
        _fail(outcome, finding)
    else:
        _need_informative(contract, problem, resolved, outcome)


def _with_nan(
    finding: Finding, runner: Runner, problem: Problem, expected: dict[str, Expectation], outputs: dict[str, Any]
) -> Finding:
    """The finding, extended by the name of an output that is NaN although the reference has
    numbers. The call is repeated on fresh memory of zeros, because a NaN of fresh memory may be an
    element that no code has written.
    """
    names = [name for name, x in expected.items() if gives_nan(x, outputs.get(name))]
    if names and runner.poison == "nan":
        try:
            outputs = _guarded(Runner(runner.implementation, runner.device, "zero", Outcome("PASS")), problem)
        except (Misbehaved, Blocked):
            return finding
    nan = next((name for name in names if gives_nan(expected[name], outputs.get(name))), "")
    nan_note = f"; {nan} is NaN where the reference has numbers" if nan and nan != finding.output else ""
    return replace(finding, message=finding.message + nan_note, nan=nan)


def _refusal(
    case: Case, problem: Problem, implementation: Implementation, declared: dict[str, Any]
) -> tuple[str, str] | None:
    """NOT_OFFERED or DECLARED_UNSUPPORTED with the reason, or None."""
    chain = [problem.producer, problem] if problem.producer else [problem]
    for call in chain:
        for name in (call.function, *CONTRACTS[call.function].companions, *call.others):
            if not implementation.offers(name):
                return "NOT_OFFERED", f"{name} is not offered"
        redundant = CONTRACTS[call.function].redundant
        lacking = [
            name
            for name in implementation.lacks(call.function, call.settings)
            if name not in redundant or name == problem.blame
        ]
        if lacking:
            return "NOT_OFFERED", f"{call.function} without {', '.join(lacking)}"
    if problem.blame and problem.blame in declared.get("unchecked", ()):
        return "DECLARED_UNSUPPORTED", f"illegal {problem.blame} is declared unchecked"
    if problem.wanted and not declared["differentiable"]:
        return "DECLARED_UNSUPPORTED", "declared not differentiable"
    if any(layout != "contiguous" for layout in problem.layouts.values()) and not declared["noncontiguous"]:
        return "DECLARED_UNSUPPORTED", "declared for contiguous inputs only"
    for call in chain[:-1] if problem.blame else chain:
        try:
            reason = implementation.supports(call.function, call.shown)
        except Exception as error:
            name = type(error).__name__
            raise Misbehaved(
                "supports", f"raises {name}", f"supports raised {name} about a legal call: {message(error)}"
            ) from error
        if reason:
            return "DECLARED_UNSUPPORTED", reason
    return None


def _must_not_pass(
    runner: Runner, contract: Contract[Any], case: Case, problem: Problem, declared: dict[str, Any]
) -> None:
    """An illegal call must raise one of CLEAR_ERRORS before it does anything else.

    Where only the device sees what is illegal, the result may show it, or be that of a legal call
    which means the same.
    """
    try:
        outputs = runner.run(problem)
    except CLEAR_ERRORS:
        return
    except (Misbehaved, Blocked, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if device_is_lost(error):
            raise
        raised = f"raised {type(error).__name__} from inside ({message(error)})"
        raise Misbehaved(
            problem.blame, "error", f"{raised}; an illegal {problem.blame} must raise ValueError"
        ) from error
    if problem.on_device and _is_marked(outputs):
        return
    if problem.same_as:
        resolved, unresolved = judged.resolved(contract.expected(case, problem.same_as, declared), outputs)
        if not unresolved and not judged.first_wrong(contract, problem.same_as, resolved, outputs):
            return
    must = "must raise ValueError" + (", or return NaN in each output of numbers" if problem.on_device else "")
    accepted = f"accepted an illegal {problem.blame}; it {must}, or be declared unchecked"
    raise Misbehaved(problem.blame, "error", accepted)


def _is_marked(outputs: dict[str, Any]) -> bool:
    """Whether every floating-point output has a NaN, and there is such an output."""
    numbers = [x for x in outputs.values() if isinstance(x, torch.Tensor) and x.is_floating_point() and x.numel()]
    return bool(numbers) and all(bool(x.float().isnan().any()) for x in numbers)


def _guarded(runner: Runner, problem: Problem) -> dict[str, Any]:
    """The outputs of the call.

    An exception that the implementation raises on a legal call is a finding.
    """
    try:
        return runner.run(problem)
    except (Misbehaved, Blocked, torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:
        if device_is_lost(error):
            raise
        name = type(error).__name__
        only = "; Triton's interpreter lacks it, a GPU may not" if mended.lacks(error) else ""
        raise Misbehaved("call", f"raises {name}", f"raised {name} on a legal call: {message(error)}{only}") from error


def _judged_law(law: Any, trial: Trial) -> Finding | None:
    try:
        return law.check(trial)
    except Inapplicable:
        return None
    except Misbehaved as wrong:
        return replace(wrong.finding, check=law.name)
    except (Blocked, torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:
        if device_is_lost(error) or _of_the_harness(error):
            raise
        if law.may_raise:
            return None
        return Finding("call", law.name, f"raised {type(error).__name__}: {message(error)}")


def _of_the_harness(error: BaseException) -> bool:
    """Whether the suite's own code raised the error, and not a call of the implementation."""
    frames = []
    trace = error.__traceback__
    while trace is not None:
        frames.append(trace.tb_frame.f_code)
        trace = trace.tb_next
    called = any(code.co_filename.endswith("interface.py") and code.co_name == "call" for code in frames)
    in_backward = any(code.co_name == "_engine_run_backward" for code in frames)  # torch.autograd's call of the engine
    return not (called or in_backward)


def device_is_lost(error: BaseException) -> bool:
    """Whether the error leaves the device unusable for this process."""
    text = message(error, most=10_000)
    return isinstance(error, RuntimeError) and ("CUDA error" in text or "device-side assert" in text)


def _trial(
    case, contract: Contract[Any], problem, expected, outputs, runner: Runner, declared, implementation: Implementation
) -> Trial:
    refusal = lambda second_problem: _refusal(case, second_problem, implementation, declared)  # noqa: E731
    in_scope = scope_of_function(implementation, case.function).holds
    questions = {"offers": implementation.offers, "names": implementation.names}
    measured = {"kept": runner.kept, "device": runner.device}
    extras: dict[str, Any] = questions | measured | {"refusal": refusal, "inside": in_scope}

    def offered(make: Callable[..., Any]) -> Callable[..., Any]:
        def made(*problems: Problem, **options: Any) -> Any:
            if any(_refusal(case, second_problem, implementation, declared) for second_problem in problems):
                raise Inapplicable
            results = make(*problems, **options)
            if runner.changed and problems[0] is problem:  # another call has a case of its own, which judges it
                raise Misbehaved(runner.changed, "input", f"changed its input {runner.changed}")
            return results

        return made

    run, run_both = offered(runner.run), offered(runner.run_both)
    return Trial(case, contract, problem, expected, outputs, run, run_both, declared, runner.outcome, extras)


def _digest(expected: dict[str, Any]) -> int:
    """A number that changes when the expected values change: sums of their words, without a
    copy.
    """
    return hash(tuple(_sums(np.ascontiguousarray(bits(x.value)).view(np.uint8).reshape(-1)) for x in expected.values()))


def _sums(data: np.ndarray) -> bytes:
    """Sums over every WORDS-th 64-bit word, and the remaining bytes."""
    whole_words = len(data) // (8 * WORDS) * 8 * WORDS
    return data[:whole_words].view(np.uint64).reshape(-1, WORDS).sum(0).tobytes() + data[whole_words:].tobytes()
