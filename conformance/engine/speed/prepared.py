"""Prepares the calls of one case, with their inputs on the device, for a clock."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, is_dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from conformance.catalogue import CONTRACTS
from conformance.core.case import Case
from conformance.core.contract import Opaque, Problem
from conformance.core.ranks import ranks_of
from conformance.engine.child.outcome import Outcome
from conformance.engine.child.runner import Runner
from conformance.interface import Implementation, named_outputs

DEEP = 4  # levels of records inside a result in which tensors are looked for
FORWARD, BOTH = "forward", "forward + backward"


class Untimed(Exception):
    """The case has no call that a clock can repeat; the message is the reason."""


class _Launched(BaseException):
    """A kernel was about to run in Triton's interpreter."""


@dataclass(frozen=True)
class Inputs:
    """A call, and its tensors on the device: all implementations get the same ones."""

    problem: Problem
    placed: dict[str, Tensor]
    device: str

    @classmethod
    def of(cls, problem: Problem, device: str) -> "Inputs":
        """The problem's tensors, copied to the device."""
        return cls(problem, _runner(Implementation(None), device).place(problem), device)


@dataclass(frozen=True)
class Calls:
    """One implementation's calls on these inputs; `backward` is None without gradients."""

    forward: Callable[[], Any]
    both: Callable[[], Any] | None

    @classmethod
    def of(cls, inputs: Inputs, implementation: Implementation) -> "Calls":
        """The calls, without any check around them, which would be timed too.

        Raises:
            Exception: what the producer of an opaque input raises, or `Blocked`.
        """
        problem, runner = inputs.problem, _runner(implementation, inputs.device)
        implementation.declares(problem.function)  # which outputs it omits
        opaque = runner.produce(problem) if problem.producer else None
        arguments, settings = runner.arguments(problem, inputs.placed, opaque)
        forward = partial(getattr(implementation.namespace, problem.function), *arguments, **settings)

        def both() -> Any:
            result = implementation.completed(problem.function, forward())
            outputs = named_outputs(result, CONTRACTS[problem.function].outputs)
            return result, runner.gradients(problem, inputs.placed, outputs)

        return cls(forward, both if problem.wanted else None)

    @property
    def by_title(self) -> dict[str, Callable[[], Any]]:
        return {FORWARD: self.forward} | ({BOTH: self.both} if self.both else {})

    def moved(self, inputs: Inputs, title: str) -> int:
        """The bytes of the tensors that the call takes and returns, counting each storage once.

        No implementation can move less. The results are those of this implementation.
        """
        cotangents = {f"d_{name}" for name in inputs.problem.cotangents} if title == FORWARD else set()
        arguments = [x for name, x in inputs.placed.items() if name not in cotangents]
        sizes: dict[int, int] = {}
        for x in tensors_in([arguments, self.by_title[title]()]):
            address = x.untyped_storage().data_ptr()
            sizes[address] = max(sizes.get(address, 0), min(x.numel() * x.element_size(), x.untyped_storage().nbytes()))
        return sum(sizes.values())


def problem_of(case: Case) -> Problem:
    """The call that is timed, with its tensors on the host.

    Raises:
        Untimed: an illegal call, a call by several ranks, or one that needs a state.
    """
    contract = CONTRACTS[case.function]
    if case.illegal:
        raise Untimed("an illegal call must raise, which no clock can time")
    if ranks_of(contract, case):
        raise Untimed("several ranks make the call together, and this is one process")
    return _first_call(contract.problem(case))


def _runner(implementation: Implementation, device: str) -> Runner:
    return Runner(implementation, device, "zero", Outcome("PASS"))


def _first_call(problem: Problem) -> Problem:
    """The call itself; if the case has several calls, the first one, and only its forward.

    Raises:
        Untimed: it takes the state that calls before it have left.
    """
    if not problem.script:
        return problem
    settings = {name: x for name, x in problem.settings.items() if "." not in name}
    if any(isinstance(x, Opaque) for x in settings.values()):
        raise Untimed("the call takes a state that other calls make")
    layouts = {name: x for name, x in problem.layouts.items() if name in {*problem.first, *settings}}
    bare = replace(problem, required=problem.first, settings=settings, layouts=layouts, wanted=(), cotangents={})
    return replace(bare, script=None, read=None, first={})


def tensors_in(x: Any, depth: int = DEEP) -> Iterator[Tensor]:
    """The tensors of a result: in containers, and in the fields of records."""
    if isinstance(x, Tensor):
        yield x
    elif depth and isinstance(x, (tuple, list)):
        for element in x:
            yield from tensors_in(element, depth - 1)
    elif depth and isinstance(x, dict):
        yield from tensors_in(list(x.values()), depth)
    elif depth and (is_dataclass(x) or hasattr(x, "__dict__")) and not isinstance(x, type):
        yield from tensors_in(list(vars(x).values()), depth)


def is_interpreted(inputs: Inputs, implementation: Implementation) -> bool:
    """Whether the call launches a kernel in Triton's interpreter; the first launch ends it."""
    interpreter = sys.modules.get("triton.runtime.interpreter")
    executor = getattr(interpreter, "GridExecutor", None)
    if executor is None:
        return False

    def launched(*_: Any, **__: Any) -> None:
        raise _Launched

    launch_method, executor.__call__ = executor.__call__, launched
    try:
        with contextlib.suppress(Exception):  # not an error here: the judge will find it
            Calls.of(inputs, implementation).forward()
    except _Launched:
        return True
    finally:
        executor.__call__ = launch_method
    return False
