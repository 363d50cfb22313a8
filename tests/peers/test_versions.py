"""The section about releases says what the reports say: how many cases differ, and what fails."""

import pytest

from conformance.peers import second_opinions, versions

PAGE = second_opinions.PAGE.read_text()


def report(release, counts, without=(), failures=()):
    functions = {
        "z_loss": {"status": "differs", "counts": counts, "without": list(without)},
        "glu": {"status": "not offered", "counts": {}, "without": []},
    }
    return {
        "versions": {"megatron.core": release},
        "functions": functions,
        "failures": [
            {"function": "z_loss", "case": {"schema": 1, "tokens": 3}, "finding": {"message": text}, "reason": ""}
            for text in failures
        ],
    }


OLD = report(
    "0.1",
    {"PASS": 3, "FAIL": 1, "WAIVED": 2, "NOT_OFFERED": 9, "DECLARED_UNSUPPORTED": 1},
    without=["padding_mask"],
    failures=["is too old"],
)
NEW = report("0.2", {"PASS": 8, "UNINFORMATIVE": 1})


def test_cases_and_what_is_missing_are_counted_per_release():
    lines = versions.section([OLD, NEW]).splitlines()
    assert "| 0.1 | 1 | 6 | 3 | `padding_mask` of `z_loss` |" in lines
    assert "| 0.2 | 1 | 9 | 0 | none |" in lines
    assert "| `z_loss` | 3 of 6 | 0 |" in lines


def test_failures_are_listed_with_their_release_and_their_case():
    assert versions.section([OLD, NEW]).endswith('\n- `z_loss`: 0.1: is too old ({"tokens":3}).\n')
    assert "- `z_loss`" not in versions.section([report("0.1", {"WAIVED": 2})])


def test_a_function_that_no_release_differs_in_is_not_in_the_second_table():
    assert "| `z_loss`" not in versions.section([NEW])


def test_the_section_is_written_anew_and_the_rest_of_the_page_stays():
    once = second_opinions.with_section("# Peers\n\nNotes.\n", versions.section([OLD]))
    assert once.startswith("# Peers\n\nNotes.\n\n" + versions.MEGATRON.heading)
    assert second_opinions.with_section(once, versions.section([OLD, NEW])).count("## ") == 1


def test_each_package_has_a_section_of_its_own_and_other_reports_have_none():
    engine = report("2.1", {"PASS": 1, "FAIL": 1}, failures=["is wrong"])
    engine["versions"] = {"transformer_engine": "2.1"}
    both = second_opinions.with_section("# Peers\n", versions.section([OLD]))
    both = second_opinions.with_section(both, versions.section([engine]))
    updated = second_opinions.with_section(both, versions.section([OLD, NEW]))
    assert "| `z_loss` | 1 of 2 |" in updated and "is wrong" not in updated
    assert [line for line in updated.splitlines() if line.startswith("## ")] == [
        package.heading.strip() for package in versions.PACKAGES
    ]
    with pytest.raises(ValueError, match="of no one package"):
        versions.section([OLD, engine])


def test_the_page_has_the_section_with_the_four_releases_that_were_judged():
    rows = [
        line.split("|")[1].strip()
        for line in PAGE.partition(versions.MEGATRON.heading)[2].splitlines()
        if line[:3] == "| 0"
    ]
    assert rows == ["0.14.0", "0.15.3", "0.16.0", "0.16.1"]
