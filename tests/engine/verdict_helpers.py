"""What several test modules of this folder use: verdict."""

from pathlib import Path

import pytest

from conformance.catalogue import CONTRACTS
from conformance.engine.options import Options
from conformance.engine.run.ledger import Ledger
from conformance.engine.run.verdict import Verdict, assemble
from conformance.families.permutation.cases import RoutingCase

ENOUGH = 10  # more informative cases than the profile smoke asks for of any function
ROWS_WRONG = {
    "output": "rows",
    "check": "exact",
    "message": "row 1 holds token 2; the reference puts token 0 there",
    "index": [1, 0],
}
SMALL = RoutingCase(function="permute", tokens=2, experts=3, hidden=1, routing=(0b100, 0b001))


class Book:
    """A ledger of one worker, written by hand."""

    def __init__(self, folder: Path, worker: str = "main", kernels: tuple[str, ...] = (), **functions) -> None:
        self.folder, self.ledger = folder, Ledger(folder, worker)
        offered = {"offered": True, "without": [], "declares": {}}
        described = {name: offered | functions.get(name, {}) for name in CONTRACTS}
        device = {"device": "cpu", "device_name": "CPU", "versions": {"torch": "2.0"}}
        self.ledger.write("implementation", functions=described, kernels=list(kernels), **device)

    def section(self, label: str, function: str, *statuses: str, scheduled: int | None = None, **content) -> "Book":
        self.ledger.write("plan", section=label, scheduled=len(statuses) if scheduled is None else scheduled)
        result = {"id": "0" * 12, "function": function, "section": label, "finding": None, "evaluations": 2}
        result |= {"seconds_implementation": 0.5, "seconds_reference": 0.25, "descriptions": {}, "shares_gpu": False}
        result |= {name: [] for name in ("kernels", "configurations", "launched", "changed")}
        result |= dict.fromkeys(("reason", "waiver", "transport", "law"), "")
        for status in statuses:
            self.ledger.write("outcome", **result | {"status": status} | content)
        return self

    def failure(
        self, status: str = "FAIL", finding: dict | None = None, case: RoutingCase = SMALL, **content
    ) -> "Book":
        record = {"id": case.id, "case": case.record(), "function": case.function, "status": status, "finding": finding}
        record |= {"found_in": "drawn-permute-0", "attempts": 7, "smallest": True, "file": "", "reason": ""}
        self.ledger.write("failure", **record | content)
        return self

    def all_pass(self, *but: str) -> "Book":
        for name in CONTRACTS:
            if name not in but:
                self.section(f"drawn-{name}-0", name, *["PASS"] * ENOUGH)
        return self

    def judged(self, function: str, *statuses: str, passed: int = ENOUGH, **content) -> "Book":
        """All functions pass; one has these outcomes after those that pass."""
        drawn = ["PASS"] * passed + [*statuses]
        return self.all_pass(function).section(f"drawn-{function}-0", function, *drawn, **content)

    def verdict(self, accept_partial: bool = False, **arguments) -> Verdict:
        options = Options("my_kernels.moe", profile="smoke", accept_partial=accept_partial)
        return assemble(self.folder, options, 12.0, **arguments)


@pytest.fixture
def book(tmp_path) -> Book:
    return Book(tmp_path)
