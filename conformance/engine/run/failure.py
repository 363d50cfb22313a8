"""One distinct failure of a run, as the ledger and the corpus keep it."""

from dataclasses import asdict, dataclass
from typing import Any

from conformance.core.case import Case
from conformance.engine.child.outcome import Outcome


@dataclass(frozen=True)
class Failure:
    """One distinct failure, at its smallest."""

    case: Case
    outcome: Outcome
    found_in: str
    attempts: int
    smallest: bool
    error: str = ""  # an error of the suite that ended the search for a smaller case
    file: str = ""  # the file of the saved case; begins with NOT_SAVED if there is none

    def record(self) -> dict[str, Any]:
        case = {"id": self.case.id, "case": self.case.record(), "function": self.case.function}
        names = ("found_in", "attempts", "smallest", "error", "file")
        return case | {name: getattr(self, name) for name in names} | asdict(self.outcome)
