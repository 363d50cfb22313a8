"""Runs one case and judges it, in the process that the implementation may kill."""

import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
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
NO_FINDING = (Misbehaved, Blocked, torch.OutOfMemoryError, MemoryError)  # errors that `evaluate` itself reports


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
    runner = Runner(implementation, device, case.poison, outcome, reached.recording if reached else nullcontext)
    try:
        with Tuning(implementation, case, outcome, single_process=not rank or rank.ranks == 1) as tuning:
            if ring:
                _related(case, runner)
            else:
                _evaluate(case, runner, rank, scores, tuning)
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


@dataclass(frozen=True)
class _Call:
    """The call that a case describes, and the implementation's declarations about its function."""

    case: Case
    contract: Contract[Any]
    problem: Problem
    runner: Runner
    declared: dict[str, Any]

    @classmethod
    def of(cls, case: Case, contract: Contract[Any], runner: Runner) -> "_Call":
        problem, implementation = contract.problem(case), runner.implementation
        function = problem.function  # of one stage, if the case names one
        declared = implementation.declares(function) if implementation.offers(function) else {}
        return cls(case, contract, problem, runner, declared)

    def returned(self, expected: dict[str, Expectation]) -> dict[str, Expectation]:
        """The expectations without outputs that are declared not to be returned."""
        return {name: x for name, x in expected.items() if name not in self.declared.get("omits", ())}

    def is_refused(self) -> bool:
        """Whether the implementation does not take the call; the outcome then says why."""
        refusal = self.refusal(self.problem)
        if refusal:
            self.runner.outcome.status, self.runner.outcome.reason = refusal
        return refusal is not None

    def refusal(self, problem: Problem) -> tuple[str, str] | None:
        """NOT_OFFERED or DECLARED_UNSUPPORTED with the reason, or None."""
        implementation, declared = self.runner.implementation, self.declared
        chain = [problem.producer, problem] if problem.producer else [problem]
        for call in chain:
            for name in (call.function, *CONTRACTS[call.function].companions, *call.others):
                if not implementation.offers(name):
                    return "NOT_OFFERED", f"{name} is not offered"
            lacking = implementation.lacks(call.function, call.settings)
            redundant = {*CONTRACTS[call.function].redundant} - {problem.blame}
            if needed := [name for name in lacking if name not in redundant]:
                return "NOT_OFFERED", f"{call.function} without {', '.join(needed)}"
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
                text = f"supports raised {name} about a legal call: {message(error)}"
                raise Misbehaved("supports", f"raises {name}", text) from error
            if reason:
                return "DECLARED_UNSUPPORTED", reason
        return None

    def trial(self, expected: dict[str, Any], outputs: dict[str, Any]) -> Trial:
        """What a law inspects after the first run of the call."""
        runner, implementation = self.runner, self.runner.implementation

        def offered(make: Callable[..., Any]) -> Callable[..., Any]:
            def made(*problems: Problem, **options: Any) -> Any:
                if any(map(self.refusal, problems)):
                    raise Inapplicable
                results = make(*problems, **options)
                if runner.changed and problems[0] is self.problem:  # a case of its own judges another call
                    raise Misbehaved(runner.changed, "input", f"changed its input {runner.changed}")
                return results

            return made

        extras: dict[str, Any] = {
            "offers": implementation.offers,
            "names": implementation.names,
            "kept": runner.kept,
            "device": runner.device,
            "refusal": self.refusal,
            "inside": scope_of_function(implementation, self.case.function).holds,
        }
        calls = offered(runner.run), offered(runner.run_both)
        call = self.case, self.contract, self.problem
        return Trial(*call, expected, outputs, *calls, self.declared, runner.outcome, extras)

    def need_informative(self, resolved: dict[str, Resolved]) -> None:
        if not judged.is_informative(self.contract, self.problem, resolved):
            reason = "no corruption of the expected output would change it"
            self.runner.outcome.status, self.runner.outcome.reason = "UNINFORMATIVE", reason


def _evaluate(case: Case, runner: Runner, rank: RankContext | None, scores: bool, tuning: Tuning) -> None:
    contract = AtRank(CONTRACTS[case.function], rank) if rank else CONTRACTS[case.function]  # type: ignore[arg-type]
    call, outcome, agree = _Call.of(case, contract, runner), runner.outcome, rank.agree if rank else bool
    problem = call.problem
    if not agree(not call.is_refused()):  # either all ranks make the call, or none does
        return
    if problem.blame:
        _must_not_pass(call)
        outcome.evaluations += 1
        return
    started = time.perf_counter()
    expected = contract.golden[case.golden][1] if case.golden else contract.expected(case, problem, call.declared)
    expected = call.returned(expected)
    outcome.seconds_reference += time.perf_counter() - started
    called = [producer_or_call.function for producer_or_call in (problem.producer, problem) if producer_or_call]
    outputs, resolved, finding = tuning.each(called, lambda: _judged_call(call, expected))
    if finding:
        _fail(outcome, finding if rank else _with_nan(finding, call, expected, outputs))
    if scores:
        outcome.scores = judged.excess(finding, resolved, outputs) if finding else judged.scores(resolved, outputs)
    if not agree(not finding):  # either all ranks check the law, or none does
        return
    if case.law and contract.laws[case.law].applies(case):
        finding = _judged_law(contract.laws[case.law], call.trial(expected, outputs))
        if finding:
            _fail(outcome, tuning.named(finding))
            return
    call.need_informative(resolved)


