"""The section about releases says what the reports say: how many cases differ, and why."""

import datetime
from pathlib import Path

import pytest

from conformance.engine.run.waivers import Waiver
from conformance.peers import versions

PAGE = (Path(__file__).parents[2] / "docs" / "peers.md").read_text()


def waiver(message, reason):
    return Waiver("z_loss", "me", reason, datetime.date(2027, 1, 1), message=message)


WAIVERS = [waiver("nan", "no tokens"), waiver("inf", "many tokens"), waiver("nan, nan", "the same, twice")]


def report(release, counts, without=(), unused=(), failures=()):
    functions = {
        "z_loss": {"status": "differs", "counts": counts, "without": list(without)},
        "glu": {"status": "not offered", "counts": {}, "without": []},
    }
    problems = [f"the waiver {waiver.name} waived nothing: remove it" for waiver in unused]
    return {
        "versions": {"megatron.core": release},
        "functions": functions,
        "problems": problems,
        "failures": [
            {"function": "z_loss", "case": {"schema": 1, "tokens": 3}, "finding": {"message": text}, "reason": ""}
            for text in failures
        ],
    }


OLD = report(
    "0.1",
    {"PASS": 3, "FAIL": 1, "WAIVED": 2, "NOT_OFFERED": 9, "DECLARED_UNSUPPORTED": 1},
    without=["padding_mask"],
    unused=WAIVERS[1:],
    failures=["is too old"],
)
NEW = report("0.2", {"PASS": 8, "UNINFORMATIVE": 1}, unused=WAIVERS)


def test_cases_and_what_is_missing_are_counted_per_release():
    lines = versions.section([OLD, NEW], WAIVERS).splitlines()
    assert "| 0.1 | 1 | 6 | 3 | `padding_mask` of `z_loss` |" in lines
    assert "| 0.2 | 1 | 9 | 0 | none |" in lines
    assert "| `z_loss` | 3 of 6 | 0 |" in lines


def test_a_cause_is_a_waiver_that_waived_or_a_failure_and_nothing_else():
    assert versions.section([OLD, NEW], WAIVERS).endswith('\n- `z_loss`: no tokens; 0.1: is too old ({"tokens":3}).\n')
    used = report("0.1", {"WAIVED": 2}, unused=WAIVERS[:1])
    assert versions.section([used], WAIVERS).endswith("\n- `z_loss`: many tokens.\n")


def test_a_function_that_no_release_differs_in_is_not_in_the_second_table():
    assert "| `z_loss`" not in versions.section([NEW], WAIVERS)


def test_the_section_is_written_anew_and_the_rest_of_the_page_stays():
    once = versions.with_section("# Peers\n\nNotes.\n", versions.section([OLD], WAIVERS))
    assert once.startswith("# Peers\n\nNotes.\n\n" + versions.MEGATRON.heading)
    assert versions.with_section(once, versions.section([OLD, NEW], WAIVERS)).count("## ") == 1


def test_each_package_has_a_section_of_its_own_and_other_reports_have_none():
    engine = report("2.1", {"PASS": 1, "FAIL": 1}, failures=["is wrong"])
    engine["versions"] = {"transformer_engine": "2.1"}
    both = versions.with_section("# Peers\n", versions.section([OLD], WAIVERS))
    both = versions.with_section(both, versions.section([engine], WAIVERS))
    again = versions.with_section(both, versions.section([OLD, NEW], WAIVERS))
    assert "| `z_loss` | 1 of 2 |" in again and "is wrong" not in again
    assert [line for line in again.splitlines() if line.startswith("## ")] == [
        package.heading.strip() for package in versions.PACKAGES
    ]
    with pytest.raises(ValueError, match="of no one package"):
        versions.section([OLD, engine], WAIVERS)


def test_the_page_has_the_section_with_the_four_releases_that_were_judged():
    rows = [
        line.split("|")[1].strip()
        for line in PAGE.partition(versions.MEGATRON.heading)[2].splitlines()
        if line[:3] == "| 0"
    ]
    assert rows == ["0.14.0", "0.15.3", "0.16.0", "0.16.1"]
