"""Laws, and the trial that a law inspects."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from conformance.core.contract import Contract, Problem
from conformance.core.tensors import SHARED
from conformance.judge import Expectation, Finding, judge
from conformance.judge.exact import Exact

Outputs = dict[str, Any]


@dataclass(frozen=True)
class Trial:
    """One case after its first run."""

    case: Any  # of the function's case class
    contract: Contract[Any]
    problem: Problem
    expected: dict[str, Expectation]
    first: Outputs  # of the first run, on the CPU
    run: Callable[..., Outputs]  # run(problem, **options) -> outputs of another run
    run_both: Callable[..., tuple[Outputs, Outputs]]  # both forwards, then both backwards
    declared: dict[str, Any]
    cost: Any  # accumulates the reference's time
    extras: dict[str, Any] = field(default_factory=dict)  # from the first run: its placed inputs

    def reference(self, problem: Problem, case: Any = None) -> dict[str, Expectation]:
        """The expected outputs of another problem, of this case or of another case."""
        started = time.perf_counter()
        expected = self.contract.expected(case or self.case, problem, self.declared)
        self.cost.seconds_reference += time.perf_counter() - started
        return expected

    def inside(self, case: Any) -> bool:
        """Whether another case is one that the namespace is for."""
        return bool(self.extras.get("inside", lambda case: True)(case))

    def judged(self, law: str, expected: dict[str, Expectation], outputs: Outputs) -> Finding | None:
        """The finding about the first wrong output, or None."""
        for name, expectation in expected.items():
            if name in self.declared.get("omits", ()):
                continue
            finding = judge(name, expectation.resolve(outputs), outputs.get(name))
            if finding:
                return Finding(name, law, finding.message, finding.index)
        return None

    def repeats(self, law: str, outputs: Outputs) -> Finding | None:
        """Compare a second run with the first: bit by bit if the implementation declares that runs
        repeat, else by the same expectations.
        """
        if not self.declared.get("deterministic"):
            return self.judged(law, self.expected, outputs)
        return same(law, {name: x for name, x in self.first.items() if name in self.expected}, outputs)


def next_values(trial: Trial) -> tuple[Any, Problem] | None:
    """The case with the next seed, and its call; None if the implementation refuses it."""
    next_case = replace(trial.case, law="", seed=trial.case.seed + 1)
    problem = trial.contract.problem(next_case)
    return None if trial.extras["refusal"](problem) else (next_case, problem)


def upside_down(x: Tensor, dim: int = 0) -> Tensor:
    """x with a dimension reversed, if x has that dimension. torch cannot flip fp8 tensors, so their
    bytes are flipped.
    """
    if dim >= x.dim():
        return x
    return x.view(torch.uint8).flip(dim).view(x.dtype) if x.element_size() == 1 else x.flip(dim)


def same(law: str, first: Mapping[str, Tensor | None], second: Outputs) -> Finding | None:
    """Bit equality of the outputs in `first`."""
    for name, value in first.items():
        if value is None:
            continue
        finding = judge(name, Exact(value), second.get(name))
        if finding:
            return Finding(name, law, finding.message.replace("the reference", "the other run"), finding.index)
    return None


@dataclass(frozen=True)
class Law:
    """A relation between runs, and the cases it applies to."""

    name: str
    check: Callable[[Trial], Finding | None]
    applies: Callable[[Any], bool] = lambda case: True
    device: str = ""  # the device type that the law needs; empty: any
    on_a_gpu: Callable[[Any], bool] | None = None  # for a law of another device: cases that a GPU checks
    recompiles: bool = False  # whether its calls run other kernels than the case's own call
    gradients: bool = False  # for functions with gradients only
    may_raise: bool = False  # an error raised by the call of the law is a refusal, and no failure
    # the predicate of cases in which it is an identity of sums, products and copies, "" if in all,
    # None if in none: there it holds bit by bit in every ring, as where a sanitizer makes one
    algebraic: str | None = None

    def holds(self, case: Any, device: str) -> bool:
        """Whether the case is to be checked on the device."""
        there = self.device in ("", device) or bool(device == "cuda" and self.on_a_gpu and self.on_a_gpu(case))
        return there and self.applies(case)


def algebraic(*laws: Law, where: str = "") -> tuple[Law, ...]:
    """The laws, declared to be algebraic in the cases of this predicate."""
    return tuple(replace(law, algebraic=where) for law in laws)


def plain(case: Any) -> bool:
    return not case.golden and not case.illegal and case.layout not in SHARED
