"""The verdict adds up what the ledger says, loses nothing, and every report says the same."""

import datetime
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from conformance.catalogue import CONTRACTS
from conformance.engine.child.runner import Outcome
from conformance.engine.choose.profiles import PROFILES
from conformance.engine.options import Options
from conformance.engine.run.ledger import Ledger
from conformance.engine.run.verdict import Verdict, assemble
from conformance.engine.run.waivers import Waiver, read_waivers
from conformance.families.permutation.cases import RoutingCase
from conformance.interface import UsageError
from conformance.report import check_path, write
from conformance.report.files import junit
from conformance.report.terminal import annotations, lines

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

    def __init__(self, folder: Path, worker: str = "main", **functions) -> None:
        self.folder, self.ledger = folder, Ledger(folder, worker)
        plain = {"offered": True, "without": [], "declares": {}}
        described = {name: plain | functions.get(name, {}) for name in CONTRACTS}
        self.ledger.write(
            "implementation", functions=described, device="cpu", device_name="CPU", versions={"torch": "2.0"}
        )

    def section(self, label: str, function: str, *statuses: str, scheduled: int | None = None, **content) -> "Book":
        self.ledger.write("plan", section=label, scheduled=len(statuses) if scheduled is None else scheduled)
        for status in statuses:
            told = {
                "finding": None,
                "reason": "",
                "seconds_implementation": 0.5,
                "seconds_reference": 0.25,
                "evaluations": 2,
                "kernels": [],
                "waiver": "",
            }
            self.ledger.write(
                "outcome",
                **told
                | {"id": "0" * 12, "function": function, "status": status, "section": label, "law": ""}
                | content,
            )
        return self

    def failure(
        self, status: str = "FAIL", finding: dict | None = None, case: RoutingCase = SMALL, **content
    ) -> "Book":
        found = {
            "found_in": "drawn-permute-0",
            "attempts": 7,
            "smallest": True,
            "file": "",
            "reason": "",
            "status": status,
            "finding": finding,
        }
        self.ledger.write(
            "failure", **found | {"id": case.id, "case": case.record(), "function": case.function} | content
        )
        return self

    def all_pass(self, *but: str) -> "Book":
        for name in CONTRACTS:
            if name not in but:
                self.section(f"drawn-{name}-0", name, *["PASS"] * ENOUGH)
        return self

    def verdict(self, **arguments) -> Verdict:
        return assemble(self.folder, Options("my_kernels.moe", profile="smoke"), 12.0, **arguments)


@pytest.fixture
def book(tmp_path) -> Book:
    return Book(tmp_path)


def differing(book: Book) -> Verdict:
    return (
        book.all_pass("permute")
        .section("drawn-permute-0", "permute", "FAIL", *["PASS"] * ENOUGH)
        .failure(finding=ROWS_WRONG)
        .verdict()
    )


# ---- exit codes


def test_all_passing_is_conformant(book):
    verdict = book.all_pass().verdict()
    assert (verdict.exit_code, verdict.verdict) == (0, "CONFORMANT")
    assert (verdict.problems, verdict.failures) == ([], [])
    assert {f.status for f in verdict.functions.values()} == {"conformant"}


@pytest.mark.parametrize("status", ["FAIL", "CRASH", "HANG", "OOM", "FLAKY", "BLOCKED"])
def test_one_wrong_case_among_many_is_not_conformant(book, status):
    verdict = book.all_pass("unpermute").section("drawn-unpermute-0", "unpermute", *["PASS"] * ENOUGH, status).verdict()
    assert (verdict.exit_code, verdict.verdict) == (1, "NOT CONFORMANT")
    assert verdict.functions["unpermute"].status == ("blocked" if status == "BLOCKED" else "differs")


@pytest.mark.parametrize("status", ["PASS", "WAIVED", "UNINFORMATIVE", "DECLARED_UNSUPPORTED", "NOT_OFFERED"])
def test_what_is_not_wrong_does_not_fail(book, status):
    assert (
        book.all_pass("permute").section("drawn-permute-0", "permute", *["PASS"] * ENOUGH, status).verdict().exit_code
        == 0
    )


def test_an_error_of_the_harness_is_no_verdict_on_the_implementation(book):
    book.all_pass("permute").section("drawn-permute-0", "permute", *["PASS"] * ENOUGH, "ERROR", reason="KeyError: 'x'")
    verdict = book.failure("ERROR").verdict()
    assert (verdict.exit_code, verdict.verdict) == (3, "HARNESS ERROR")
    assert verdict.functions["permute"].status == "not judged"
    assert "KeyError: 'x'" in verdict.problems[0]
    assert verdict.failures == []


