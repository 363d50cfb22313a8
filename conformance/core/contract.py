"""What a contract is: everything the suite knows of one function."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from conformance.core.case import Case
from conformance.judge import Expectation


@dataclass(frozen=True)
class Problem:
    """One call: CPU master copies of its inputs, how they lie in memory, and what is asked of the gradients."""

    function: str
    required: dict[str, Any]  # passed by position, in this order
    settings: dict[str, Any] = field(default_factory=dict)  # passed by keyword
    layouts: dict[str, str] = field(default_factory=dict)  # by the name of an input or cotangent
    wanted: tuple[str, ...] = ()  # inputs that require grad
    cotangents: dict[str, Tensor] = field(default_factory=dict)  # by output; an output without one is unused
    producer: "Problem | None" = None  # makes the opaque input that this call consumes
    produced: Any = None  # what the reference's producer makes of it
    blame: str = ""  # the argument that makes the call illegal
    script: Callable[[Any, dict[str, Any]], dict[str, Any]] | None = (
        None  # several calls: (implementation, placed inputs) -> named outputs
    )
    first: dict[str, Any] = field(default_factory=dict)  # of a script: what its first call is given, for `supports`
    read: Callable[[Any, dict[str, Any]], dict[str, Any]] | None = (
        None  # what outputs hold, looked at when the calls are over: (implementation, outputs)
    )

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name: x for name, x in (self.required | self.settings).items() if isinstance(x, Tensor)}

    @property
    def shown(self) -> dict[str, Any]:
        """What `supports` is asked about: the arguments of the call, or of the first of several."""
        first = self.first if self.script else self.required
        return {name: x for name, x in (first | self.settings).items() if not isinstance(x, Opaque)}

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> "Problem":
        """The same call on other values."""
        required = {name: tensors.get(name, x) for name, x in self.required.items()}
        settings = {name: tensors.get(name, x) for name, x in self.settings.items()}
        return replace(self, required=required, settings=settings)


class Opaque:
    """Stands in a Problem for the value that its producer makes."""

    def __init__(self, field_name: str) -> None:
        self.field_name = field_name


C = TypeVar("C", bound=Case)


class Contract(ABC, Generic[C]):
    """Inputs, expected outputs and laws of one function."""

    function: str
    outputs: tuple[str, ...]  # what the function returns, in order
    primary: str  # the output that the controls corrupt
    optional: tuple[str, ...] = ()  # keyword arguments that an implementation may lack
    redundant: tuple[
        str, ...
    ] = ()  # settings that are passed to those who take them; others find the same in the other arguments
    companions: tuple[str, ...] = ()  # functions that must be offered beside it
    static: tuple[str, ...] = ()  # settings that fix every shape, so that nothing needs to wait for the device
    laws: dict[str, Any] = {}  # noqa: RUF012  (filled once, where the contract is registered)
    golden: dict[str, tuple[Problem, dict[str, Expectation]]] = {}  # noqa: RUF012  (likewise)
    illegal: dict[str, Any] = {}  # noqa: RUF012  (rule name -> function that breaks it)

    @abstractmethod
    def legal(self, case: C) -> Problem:
        """The call that the case describes, by the rules."""

    @abstractmethod
    def expected(self, case: C, problem: Problem, declared: Mapping[str, Any]) -> dict[str, Expectation]:
        """The right outputs and gradients, by the reference, on the master copies, for an implementation that declares this."""

    @abstractmethod
    def neighbour(self, case: C) -> C:
        """Another case of this function, with other settings and sizes."""

    @abstractmethod
    def simpler(self, case: C) -> Iterator[C]:
        """Smaller cases to try, the boldest first."""

    def problem(self, case: C) -> Problem:
        """The call that the case describes."""
        if case.golden:
            return self.golden[case.golden][0]
        problem = expanded(self.legal(case))
        return self.illegal[case.illegal](problem) if case.illegal else problem

    def explain(self, problem: Problem, output: str, index: tuple[int, ...], observed: Tensor) -> str | None:
        """What went wrong in the function's own words, if that can be told from one element."""
        return None


def expanded(problem: Problem) -> Problem:
    """An expanded input repeats its first entry: let the master copy say so too."""
    for name, layout in problem.layouts.items():
        if layout == "expanded":
            masters = {k: x[:1].expand(x.shape).clone() for k, x in problem.tensors.items() if k == name and len(x)}
            cotangents = {
                k: x[:1].expand(x.shape).clone() if f"d_{k}" == name and len(x) else x
                for k, x in problem.cotangents.items()
            }
            return replace(problem.with_tensors(masters), cotangents=cotangents)
    return problem


def accumulator_of(declared: Mapping[str, Any], storage: torch.dtype) -> torch.dtype:
    """The dtype that sums are declared to be taken in."""
    return storage if declared.get("accumulator") == "storage" else torch.float32


def leaf(x: Tensor) -> Tensor:
    """A float64 copy that autograd can be asked for."""
    return x.detach().to(torch.float64, copy=True).requires_grad_()


def computed_in(declared: Mapping[str, Any], *tensors: Tensor | None) -> torch.dtype:
    """float64 if an input is, else what is declared."""
    given = [x for x in tensors if x is not None]
    return torch.float64 if any(x.dtype == torch.float64 for x in given) else accumulator_of(declared, given[0].dtype)
