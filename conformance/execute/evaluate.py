"""Runs one case and judges it. Everything here happens in the process that the implementation may kill."""

import time
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from conformance.case import Case
from conformance.contracts.base import Contract, Opaque, Problem
from conformance.execute.poison import Poison
from conformance.interface import Implementation, named_outputs
from conformance.judge import Finding, controls, judge
from conformance.judge.exact import Exact, bits
from conformance.laws import Trial
from conformance.registry import CONTRACTS
from conformance.values import laid_out

CLEAR_ERRORS = (ValueError, TypeError, AssertionError, IndexError, NotImplementedError)


@dataclass
class Outcome:
    """What became of one case."""

    status: str  # PASS FAIL CRASH HANG OOM NOT_OFFERED DECLARED_UNSUPPORTED BLOCKED UNINFORMATIVE, or ERROR of the harness
    finding: dict[str, Any] | None = None
    reason: str = ""
    seconds_implementation: float = 0.0
    seconds_reference: float = 0.0
    evaluations: int = 0
    kernels: list[str] = field(default_factory=list)  # names of the kernel specialisations that were compiled or loaded for it
    calls: list[str] = field(default_factory=list)  # "file:function" of the implementation's Python functions that it ran, if traced


class Blocked(Exception):
    """The producer of an opaque input is wrong, so nothing can be said of its consumer."""


class Inapplicable(Exception):
    """A law asks for a call that the implementation does not offer."""


class Misbehaved(Exception):
    """The call itself was wrong, before any value could be judged."""

    def __init__(self, output: str, check: str, message: str) -> None:
        super().__init__(message)
        self.finding = Finding(output, check, message)


@dataclass
class Runner:
    """Makes calls of one implementation on one device, and measures them."""

    implementation: Implementation
    device: str
    poison: str
    outcome: Outcome
    placed: dict[str, Tensor] = field(default_factory=dict)
    changed: str = ""  # an input that the last run changed

    def run(
        self,
        problem: Problem,
        *,
        poison: str = "",
        storage: dict[str, Tensor] | None = None,
        late: bool = False,
        forbid_sync: bool = False,
        replay: Problem | None = None,
    ) -> dict[str, Any]:
        """Place the inputs, call, ask for the gradients, and look after the inputs and the guards.

        Args:
            poison: what fresh memory holds, if not the case's own.
            storage: placed inputs of an earlier run, to be overwritten by this one's.
            late: let the device write the inputs only after the call has been made.
            forbid_sync: make waiting for the device an error.
            replay: capture the call in a graph, put these values in, and replay it.

        Raises:
            Misbehaved: the implementation raised, or returned something else than the interface says.
            Blocked: the producer of an opaque input is wrong.
        """
        placed = self._place(problem, storage)
        self.placed = placed
        with Poison(poison or self.poison) as memory:
            opaque = self._produce(problem) if problem.producer else None
            started = time.perf_counter()
            try:
                if late:
                    self._delay(problem, placed)
                if forbid_sync:
                    torch.cuda.set_sync_debug_mode("error")
                outputs = self._call(problem, placed, opaque) if replay is None else self._captured(problem, replay, placed, opaque)
            finally:
                if forbid_sync:
                    torch.cuda.set_sync_debug_mode("default")
            if self.device == "cuda":
                torch.cuda.synchronize()
            self.outcome.seconds_implementation += time.perf_counter() - started
        self.outcome.evaluations += 1
        if memory.overrun():
            raise Misbehaved("memory", "memory", "wrote outside the memory it had allocated")
        masters = (replay or problem).tensors
        self.changed = next((name for name, x in masters.items() if (bits(x) != bits(placed[name].detach().cpu())).any()), "")
        return {name: x.detach().cpu() if isinstance(x, Tensor) else x for name, x in outputs.items()}

    def _place(self, problem: Problem, storage: dict[str, Tensor] | None) -> dict[str, Tensor]:
        masters = problem.tensors | {f"d_{name}": x for name, x in problem.cotangents.items()}
        if storage is None:
            placed = {name: laid_out(x.to(self.device, copy=True), problem.layouts.get(name, "contiguous")) for name, x in masters.items()}
        else:
            placed = {name: storage[name].detach().copy_(x) if name in storage else x.to(self.device) for name, x in masters.items()}
        for name in problem.wanted:
            placed[name] = placed[name].detach().requires_grad_()
        return placed

    def _delay(self, problem: Problem, placed: dict[str, Tensor]) -> None:
        """Overwrite the inputs by garbage now, and by their values after a pause on the current stream."""
        sources = {name: x.detach().clone() for name, x in placed.items()}
        for x in placed.values():
            x.detach().zero_()
        torch.cuda._sleep(2_000_000)  # about a millisecond
        for name, x in placed.items():
            x.detach().copy_(sources[name])

    def _produce(self, problem: Problem) -> dict[str, Any]:
        """The opaque inputs, from this implementation's own producer, whose rows must be right."""
        assert problem.producer is not None
        producer = problem.producer
        moved = {name: x.to(self.device) if isinstance(x, Tensor) else x for name, x in (producer.required | producer.settings).items()}
        arguments = [moved[name] for name in producer.required]
        try:
            result = self.implementation.call(producer.function, *arguments, **{name: moved[name] for name in producer.settings})
            outputs = named_outputs(result, CONTRACTS[producer.function].outputs)
        except Exception as error:
            raise Blocked(f"{producer.function} raised {type(error).__name__}: {error}") from error
        got = outputs["rows"].detach().cpu() if isinstance(outputs["rows"], Tensor) else None
        wrong = judge("rows", Exact(problem.produced.rows), got)
        if wrong:
            raise Blocked(f"{producer.function} is wrong here: rows {wrong.message}")
        return outputs

    def _call(self, problem: Problem, placed: dict[str, Tensor], opaque: dict[str, Any] | None) -> dict[str, Any]:
        contract = CONTRACTS[problem.function]
        arguments = [opaque[x.field_name] if isinstance(x, Opaque) and opaque else placed.get(name, x) for name, x in problem.required.items()]
        settings = {name: placed.get(name, x) for name, x in problem.settings.items()}
        try:
            outputs = named_outputs(self.implementation.call(problem.function, *arguments, **settings), contract.outputs)
        except ValueError as error:
            if str(error).startswith("returned"):
                raise Misbehaved("call", "signature", str(error)) from error
            raise
        return outputs | self._gradients(problem, placed, outputs)

    def _gradients(self, problem: Problem, placed: dict[str, Tensor], outputs: dict[str, Any]) -> dict[str, Tensor]:
        if not problem.wanted:
            return {}
        used = [name for name in problem.cotangents if isinstance(outputs.get(name), Tensor)]
        for name in used:
            if tuple(outputs[name].shape) != tuple(placed[f"d_{name}"].shape):
                raise Misbehaved(name, "shape", f"has shape {tuple(outputs[name].shape)}; the reference's is {tuple(placed[f'd_{name}'].shape)}")
        gradients: tuple[Tensor | None, ...]
        attached = [name for name in used if outputs[name].requires_grad]
        inputs = [placed[name] for name in problem.wanted]
        if attached:
            cotangents = [placed[f"d_{name}"].to(outputs[name].dtype) for name in attached]
            gradients = torch.autograd.grad([outputs[name] for name in attached], inputs, cotangents, allow_unused=True)
        else:
            gradients = ()
        asked = zip(problem.wanted, inputs, gradients or (None,) * len(inputs), strict=True)
        return {f"d_{name}": torch.zeros_like(x) if g is None else g for name, x, g in asked}

    def _captured(self, problem: Problem, replay: Problem, placed: dict[str, Tensor], opaque: dict[str, Any] | None) -> dict[str, Any]:
        self._call(problem, placed, opaque)  # compiles what must be compiled
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            outputs = self._call(problem, placed, opaque)
        for name, master in replay.tensors.items():
            placed[name].copy_(master)
        graph.replay()
        torch.cuda.synchronize()
        return {name: x.clone() if isinstance(x, Tensor) else x for name, x in outputs.items()}


