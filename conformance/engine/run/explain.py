"""Finds the wrong stage of a failing case: each stage runs alone, on the reference's inputs."""

from collections.abc import Iterator
from dataclasses import dataclass

from conformance.catalogue import CONTRACTS
from conformance.core.case import Case
from conformance.engine.child.outcome import Outcome
from conformance.engine.run.pool import Pool
from conformance.engine.run.session import FAILING
from conformance.texts import failure_text
from conformance.usage import UsageError


@dataclass(frozen=True)
class Explained:
    """The outcomes of a case and of its stages by name, in the order in which they run."""

    case: Outcome
    stages: dict[str, Outcome]

    @property
    def first(self) -> str:
        """The first stage that is wrong by itself; empty: none."""
        return next((name for name, outcome in self.stages.items() if outcome.status in FAILING), "")

    @property
    def is_wrong(self) -> bool:
        return bool(self.first) or self.case.status in FAILING

    def lines(self) -> Iterator[str]:
        """The case, a line per stage, and the conclusion."""
        yield f"the whole: {told(self.case)}"
        width = max(map(len, self.stages))
        yield from (f"  {name:{width}}  {told(outcome)}" for name, outcome in self.stages.items())
        unseen = [name for name, outcome in self.stages.items() if outcome.status not in (*FAILING, "PASS")]
        if self.first:
            yield f"{self.first} is the first stage that is wrong by itself"
        elif self.is_wrong:
            yield f"no stage is wrong by itself, so {'these stages or ' if unseen else ''}what joins them is wrong"
        else:
            yield "no stage is wrong"
        if unseen and not self.first:
            yield f"not judged: {', '.join(unseen)}"


def told(outcome: Outcome) -> str:
    """The status, with what is wrong, or with the reason why there is no verdict."""
    return f"{outcome.status}{':' * bool(outcome.finding)} {failure_text(outcome.finding, outcome.reason)}".strip()


def explain(case: Case, pool: Pool) -> Explained:
    """Run the case and its stages.

    Raises:
        UsageError: the case has no stages.
    """
    stages = CONTRACTS[case.function].stages(case)
    if not stages:
        staged_functions = ", ".join(name for name, contract in CONTRACTS.items() if contract.has_stages)
        raise UsageError(f"{case.function} {case.id} has no stages; explain takes drawn cases of {staged_functions}")
    return Explained(pool.run_alone(case), {name: pool.run_alone(stage) for name, stage in stages.items()})
