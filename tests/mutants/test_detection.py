"""The record of what finds which defects tells what its report holds."""

from benchmarks.detection import figures, joined


def result(mutant, origin, way="value", check="exact", case="{}"):
    killed = way != "survived"
    function = "permute" if killed else ""
    title = f"a title [{origin}]"
    return {"mutant": mutant, "title": title, "way": way, "check": check, "case": case} | {
        "function": function,
        "killed": killed,
    }


REPORT = [
    result("P01", "TransformerEngine #2196, 2.1 to 2.8"),
    result("P02", "TransformerEngine #2907, 2.0 to 2.15"),
    result("X01", "a mistake that tiles invite", case='{"golden": "one"}'),
    result("C02", "a mistake that state invites", "law", "history"),
    result("C01", "a mistake that state invites", "law", "repeated"),
    result("N02", "a class of inputs: sizes", "survived", "", ""),
]


def test_what_finds_a_defect_first_is_counted_for_public_code_and_for_other_defects():
    record = figures(REPORT)
    assert record["tables"][0]["rows"] == [
        ["case, exact", "2", "0"],
        ["golden case, exact", "0", "1"],
        ["law `history`", "0", "1"],
        ["law `repeated`", "0", "1"],
        ["nothing", "0", "1"],
    ]
    assert record["details"][0]["rows"][0] == ["public code", "case, exact", "2"]


def test_laws_are_listed_with_the_defects_that_they_find_first():
    assert figures(REPORT)["details"][1]["rows"] == [["history", "C02 (permute)"], ["repeated", "C01 (permute)"]]


def test_survivors_are_counted_and_named():
    meaning = figures(REPORT)["meaning"]
    assert "5 of 6 defects are killed" in meaning
    assert "Not killed: N02: a title [a class of inputs: sizes]. " in meaning
    assert "Not killed" not in figures(REPORT[:-1])["meaning"]


def test_of_a_defect_in_two_reports_the_last_counts():
    missed, killed = result("N02", "a class of inputs: sizes", "survived"), result("N02", "a class of inputs: sizes")
    assert joined([[missed, REPORT[0]], [killed]]) == [killed, REPORT[0]]
    assert joined([[killed], [missed]]) == [missed]
