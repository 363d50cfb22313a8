"""The document of what finds which defects tells what its report holds."""

from benchmarks.detection import document, joined


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


def test_each_class_has_a_row_for_what_finds_it():
    rows = [line for line in document(REPORT).splitlines() if line.startswith("| ")][1:]
    assert rows == [
        "| public code | case, exact | 2 |",
        "| sizes | nothing | 1 |",
        "| state invites | law `history` | 1 |",
        "| state invites | law `repeated` | 1 |",
        "| tiles invite | golden case, exact | 1 |",
    ]


def test_laws_are_listed_with_the_defects_that_they_find_first():
    listed = document(REPORT).partition("## Found first by a law")[2].partition("##")[0].split()
    assert listed == ["-", "`history`:", "C02", "(permute)", "-", "`repeated`:", "C01", "(permute)"]


def test_survivors_are_counted_and_named():
    text = document(REPORT)
    assert "5 of 6 defects are killed" in text
    assert text.endswith("## Not killed\n\n- N02: a title [a class of inputs: sizes]\n")
    assert "## Not killed" not in document(REPORT[:-1])


def test_of_a_defect_in_two_reports_the_last_counts():
    missed, found = result("N02", "a class of inputs: sizes", "survived"), result("N02", "a class of inputs: sizes")
    assert joined([[missed, REPORT[0]], [found]]) == [found, REPORT[0]]
    assert joined([[found], [missed]]) == [missed]
