"""The verdict adds up what the ledger says, loses nothing, and every report says the same."""

import pytest

from conformance.catalogue import CONTRACTS
from conformance.engine.choose.profiles import PROFILES
from conformance.engine.options import Options
from conformance.engine.run.interrupt import TIME_LIMIT
from conformance.engine.run.ledger import Ledger
from conformance.engine.run.verdict import assemble
from conformance.report.files import junit, markdown
from conformance.report.terminal import lines
from tests.engine.verdict_helpers import ENOUGH, Book


def test_all_passing_is_conformant(book):
    verdict = book.all_pass().verdict()
    assert (verdict.exit_code, verdict.verdict) == (0, "CONFORMANT")
    assert (verdict.problems, verdict.failures) == ([], [])
    assert {f.status for f in verdict.functions.values()} == {"conformant"}


@pytest.mark.parametrize("status", ["FAIL", "CRASH", "HANG", "OOM", "FLAKY", "BLOCKED"])
def test_one_wrong_case_among_many_is_not_conformant(book, status):
    verdict = book.judged("unpermute", status).verdict()
    assert (verdict.exit_code, verdict.verdict) == (1, "NOT CONFORMANT")
    assert verdict.functions["unpermute"].status == ("blocked" if status == "BLOCKED" else "differs")


def test_a_blocked_function_says_in_how_many_cases_and_does_not_differ(book):
    verdict = book.judged("unpermute", "BLOCKED", passed=1).verdict()
    printed = lines(verdict)
    (line,) = (x for x in printed if x.startswith("unpermute"))
    assert f"in 1 of {verdict.functions['unpermute'].cases} cases" in line
    assert any(f"0 of {len(CONTRACTS)} functions differ · 1 blocked" in x for x in printed)


@pytest.mark.parametrize("status", ["PASS", "WAIVED", "UNINFORMATIVE", "DECLARED_UNSUPPORTED", "NOT_OFFERED"])
def test_what_is_not_wrong_does_not_fail(book, status):
    assert book.judged("permute", status).verdict().exit_code == 0


def test_an_error_of_the_harness_is_no_verdict_on_the_implementation(book):
    verdict = book.judged("permute", "ERROR", reason="KeyError: 'x'").failure("ERROR").verdict()
    assert (verdict.exit_code, verdict.verdict) == (3, "HARNESS ERROR")
    assert verdict.functions["permute"].status == "not judged"
    assert "KeyError: 'x'" in verdict.problems[0]
    assert verdict.failures == []


def test_a_lost_result_is_an_error(book):
    verdict = book.judged("permute", scheduled=ENOUGH + 1).verdict()
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
    verdict = book.judged("permute", *["UNINFORMATIVE"] * ENOUGH, passed=least - 1).verdict()
    assert (verdict.exit_code, verdict.verdict) == (4, "TOO LITTLE TESTED")
    assert f"{least - 1} informative cases; the profile smoke asks for {least}" in verdict.problems[0]
    assert verdict.functions["permute"].status == "too little tested"


@pytest.mark.parametrize(("passed", "sentence"), [(1, ["; 3 did not run: permute is not offered"]), (ENOUGH, [])])
def test_what_cases_need_and_is_not_offered_is_said_where_too_few_run(book, passed, sentence):
    book.all_pass("unpermute").section("fixed-unpermute", "unpermute", *["PASS"] * passed)
    book.section("drawn-unpermute-0", "unpermute", *["NOT_OFFERED"] * 3, reason="permute is not offered")
    problems = book.verdict().problems
    assert len(problems) == len(sentence) and all(x.endswith(end) for x, end in zip(problems, sentence, strict=True))


def test_too_many_unsupported_cases_are_too_little(book):
    verdict = book.judged("permute", *["DECLARED_UNSUPPORTED"] * (ENOUGH + 1)).verdict()
    assert (verdict.exit_code, verdict.functions["permute"].status) == (4, "too little tested")
    assert "52% of the cases are declared unsupported; the profile smoke allows 50%" in verdict.problems[0]