def _judged_call(
    call: _Call, expected: dict[str, Expectation]
) -> tuple[dict[str, Any], dict[str, Resolved], Finding | None]:
    """The outputs of one call, the resolved expectations, and the first finding about the call."""
    runner, problem, digest_before = call.runner, call.problem, _digest(expected)
    configurations.take()
    outputs = _guarded(runner, problem)
    runner.outcome.configurations = sorted({*runner.outcome.configurations, *configurations.take()})
    changed = runner.changed
    # the caller may overwrite the inputs and keep the results, as the law does
    reuse = call.contract.laws.get("buffer_reuse")
    shared = runner.alias if reuse is not None and reuse.applies(call.case) else None
    if _digest(expected) != digest_before:
        raise Misbehaved("memory", "memory", "overwrote memory that belongs to the test")
    resolved, unresolved = judged.resolved(expected, outputs)
    finding = judged.first_wrong(call.contract, problem, resolved, outputs)
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


def _related(case: Case, runner: Runner) -> None:
    """Check bit by bit every algebraic law of the function that applies to the case."""
    contract, outcome = CONTRACTS[case.function], runner.outcome
    laws = relations.laws_of(contract, case, runner.device)
    if not laws:
        outcome.status, outcome.reason = "UNINFORMATIVE", "it has no algebraic law"
        return
    call = _Call.of(case, contract, runner)
    if call.is_refused():
        return
    call = replace(call, declared=call.declared | {"deterministic": True})  # in a ring the order of a sum is free
    expected = call.returned(contract.expected(case, call.problem, call.declared))
    outputs = _guarded(runner, call.problem)
    resolved, unresolved = judged.resolved(relations.another_run(expected, outputs), outputs)
    finding = judged.first_wrong(contract, call.problem, resolved, outputs)
    if unresolved and not finding:
        raise unresolved
    trial = call.trial(resolved, outputs)
    for law in laws:
        finding = finding or _judged_law(law, trial)
    if finding:
        _fail(outcome, finding)
    else:
        call.need_informative(resolved)


def _with_nan(finding: Finding, call: _Call, expected: dict[str, Expectation], outputs: dict[str, Any]) -> Finding:
    """The finding, extended by the name of an output that is NaN although the reference has
    numbers. The call is repeated on fresh memory of zeros, because a NaN of fresh memory may be an
    element that no code has written.
    """
    runner = call.runner
    names = [name for name, x in expected.items() if gives_nan(x, outputs.get(name))]
    if names and runner.poison == "nan":
        try:
            again = Runner(runner.implementation, runner.device, "zero", Outcome("PASS"))
            outputs = _guarded(again, call.problem)
        except (Misbehaved, Blocked):
            return finding
    nan = next((name for name in names if gives_nan(expected[name], outputs.get(name))), "")
    nan_note = f"; {nan} is NaN where the reference has numbers" if nan and nan != finding.output else ""
    return replace(finding, message=finding.message + nan_note, nan=nan)


def _must_not_pass(call: _Call) -> None:
    """An illegal call must raise one of CLEAR_ERRORS before it does anything else.

    Where only the device sees what is illegal, the result may show it, or be that of a legal call
    which means the same.
    """
    problem = call.problem
    try:
        outputs = call.runner.run(problem)
    except CLEAR_ERRORS:
        return
    except (Misbehaved, Blocked, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if device_is_lost(error):
            raise
        raised = f"raised {type(error).__name__} from inside ({message(error)})"
        text = f"{raised}; an illegal {problem.blame} must raise ValueError"
        raise Misbehaved(problem.blame, "error", text) from error
    numbers = [x for x in outputs.values() if isinstance(x, torch.Tensor) and x.is_floating_point() and x.numel()]
    if problem.on_device and numbers and all(bool(x.float().isnan().any()) for x in numbers):
        return
    if problem.same_as:
        expected = call.contract.expected(call.case, problem.same_as, call.declared)
        resolved, unresolved = judged.resolved(expected, outputs)
        if not unresolved and not judged.first_wrong(call.contract, problem.same_as, resolved, outputs):
            return
    must = "must raise ValueError" + (", or return NaN in each output of numbers" if problem.on_device else "")
    accepted = f"accepted an illegal {problem.blame}; it {must}, or be declared unchecked"
    raise Misbehaved(problem.blame, "error", accepted)


def _guarded(runner: Runner, problem: Problem) -> dict[str, Any]:
    """The outputs of the call; an exception that it raises, although it is legal, is a finding."""
    try:
        return runner.run(problem)
    except NO_FINDING:
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
    except NO_FINDING:
        raise
    except Exception as error:
        if device_is_lost(error) or _of_the_harness(error):
            raise
        if law.may_raise:
            return None
        return Finding("call", law.name, f"raised {type(error).__name__}: {message(error)}")


def _of_the_harness(error: BaseException) -> bool:
    """Whether the suite's own code raised the error, and not a call of the implementation."""
    codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    called = any(code.co_filename.endswith("interface.py") and code.co_name == "call" for code in codes)
    in_backward = any(code.co_name == "_engine_run_backward" for code in codes)  # torch.autograd's call of the engine
    return not (called or in_backward)


def device_is_lost(error: BaseException) -> bool:
    """Whether the error leaves the device unusable for this process."""
    text = message(error, most=10_000)
    return isinstance(error, RuntimeError) and ("CUDA error" in text or "device-side assert" in text)


def _digest(expected: dict[str, Any]) -> int:
    """A number that changes when the expected values change: sums of their words, not a copy."""
    return hash(tuple(_sums(np.ascontiguousarray(bits(x.value)).view(np.uint8).reshape(-1)) for x in expected.values()))


def _sums(data: np.ndarray) -> bytes:
    """Sums over every WORDS-th 64-bit word, and the remaining bytes."""
    whole_words = len(data) // (8 * WORDS) * 8 * WORDS
    return data[:whole_words].view(np.uint64).reshape(-1, WORDS).sum(0).tobytes() + data[whole_words:].tobytes()
