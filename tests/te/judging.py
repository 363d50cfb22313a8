"""An adapter over a stand-in, judged by the suite in this process; each call must name its path."""

from collections.abc import Callable, Collection, Iterator
from typing import Any

from torch import Tensor

from conformance.core.case import Case
from conformance.core.space import Space
from conformance.engine.child.child import _description
from conformance.engine.child.evaluate import evaluate
from conformance.engine.child.outcome import Outcome
from conformance.engine.choose.plan import cases_of, sections
from conformance.engine.choose.profiles import PROFILES
from conformance.engine.options import ChildOptions
from conformance.interface import Implementation
from conformance.peers.te import Adapter
from tests.common.fast import normal

NOTHING_WRONG = ("PASS", "UNINFORMATIVE", "DECLARED_UNSUPPORTED")
MOST = 15  # cases of a function that are covering, and that are drawn


def leaf(*shape: int, seed: int = 0) -> Tensor:
    """Normal random numbers that require a gradient."""
    return normal(*shape, seed=seed).requires_grad_()


class Checked:
    """The adapter's functions, each raising where it did not run the path that it claims."""

    def __init__(self, te: Any, adapter: Adapter) -> None:
        self.supports, self.declares = adapter.supports, adapter.declares
        assert adapter.probes.answers  # they call the stand-in, once
        for function in adapter.offered:
            setattr(self, function, self._checked(te, adapter, function))

    def _checked(self, te: Any, adapter: Adapter, function: str) -> Callable[..., Any]:
        call = getattr(adapter, function)

        def checked(*args: Any, **settings: Any) -> Any:
            te.calls.clear()
            result = call(*args, **settings)
            claimed = symbols_of(adapter.path[function], te)
            if claimed != te.calls:
                raise RuntimeError(f"claims {claimed}, ran {te.calls}")
            return result

        checked.__signature__ = call.__signature__  # type: ignore[attr-defined]
        return checked


def symbols_of(path: str, te: Any) -> list[str]:
    """The stand-in's symbols among the steps of a path."""
    first = [step.split()[0] for step in path.partition(" [")[0].split(", then ")]
    return [name for name in first if name in te.symbols]


def _every(case: Case) -> bool:
    return True


def cases(
    implementation: Any, functions: Collection[str], most: int, only: Callable[[Any], bool] = _every
) -> Iterator[Case]:
    """Golden cases, illegal calls, and the first others of the gate, large ones aside."""
    described = _description(Implementation(implementation, "te"), ChildOptions("te", device="cpu"))
    space = Space.of(described)
    for section in sections():
        if section.function in functions and described["functions"][section.function]["offered"]:
            chosen = cases_of(section, PROFILES["gate"], space, 0)
            small = [x for x in chosen if only(x) and not x.is_large and not x.layout.startswith("wide")]
            yield from small if section.kind == "fixed" else small[:most]


def judged(
    implementation: Any, functions: Collection[str], most: int = MOST, only: Callable[[Any], bool] = _every
) -> list[tuple[Case, Outcome]]:
    """Each case with its outcome."""
    offered = Implementation(implementation, "te")
    return [(case, evaluate(case, offered, "cpu")) for case in cases(implementation, functions, most, only)]


def wrong(outcomes: list[tuple[Case, Outcome]]) -> list[str]:
    """The cases that do not pass, as text."""
    failing = [(case, outcome) for case, outcome in outcomes if outcome.status not in NOTHING_WRONG]
    return [f"{case.function} {case.text} {outcome.finding or outcome.reason}" for case, outcome in failing]
