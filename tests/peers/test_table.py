"""The table of peers is written from reports."""

from pathlib import Path

from conformance.peers import second_opinions, table

_, HEADING, FOLLOWING = second_opinions.PAGE.read_text().partition(table.HEAD.partition("\n")[0])
PAGE = HEADING + FOLLOWING.partition("\n## ")[0]
REPORT = {
    "implementation": "a.peer",
    "versions": {"python": "3.11.7", "torch": "2.13.0"},
    "device": "CPU",
    "verdict": "NOT CONFORMANT",
    "ended_by": "",
    "functions": {
        "permute": {"status": "differs", "counts": {"PASS": 3, "FAIL": 1, "DECLARED_UNSUPPORTED": 2, "NOT_OFFERED": 9}},
        "glu": {"status": "not offered", "counts": {}},
    },
}
ROWS = PAGE[: -len(table.notes_of(PAGE))].splitlines()
ROW = "| `a.peer` | torch 2.13.0 | CPU | NOT CONFORMANT | `permute` | 3 | 1 FAIL | 2 |"


def test_a_row_per_judged_function():
    assert list(table.rows(REPORT)) == [ROW]
    assert list(table.rows(REPORT | {"ended_by": "the time limit"})) == [ROW.replace("ANT |", "ANT, ended early |")]


def test_the_notes_below_the_table_stay():
    page = table.page([REPORT], "\nNotes.\n")
    assert page == table.HEAD + ROW + "\n\nNotes.\n"
    assert table.page([REPORT], table.notes_of(page)) == page
    assert table.notes_of(page + "| another | table |\nMore.\n") == "\nNotes.\n| another | table |\nMore.\n"


def test_the_page_is_of_this_form_and_names_peers_that_exist():
    assert PAGE.startswith(table.HEAD)
    named = {line.split("`")[1].partition(":")[0] for line in ROWS if line.startswith("| `")}
    assert named
    for module in named:
        assert (Path(__file__).parents[2] / f"{module.replace('.', '/')}.py").exists()
