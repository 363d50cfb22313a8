"""Baselines, failures and reports of a verdict."""

import json
import shlex
from dataclasses import replace
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import pytest

from conformance.catalogue import CONTRACTS
from conformance.core.case import case_from
from conformance.engine.run.verdict import Verdict
from conformance.families.permutation.cases import RoutingCase
from conformance.interface import UsageError
from conformance.report import WRITERS, report_text
from conformance.report.delivery import deliver
from conformance.report.terminal import annotations, lines
from conformance.usage import REPORTS, check_report
from tests.engine.verdict_helpers import ENOUGH, ROWS_WRONG, SMALL, Book


def write(verdict: Verdict, path: Path) -> None:
    assert deliver(0, [str(path)], partial(report_text, verdict)) == 0


def test_kernels_that_no_case_launched_are_named(tmp_path):
    def printed(name: str, *kernels: str, launched: list[str], **options) -> str:
        book = Book(tmp_path / name, kernels=kernels).judged("permute", kernels=launched)
        return " ".join(" ".join(lines(book.verdict(**options))).split())

    both, first_kernel = ["a_kernel 12ab", "b_kernel 34cd"], ["a_kernel 12ab", "a_kernel 56ef"]
    one = printed("one", "a_kernel", "b_kernel", launched=first_kernel)
    assert "not launched b_kernel: kernels that no case" in one
    assert "not launched" not in printed("both", "a_kernel", "b_kernel", launched=both)
    assert "not launched" not in printed("none", "a_kernel", launched=[])  # without a compiler


def test_a_failure_whose_reduction_was_ended_by_an_error_says_so(book):
    book.judged("permute", "FAIL").failure("FAIL", ROWS_WRONG, smallest=False, error="KeyError: 'x'")
    assert "not reduced further: KeyError: 'x'" in " ".join(" ".join(lines(book.verdict())).split())


def differing(book: Book) -> Verdict:
    return book.judged("permute", "FAIL").failure(finding=ROWS_WRONG).verdict()


# ---- exit codes


def baseline_of(book: Book) -> dict:
    return json.loads(json.dumps(book.all_pass().verdict().record()))


def test_the_same_again_is_no_regression(book):
    assert book.verdict(baseline=baseline_of(book)).exit_code == 0


GONE = {"sort_chunks": {"offered": False}}


@pytest.mark.parametrize(
    ("functions", "unsupported", "problem"),
    [
        (GONE, 0, "sort_chunks was conformant in the baseline and is not offered any more"),
        ({"permute": {"without": ["align"]}}, 0, "permute no longer accepts align"),
        ({}, 2, "permute: 17% declared unsupported, 0% in the baseline"),
    ],
)
def test_less_than_the_baseline_is_a_regression_and_more_is_none(book, tmp_path, functions, unsupported, problem):
    book_after = Book(tmp_path / "later", **functions).all_pass("permute", *functions)
    book_after.section("drawn-permute-0", "permute", *["PASS"] * ENOUGH, *["DECLARED_UNSUPPORTED"] * unsupported)
    verdict = book_after.verdict(baseline=baseline_of(book))
    assert (verdict.exit_code, verdict.verdict, len(verdict.problems)) == (5, "REGRESSION", 1)
    assert problem in verdict.problems[0]
    assert book.verdict(baseline=book_after.verdict().record()).exit_code == 0


def test_a_failure_outweighs_a_regression(book, tmp_path):
    book_after = Book(tmp_path / "later", **GONE).all_pass("sort_chunks").section("corpus", "permute", "FAIL")
    assert book_after.verdict(baseline=baseline_of(book)).exit_code == 1


# ---- failures


def test_the_smallest_of_equal_failures_is_kept(book):
    larger = RoutingCase(function="permute", tokens=12, experts=8, hidden=100, align=16, routing=(1,) * 12)
    for case in (larger, SMALL, RoutingCase(function="permute", golden="by_expert")):
        book.failure(finding=ROWS_WRONG, case=case)
    assert [failure["id"] for failure in book.verdict().failures] == [SMALL.id]


def test_different_failures_are_all_kept_in_the_order_of_the_functions(book):
    book.failure("CRASH", case=RoutingCase(function="unpermute")).failure("HANG")
    book.failure(finding=ROWS_WRONG | {"check": "shape"}).failure(finding=ROWS_WRONG)
    assert [failure["function"] for failure in book.verdict().failures] == ["permute"] * 3 + ["unpermute"]


