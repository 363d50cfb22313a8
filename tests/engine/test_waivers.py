"""A waiver covers one known difference for at most a year, and says nothing impossible."""

import datetime
from pathlib import Path

import pytest

from conformance import peers
from conformance.catalogue import CONTRACTS
from conformance.core.known_names import JUDGED, judged_of
from conformance.engine.child.outcome import Outcome
from conformance.engine.run.waivers import Waiver, read_waivers
from conformance.families.permutation.cases import RoutingCase
from conformance.interface import UsageError
from conformance.judge.expectation import Resolved
from tests.engine.verdict_helpers import ROWS_WRONG, SMALL

WAIVER = 'function = "permute"\nowner = "me"\nreason = "known"\nexpires = 2027-01-01\n'


TODAY = datetime.date(2026, 1, 1)  # a year before


def read(folder: Path, text: str) -> list[Waiver]:
    (folder / "waivers.toml").write_text(text)
    return read_waivers(folder / "waivers.toml", TODAY)


WRONG, CRASH = Outcome("FAIL", ROWS_WRONG), Outcome("CRASH")
NARROW = 'check = "exact"\noutput = "rows"\nwhere = { tokens = 2, dtype = "float32" }'


@pytest.mark.parametrize(
    ("text", "covered", "others"),
    [
        (
            NARROW,
            WRONG,
            [
                CRASH,
                Outcome("FAIL", ROWS_WRONG | {"check": "shape"}),
                Outcome("FAIL", ROWS_WRONG | {"output": "probs"}),
            ],
        ),
        ('check = "CRASH"', CRASH, [WRONG]),
        ("", WRONG, [Outcome("ERROR", reason="KeyError: 'x'")]),  # of the harness
    ],
)
def test_a_waiver_covers_what_it_says_and_nothing_else(tmp_path, text, covered, others):
    (waiver,) = read(tmp_path, f"[[waiver]]\n{WAIVER}{text}")
    assert waiver.covers(SMALL, covered)
    assert not any(waiver.covers(SMALL, outcome) for outcome in others)
    assert not waiver.covers(RoutingCase(function="unpermute", tokens=2), covered)
    assert waiver.covers(RoutingCase(function="permute", tokens=3), covered) == (text != NARROW)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[[waiver]", "Expected"),
        ("waiver = 3", "waiver"),
        ("waiver = [3]", "tables"),
        ('[[waver]]\nfunction = "permute"', "waver"),
        (f"[[waiver]]\n{WAIVER}"[:-22], "lacks expires"),
        (f'[[waiver]]\n{WAIVER}whom = "x"', "unknown field whom"),
        (f"[[waiver]]\n{WAIVER}".replace("permute", "transmute"), "transmute"),
        (f"[[waiver]]\n{WAIVER}".replace("2027-01-01", '"2027-01-01"'), "must be a date"),
        (f"[[waiver]]\n{WAIVER}".replace("2027-01-01", "2027-01-01T10:00:00"), "must be a date"),
        (f"[[waiver]]\n{WAIVER}".replace("2027", "2025"), "expired on 2025-01-01"),
        (f"[[waiver]]\n{WAIVER}where = 3", "where"),
        (f"[[waiver]]\n{WAIVER}where = {{ tokenz = 3 }}", "tokenz"),
        (f"[[waiver]]\n{WAIVER}check = 3", "check"),
        (f"[[waiver]]\n{WAIVER}".replace('"me"', '""'), "owner is ''; it must be text, and not empty"),
        (f"[[waiver]]\n{WAIVER}".replace('"known"', '" "'), "reason is ' '; it must be text, and not empty"),
        (f'[[waiver]]\n{WAIVER}message = ""', "message is ''"),
        (f"[[waiver]]\n{WAIVER}".replace("2027-01-01", "2027-01-03"), "it must be within a year from today"),
        (f'[[waiver]]\n{WAIVER}check = "exacter"', "check is 'exacter'; it must be raises … or one of .*exact,"),
        (f'[[waiver]]\n{WAIVER}check = "PASS"', "check is 'PASS'"),
        (f'[[waiver]]\n{WAIVER}check = "evenly_spread"', "check is 'evenly_spread'"),
        (f'[[waiver]]\n{WAIVER}output = "loss"', "output is 'loss'; it must be one of .*row_map"),
        (f'[[waiver]]\n{WAIVER}output = "0.rows"', "output is '0.rows'"),
        (f"[[waiver]]\n{WAIVER}where = {{ tokens = -1 }}", "where.tokens is -1; it must be a whole number ≥ 0"),
        (f"[[waiver]]\n{WAIVER}where = {{ tokens = true }}", "where.tokens is True"),
        (f'[[waiver]]\n{WAIVER}where = {{ dtype = "float128" }}', "where.dtype is 'float128'; it must be one of"),
        (f'[[waiver]]\n{WAIVER}where = {{ golden = "none" }}', "where.golden is 'none'; it must be one of"),
        (f'[[waiver]]\n{WAIVER}where = {{ illegal = "none" }}', "where.illegal is 'none'; it must be one of"),
        (f'[[waiver]]\n{WAIVER}where = {{ law = "none" }}', "where.law is 'none'; it must be one of"),
        (f'[[waiver]]\n{WAIVER}where = {{ function = "glu" }}', "where.function is 'glu'; it must be one of permute"),
    ],
)
def test_a_waiver_that_cannot_be_used_is_a_usage_error(tmp_path, text, named):
    with pytest.raises(UsageError, match=named):
        read(tmp_path, text)


def test_a_waiver_is_good_on_its_last_day(tmp_path):
    assert read(tmp_path, f"[[waiver]]\n{WAIVER}".replace("2027-01-01", str(TODAY)))


ACCEPTED = {
    "permute": [
        'check = "history"',
        'check = "OOM"',
        'check = "raises KeyError"',
        'output = "d_tokens"',
        'output = "supports"',
        'output = "routing_map"\ncheck = "error"',
        "where = { routing = [1, 2] }",
        'where = { dtype = "float8_e4m3fn", layout = "expanded" }',
        'where = { law = "determinism" }',
    ],
    "route": ['output = "3.routing_map"', 'output = "state.expert_bias"', "where = { bias = true }"],
    "quantize": ['output = "codes"', 'output = "scales.columnwise"', 'check = "code"'],
}


@pytest.mark.parametrize(("function", "text"), [(name, text) for name, texts in ACCEPTED.items() for text in texts])
def test_a_waiver_of_what_a_finding_may_say_is_accepted(tmp_path, function, text):
    assert read(tmp_path, f"[[waiver]]\n{WAIVER.replace('permute', function)}{text}")[0].function == function


def test_every_check_of_an_expectation_is_known():
    classes, checks = [Resolved], set()
    while classes:
        cls = classes.pop()
        classes += cls.__subclasses__()
        checks |= {cls.check} if hasattr(cls, "check") else set()
    assert checks == {*JUDGED}


def test_the_outputs_of_golden_cases_are_known():
    for contract in CONTRACTS.values():
        names = {name for _, expected in contract.golden.values() for name in expected}
        assert names <= judged_of(contract)
        assert contract.primary in judged_of(contract)


def test_the_waivers_that_the_suite_keeps_are_sound():
    path = Path(str(peers.__file__)).parent / "megatron.waivers.toml"
    assert read_waivers(path, datetime.date(2026, 12, 31))