def test_a_part_of_a_run_is_not_asked_for_the_minimum(book):
    assert book.section("drawn-permute-0", "permute", "PASS").verdict(is_complete=False).exit_code == 0


def test_a_shard_to_which_no_case_fell_is_neither_a_failure_nor_a_success(book, tmp_path):
    verdict = book.verdict(is_complete=False, may_be_empty=True)
    assert (verdict.exit_code, verdict.verdict) == (0, "EMPTY SHARD")
    assert {function.status for function in verdict.functions.values()} == {"not run"}
    assert "EMPTY SHARD   0 functions" in "\n".join(lines(verdict))
    assert book.verdict(is_complete=False, may_be_empty=True, interrupted="SIGTERM").exit_code == 4


def test_other_runs_without_a_case_are_too_little(book, tmp_path):
    verdict = book.verdict(is_complete=False)
    assert (verdict.exit_code, verdict.verdict) == (4, "TOO LITTLE TESTED")
    nothing = Book(tmp_path / "nothing", **{name: {"offered": False} for name in CONTRACTS})
    assert nothing.verdict(is_complete=False, may_be_empty=True).exit_code == 4


def test_a_function_of_which_a_part_of_a_run_has_no_case_is_not_called_conformant(book):
    verdict = book.section("drawn-permute-0", "permute", "PASS").verdict(is_complete=False)
    assert [verdict.functions[name].status for name in ("permute", "unpermute")] == ["conformant", "not run"]
    shown = "\n".join(lines(verdict))
    assert f"   1 functions · 1 cases in {verdict.seconds:.0f} s" in shown
    assert f"{len(CONTRACTS) - 1} functions not run · 0 functions not offered" in shown
    assert "permute             conformant · 1 cases" in shown
    assert "unpermute           not run" not in shown  # one list says it of all of them
    names = shown.split("not run             ")[1]
    assert [name for name in CONTRACTS if name not in names.replace(",", " ").split()] == ["permute"]
    assert junit(verdict).count('message="not run"') == len(CONTRACTS) - 1


def test_an_interrupted_run_calls_no_function_conformant_and_loses_no_result(book):
    book.section("drawn-permute-0", "permute", *["PASS"] * ENOUGH, scheduled=ENOUGH + 1)
    verdict = book.verdict(interrupted="SIGTERM", waivers=("unpermute (me)",))
    assert (verdict.exit_code, verdict.verdict) == (4, "INTERRUPTED")
    assert verdict.problems == [f"SIGTERM ended the run after {ENOUGH} cases"]
    assert [verdict.functions[name].status for name in ("permute", "unpermute")] == ["too little tested", "not run"]


@pytest.mark.parametrize(("interrupted", "status"), [("SIGTERM", "too little tested"), ("", "conformant")])
def test_a_function_of_an_interrupted_part_of_a_run_is_not_conformant(book, interrupted, status):
    book.section("drawn-permute", "permute", *["PASS"] * ENOUGH)
    verdict = book.verdict(interrupted=interrupted, is_complete=False)
    assert verdict.functions["permute"].status == status
    assert ("ended early by SIGTERM" in "\n".join(lines(verdict))) == (interrupted == "SIGTERM")


@pytest.mark.parametrize("is_complete", [True, False])
@pytest.mark.parametrize("reason", ["SIGINT", "SIGTERM", "a signal"])
def test_an_interrupted_run_is_not_conformant_even_if_every_case_has_passed(book, is_complete, reason):
    verdict = book.all_pass().verdict(interrupted=reason, is_complete=is_complete)
    assert (verdict.exit_code, verdict.verdict) == (4, "INTERRUPTED")
    assert "CONFORMANT" not in "\n".join(lines(verdict))
    assert book.verdict(is_complete=is_complete).verdict == "CONFORMANT"


@pytest.mark.parametrize("interrupted", ["", "SIGTERM"])
@pytest.mark.parametrize(("statuses", "code"), [(("FAIL",), 1), (("ERROR",), 3), (("FAIL", "ERROR"), 3)])
def test_an_error_of_the_harness_outweighs_a_failure_and_both_an_interruption(book, statuses, code, interrupted):
    assert book.judged("permute", *statuses).verdict(interrupted=interrupted).exit_code == code