def test_numbers_are_added_up(book):
    book.section("corpus", "permute", "PASS", "PASS", kernels=["copy 1", "copy 2"])
    verdict = book.section("fixed-permute", "permute", "PASS", kernels=["copy 2"]).verdict()
    assert (verdict.cases, verdict.evaluations, verdict.kernels_compiled) == (3, 6, 2)
    assert (verdict.seconds_implementation, verdict.seconds_reference) == (1.5, 0.75)


# ---- reports


def test_the_json_report_holds_everything(book, tmp_path):
    write(differing(book), tmp_path / "out.json")
    report = json.loads((tmp_path / "out.json").read_text())
    numbers = (report["exit_code"], report["cases"], report["seconds"])
    assert (report["verdict"], *numbers) == ("NOT CONFORMANT", 1, len(CONTRACTS) * ENOUGH + 1, 12.0)
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


def test_the_junit_report_has_no_test_of_what_is_not_offered(tmp_path):
    write(Book(tmp_path, sort_chunks={"offered": False}).all_pass("sort_chunks").verdict(), tmp_path / "out.xml")
    suite = ElementTree.parse(tmp_path / "out.xml").getroot()
    assert (suite.get("skipped"), suite.get("tests")) == ("0", str(len(CONTRACTS) - 1))
    assert "sort_chunks" not in [test.get("name") for test in suite.iter("testcase")]
    assert {item.get("name"): item.get("value") for item in suite.iter("property")}["not offered"] == "sort_chunks"


ODD_TEXTS = ("a < b & c > d", "quotes \" and '", "bell \x07 and escape \x1b[31m", "nul \x00", "surrogate \ud800")


@pytest.mark.parametrize("text", [*ODD_TEXTS, "pipe | and `ticks`"])
def test_reports_survive_whatever_an_error_says(book, tmp_path, text):
    book.judged("permute", "FAIL", passed=0).failure(finding=ROWS_WRONG | {"message": text}, reason=text)
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


@pytest.mark.parametrize("path", ["out.txt", "out", "missing/out.json", "folder.json"])
def test_a_report_that_cannot_be_written_is_a_usage_error(tmp_path, path):
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(UsageError, match=str(path)):
        check_report(str(tmp_path / path))
    check_report(str(tmp_path / "out.json"))
    assert tuple(WRITERS) == REPORTS


def test_the_screen_shows_the_smallest_case_and_its_replay(book):
    shown = " ".join(" ".join(lines(differing(book))).split())
    assert f"NOT CONFORMANT 1 of {len(CONTRACTS)} functions differ" in shown
    assert "rows [exact] row 1 holds token 2" in shown
    assert "smallest case T=2 H=1 E=3, float32, routing map 001 100" in shown
    assert f"replay moe-conformance replay {SMALL.id} --impl my_kernels.moe" in shown


def test_a_search_that_did_not_end_does_not_call_its_case_the_smallest(book):
    book.judged("permute", "FAIL", passed=0).failure(finding=ROWS_WRONG, smallest=False)
    shown = " ".join(" ".join(lines(book.verdict())).split())
    assert "failing case T=2" in shown
    assert "smallest case" not in shown


BOUND = {"output": "rows", "check": "bound", "message": "[0] is 2; it must be within 0.1 of 1", "index": [0]}


def shown_failures(book: Book, *statuses: tuple[str, dict | None], case: RoutingCase = SMALL) -> str:
    book.judged("permute", *(status for status, _ in statuses), passed=0)
    for status, finding in statuses:
        book.failure(status, finding, case, reason="" if finding else 'SIGSEGV at "kernel.py", line 3')
    return "\n".join(lines(book.verdict()))


def test_the_most_damaging_failure_is_shown_first(book):
    law, nan = ROWS_WRONG | {"check": "split"}, ROWS_WRONG | {"message": "is nan", "nan": "rows"}
    ratio = BOUND | {"check": "ratio", "output": "probs"}
    failed = [("FAIL", finding) for finding in (law, ratio, BOUND, ROWS_WRONG, nan)]
    text = shown_failures(book, *failed, ("CRASH", None))
    crash = 'CRASH: SIGSEGV at "kernel.py", line 3'
    words = (crash, "is nan", ROWS_WRONG["message"], "[bound]", "[ratio]", "also breaks the law split")
    assert sorted(words, key=text.index) == list(words)


