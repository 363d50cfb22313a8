"""The Action and the recipes of docs/ci judge a kernel, from the installed wheel."""

import json
from pathlib import Path

import pytest

from tests.installed import recipes
from tests.installed.recipes import RECIPES

ENDS = {
    **dict.fromkeys(("github-actions.yml 1", "github-actions.yml 2", "github-actions.yml verdict"), 0),
    **dict.fromkeys(("github-actions-gpu.yml", "plain.sh", "slurm.sh 1", "slurm.sh 2", "slurm.sh verdict"), 0),
    "action right": 0,
    "action wrong": 1,
    "action slow": 4,
}


@pytest.mark.parametrize("recipe", ENDS)
def test_a_recipe_ends_with_the_exit_code_of_the_verdict(results_by_step, recipe):
    ((code, out),) = results_by_step[recipe]
    assert code == ENDS[recipe], out
    assert "CONFORMANT" in out or recipe == "action slow"


def test_every_recipe_is_run():
    run_by_a_workflow = {"gpu.sh"}
    assert {path.name for path in RECIPES.iterdir()} - run_by_a_workflow == {
        label.split()[0] for label in ENDS if not label.startswith("action")
    }


def test_the_verdict_of_shards_has_the_cases_of_both(results_by_step, user_folder):
    for folder, recipe, report in (
        ("matrix", "github-actions.yml", "shard-{}/verdict.json"),
        ("plain", "slurm.sh", "shard-{}.json"),
    ):
        counts = [json.loads((user_folder / folder / report.format(number)).read_text())["cases"] for number in (1, 2)]
        ((_, out),) = results_by_step[f"{recipe} verdict"]
        assert all(counts) and f" {sum(counts)} cases" in out


def summary(user_folder: Path, name: str) -> str:
    return (user_folder / f"action-{name}" / "GITHUB_STEP_SUMMARY").read_text()


def test_the_action_annotates_the_failing_function_and_writes_summary_and_output(results_by_step, user_folder):
    ((_, out),) = results_by_step["action wrong"]
    assert "::error file=my_kernels.py,line=3,title=permute differs::" in out
    assert (user_folder / "action-wrong" / "GITHUB_OUTPUT").read_text() == "exit-code=1\n"
    assert summary(user_folder, "wrong").startswith("# NOT CONFORMANT") and summary(user_folder, "right").startswith(
        "# CONFORMANT"
    )
    assert {"verdict.json", "verdict.html"} <= {path.name for path in (user_folder / "action-wrong").iterdir()}


def test_a_cancelled_action_writes_what_was_found_so_far(results_by_step, user_folder):
    report = json.loads((user_folder / "action-slow" / "verdict.json").read_text())
    assert (report["verdict"], report["ended_by"]) == ("INTERRUPTED", "SIGTERM")
    assert summary(user_folder, "slow").startswith("# INTERRUPTED")


def test_a_step_after_a_failure_runs_only_if_it_always_does():
    script = recipes.of_workflow("github-actions.yml", "verdict")
    assert script.count('[ "$code" != 0 ] ||') == 2 and script.splitlines()[-2].startswith("bash")