def test_an_error_of_the_harness_outweighs_a_failure(book):
    assert (
        book.all_pass("permute")
        .section("drawn-permute-0", "permute", "FAIL", "ERROR", *["PASS"] * ENOUGH)
        .verdict()
        .exit_code
        == 3
    )


def test_a_lost_result_is_an_error(book):
    verdict = (
        book.all_pass("permute")
        .section("drawn-permute-0", "permute", *["PASS"] * ENOUGH, scheduled=ENOUGH + 1)
        .verdict()
    )
    assert verdict.exit_code == 3
    assert f"{ENOUGH + 1} cases were scheduled and {ENOUGH} have a result" in verdict.problems[0]


def test_a_line_that_was_cut_off_is_a_lost_result(book, tmp_path):
    book.all_pass()
    path = tmp_path / "main.jsonl"
    path.write_text(path.read_text()[:-20])
    assert book.verdict().exit_code == 3


def test_all_workers_are_added_up(book, tmp_path):
    book.all_pass("permute")
    for worker in range(3):
        Book(tmp_path, f"gw{worker}").section(f"drawn-permute-{worker}", "permute", *["PASS"] * 4)
    verdict = book.verdict()
    assert (verdict.exit_code, verdict.functions["permute"].cases) == (0, 12)


def test_too_few_informative_cases_are_too_little(book):
    least = PROFILES["smoke"].minimum("permute")
    book.all_pass("permute").section("drawn-permute-0", "permute", *["PASS"] * (least - 1), *["UNINFORMATIVE"] * ENOUGH)
    verdict = book.verdict()
    assert (verdict.exit_code, verdict.verdict) == (4, "TOO LITTLE TESTED")
    assert f"{least - 1} informative cases; the profile smoke asks for {least}" in verdict.problems[0]
    assert verdict.functions["permute"].status == "too little tested"


def test_too_many_unsupported_cases_are_too_little(book):
    book.all_pass("permute").section(
        "drawn-permute-0", "permute", *["PASS"] * ENOUGH, *["DECLARED_UNSUPPORTED"] * (ENOUGH + 1)
    )
    verdict = book.verdict()
    assert (verdict.exit_code, verdict.functions["permute"].status) == (4, "too little tested")
    assert "52% of the cases are declared unsupported; the profile smoke allows 50%" in verdict.problems[0]


def test_a_part_of_a_run_is_not_asked_for_the_minimum(book):
    assert book.section("drawn-permute-0", "permute", "PASS").verdict(whole=False).exit_code == 0


def test_a_function_of_which_a_part_of_a_run_has_no_case_is_not_called_conformant(book):
    verdict = book.section("drawn-permute-0", "permute", "PASS").verdict(whole=False)
    assert [verdict.functions[name].status for name in ("permute", "unpermute")] == ["conformant", "not run"]
    shown = "\n".join(lines(verdict))
    assert (
        f"   1 functions · 1 cases in {verdict.seconds:.0f} s" in shown
        and f"{len(CONTRACTS) - 1} functions not run · 0 functions not offered" in shown
    )
    assert (
        "permute             conformant · 1 cases" in shown and "unpermute           not run" not in shown
    )  # one list says it of all of them
    names = shown.split("not run             ")[1]
    assert [name for name in CONTRACTS if name not in names.replace(",", " ").split()] == ["permute"]
    assert junit(verdict).count('message="not run"') == len(CONTRACTS) - 1


def test_an_interrupted_run_calls_no_function_conformant_and_loses_no_result(book):
    book.section("drawn-permute-0", "permute", *["PASS"] * ENOUGH, scheduled=ENOUGH + 1)
    verdict = book.verdict(interrupted=True, waivers=("unpermute (me)",))
    assert (verdict.exit_code, verdict.verdict) == (4, "TOO LITTLE TESTED")
    assert verdict.problems == [f"the run was interrupted after {ENOUGH} cases"]
    assert [verdict.functions[name].status for name in ("permute", "unpermute")] == ["too little tested", "not run"]


@pytest.mark.parametrize(("status", "code"), [("FAIL", 1), ("ERROR", 3)])
def test_what_an_interrupted_run_has_found_is_said(book, status, code):
    verdict = book.section("drawn-permute-0", "permute", "PASS", status).verdict(interrupted=True)
    assert verdict.exit_code == code


