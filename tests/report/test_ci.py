"""The CI recipes: their flags exist; the script of a GPU runner keeps compiled kernels."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import time
import tomllib
from pathlib import Path

import pytest
import yaml

from conformance.engine.options import flags
from tests.report.cli_helpers import executable

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "docs" / "ci"
# stands for the command: writes its kernel, its folder, its arguments, then waits or ends
COMMAND = """#!/usr/bin/env bash
trap 'echo INTERRUPTED > verdict.md; exit 4' TERM
echo "$TRITON_CACHE_DIR" >> folders; echo "$@" >> arguments
[ -e "$TRITON_CACHE_DIR/abc/kernel.cubin" ] && echo warm >> found || echo cold >> found
mkdir -p "$TRITON_CACHE_DIR/abc"; echo code > "$TRITON_CACHE_DIR/abc/kernel.cubin"
for _ in $(seq "${TURNS:-0}"); do [ -e go ] || sleep 0.1; done
echo CONFORMANT > verdict.md
exit "${CODE:-0}"
"""
PYTHON = '#!/usr/bin/env bash\necho "triton ${TRITON:-3.6.0} torch 2.11.0+cu130"\n'
GPU = '#!/usr/bin/env bash\necho "NVIDIA ${GPU_NAME:-H200}, 9.0"\necho "NVIDIA second, 9.0"\n'


@pytest.fixture
def runner(tmp_path) -> Path:
    """A machine's folder: a command, a driver and Python on PATH."""
    for name, text in (("moe-conformance", COMMAND), ("nvidia-smi", GPU), ("python3", PYTHON)):
        executable(tmp_path / "bin" / name, text)
    return tmp_path


def started(runner: Path, *arguments: str, **environment: str) -> subprocess.Popen:
    base = {
        "PATH": f"{runner}/bin:{os.environ['PATH']}",
        "IMPL": "my_kernels.moe",
        "CACHE": str(runner / "cache"),
    }
    command = [str(RECIPES / "gpu.sh"), *arguments]
    return subprocess.Popen(command, cwd=runner, env=base | environment, stderr=subprocess.PIPE, text=True)


def run(runner: Path, *arguments: str, **environment: str) -> int:
    process = started(runner, *arguments, **environment)
    process.communicate(timeout=600)
    return process.returncode


def wait_for(file: Path, process: subprocess.Popen) -> None:
    while not file.exists():
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.05)


def read(runner: Path, name: str) -> list[str]:
    return (runner / name).read_text().splitlines()


def test_the_second_run_finds_the_kernels_of_the_first(runner):
    assert run(runner, "--profile", "gate") == 0
    assert run(runner, "--profile", "gate") == 0
    assert read(runner, "found") == ["cold", "warm"]
    assert read(runner, "folders")[0].startswith(f"{runner}/cache/NVIDIA-H200-9.0-triton-3.6.0-torch-2.11.0+cu130")
    assert read(runner, "arguments")[0].endswith("--report verdict.md --profile gate")


@pytest.mark.parametrize("change", [{"TRITON": "3.7.0"}, {"GPU_NAME": "B200"}])
def test_another_compiler_or_gpu_has_its_own_kernels(runner, change):
    run(runner)
    run(runner, **change)
    assert read(runner, "found") == ["cold", "cold"]


def test_kernels_that_no_run_has_read_for_a_month_are_removed(runner):
    run(runner)
    (kernel,) = (runner / "cache").rglob("*.cubin")
    month = time.time() - 40 * 86400
    os.utime(kernel, (month, month))
    run(runner)
    assert read(runner, "found") == ["cold", "cold"]


@pytest.mark.parametrize("code", [0, 1, 3, 4])
def test_the_exit_code_is_the_verdicts(runner, code):
    assert run(runner, CODE=str(code)) == code


def test_a_cancelled_job_has_its_verdict(runner):
    process = started(runner, TURNS="6000")
    wait_for(runner / "found", process)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=600)
    assert (process.returncode, read(runner, "verdict.md")) == (4, ["INTERRUPTED"])