def evaluate(case: Case, implementation: Implementation, device: str = "cpu") -> Outcome:
    """Judge one case: values first, then its law, then, if all is well, the judge itself."""
    outcome = Outcome("PASS")
    try:
        _evaluate(case, implementation, device, outcome)
    except Misbehaved as wrong:
        _fail(outcome, wrong.finding)
    except Blocked as blocked:
        outcome.status, outcome.reason = "BLOCKED", str(blocked)
    except (torch.OutOfMemoryError, MemoryError) as error:
        outcome.status, outcome.reason = "OOM", str(error)
    return outcome


def _fail(outcome: Outcome, finding: Finding) -> None:
    outcome.status, outcome.finding = "FAIL", asdict(finding)


def _evaluate(case: Case, implementation: Implementation, device: str, outcome: Outcome) -> None:
    contract = CONTRACTS[case.function]
    problem = contract.problem(case)
    declared = implementation.declares(case.function) if implementation.offers(case.function) else {}
    refusal = _refusal(case, problem, implementation, declared)
    if refusal:
        outcome.status, outcome.reason = refusal
        return
    runner = Runner(implementation, device, case.poison, outcome)
    if problem.blame:
        _must_raise(runner, problem, outcome)
        return
    started = time.perf_counter()
    expected = contract.golden[case.golden][1] if case.golden else contract.expected(case, problem, declared["accumulator"])
    expected = {name: x for name, x in expected.items() if name not in declared.get("omits", ())}
    outcome.seconds_reference += time.perf_counter() - started
    before = _digest(expected)
    outputs = _guarded(runner, problem)
    changed = runner.changed
    if _digest(expected) != before:
        raise Misbehaved("memory", "memory", "overwrote memory that belongs to the test")
    for name, expectation in expected.items():
        finding = judge(name, expectation, outputs.get(name))
        if finding:
            told = contract.explain(problem, name, finding.index, outputs[name]) if finding.index else None
            _fail(outcome, replace(finding, message=told) if told else finding)
            return
    if changed:
        raise Misbehaved(changed, "input", f"changed its input {changed}")
    if case.law and contract.laws[case.law].applies(case):
        trial = _trial(case, contract, problem, expected, outputs, runner, declared, implementation)
        finding = _judged_law(contract.laws[case.law], trial)
        if finding:
            _fail(outcome, finding)
            return
    informative = sum(controls.check(name, x) for name, x in expected.items() if name in (contract.primary, *(f"d_{w}" for w in problem.wanted)))
    if not informative:
        outcome.status, outcome.reason = "UNINFORMATIVE", "no corruption of the expected output would change it"


