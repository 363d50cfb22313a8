"""The suite finds every planted defect and a sample of the automatic mutants."""

import json
from pathlib import Path

import pytest

from benchmarks.detection import figures
from conformance import cli
from conformance.interface import UsageError
from conformance.mutants.score import KEPT, Mutant, PassedCase, Result, attempt, passed_cases, score_mutants
from tests.common.suite import gate_cases
from tests.mutants.test_planted import MANY_ROWS

# of classes that a CPU's cases had, and a GPU's fewer structures had not
FEW_STRUCTURES = {
    "AD41": "activation",
    "M22": "alltoall_combine",
    "RB36": "grouped_wgrad",
    "RC080": "permute",
    "RC183": "deepep_dispatch",
    "Y21": "grouped_dgrad",
}


@pytest.mark.parametrize(("name", "function"), (FEW_STRUCTURES | dict.fromkeys(sorted(MANY_ROWS), "permute")).items())
def test_a_gpus_cases_kill_defects_of_few_structures_and_of_many_rows(name, function):
    (result,) = score_mutants("moe_ref", "planted", only=name, functions=(function,), one_gpu=True)
    assert (result.way, result.function) == ("value", function)


def test_a_case_that_a_cpu_cannot_run_in_time_is_left_out_and_named(capsys):
    results = score_mutants("moe_ref", "planted", only="N05", functions=("permute",), one_gpu=True)
    printed = capsys.readouterr().out
    assert [result.way for result in results] == ["value"]
    assert "left out: a case of 2,097,152 rows" in printed and '"align":2097152' in printed
    score_mutants("moe_ref", "planted", only="D02", functions=("pad_routing_map",))
    assert "left out" not in capsys.readouterr().out


def test_a_sample_of_automatic_mutants_is_killed_and_each_survivor_is_explained():
    results = score_mutants("moe_fast", "automatic", sample=6, functions=("indices_to_multihot",))
    explained = " ".join(change for _, change, _ in json.loads((Path(__file__).parent / "survivors.json").read_text()))
    survivors = [result for result in results if not result.killed]
    assert len(results) == 6
    assert len(survivors) < 4
    assert [result.line for result in survivors if f"`{result.title}`" not in explained] == []


def test_the_command_writes_the_report_that_the_table_of_classes_is_made_of(tmp_path, capsys):
    report = tmp_path / "report.json"
    chosen = ("--impl", "moe_ref", "--only", "P01", "--function", "permute")
    assert cli.main(["mutants", *chosen, "--report", str(report)]) == 0
    assert "1 of 1 defects are killed" in figures(json.loads(report.read_text()))["meaning"]
    assert cli.main(["mutants", *chosen, "--report", str(tmp_path / "report.md")]) == cli.USAGE
    assert "the report of mutants is a .json file" in capsys.readouterr().err


def test_nothing_is_learned_from_mutants_of_a_wrong_implementation():
    with pytest.raises(UsageError, match="itself fails"):
        score_mutants("tests.engine.misbehaving:LeavesRowsUnwritten", "planted")


@pytest.mark.parametrize("kind", ["automatic", "all"])
def test_the_oracle_is_not_changed_together_with_its_mutants(kind):
    with pytest.raises(UsageError, match="a copy of it"):
        score_mutants("moe_ref", kind)


def test_a_mutant_runs_on_the_cases_that_reach_it_alone():
    passed = passed_cases("moe_ref", 0, 1, ("aux_loss_scores",), trace=True, one_gpu=False)
    kinds = {name: f"moe_ref/router/scores.py:{name}" for name in ("softmax", "sigmoid", "sqrtsoftplus")}
    drawn = [item for item in passed if not (item.case.golden or item.case.law or item.case.illegal)]
    for item in drawn:
        assert {name for name, call in kinds.items() if call in item.calls} == {item.case.score}
    assert {item.case.score for item in drawn} == set(kinds)


def test_a_mutant_without_time_is_unfinished_and_not_survived():
    passed = [PassedCase(case, 0.0, frozenset({"file:function"})) for case in gate_cases("jitter")[:3]]
    same = Mutant("same", "no change", "moe_ref", touches="file:function")
    assert (attempt(same, passed).way, attempt(same, passed).cases) == ("survived", 3)
    without = attempt(same, passed, seconds=0.0)
    assert without.way == "unfinished" and not without.killed and without.cases < 3
    assert without.line.startswith("UNFINISHED ")


def test_a_mutant_runs_on_the_cases_in_which_it_differs_and_on_others_where_a_process_may_keep_a_value():
    cases = list({case.id: case for case in gate_cases("jitter")}.values())[: KEPT + 4]
    passed = [PassedCase(case, 0.0, frozenset({"file:function"})) for case in cases]

    def ran(count: int) -> Result:
        differs = frozenset(case.id for case in cases[:count])
        return attempt(Mutant("same", "no change", "moe_ref", touches="file:function", differs=differs), passed)

    assert [(ran(count).way, ran(count).cases) for count in (1, KEPT, KEPT + 1)] == [
        *[("survived", len(cases))] * 2,
        ("survived", KEPT + 1),
    ]
    assert ran(0).line.endswith("same: no change (differs in no case)")


def test_a_mutant_runs_on_a_case_in_which_it_differs_that_no_trace_shows():
    """As in a function that each process calls once: another process has traced it."""
    first, second = list({case.id: case for case in gate_cases("jitter")}.values())[:2]
    passed = [PassedCase(first, 0.0, frozenset({"file:function"})), PassedCase(second, 0.0, frozenset())]
    mutant = Mutant("same", "no change", "moe_ref", touches="file:function", differs=frozenset({second.id}))
    assert attempt(mutant, passed).cases == 2


def test_several_functions_of_the_command_are_separated_by_commas(capsys):
    chosen = ("mutants", "--impl", "moe_ref", "--only", "D02", "--function")
    assert cli.main([*chosen, "pad_routing_map,jitter"]) == 0
    assert "score 1 of 1" in capsys.readouterr().out
    assert cli.main([*chosen, "jitter,permuted"]) == cli.USAGE
    assert "--function is 'permuted'" in capsys.readouterr().err
    assert cli.main([*chosen, "jitter", "--mutant-seconds", "-1"]) == cli.USAGE
    assert "--mutant-seconds is -1.0; it must be more than 0" in capsys.readouterr().err