def test_a_cancelled_step_signals_its_shell_which_must_be_the_command():
    workflow = (RECIPES / "github-actions-gpu.yml").read_text()
    assert re.search(r"- run: exec ci/gpu\.sh ", workflow)


def test_reports_of_an_earlier_run_are_removed(runner):
    (runner / "verdict.json").write_text("old")
    run(runner)
    assert not (runner / "verdict.json").exists()


def test_a_second_run_waits_for_the_gpu(runner):
    first = started(runner, TURNS="6000")
    wait_for(runner / "found", first)
    second = started(runner)
    time.sleep(0.3)
    assert read(runner, "found") == ["cold"]
    (runner / "go").touch()
    assert [process.wait(600) for process in (first, second)] == [0, 0]
    assert read(runner, "found") == ["cold", "warm"]


@pytest.mark.parametrize("missing", ["IMPL", "CACHE"])
def test_a_missing_setting_is_named(runner, missing):
    process = started(runner, **{missing: ""})
    assert missing in process.communicate(timeout=600)[1]
    assert process.returncode != 0


def commands(text: str) -> list[list[str]]:
    """Every call of the command in a recipe, or of the script that passes its arguments on."""
    joined = re.sub(r"\\\n\s*", " ", text)
    calls = re.findall(r"(?:moe-conformance|ci/gpu\.sh)( (?:run )?--.*)$", joined, re.MULTILINE)
    return [shlex.split(re.sub(r"\$\{\{.*?\}\}|\"?\$\{?[A-Z]\w*(?::-[^}]*)?\}?\"?|\"\$@\"", "1/2", x)) for x in calls]


@pytest.mark.parametrize("recipe", sorted(path.name for path in RECIPES.iterdir()))
def test_the_flags_of_a_recipe_exist(recipe):
    calls = commands((RECIPES / recipe).read_text())
    assert calls
    for call in calls:
        words = [word for word in call if word not in ("run", "1/2")]
        assert {word for word in words if word.startswith("--")} <= {flag for flag, _ in flags()}, recipe


def test_a_flag_that_does_not_exist_is_noticed():
    assert commands("  - run: ci/gpu.sh --profiles gate") == [["--profiles", "gate"]]


def test_this_project_is_tested_on_every_python_that_it_declares():
    job = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text())["jobs"]["test"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = [text.rpartition(" ")[2] for text in project["classifiers"] if ":: 3." in text]
    assert job["strategy"]["matrix"]["python"] == declared
    assert project["requires-python"] == f">={declared[0]}"
    (command,) = (shlex.split(step["run"]) for step in job["steps"] if "run" in step)
    assert command[0] == "make" and re.search(rf"^{command[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert any("matrix.python" in str(step.get("with")) for step in job["steps"])


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_the_scripts_have_no_known_mistakes():
    subprocess.run(["shellcheck", *map(str, RECIPES.glob("*.sh"))], check=True)


def test_a_job_of_a_slurm_array_judges_its_shard_and_the_second_job_merges(tmp_path):
    executable(tmp_path / ".venv-conformance/bin/moe-conformance", '#!/usr/bin/env bash\necho "$@"\nexit 1\n')
    (tmp_path / "shard-1.json").touch()
    (tmp_path / "shard-2.json").touch()
    task = {"SLURM_ARRAY_TASK_ID": "2", "SLURM_ARRAY_TASK_COUNT": "8"}
    commands_run = []
    for environment in (task, {}):
        done = subprocess.run(
            [str(RECIPES / "slurm.sh")], cwd=tmp_path, env=os.environ | environment, capture_output=True, text=True
        )
        commands_run.append(done.stdout.strip())
        assert done.returncode == 1  # the verdict is not lost
    assert commands_run[0].endswith("--shard 2/8 --report shard-2.json")
    assert commands_run[1].startswith("merge shard-1.json shard-2.json --report verdict.json")