def _refusal(case: Case, problem: Problem, implementation: Implementation, declared: dict[str, Any]) -> tuple[str, str] | None:
    """NOT_OFFERED or DECLARED_UNSUPPORTED with the reason, or None."""
    chain = [problem.producer, problem] if problem.producer else [problem]
    for call in chain:
        if not implementation.offers(call.function):
            return "NOT_OFFERED", f"{call.function} is not offered"
        lacking = implementation.lacks(call.function, call.settings)
        if lacking:
            return "NOT_OFFERED", f"{call.function} without {', '.join(lacking)}"
    if problem.blame and problem.blame in declared.get("unchecked", ()):
        return "DECLARED_UNSUPPORTED", f"illegal {problem.blame} is declared unchecked"
    if problem.wanted and not declared["differentiable"]:
        return "DECLARED_UNSUPPORTED", "declared not differentiable"
    if any(layout != "contiguous" for layout in problem.layouts.values()) and not declared["noncontiguous"]:
        return "DECLARED_UNSUPPORTED", "declared for contiguous inputs only"
    if problem.blame:
        return None
    for call in chain:
        arguments = {name: x for name, x in (call.required | call.settings).items() if not isinstance(x, Opaque)}
        reason = implementation.supports(call.function, arguments)
        if reason:
            return "DECLARED_UNSUPPORTED", reason
    return None


def _must_raise(runner: Runner, problem: Problem, outcome: Outcome) -> None:
    """An illegal call must raise an error that says so, before it does anything else."""
    try:
        runner.run(problem)
    except CLEAR_ERRORS:
        outcome.evaluations += 1
        return
    except (Misbehaved, Blocked, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if device_is_lost(error):
            raise
        message = f"raised {type(error).__name__} from inside ({_short(error)}); an illegal {problem.blame} must raise ValueError"
        raise Misbehaved(problem.blame, "error", message) from error
    raise Misbehaved(problem.blame, "error", f"accepted an illegal {problem.blame}; it must raise ValueError, or be declared unchecked")


def _guarded(runner: Runner, problem: Problem) -> dict[str, Any]:
    """The outputs; what the implementation raises on a legal call is a finding."""
    try:
        return runner.run(problem)
    except (Misbehaved, Blocked, torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:
        if device_is_lost(error):
            raise
        name = type(error).__name__
        raise Misbehaved("call", f"raises {name}", f"raised {name} on a legal call: {_short(error)}") from error


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
        return Finding("call", law.name, f"raised {type(error).__name__}: {_short(error)}")


def _of_the_harness(error: BaseException) -> bool:
    """Whether the error was raised by the suite's own code rather than under a call of the implementation."""
    frames = []
    trace = error.__traceback__
    while trace is not None:
        frames.append(trace.tb_frame.f_code)
        trace = trace.tb_next
    return not any(code.co_filename.endswith("interface.py") and code.co_name == "call" for code in frames) and "backward" not in str(frames[-1])


def device_is_lost(error: BaseException) -> bool:
    """Whether the error leaves the device unusable for this process."""
    text = str(error)
    return isinstance(error, RuntimeError) and ("CUDA error" in text or "device-side assert" in text)


def _trial(case, contract: Contract[Any], problem, expected, outputs, runner: Runner, declared, implementation: Implementation) -> Trial:
    extras: dict[str, Any] = {"placed": runner.placed, "refusal": lambda other: _refusal(case, other, implementation, declared)}
    if problem.producer:
        extras["reference_row_map"] = problem.produced.row_map

    def run(other: Problem, **how: Any) -> dict[str, Any]:
        if _refusal(case, other, implementation, declared):
            raise Inapplicable
        return runner.run(other, **how)

    return Trial(case, contract, problem, expected, outputs, run, declared, runner.outcome, extras)


def _digest(expected: dict[str, Any]) -> int:
    """A number that changes when the expected values do."""
    return hash(tuple(bits(x.value).tobytes() for x in expected.values()))


def _short(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if len(text) < 200 else text[:197] + "…"
