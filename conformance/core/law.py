"""What a law sees, and what it is."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from conformance.core.contract import Contract, Problem
from conformance.judge import Expectation, Finding, judge
from conformance.judge.exact import Exact

Outputs = dict[str, Any]


@dataclass(frozen=True)
class Trial:
    """One case after its first run."""

    case: Any  # of the function's own class
    contract: Contract[Any]
    problem: Problem
    expected: dict[str, Expectation]
    first: Outputs  # what the first run returned, on the CPU
    run: Callable[..., Outputs]  # run(problem, **how) -> outputs of another run
    declared: dict[str, Any]
    cost: Any  # where the time that the reference takes is added up
    extras: dict[str, Any] = field(default_factory=dict)  # what the first run left for a law: its placed inputs

    def reference(self, problem: Problem, case: Any = None) -> dict[str, Expectation]:
        """The right outputs of another problem, of this case or of another one."""
        started = time.perf_counter()
        expected = self.contract.expected(case or self.case, problem, self.declared)
        self.cost.seconds_reference += time.perf_counter() - started
        return expected

    def judged(self, law: str, expected: dict[str, Expectation], outputs: Outputs) -> Finding | None:
        """The first output that is not as expected."""
        for name, expectation in expected.items():
            if name in self.declared.get("omits", ()):
                continue
            finding = judge(name, expectation.resolve(outputs), outputs.get(name))
            if finding:
                return Finding(name, law, finding.message, finding.index)
        return None

    def repeats(self, law: str, outputs: Outputs) -> Finding | None:
        """The second run against the first: bit by bit if that is declared, else by the judge of the first."""
        if not self.declared.get("deterministic"):
            return self.judged(law, self.expected, outputs)
        return same(law, {name: x for name, x in self.first.items() if name in self.expected}, outputs)


def upside_down(x: Tensor, dim: int = 0) -> Tensor:
    """x with a dimension reversed, if it has that; fp8 has no flip of its own."""
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
    """A relation, and the cases that it applies to."""

    name: str
    check: Callable[[Trial], Finding | None]
    applies: Callable[[Any], bool] = lambda case: True
    device: str = ""  # the kind of device it needs; empty: any


def plain(case: Any) -> bool:
    return not case.golden and not case.illegal and case.layout != "expanded"
