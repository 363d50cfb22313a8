"""The search: guided by what cases reach, honest about what it finds, and its cases are kept."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import hypothesis
import pytest
import torch

from conformance.cli import main
from conformance.core.space import Space
from conformance.engine.child.line_coverage import CALLS, LineCoverage
from conformance.engine.child.outcome import Outcome
from conformance.engine.choose.draw import drawn, run_seed, scope_of
from conformance.engine.options import Options
from conformance.engine.run import corpus
from conformance.engine.run.choice import Choice
from conformance.engine.run.interesting_cases import InterestingCases
from conformance.engine.run.rarity import Rarity
from conformance.engine.run.search import Search, Searched
from conformance.interface import load
from conformance.judge import Bounded, RowWise
from conformance.judge.ratios import row_wise
from tests.engine.reduction_helpers import failed

FUNCTION = "permute"
SCOPE = scope_of(FUNCTION, Space())
GATES = (
    lambda case: case.dtype == "float16",
    lambda case: case.map_dtype == "int32",
    lambda case: case.tokens >= 4,
    lambda case: case.probs == "bfloat16",
    lambda case: case.poison == "max",
    lambda case: case.align >= 8,
)


def depth(case):
    """The nested branches of a launcher that the case enters; behind the last one is a fault."""
    return next((level for level, gate in enumerate(GATES) if not gate(case)), len(GATES))


def nested(case):
    if depth(case) == len(GATES):
        return failed()
    return Outcome("PASS", lines=[f"launcher.py:{line}" for line in range(depth(case) + 1)])


def search_with(answer, folder, seed=0, function=FUNCTION, waivers=()):
    """A search of one function in a pool that answers so."""
    options, pool = Options("nobody", corpus=str(folder), seed=seed), SimpleNamespace(answer=answer)
    pool.run = lambda cases: [(case, answer(case)) for case in cases]
    session = SimpleNamespace(options=options, space=Space(), choice=Choice(), pool=pool, waivers=list(waivers))
    return Search(session, [function], 3600, Searched())


def rounds(search, most):
    """The number of cases until something fails; None if nothing does."""
    for turn in range(most):
        search.climb(SCOPE, search.kept[FUNCTION], run_seed(FUNCTION, search.session.options.seed, turn), search.ends)
        if search.failed:
            return search.searched.cases
    return None


def test_a_fault_behind_nested_branches_is_found_more_often_than_by_as_many_plain_draws(tmp_path):
    times_drawn = 0
    for seed in (0, 1):
        cases = rounds(search_with(nested, tmp_path, seed), most=40)
        assert cases is not None
        draws = drawn(SCOPE.drawn(), run_seed(FUNCTION, seed), cases)
        times_drawn += any(depth(case) == len(GATES) for case in draws)
    assert times_drawn < 2  # the search: both times


def test_without_a_fault_the_same_search_finds_nothing(tmp_path):
    assert rounds(search_with(lambda case: Outcome("PASS", lines=["launcher.py:1"]), tmp_path), most=1) is None


def test_the_climb_has_the_scores_and_the_lines_as_targets_and_no_other_score(tmp_path, monkeypatch):
    targets = {}
    monkeypatch.setattr(hypothesis, "target", lambda value, label: targets.setdefault(label, value))
    scores = {"error": 0.25, "ratio": 0.5, "other": 0.75}
    rounds(search_with(lambda case: Outcome("PASS", scores=scores, lines=["a.py:1", "a.py:2"]), tmp_path), most=1)
    assert targets == {"error": 0.25, "ratio": 0.5, "lines": 2.0}
    targets.clear()
    for outcome in (Outcome("PASS"), replace(failed(), scores=scores)):  # nothing climbs from what is found
        rounds(search_with(lambda case, outcome=outcome: outcome, tmp_path), most=1)
        assert targets == {"lines": 0.0}


def test_rare_cases_have_more_combinations_of_values_than_as_many_plain_draws():
    cases = drawn(SCOPE.drawn(), 1, 60)
    rare, first_drawn, last = Rarity(), Rarity(), Rarity()
    chosen = rare.rarest(cases, 20)
    for case in cases[:20]:
        first_drawn.add(case)
    assert len(set(chosen)) == 20
    assert sum(map(rare.new, cases)) < sum(map(first_drawn.new, cases)) < sum(map(last.new, cases))


def test_a_value_that_never_came_makes_a_case_rare_and_its_seed_does_not():
    rarity = Rarity()
    case = SCOPE.case({"hidden": 4})
    rarity.add(case)
    assert (rarity.new(case), rarity.new(replace(case, seed=9))) == (0, 0)
    assert rarity.new(replace(case, dtype="bfloat16")) > 0
    assert rarity.new(replace(case, law="history")) > 0


def test_a_seed_repeats_a_search(tmp_path):
    texts = []
    for _ in range(2):
        search = search_with(nested, tmp_path)
        rounds(search, most=1)
        texts.append([case.text for case in search.outcomes])
    assert texts[0] == texts[1]


def test_the_kept_cases_are_few_and_reach_everything(tmp_path):
    small, large, third = drawn(SCOPE.drawn(), 1, 3)
    interesting = InterestingCases(tmp_path, [small])
    for case, lines in ((small, ["a"]), (large, ["a", "b"]), (third, ["c"])):
        interesting.add(case, Outcome("PASS", lines=lines))
    corpus.save(tmp_path, small, {})
    assert interesting.save({}) == 2
    assert {case.text for case in InterestingCases.read(tmp_path, FUNCTION).seeds} == {large.text, third.text}


def test_a_kept_case_that_did_not_run_stays(tmp_path):
    (case,) = drawn(SCOPE.drawn(), 1, 1)
    corpus.save(tmp_path, case, {})
    InterestingCases.read(tmp_path, FUNCTION).save({})
    assert InterestingCases.read(tmp_path, FUNCTION).seeds == [case]


def test_the_error_of_a_bound_is_that_of_the_worst_element_beyond_its_rounding():
    ones, bound = torch.ones(3, dtype=torch.float64), torch.tensor([0.5, 0.25, 0.0], dtype=torch.float64)
    expectation = Bounded(ones, bound, torch.float32, torch.float32)
    assert expectation.scores(torch.tensor([1.25, 1.1875, 1.0])) == {"error": 0.75}
    assert expectation.scores(torch.ones(3)) == {"error": 0}
    # 1 + 2⁻⁹ lies between two numbers of bfloat16: the nearest has no error beyond its rounding
    between = Bounded(ones + 2.0**-9, bound, torch.bfloat16, torch.float32)
    assert between.scores(torch.ones(3, dtype=torch.bfloat16)) == {"error": 0}
    assert between.scores(torch.ones(3, dtype=torch.bfloat16) + 2.0**-7)["error"] > 0


def test_the_ratio_of_a_contraction_is_the_largest_share_of_a_limit():
    value = torch.linspace(1, 2, 8192, dtype=torch.float64).reshape(64, 128)
    bounded = Bounded(value, value * 1e-3, torch.float32, torch.float32)
    expectation = row_wise(bounded, value.float(), value, 128)
    assert isinstance(expectation, RowWise)
    honest, worse = (expectation.scores((value * factor).float())["ratio"] for factor in (1, 1 + 1e-5))
    assert honest < 1 < worse


@pytest.fixture
def branching(tmp_path, monkeypatch):
    """An implementation whose `permute` takes one of two branches."""
    (tmp_path / "branching.py").write_text("def permute(x):\n    if x:\n        return 1\n    return 2\n")
    monkeypatch.syspath_prepend(tmp_path)
    return load("branching")


def test_the_lines_of_the_branch_that_a_case_takes_are_reached(branching):
    implementation, rarity = branching, []
    for argument, function in ((1, "permute"), (0, "permute"), (1, "unknown")):
        reached = LineCoverage(implementation, function)
        with reached.recording():
            implementation.namespace.permute(argument)
        implementation.namespace.permute(1 - argument)  # not recorded
        rarity.append(reached.lines)
    both = {"branching.py:2"}
    assert rarity == [both | {"branching.py:3"}, both | {"branching.py:4"}, set()]


def test_only_the_first_calls_of_a_function_are_traced(branching):
    reached = LineCoverage(branching, "permute")
    with reached.recording():
        for i in range(CALLS + 1):
            branching.namespace.permute(i == CALLS)
    assert reached.lines == {"branching.py:2", "branching.py:4"}


IMPLEMENTATIONS = {
    "honest": "from moe_ref import permute\n",
    "wrong": "import moe_ref\n\ndef permute(tokens, routing_map, *, probs=None):\n"
    "    out = moe_ref.permute(tokens, routing_map, probs=probs)\n"
    "    return out._replace(rows=out.rows.flip(0))\n",
    "crashing": "import os\nimport moe_ref\n\ndef permute(tokens, routing_map, *, probs=None):\n"
    "    if len(tokens) > 2:\n        os._exit(9)\n"
    "    return moe_ref.permute(tokens, routing_map, probs=probs)\n",
}


@pytest.mark.parametrize(("name", "code"), [("honest", 0), ("wrong", 1), ("crashing", 1)])
def test_the_exit_code_tells_what_was_found(tmp_path, monkeypatch, capsys, name, code):
    (tmp_path / f"{name}_kernels.py").write_text(IMPLEMENTATIONS[name])
    monkeypatch.chdir(tmp_path)
    flags = ["--impl", f"{name}_kernels", "--function", FUNCTION, "--minutes", "0.0001", "--jobs", "1"]
    assert main(["fuzz", *flags, "--device", "cpu"]) == code
    printed = capsys.readouterr().out
    assert ("moe-conformance replay" in printed) == bool(code)
    if name == "honest":
        assert list((tmp_path / ".moe-conformance/fuzz" / FUNCTION).glob("*.json"))
    if name == "crashing":
        assert "CRASH" in printed


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--minutes", "0"], "--minutes is 0.0; it must be above 0"),
        (["--function", "premute"], "--function is 'premute'; the nearest is permute; known are"),
        (["--function", "gate"], "--function gate is not offered by moe_ref.permutation"),
    ],
)
def test_an_illegal_argument_is_refused_with_a_sentence(tmp_path, capsys, flags, sentence):
    chosen = ["--corpus", str(tmp_path / "kept"), "--jobs", "1", "--device", "cpu"]
    assert main(["fuzz", "--impl", "moe_ref.permutation", *chosen, *flags]) == 2
    assert sentence in capsys.readouterr().err


def test_a_signal_ends_the_search_at_once_with_what_was_found(tmp_path):
    (tmp_path / "wrong_kernels.py").write_text(IMPLEMENTATIONS["wrong"])
    flags = ["--impl", "wrong_kernels", "--function", FUNCTION, "--minutes", "600", "--jobs", "1", "--device", "cpu"]
    process = subprocess.Popen(
        [sys.executable, "-m", "conformance", "fuzz", *flags],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        assert "its smallest case will follow" in process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        printed, _ = process.communicate(timeout=600)  # of a search of ten hours
    finally:
        process.kill()
    assert process.returncode == 1
    assert "ended by SIGTERM" in printed and "moe-conformance replay" in printed
