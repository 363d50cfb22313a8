"""The gate's cases find every planted defect.

Each defect is tried first on the case that has killed it before, if the gate has that case. One
process tries them one after another, because starting a process costs more than the case.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import moe_ref
from conformance.catalogue import CONTRACTS, FAMILIES, NAMES
from conformance.core.case import Case, case_from
from conformance.core.space import Space
from conformance.engine.child.outcome import Outcome
from conformance.engine.choose.plan import cases_of, sections
from conformance.engine.choose.profiles import PROFILES
from conformance.engine.options import ChildOptions
from conformance.engine.run.pool import Pool
from conformance.mutants.planted import DEFECTS
from conformance.mutants.score import Mutant, PassedCase, attempt
from tests.common.suite import JUDGED
from tests.mutants.killers import KILLERS

LISTED = {
    *("P01", "P02", "P04", "P06", "P09", "P10", "P12", "P13", "P19", "P21", "D01", "D02", "D05"),
    *("R01", "R03", "R04", "R05", "R06", "R08", "R09", "R10", "R15", "R16", "R19", "R20", "R26", "R27"),
    *("A01", "A05", "A07", "A09", "A10", "A11", "A12"),
    *(f"S{number:02}" for number in range(1, 11)),
    *("Q01", "Q03", "Q08q", "Q11", "Q13", "Q15", "G21q", "Q11g", "Q13g", "Q13m", "Q13l", "Q15g", "B01"),
    *("E01", "E02", "E04", "E06", "E07", "F02"),
    *(f"L{number:02}" for number in range(1, 21)),
    *(f"W{number:02}" for number in range(1, 8)),
    *("G01", "G03", "G04", "G12", "G21", "J01", "H02", "H04", "H04s", "Q08", "K01"),
    *(f"T{number:02}" for number in range(1, 21)),
    *(f"V{number:02}" for number in range(1, 11)),
    *(f"N{number:02}" for number in range(1, 18)),
    *(f"I{number:02}" for number in range(1, 6)),
    *(f"C{number:02}" for number in range(1, 46)),
    *(f"X{number:02}" for number in range(1, 29)),
    *(f"U{number:02}" for number in range(1, 68) if number != 11),
    *(f"Y{number:02}" for number in range(1, 48) if number != 15),
    *(f"Z{number:02}" for number in range(1, 25) if number != 13),
    *(f"O{number:02}" for number in range(1, 15)),
    *(f"M{number:02}" for number in range(1, 37) if number != 10),
    *(f"ML{number:02}" for number in range(1, 64)),
    *(f"SL{number:02}" for number in range(1, 22)),
    *(f"CK{number:02}" for number in range(1, 32)),
    *(f"DW{number:02}" for number in range(1, 8)),
    *(f"AD{number:02}" for number in range(1, 85)),
    *(f"AE{number:03}" for number in range(1, 197)),
    *(f"RB{number:02}" for number in range(1, 81)),
    *(f"RC{number:03}" for number in range(1, 241)),
    *(f"RD{number:03}" for number in range(1, 39)),
}
LACKING = (  # of AE: those for which cases were missing
    *(5, 9, 10, 28, 47, 54, 56, 57, 59, 73, 81, 82, 98, 116, 124, 126, 157, 159, 178, 180, 181, 182, 194),
)
LACKING_REPORTED = (3, 4, 37, 38, 47, 53, 57, 71, 75)  # of RB
LACKING_REWRITTEN = (  # of RC
    *(11, 12, 17, 23, 28, 32, 33, 35, 36, 37, 52, 59, 61, 64, 76, 77, 79, 90, 95, 99, 102, 104, 120, 125, 134),
    *(152, 157, 165, 166, 183, 187, 189, 196, 199, 205, 206, 212, 214, 215, 218, 225, 235, 236, 240),
)
# the others take minutes: docs/detection.md
LEFT_OUT = {f"AE{number:03}" for number in range(1, 197) if number not in LACKING and number % 12}
LEFT_OUT |= {f"RB{number:02}" for number in range(1, 81) if number not in LACKING_REPORTED and number % 16}
LEFT_OUT |= {f"RC{number:03}" for number in range(1, 241) if number not in LACKING_REWRITTEN and number % 24}
MANY_ROWS = {"N02", "N03"}  # need more rows than an interpreter can run
LARGE = MANY_ROWS | {f"N{number}" for number in range(12, 18)}  # N12 to N17: tests/experts/test_many_rows.py

RAISING = {  # every other defect but two accepts every legal call, so it is not killed by the way it is planted
    "R04": "raises RuntimeError",  # the wrong group shows at the first exchange
    **dict.fromkeys(("C24", "C25", "U40"), "raises ValueError"),  # a lost queue shows at a replay
}
# E04 raises where a rank receives nothing; what ML20 does to a case depends on the case before
MAY_RAISE = {"E04", "ML20"}

SWITCHED = '''
"""The reference with the defect that the file beside this one names, or with none."""

from pathlib import Path

from conformance.interface import load
from conformance.mutants import planted


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    defect = Path(__file__).with_name("defect").read_text()
    return getattr(getattr(planted, defect).moe_ref if defect else load("moe_ref").namespace, name)
'''


class Switched:
    """A pool of one process, whose implementation has one defect at a time."""

    def __init__(self, folder: Path, pool: Pool) -> None:
        self.file, self.pool = folder / "defect", pool

    def outcome(self, case: Case, defect: str = "") -> Outcome:
        self.file.write_text(defect)
        return self.pool.answer(case)

    def is_sound(self, case: Case) -> bool:
        """Whether the reference itself passes the case."""
        return self.outcome(case).status in JUDGED

    def check_that_kills(self, defect: str, case: Case) -> str:
        """The check that fails by the defect alone; empty if none does.

        A defect may leave something behind in the process, a message to another rank for example.
        The reference then fails too, so that the defect is tried again in a process of its own.
        """
        outcome = self.outcome(case, defect)
        killed = outcome.status == "FAIL" and outcome.finding and self.is_sound(case)
        return outcome.finding["check"] if killed else ""


@pytest.fixture
def switched(tmp_path: Path) -> Iterator[Switched]:
    (tmp_path / "switched_reference.py").write_text(SWITCHED)
    (tmp_path / "defect").write_text("")
    with Pool(ChildOptions("switched_reference", "cpu", search=(str(tmp_path),))) as pool:
        yield Switched(tmp_path, pool)


def family_of(defect: str) -> str:
    """The family of the first function that the defect changes."""
    package = getattr(moe_ref, next(iter(DEFECTS[defect].wrappers))).__module__.split(".")[1]
    return package if package in NAMES else "router"  # whose cases hold the state


def gate_of(family: str) -> dict[str, Case]:
    """The gate's cases of a family on a CPU, by id."""
    functions = {contract.function for contract in FAMILIES[NAMES.index(family)].contracts}
    of_family = [section for section in sections() if section.function in functions]
    return {case.id: case for section in of_family for case in cases_of(section, PROFILES["gate"], Space(), 0)}