def test_offering_nothing_is_too_little(tmp_path):
    verdict = Book(tmp_path, **{name: {"offered": False} for name in CONTRACTS}).verdict()
    assert verdict.exit_code == 4
    assert f"offers none of {', '.join(CONTRACTS)}" in verdict.problems[0]
    assert {f.status for f in verdict.functions.values()} == {"not offered"}


def test_a_function_that_is_not_offered_is_not_held_against_it(tmp_path):
    verdict = Book(tmp_path, sort_chunks={"offered": False, "without": ["probs"]}).all_pass("sort_chunks").verdict()
    assert (verdict.exit_code, verdict.functions["sort_chunks"].status) == (0, "not offered")


# ---- waivers


def test_what_is_waived_is_counted(book):
    book.all_pass("permute").section("drawn-permute-0", "permute", *["PASS"] * ENOUGH).section(
        "corpus", "permute", "WAIVED", waiver="permute (me)"
    )
    verdict = book.verdict(waivers=("permute (me)",))
    assert (verdict.exit_code, verdict.functions["permute"].counts["WAIVED"]) == (0, 1)
    assert "1 waived" in "\n".join(lines(verdict))


def test_a_waiver_that_waives_nothing_is_an_error(book):
    book.all_pass()
    verdict = book.verdict(waivers=("permute (me)",))
    assert verdict.exit_code == 3
    assert "the waiver permute (me) waived nothing" in verdict.problems[0]
    assert book.verdict(waivers=("permute (me)",), whole=False).exit_code == 0


WAIVER = 'function = "permute"\nowner = "me"\nreason = "known"\nexpires = 2999-01-01\n'
TODAY = datetime.date(2026, 1, 1)


def read(folder: Path, text: str) -> list[Waiver]:
    (folder / "waivers.toml").write_text(text)
    return read_waivers(folder / "waivers.toml", TODAY)


def test_a_waiver_covers_what_it_says_and_nothing_else(tmp_path):
    (waiver,) = read(
        tmp_path, f'[[waiver]]\n{WAIVER}check = "exact"\noutput = "rows"\nwhere = {{ tokens = 2, dtype = "float32" }}'
    )
    assert waiver.covers(SMALL, Outcome("FAIL", ROWS_WRONG))
    assert not waiver.covers(RoutingCase(function="unpermute", tokens=2), Outcome("FAIL", ROWS_WRONG))
    assert not waiver.covers(RoutingCase(function="permute", tokens=3), Outcome("FAIL", ROWS_WRONG))
    assert not waiver.covers(SMALL, Outcome("FAIL", ROWS_WRONG | {"check": "shape"}))
    assert not waiver.covers(SMALL, Outcome("FAIL", ROWS_WRONG | {"output": "probs"}))
    assert not waiver.covers(SMALL, Outcome("CRASH"))


def test_a_waiver_may_name_a_status(tmp_path):
    (waiver,) = read(tmp_path, f'[[waiver]]\n{WAIVER}check = "CRASH"')
    assert waiver.covers(SMALL, Outcome("CRASH"))
    assert not waiver.covers(SMALL, Outcome("FAIL", ROWS_WRONG))


def test_no_waiver_covers_an_error_of_the_harness(tmp_path):
    (waiver,) = read(tmp_path, f"[[waiver]]\n{WAIVER}")
    assert waiver.covers(SMALL, Outcome("FAIL", ROWS_WRONG))
    assert not waiver.covers(SMALL, Outcome("ERROR", reason="KeyError: 'x'"))


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
        (f"[[waiver]]\n{WAIVER}".replace("2999-01-01", '"2999-01-01"'), "must be a date"),
        (f"[[waiver]]\n{WAIVER}".replace("2999-01-01", "2999-01-01T10:00:00"), "must be a date"),
        (f"[[waiver]]\n{WAIVER}".replace("2999", "2025"), "expired on 2025-01-01"),
        (f"[[waiver]]\n{WAIVER}where = 3", "where"),
        (f"[[waiver]]\n{WAIVER}where = {{ tokenz = 3 }}", "tokenz"),
        (f"[[waiver]]\n{WAIVER}check = 3", "check"),
    ],
)
def test_a_waiver_that_cannot_be_used_is_a_usage_error(tmp_path, text, named):
    with pytest.raises(UsageError, match=named):
        read(tmp_path, text)


def test_a_waiver_is_good_on_its_last_day(tmp_path):
    assert read(tmp_path, f"[[waiver]]\n{WAIVER}".replace("2999-01-01", str(TODAY)))


# ---- baselines


def baseline_of(book: Book) -> dict:
    return json.loads(json.dumps(book.all_pass().verdict().record()))


