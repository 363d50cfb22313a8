"""Predicates over cases: their syntax, their errors, and cases that are changed to match them."""

import random
from dataclasses import replace

import pytest

from conformance.catalogue import CONTRACTS
from conformance.core.case import Case
from conformance.core.space import Space
from conformance.core.where import parsed
from conformance.engine.choose.draw import scope_of
from conformance.engine.choose.plan import Section, cases_of, structures_of
from conformance.engine.choose.profiles import PROFILES
from conformance.interface import UsageError

CASE = Case.family["permute"](function="permute", tokens=4, experts=2, dtype="bfloat16", align=32, routing=(1, 2, 3, 0))
ROUTED = Case.family["route"](function="route", seed=3)


@pytest.mark.parametrize("text", ["probs in ('', float32)", "probs=''", "align in (16, 32) and dtype!=float16"])
def test_a_predicate_is_written_as_it_is_read(text):
    assert parsed(text, "where").text == text
    assert parsed(parsed(text, "where").text, "where") == parsed(text, "where")


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("", True),
        ("dtype=bfloat16", True),
        ("dtype == 'bfloat16' and align=32", True),
        ("dtype=bfloat16 and align=16", False),
        ("dtype!=float16", True),
        ("dtype!=bfloat16", False),
        ("dtype in (float16, bfloat16)", True),
        ("dtype in(float16)", False),
        ("tokens<5 and tokens<=4 and tokens>3 and tokens>=4", True),
        ("tokens<4", False),
        ("tokens>4", False),
        ("slack=none", True),
        ("slack<3", False),
        ("routing=[1, 2, 3, 0]", True),
        ("routing=[1]", False),
        ("golden='' and function=permute", True),
    ],
)
def test_a_predicate_holds_where_it_says(text, holds):
    assert parsed(text, "--where").holds(CASE) == holds


def test_a_golden_case_has_no_fields_of_its_own():
    golden = replace(CASE, golden="empty", dtype="bfloat16")
    assert not parsed("dtype=bfloat16", "--where").holds(golden)
    assert parsed("golden=empty", "--where").holds(golden)


@pytest.mark.parametrize(
    "text", ["dtype", "dtype=", "dtype=a b", "=3", "dtype=a and", "dtype in ()", "a=1 or b=2", "a<>1"]
)
def test_text_that_is_no_predicate_is_refused_with_the_syntax_of_one(text):
    with pytest.raises(UsageError, match=r"--where: .* is no term; a predicate is field=value, "):
        parsed(text, "--where")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("colour=1", "no case has the field 'colour'; the fields are function, golden,"),
        ("dtype=float17", "dtype is 'float17'; it must be one of float32, "),
        ("align=many", "align is 'many'; it must be"),
        ("dtype<3", "dtype<3: a field is only < or > a whole number"),
        ("law=gravity", "law is 'gravity'; it must be one of"),
        ("function=gate", "function is 'gate'; it must be one of permute"),
    ],
)
def test_a_predicate_with_an_unknown_field_or_value_names_the_known_ones(text, message):
    with pytest.raises(UsageError) as error:
        parsed(text, "--where").applies([CONTRACTS["permute"]], "--where")
    assert message in str(error.value)


def test_a_predicate_applies_to_the_functions_that_have_its_fields():
    functions = [CONTRACTS[name] for name in ("gate", "permute", "unpermute", "sort_chunks")]
    assert parsed("align=32", "--where").applies(functions, "--where") == ["permute", "unpermute"]


@pytest.mark.parametrize("text", ["dtype=bfloat16 and align=32", "dtype!=float32 and tokens in (7, 9) and law=split"])
def test_a_narrow_predicate_still_has_its_number_of_drawn_cases(text):
    where, section = parsed(text, "--where"), Section("drawn", "permute")
    wanted = len(cases_of(section, PROFILES["gate"], Space(), 0))
    cases = [case for structure in structures_of(section, PROFILES["gate"], Space(), 0, where) for case in structure]
    scope = scope_of("permute", Space())
    assert len({case.text for case in cases}) == len(cases) >= 0.8 * wanted
    assert all(where.holds(case) and scope.fits(case) and case.law in scope.laws(case) for case in cases)


def test_a_case_that_is_moved_to_larger_units_has_fewer():
    """Sizes of MXFP8 are in units of 32, of most other scalings in elements."""
    scope, where = scope_of("quantize", Space()), parsed("scaling=mxfp8", "--where")
    case = scope.case({"tokens": 151, "hidden": 190, "experts": 2, "counts": (89, 62)})
    moved = where.steered(scope, case, random.Random(0))
    assert (moved.scaling, moved.is_large, scope.fits(moved)) == ("mxfp8", False, True)
    assert replace(case, scaling="mxfp8", counts=()).is_large


def test_without_steering_few_drawn_cases_match():
    where = parsed("dtype=bfloat16 and align=32", "--where")
    cases = cases_of(Section("drawn", "permute"), PROFILES["gate"], Space(), 0)
    assert sum(map(where.holds, cases)) < 0.2 * len(cases)


def test_a_case_that_cannot_be_moved_is_left_out():
    """Only cases without an alignment have a capacity."""
    where = parsed("align=32 and capacity=3", "--where")
    assert where.steered(scope_of("permute", Space()), CASE, random.Random(0)) is None
