"""The GitHub Action: its steps, run in a shell, have the verdict's exit code, summary and files."""

import os
import re
import signal
import stat
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from conformance.engine.options import flags

ROOT = Path(__file__).parents[2]
ACTION = yaml.safe_load((ROOT / "action.yml").read_text())
# stands for the command: writes its arguments and reports, then waits, or ends
COMMAND = """#!/usr/bin/env bash
trap 'echo INTERRUPTED > verdict.md; exit 4' TERM
printf '%s\\n' "$@" > arguments
for _ in $(seq "${TURNS:-0}"); do sleep 0.1; done
echo CONFORMANT > verdict.md
exit "${CODE:-0}"
"""


def step(name: str) -> dict[str, Any]:
    return next(step for step in ACTION["runs"]["steps"] if step["name"] == name)


def started(folder: Path, name: str, given: dict[str, str], **environment: str) -> subprocess.Popen:
    """The step's shell, with inputs as GitHub fills them in."""
    inputs = {key: one.get("default", "") for key, one in ACTION["inputs"].items()} | given
    chosen = step(name)
    filled = {
        key: re.sub(r"\$\{\{ inputs\.([\w-]+) \}\}", lambda found: inputs[found[1]], value)
        for key, value in chosen["env"].items()
    }
    assert not any("${{" in value.replace("${{ github.action_path }}", "") for value in filled.values())
    files = {name: str(folder / name) for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")}
    own = os.environ | {"PATH": f"{folder}/bin:{os.environ['PATH']}"} | files | filled | environment
    return subprocess.Popen(["bash", "-e", "-o", "pipefail", "-c", chosen["run"]], cwd=folder, env=own)


@pytest.fixture
def folder(tmp_path) -> Path:
    for name in ("moe-conformance", "python3"):
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(COMMAND)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return tmp_path


@pytest.mark.parametrize("code", [0, 1, 4])
def test_the_exit_code_and_the_summary_are_the_verdicts(folder, code):
    assert started(folder, "Judge", {"impl": "mine"}, CODE=str(code)).wait(20) == code
    assert (folder / "GITHUB_OUTPUT").read_text() == f"exit-code={code}\n"
    assert (folder / "GITHUB_STEP_SUMMARY").read_text() == "CONFORMANT\n"


def test_inputs_become_options_that_exist(folder):
    given = {
        "impl": "my.kernels:Fused",
        "since": "main",
        "seconds": "60",
        "arguments": "--function permute,gate --jobs 2",
    }
    assert started(folder, "Judge", given).wait(20) == 0
    words = (folder / "arguments").read_text().splitlines()
    assert words[:3] == ["run", "--impl", "my.kernels:Fused"]
    assert words[-6:] == ["--function", "permute,gate", "--jobs", "2", "--since", "main"]
    assert {word for word in words if word.startswith("--")} <= {flag for flag, _ in flags()}


def test_an_input_is_one_word_whatever_it_holds(folder):
    given = {"impl": "a b; touch stolen", "corpus": "$(touch stolen)"}
    assert started(folder, "Judge", given).wait(20) == 0
    words = (folder / "arguments").read_text().splitlines()
    assert {"a b; touch stolen", "$(touch stolen)"} <= {*words} and not (folder / "stolen").exists()


def test_a_cancelled_job_has_its_verdict(folder):
    process = started(folder, "Judge", {"impl": "mine"}, TURNS="100")
    while not (folder / "arguments").exists():
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 4
    assert (folder / "GITHUB_STEP_SUMMARY").read_text() == "INTERRUPTED\n"


def test_the_package_is_installed_from_this_version(folder):
    assert started(folder, "Install", {}).wait(20) == 0
    words = (folder / "arguments").read_text().splitlines()
    assert words == ["-m", "pip", "install", "-q", "${{ github.action_path }}[fast]"]


def test_every_input_is_used_and_required_or_has_a_default():
    text = (ROOT / "action.yml").read_text()
    for name, one in ACTION["inputs"].items():
        assert f"inputs.{name} " in text and ("default" in one) != one.get("required", False)