def test_the_same_again_is_no_regression(book):
    assert book.verdict(baseline=baseline_of(book)).exit_code == 0


def test_a_function_that_is_gone_is_a_regression(book, tmp_path):
    later = Book(tmp_path / "later", sort_chunks={"offered": False}).all_pass("sort_chunks")
    verdict = later.verdict(baseline=baseline_of(book))
    assert (verdict.exit_code, verdict.verdict) == (5, "REGRESSION")
    assert "sort_chunks was conformant in the baseline and is not offered any more" in verdict.problems[0]
    assert book.verdict(baseline=later.verdict().record()).exit_code == 0


def test_a_setting_that_is_gone_is_a_regression(book, tmp_path):
    later = Book(tmp_path / "later", permute={"without": ["align"]}).all_pass()
    verdict = later.verdict(baseline=baseline_of(book))
    assert (verdict.exit_code, verdict.problems) == (5, ["permute no longer accepts align"])
    assert book.verdict(baseline=later.verdict().record()).exit_code == 0


def test_more_unsupported_cases_are_a_regression(book, tmp_path):
    later = (
        Book(tmp_path / "later")
        .all_pass("permute")
        .section("drawn-permute-0", "permute", *["PASS"] * ENOUGH, *["DECLARED_UNSUPPORTED"] * 2)
    )
    verdict = later.verdict(baseline=baseline_of(book))
    assert verdict.exit_code == 5
    assert "permute: 17% declared unsupported, 0% in the baseline" in verdict.problems[0]


def test_a_failure_outweighs_a_regression(book, tmp_path):
    later = (
        Book(tmp_path / "later", sort_chunks={"offered": False})
        .all_pass("sort_chunks")
        .section("corpus", "permute", "FAIL")
    )
    assert later.verdict(baseline=baseline_of(book)).exit_code == 1


# ---- failures


def test_the_smallest_of_equal_failures_is_kept(book):
    larger = RoutingCase(
        function="permute", tokens=12, experts=8, hidden=100, dtype="bfloat16", align=16, routing=(1,) * 12
    )
    golden = RoutingCase(function="permute", golden="by_expert")
    book.all_pass().failure(finding=ROWS_WRONG, case=larger).failure(finding=ROWS_WRONG).failure(
        finding=ROWS_WRONG, case=golden
    )
    assert [failure["id"] for failure in book.verdict().failures] == [SMALL.id]


def test_different_failures_are_all_kept_in_the_order_of_the_functions(book):
    other = RoutingCase(function="unpermute")
    book.failure("CRASH", case=other).failure(finding=ROWS_WRONG | {"check": "shape"}).failure(
        finding=ROWS_WRONG
    ).failure("HANG")
    assert [failure["function"] for failure in book.verdict().failures] == [
        "permute",
        "permute",
        "permute",
        "unpermute",
    ]


def test_numbers_are_added_up(book):
    book.section("corpus", "permute", "PASS", "PASS", kernels=["copy 1", "copy 2"]).section(
        "fixed-permute", "permute", "PASS", kernels=["copy 2"]
    )
    verdict = book.verdict()
    assert (verdict.cases, verdict.evaluations, verdict.kernels_compiled) == (3, 6, 2)
    assert (verdict.seconds_implementation, verdict.seconds_reference) == (1.5, 0.75)


# ---- reports


def test_the_json_report_holds_everything(book, tmp_path):
    write(differing(book), tmp_path / "out.json")
    report = json.loads((tmp_path / "out.json").read_text())
    assert (report["verdict"], report["exit_code"], report["cases"], report["seconds"]) == (
        "NOT CONFORMANT",
        1,
        len(CONTRACTS) * ENOUGH + 1,
        12.0,
    )
    assert (report["implementation"], report["profile"], report["seed"]) == ("my_kernels.moe", "smoke", 0)
    assert report["versions"] == {"torch": "2.0"}
    assert set(report["functions"]) == set(CONTRACTS)
    assert report["functions"]["permute"]["status"] == "differs"
    assert report["functions"]["permute"]["counts"] == {"FAIL": 1, "PASS": ENOUGH}
    assert report["failures"][0]["case"] == SMALL.record()


def test_the_junit_report_has_a_test_for_each_function(book, tmp_path):
    write(differing(book), tmp_path / "out.xml")
    suite = ElementTree.parse(tmp_path / "out.xml").getroot()
    assert (suite.tag, suite.get("tests"), suite.get("failures")) == ("testsuite", str(len(CONTRACTS)), "1")
    assert (suite.get("skipped"), suite.get("time")) == ("0", "12.000")
    tests = {test.get("name"): test for test in suite.iter("testcase")}
    assert set(tests) == set(CONTRACTS)
    assert [name for name, test in tests.items() if test.find("failure") is not None] == ["permute"]
    assert f"replay {SMALL.id}" in tests["permute"].find("failure").text


