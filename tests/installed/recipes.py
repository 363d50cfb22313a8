"""The Action and the recipes of docs/ci as steps of the driver: their own scripts, with the
installed command.

GitHub's own actions (checkout, artifacts), nvidia-smi and the creation of an environment are stood
in for; in that environment pip checks its arguments and installs nothing.
"""

import re
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "docs" / "ci"
ACTION = yaml.safe_load((ROOT / "action.yml").read_text())
Step = list[Any]  # of the driver
PIP = f"""#!/bin/sh
export PIP_DRY_RUN=1 PIP_NO_DEPS=1 PIP_NO_INDEX=1 PIP_DISABLE_PIP_VERSION_CHECK=1
exec {sys.executable} -m pip "$@"
"""
PYTHON = f"""#!/bin/sh
[ "$1 $2" = "-m venv" ] || exec {sys.executable} "$@"
mkdir -p "$3/bin"
cp bin/pip "$3/bin/pip"
cp "$COMMAND" "$3/bin/moe-conformance"
"""
GPU = "#!/bin/sh\necho 'NVIDIA H200, 9.0'\n"


def action_step(name: str) -> dict[str, Any]:
    return next(step for step in ACTION["runs"]["steps"] if step["name"] == name)


def of_action(name: str, chosen_inputs: dict[str, str]) -> tuple[str, dict[str, str]]:
    """The script of a step and its environment, with inputs as GitHub fills them in."""
    inputs = {key: one.get("default", "") for key, one in ACTION["inputs"].items()} | chosen_inputs
    chosen = action_step(name)
    filled = {
        key: re.sub(r"\$\{\{ inputs\.([\w-]+) \}\}", lambda found: inputs[found[1]], value)
        for key, value in chosen["env"].items()
    }
    assert not any("${{" in value.replace("${{ github.action_path }}", "") for value in filled.values())
    return chosen["run"], filled


def of_workflow(recipe: str, job: str, **filled: str) -> str:
    """The job's scripts in one; GitHub goes on after a failure with steps that always run."""
    steps = [step for step in yaml.safe_load((RECIPES / recipe).read_text())["jobs"][job]["steps"] if "run" in step]
    lines = ["code=0"]
    for step in steps:
        assert step.get("if", "always()") == "always()"
        text = re.sub(r"\$\{\{ (.*?) \}\}", lambda match: filled[match[1]], step["run"])
        guard = "" if "if" in step else '[ "$code" != 0 ] || '
        lines.append(f"{guard}bash -e -o pipefail -c '{text}' || code=$?")
        assert "'" not in text
    return "\n".join([*lines, 'exit "$code"'])


def steps(wheel: Path, kernels: dict[str, str]) -> list[tuple[str, Step]]:
    """(label, step) of all recipes; steps without a label prepare a folder.

    Args:
        kernels: texts of modules: `right`, `wrong` and `slow`.
    """
    files = {"bin/pip": PIP, "bin/python3": PYTHON, "bin/nvidia-smi": GPU, "requirements.txt": ""}
    files |= {"my_kernels/__init__.py": "", "my_kernels/moe.py": kernels["right"], "ci/gpu.sh": _text("gpu.sh")}
    settings = {"PATH": "bin", "PACKAGE": f"{wheel}[fast]", "GITHUB_STEP_SUMMARY": "summary"}
    ready = "chmod +x bin/* ci/*\n"
    listed: list[tuple[str, Step]] = [("", ["cd", "matrix"]), ("", ["write", files])]
    for number in (1, 2):
        script = of_workflow("github-actions.yml", "gate", **{"matrix.shard": f"{number}/2"})
        artifacts = f"trap 'mkdir shard-{number}; mv verdict.json shard-{number}' EXIT"  # as the artifacts
        listed.append((f"github-actions.yml {number}", ["shell", f"{ready}{artifacts}\n{script}", settings, 0]))
    listed.append(("github-actions.yml verdict", ["shell", of_workflow("github-actions.yml", "verdict"), settings, 0]))
    return [*listed, *_scripts(files, settings, ready), *_action(kernels)]


def _text(recipe: str) -> str:
    return (RECIPES / recipe).read_text()


def _scripts(files: dict[str, str], settings: dict[str, str], ready: str) -> list[tuple[str, Step]]:
    event = "github.event_name == 'push' && 'smoke' || 'gate'"
    gpu = of_workflow("github-actions-gpu.yml", "judge", **{event: "gate"})
    runner = {**settings, "IMPL": "my_kernels.moe", "CACHE": "cache", "GITHUB_PATH": "path"}
    listed: list[tuple[str, Step]] = [
        ("", ["cd", "plain"]),
        ("", ["write", files]),
        ("plain.sh", ["shell", ready + _text("plain.sh"), settings, 0]),
    ]
    for number in (1, 2):
        task = {"SLURM_ARRAY_TASK_ID": str(number), "SLURM_ARRAY_TASK_COUNT": "2"}
        listed.append((f"slurm.sh {number}", ["shell", _text("slurm.sh"), settings | task, 0]))
    listed.append(("slurm.sh verdict", ["shell", _text("slurm.sh"), settings, 0]))
    listed += [("", ["cd", "gpu"]), ("", ["write", files])]
    return [*listed, ("github-actions-gpu.yml", ["shell", ready + gpu, runner, 0])]


def _action(kernels: dict[str, str]) -> list[tuple[str, Step]]:
    inputs = {"impl": "my_kernels", "arguments": "--function permute --where tokens<=9"}
    files = {name: name for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")} | {"GITHUB_ACTIONS": "true"}
    listed: list[tuple[str, Step]] = []
    for name, seconds in (("right", 0), ("wrong", 0), ("slow", 1)):
        script, filled = of_action("Judge", inputs)
        listed.append(("", ["cd", f"action-{name}"]))
        listed.append(("", ["write", {"my_kernels.py": kernels[name]}]))
        listed.append((f"action {name}", ["shell", script, filled | files, seconds]))
    return listed
