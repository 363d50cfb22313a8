"""The GitHub Action: its inputs become arguments, whatever they hold."""

import os
import subprocess
from pathlib import Path

import pytest

from conformance.engine.options import flags
from tests.installed.recipes import ACTION, of_action
from tests.report.cli_helpers import executable

ROOT = Path(__file__).parents[2]
# writes its arguments; in tests/installed the steps run the command itself
COMMAND = "#!/usr/bin/env bash\nprintf '%s\\n' \"$@\" > arguments\n"


def started(folder: Path, name: str, inputs: dict[str, str]) -> subprocess.Popen:
    """The step's shell."""
    script, filled = of_action(name, inputs)
    files = {name: str(folder / name) for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")}
    environment = os.environ | {"PATH": f"{folder}/bin:{os.environ['PATH']}"} | files | filled
    return subprocess.Popen(["bash", "-e", "-o", "pipefail", "-c", script], cwd=folder, env=environment)


@pytest.fixture
def folder(tmp_path) -> Path:
    for name in ("moe-conformance", "python3"):
        executable(tmp_path / "bin" / name, COMMAND)
    return tmp_path


def test_inputs_become_options_that_exist(folder):
    options = {
        "impl": "my.kernels:Fused",
        "since": "main",
        "seconds": "60",
        "arguments": "--function permute,gate --jobs 2",
    }
    assert started(folder, "Judge", options).wait(20) == 0
    words = (folder / "arguments").read_text().splitlines()
    assert words[:3] == ["run", "--impl", "my.kernels:Fused"]
    assert words[-6:] == ["--function", "permute,gate", "--jobs", "2", "--since", "main"]
    assert {word for word in words if word.startswith("--")} <= {flag for flag, _ in flags()}


def test_an_input_is_one_word_whatever_it_holds(folder):
    inputs = {"impl": "a b; touch stolen", "corpus": "$(touch stolen)"}
    assert started(folder, "Judge", inputs).wait(20) == 0
    words = (folder / "arguments").read_text().splitlines()
    assert {"a b; touch stolen", "$(touch stolen)"} <= {*words} and not (folder / "stolen").exists()


def test_the_package_is_installed_from_this_version(folder):
    assert started(folder, "Install", {}).wait(20) == 0
    words = (folder / "arguments").read_text().splitlines()
    assert words == ["-m", "pip", "install", "-q", "${{ github.action_path }}[fast]"]


def test_every_input_is_used_and_required_or_has_a_default():
    text = (ROOT / "action.yml").read_text()
    for name, settings in ACTION["inputs"].items():
        assert f"inputs.{name} " in text and ("default" in settings) != settings.get("required", False)
