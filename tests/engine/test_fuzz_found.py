"""What a search counts, shows and hands on: exit codes, the live line, waivers, sequences."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from conformance.catalogue import CONTRACTS
from conformance.cli import main
from conformance.core.space import Space
from conformance.engine.child.outcome import Outcome
from conformance.engine.choose.draw import drawn, scope_of
from conformance.engine.run import corpus
from conformance.engine.run.failure import Failure
from conformance.engine.run.search import Searched
from tests.engine.reduction_helpers import failed, failing_if
from tests.engine.test_fuzz import search_with

CASE = scope_of("permute", Space()).case({"hidden": 3})
WRONG = failed()
ERROR = Outcome("ERROR", reason="of the suite")


def failure(outcome):
    return Failure(CASE, outcome, "fuzz-permute", 0, True)


@pytest.mark.parametrize(
    ("searched", "code"),
    [
        (Searched(judged=1), 0),
        (Searched(judged=1, failures=[failure(WRONG)]), 1),
        (Searched(judged=1, failures=[failure(WRONG)], ended_by="SIGINT"), 1),
        (Searched(judged=1, failures=[failure(WRONG), failure(ERROR)]), 3),
        (Searched(judged=1, ended_by="SIGINT"), 4),
        (Searched(cases=9), 4),
    ],
)
def test_exit_codes_are_those_of_a_run(searched, code):
    assert searched.exit_code == code


def test_a_search_that_judges_nothing_is_no_success(tmp_path, monkeypatch, capsys):
    (tmp_path / "refusing_kernels.py").write_text(
        "from moe_ref import permute\n\ndef supports(function, **arguments):\n    return 'nothing'\n"
    )
    monkeypatch.chdir(tmp_path)
    flags = ["--function", "permute", "--minutes", "0.02", "--jobs", "1", "--device", "cpu", "--seed", "7"]
    assert main(["fuzz", "--impl", "refusing_kernels", *flags]) == 4
    assert " 0 judged" in capsys.readouterr().out


def test_a_waived_failure_is_counted_and_not_reported(tmp_path):
    waiver = SimpleNamespace(covers=lambda case, outcome: case.hidden == 3)
    for waivers, failures, waived in (([waiver], 0, 1), ([], 1, 0)):
        search = search_with(lambda case: WRONG, tmp_path, waivers=waivers)
        search.judged(CASE, search.ends)
        assert (len(search.failed), search.searched.waived) == (failures, waived)


def test_the_live_line_has_the_rate_the_scores_and_the_new_lines(tmp_path):
    answers = iter([Outcome("PASS", scores={"error": 0.25}, lines=["a.py:1", "a.py:2"]), WRONG])
    search = search_with(lambda case: next(answers), tmp_path)
    search.progress.function = "permute"
    search.judged(CASE, search.ends)
    search.judged(scope_of("permute", Space()).case({"hidden": 4}), search.ends)
    line = search.progress.line()
    for text in ("2 cases", "cases per second", "permute error 0.25", "2 lines and kernels (2 new)", "1 distinct"):
        assert text in line


@pytest.mark.parametrize(("function", "field"), [("route", "steps"), ("alltoall_dispatch", "journey")])
def test_a_function_with_a_machine_is_searched_by_sequences(tmp_path, function, field):
    search = search_with(lambda case: Outcome("PASS"), tmp_path, function=function)
    search.sequences(scope_of(function, Space()), 0, search.ends)
    assert max(len(getattr(case, field).split("+")) for case in search.outcomes) > 3


def test_a_function_without_a_machine_has_no_sequences(tmp_path):
    search = search_with(lambda case: Outcome("PASS"), tmp_path)
    search.sequences(scope_of("permute", Space()), 0, search.ends)
    assert not search.outcomes


def test_a_failing_sequence_is_found_and_the_search_goes_on(tmp_path):
    failing, _ = failing_if(lambda case: "backward" in case.steps, failed("3.probs"))
    search = search_with(failing, tmp_path, function="route")
    search.sequences(scope_of("route", Space()), 0, search.ends)
    assert [key[1:] for key in search.failed] == [("#.probs", "exact", "FAIL")]


@pytest.mark.parametrize("function", CONTRACTS)
def test_changed_cases_of_every_function_are_legal_and_other_cases(function):
    scope = scope_of(function, Space())
    shapes = scope.always() or [scope.case({})]
    changed = drawn(scope.near(shapes), 0, 16)
    assert {scope.refused(case) for case in changed} == {None}
    assert len({replace(case, law="") for case in changed} - {replace(case, law="") for case in shapes}) > 2


def test_a_folder_of_cases_has_failing_ones_first_and_then_those_of_a_search(tmp_path):
    scope = scope_of("permute", Space())
    failing, reached = scope.case({"hidden": 2}), scope.case({"hidden": 5})
    corpus.save(tmp_path, failing, {})
    corpus.save(tmp_path / corpus.REACHED / "permute", reached, {})
    assert corpus.read_all(tmp_path) == [failing, reached]
    assert corpus.read_folder(tmp_path) == [failing]
    assert corpus.read_all(tmp_path / "nowhere") == []