def test_the_junit_report_skips_what_is_not_offered(tmp_path):
    write(Book(tmp_path, sort_chunks={"offered": False}).all_pass("sort_chunks").verdict(), tmp_path / "out.xml")
    suite = ElementTree.parse(tmp_path / "out.xml").getroot()
    assert suite.get("skipped") == "1"
    assert [test.get("name") for test in suite.iter("testcase") if test.find("skipped") is not None] == ["sort_chunks"]


@pytest.mark.parametrize(
    "text",
    [
        "a < b & c > d",
        "quotes \" and '",
        "bell \x07 and escape \x1b[31m",
        "nul \x00",
        "surrogate \ud800",
        "pipe | and `ticks`",
    ],
)
def test_reports_survive_whatever_an_error_says(book, tmp_path, text):
    book.all_pass("permute").section("drawn-permute-0", "permute", "FAIL").failure(
        finding=ROWS_WRONG | {"message": text}, reason=text
    )
    verdict = book.verdict()
    for ending in (".json", ".xml", ".md"):
        write(verdict, tmp_path / f"out{ending}")
    assert ElementTree.parse(tmp_path / "out.xml").getroot().get("failures") == "1"
    assert json.loads((tmp_path / "out.json").read_text())["exit_code"] == 1


def test_the_markdown_report_has_a_table_and_a_section_for_each_failure(book, tmp_path):
    write(differing(book), tmp_path / "out.md")
    text = (tmp_path / "out.md").read_text()
    assert text.startswith("# NOT CONFORMANT: `my_kernels.moe`")
    assert f"{len(CONTRACTS) * ENOUGH + 1} cases in 12 s, profile smoke, seed 0" in text
    assert f"| `permute` | differs | {ENOUGH + 1} | 1 FAIL, {ENOUGH} PASS |  |" in text
    assert "## `permute`" in text
    assert f"moe-conformance replay {SMALL.id} --impl my_kernels.moe" in text


@pytest.mark.parametrize("path", ["out.html", "out", "missing/out.json"])
def test_a_report_that_cannot_be_written_is_a_usage_error(tmp_path, path):
    with pytest.raises(UsageError, match=str(path)):
        check_path(str(tmp_path / path))
    assert check_path(str(tmp_path / "out.json")) == tmp_path / "out.json"


def test_a_folder_is_no_report(tmp_path):
    (tmp_path / "out.json").mkdir()
    with pytest.raises(UsageError, match=r"out\.json"):
        check_path(str(tmp_path / "out.json"))


def test_the_screen_shows_the_smallest_case_and_its_replay(book):
    shown = " ".join(" ".join(lines(differing(book))).split())
    assert f"NOT CONFORMANT 1 of {len(CONTRACTS)} functions differ" in shown
    assert "rows [exact] row 1 holds token 2" in shown
    assert "smallest case T=2 H=1 E=3, float32, routing map 001 100" in shown
    assert f"replay moe-conformance replay {SMALL.id} --impl my_kernels.moe" in shown


def test_a_search_that_did_not_end_does_not_call_its_case_the_smallest(book):
    book.all_pass("permute").section("drawn-permute-0", "permute", "FAIL").failure(finding=ROWS_WRONG, smallest=False)
    shown = " ".join(" ".join(lines(book.verdict())).split())
    assert "failing case T=2" in shown
    assert "smallest case" not in shown


def test_a_crash_is_shown_with_its_place(book):
    book.all_pass("permute").section("drawn-permute-0", "permute", "CRASH").failure(
        "CRASH", reason='SIGSEGV at "kernel.py", line 3'
    )
    assert 'CRASH: SIGSEGV at "kernel.py", line 3' in "\n".join(lines(book.verdict()))


def test_what_is_declared_is_printed(tmp_path):
    declared = {"permute": {"declares": {"accumulator": "storage", "deterministic": True}}}
    assert "declares: permute: accumulator storage, deterministic" in lines(
        Book(tmp_path, **declared).all_pass().verdict()
    )


def test_annotations_are_for_github_only(book, monkeypatch):
    verdict = differing(book)
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    assert annotations(verdict) == []
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    (line,) = annotations(verdict)
    assert line.startswith("::error title=permute differs::")
    assert f"replay {SMALL.id}" in line
    assert "\n" not in line