def test_every_defect_is_listed():
    assert set(DEFECTS) == LISTED


@pytest.mark.parametrize("family", NAMES)
def test_every_listed_defect_is_planted_and_killed_by_a_value_or_a_law(family, switched):
    cases, killers = gate_of(family), json.loads(KILLERS.read_text())
    defects = [name for name in DEFECTS if name not in LARGE | LEFT_OUT and family_of(name) == family]
    likely = {name: cases[killers[name]] for name in defects if killers.get(name) in cases}
    passed = [PassedCase(case, 0.0, frozenset()) for case in cases.values()]
    checks = {}
    for name in defects:
        case = likely.get(name)
        checks[name] = switched.check_that_kills(name, case) if case else ""
        if not checks[name]:
            first = tuple(function for function in DEFECTS[name].wrappers if function in CONTRACTS)
            planted = f"conformance.mutants.planted:{name}.moe_ref"
            result = attempt(Mutant(name, "", planted, first=first, likely=case), passed)
            assert result.way in ("value", "law"), result.line
            assert switched.is_sound(case_from(json.loads(result.case))), result.case
            checks[name] = result.check
    raising = {name: check for name, check in checks.items() if check.startswith("raises") and name not in MAY_RAISE}
    assert len(defects) > 10
    assert raising == {name: check for name, check in RAISING.items() if name in defects}
    assert family != "permutation" or checks["D02"] == "history"  # a kept alignment shows only in a second call
