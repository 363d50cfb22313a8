"""`merge`: the verdict of all shards is the verdict of the whole run."""

import json
from pathlib import Path

import pytest

from conformance.cli import main
from conformance.engine.options import Options
from conformance.engine.run.merging import merge
from conformance.engine.run.session import judge_with
from conformance.interface import UsageError

SHARDS = ("1/2", "2/2")
DEFECT = "conformance.mutants.planted:P21.moe_ref.permutation"


def reports_of(folder: Path, implementation: str, shards=SHARDS) -> list[dict]:
    """The JSON report of each shard, as a file holds it; "" is the whole run."""
    reports = []
    for shard in shards:
        shard_folder = folder / (shard.replace("/", "_") or "whole")
        where = {"profile": "smoke", "device": "cpu", "corpus": str(folder / "corpus"), "shard": shard}
        verdict = judge_with(Options(implementation, jobs=1, function="permute,unpermute", **where), shard_folder)
        reports.append(json.loads(json.dumps(verdict.record())))
    return reports


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> list[dict]:
    return reports_of(tmp_path_factory.mktemp("parts"), "moe_ref.permutation")


def test_the_shards_together_are_the_whole_run(shards, tmp_path):
    (run_report,) = reports_of(tmp_path, "moe_ref.permutation", [""])
    merged = merge(shards).record()
    for name in ("verdict", "exit_code", "cases", "problems", "failures", "versions", "device"):
        assert merged[name] == run_report[name], name
    for name, function in run_report["functions"].items():
        for key in ("status", "cases", "counts", "note"):
            assert merged["functions"][name][key] == function[key], (name, key)
    assert merge([shards[1], shards[0], shards[1]]).record() == merge(shards).record()  # in any order, one twice


def test_a_failure_of_one_shard_is_one_of_the_run(tmp_path):
    merged = merge(reports_of(tmp_path, DEFECT))
    assert (merged.verdict, merged.exit_code) == ("NOT CONFORMANT", 1)
    assert {failure["function"] for failure in merged.failures} == {"permute"}
    assert merged.functions["permute"].status == "differs" and merged.functions["unpermute"].status == "conformant"


def test_too_few_cases_of_all_shards_are_too_few(shards):
    reports = json.loads(json.dumps(shards))
    for report in reports:
        counts = {"NOT_OFFERED": 2, "UNINFORMATIVE": 1}
        report["functions"]["permute"] |= {"counts": counts, "cases": 3, "missing": {"permute without align": 2}}
    merged = merge(reports)
    assert (merged.exit_code, merged.functions["permute"].status) == (4, "too little tested")
    assert "permute: 0 informative cases" in merged.problems[0]
    assert "; 4 did not run: permute without align" in merged.problems[0]


def test_an_interrupted_shard_interrupts_the_run(shards):
    cut = [shards[0], shards[1] | {"ended_by": "SIGTERM", "exit_code": 4, "verdict": "INTERRUPTED"}]
    merged = merge(cut)
    assert (merged.verdict, merged.exit_code) == ("INTERRUPTED", 4)
    assert merged.problems[0] == "SIGTERM ended a shard"


def test_an_error_of_a_shard_is_one_of_the_run(shards):
    merged = merge([shards[0], shards[1] | {"exit_code": 3, "problems": ["a result is lost"]}])
    assert (merged.exit_code, merged.problems) == (3, ["a result is lost"])


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"seed": 5}, "the reports differ in seed: 0 and 5"),
        ({"versions": {"torch": "1"}}, "the reports differ in versions"),
        ({"device": "NVIDIA H200"}, "the reports differ in device: CPU and NVIDIA H200"),
        ({"shard": "1/2"}, "there is no report of the shard 2/2"),
        ({"shard": ""}, "is not of a shard"),
    ],
)
def test_reports_of_other_runs_are_refused(shards, change, sentence):
    with pytest.raises(UsageError, match=sentence):
        merge([shards[0], shards[1] | change])


def test_the_command_has_the_exit_code_of_the_run_and_writes_its_report(shards, tmp_path, capsys):
    paths = [tmp_path / f"{i}.json" for i in range(2)]
    for path, report in zip(paths, shards, strict=True):
        path.write_text(json.dumps(report))
    out = tmp_path / "verdict.json"
    assert main(["merge", *map(str, paths), "--report", str(out)]) == 0
    assert "CONFORMANT   2 functions" in capsys.readouterr().out
    assert json.loads(out.read_text())["cases"] == sum(report["cases"] for report in shards)
    assert main(["merge", str(paths[0])]) == 2
    assert "there is no report of the shard 2/2" in capsys.readouterr().err