@pytest.mark.parametrize(("cases", "verdict", "code"), [(ENOUGH, "CONFORMANT", 0), (2, "INTERRUPTED", 4)])
def test_at_the_time_limit_a_run_is_conformant_with_the_minimum_of_every_function(book, cases, verdict, code):
    for name in CONTRACTS:
        count = cases if name == "permute" else ENOUGH
        book.section(f"drawn-{name}", name, *["PASS"] * count, scheduled=count + 1)
    at_the_limit = book.verdict(interrupted=TIME_LIMIT, waivers=("unpermute (me)",))
    assert (at_the_limit.verdict, at_the_limit.exit_code) == (verdict, code)
    assert "ended early by the time limit" in "\n".join(lines(at_the_limit))
    assert "ended early by the time limit" in markdown(at_the_limit)
    assert any(problem.startswith("permute: 2 informative") for problem in at_the_limit.problems) == bool(code)


@pytest.mark.parametrize(("accept_partial", "code"), [(False, 4), (True, 0)])
def test_before_the_covering_array_has_run_a_run_is_conformant_so_far(book, accept_partial, code):
    for name in CONTRACTS:
        book.section(f"covering-{name}", name, *["PASS"] * ENOUGH, scheduled=ENOUGH + 2 * (name == "permute"))
    verdict = book.verdict(interrupted=TIME_LIMIT, accept_partial=accept_partial)
    assert (verdict.verdict, verdict.exit_code) == ("CONFORMANT SO FAR", code)
    assert "CONFORMANT SO FAR" in markdown(verdict) and "2 cases not run" in "\n".join(lines(verdict))
    assert any("--accept-partial" in problem for problem in verdict.problems) == bool(code)


def test_sections_that_were_not_drawn_are_counted(book):
    book.all_pass().ledger.write("sections", labels=["covering-permute", "covering-gate"])
    verdict = book.verdict(interrupted=TIME_LIMIT)
    assert (verdict.verdict, verdict.not_drawn) == ("CONFORMANT SO FAR", ["covering-permute", "covering-gate"])
    assert "2 sections not drawn" in "\n".join(lines(verdict))


def test_a_run_that_ended_before_its_start_blames_no_implementation(tmp_path):
    Ledger(tmp_path, "main").close()
    verdict = assemble(tmp_path, Options("my_kernels.moe", profile="smoke"), 1.0, interrupted=TIME_LIMIT)
    assert (verdict.verdict, verdict.exit_code) == ("INTERRUPTED", 4)
    assert verdict.problems == ["the time limit ended the run after 0 cases"]


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
    book.judged("permute").section("corpus", "permute", "WAIVED", waiver="permute (me)")
    verdict = book.verdict(waivers=("permute (me)",))
    assert (verdict.exit_code, verdict.functions["permute"].counts["WAIVED"]) == (0, 1)
    assert "1 waived" in "\n".join(lines(verdict))


def test_a_waiver_that_waives_nothing_is_an_error(book):
    book.all_pass()
    verdict = book.verdict(waivers=("permute (me)",))
    assert verdict.exit_code == 3
    assert "the waiver permute (me) waived nothing" in verdict.problems[0]
    assert book.verdict(waivers=("permute (me)",), is_complete=False).exit_code == 0


# ---- kernels


@pytest.mark.parametrize(("kernels", "fields"), [(["k"], {"width": 1.0}), ([], {})])
def test_a_field_whose_changes_compile_kernels_is_named(book, kernels, fields):
    book.section("drawn-glu", "glu", *["PASS"] * 10, changed=["width", "seed"], kernels=kernels)
    book.section("covering-glu", "glu", *["PASS"] * 10, changed=["seed"])
    verdict = book.verdict()
    assert verdict.functions["glu"].specialised_by == fields
    assert any("glu: width (1.0)" in line for line in lines(verdict)) == bool(fields)