def test_a_case_that_could_not_be_saved_is_replayed_by_its_text(book):
    book.judged("permute", "FAIL", passed=0)
    book.failure("FAIL", ROWS_WRONG, file="not saved: [Errno 30] Read-only file system")
    (line,) = (line for line in lines(book.verdict()) if line.startswith("  replay"))
    words = shlex.split(line)
    assert (words[:3], words[4]) == (["replay", "moe-conformance", "replay"], "--impl")
    assert case_from(json.loads(words[3])) == SMALL


def test_a_sum_that_is_wrong_says_what_may_be_declared(book, tmp_path):
    hint = 'declare it: declares("permute") -> {"accumulator": "storage"}'
    narrow = replace(SMALL, dtype="bfloat16")
    assert hint in shown_failures(book, ("FAIL", BOUND), case=narrow)
    declaring = Book(tmp_path / "declaring", permute={"declares": {"accumulator": "storage"}})
    assert hint not in shown_failures(declaring, ("FAIL", BOUND), case=narrow)
    assert hint not in shown_failures(Book(tmp_path / "exact"), ("FAIL", ROWS_WRONG), case=narrow)
    assert hint not in shown_failures(Book(tmp_path / "nan"), ("FAIL", BOUND | {"nan": True}), case=narrow)
    assert hint not in shown_failures(Book(tmp_path / "wide"), ("FAIL", BOUND))  # float32 is no narrower


RAISED = {"output": "call", "message": "raised on a legal call"}


def test_a_call_that_a_kernel_refuses_says_how_to_refuse_it(book, tmp_path):
    refusing, contiguous = 'let supports("permute", …) return a reason', '{"noncontiguous": False}'
    unknown, another = (RAISED | {"check": f"raises {name}"} for name in ("TypeError", "RuntimeError"))
    assert refusing in shown_failures(book, ("FAIL", unknown))
    assert "way out" not in shown_failures(Book(tmp_path / "other"), ("FAIL", another))
    strided = replace(SMALL, layout="transposed", layout_of="tokens")
    assert contiguous in shown_failures(Book(tmp_path / "strided"), ("FAIL", another), case=strided)
    declaring = Book(tmp_path / "declaring", permute={"declares": {"noncontiguous": False}})
    assert contiguous not in shown_failures(declaring, ("FAIL", another), case=strided)
    assert contiguous not in shown_failures(Book(tmp_path / "wrong"), ("FAIL", ROWS_WRONG), case=strided)


@pytest.mark.parametrize(
    ("declared", "sentences"),
    [
        ({"omits": ("pad_offsets",)}, ["declares: permute: omits pad_offsets"]),
        ({"omits": ()}, []),
        ({"accumulator": "storage", "deterministic": True}, ["declares: permute: accumulator storage, deterministic"]),
    ],
)
def test_what_is_declared_is_printed_and_no_output_that_is_not_omitted(tmp_path, declared, sentences):
    book = Book(tmp_path, permute={"declares": declared}).all_pass()
    assert [line for line in lines(book.verdict()) if "declares" in line] == sentences


def test_long_names_keep_the_table_and_the_others_have_one_line(tmp_path):
    long = "activation_backward_and_quantize"
    offered = {name: {"offered": name in ("permute", long)} for name in CONTRACTS}
    book = Book(tmp_path, **offered)
    for name in ("permute", long):
        book.section(f"drawn-{name}-0", name, *["PASS"] * ENOUGH)
    shown = lines(book.verdict())
    (short,) = [line for line in shown if line.startswith("permute ")]
    (another,) = [line for line in shown if line.startswith(long)]
    (not_offered,) = [line for line in shown if line.startswith("not offered")]
    assert short.index("conformant") == another.index("conformant") == not_offered.index("gate") == len(long) + 1
    listed = not_offered[len(long) :].partition(", …")[0].count(",") + 1
    assert not_offered.endswith(f"… (and {len(CONTRACTS) - 2 - listed} more)")
    assert len(not_offered) <= 160


def test_annotations_are_for_github_only(book, monkeypatch):
    verdict = differing(book)
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    assert annotations(verdict) == []
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    (line,) = annotations(verdict)
    assert line.startswith("::error title=permute differs::")
    assert f"replay {SMALL.id}" in line
    assert "\n" not in line
