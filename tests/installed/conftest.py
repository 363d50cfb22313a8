"""The package as a user installs it: a wheel, in a folder of its own that nobody may write."""

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.installed import steps
from tests.installed.recipes import of_action

ROOT = Path(__file__).parents[2]
PACKAGES = ("moe_ref", "moe_fast", "conformance", "fast_interpreter")
# also looks where it runs: in a child of the installed package, with the user's own environment
DISPATCH = """
import os

import conformance, moe_ref
from conformance.peers.reference_world import allgather_combine, allgather_dispatch

assert conformance.__file__.startswith({installed!r}) and moe_ref.__file__.startswith({installed!r})
assert os.environ["PYTHONPATH"] == {installed!r}
assert not set(os.environ) & {{"PYTHONSAFEPATH", "MOE_CONFORMANCE_ENVIRONMENT"}}
"""
HOST = "def pytest_addoption(parser):\n    parser.addoption('--device')\n    parser.addoption('--profile')\n"
READ_ONLY = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && exec "$@"'


@pytest.fixture(scope="session")
def source(tmp_path_factory) -> Path:
    """A copy of the source, in which a build may write."""
    if not all(map(find_spec, ("pip", "setuptools"))):
        pytest.skip("pip and setuptools build the wheel")
    source = tmp_path_factory.mktemp("source")
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, source)
    for name in (*PACKAGES, "docs", "tests", "benchmarks", "examples"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    return source


@pytest.fixture(scope="session")
def wheel(source) -> Path:
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--disable-pip-version-check", "--no-deps"]
    command += ["--no-build-isolation", "-w", str(source / "wheels"), str(source)]
    subprocess.run(command, check=True, timeout=1200)
    (built,) = (source / "wheels").iterdir()
    return built


@pytest.fixture(scope="session")
def installed(wheel, tmp_path_factory) -> Path:
    """The folder in which the Action's own step has installed the wheel, with its bytecode."""
    folder = tmp_path_factory.mktemp("installed")
    script, filled = of_action("Install", {"package": f"{wheel}[fast]"})
    path = {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    pip_settings = {
        "PIP_TARGET": str(folder),
        "PIP_NO_DEPS": "1",
        "PIP_NO_INDEX": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }
    command = ["bash", "-e", "-o", "pipefail", "-c", script]
    subprocess.run(command, env=os.environ | path | pip_settings | filled, check=True, timeout=1200)
    return folder


def of_user(installed: Path) -> dict[str, str]:
    """An environment in which the wheel is installed, and bytecode is not written."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    return environment | {"PYTHONPATH": str(installed), "PYTHONDONTWRITEBYTECODE": "1"}


def read_only(folder: Path) -> list[str]:
    """What runs a command for which the folder is mounted read-only; nothing if that is not
    allowed here. Permissions alone would not stop root.
    """
    command = ["unshare", "--map-root-user", "--mount", "sh", "-c", READ_ONLY, str(folder)]
    try:
        return command if subprocess.run([*command, "true"], capture_output=True).returncode == 0 else []
    except FileNotFoundError:
        return []


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of every file and folder; of a folder the time of its last new or lost file."""
    paths = [folder, *folder.rglob("*")]
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in paths}


@pytest.fixture(scope="session")
def user_folder(installed, tmp_path_factory) -> Path:
    """A folder with a user's modules, and with names that belong to others."""
    user_folder = tmp_path_factory.mktemp("user_folder")
    (user_folder / "my_kernels.py").write_text(steps.kernels()[-1])
    (user_folder / "my_dispatch.py").write_text(DISPATCH.format(installed=str(installed)))
    (user_folder / "conftest.py").write_text(HOST)
    (user_folder / "test_host.py").write_text(
        "def test(pytestconfig):\n    assert pytestconfig.getoption('device') == 'x'\n"
    )
    for name in ("conformance", "moe_ref", "torch"):
        (user_folder / name).mkdir()
        (user_folder / name / "__init__.py").write_text("raise RuntimeError('the wrong package')\n")
    return user_folder


@pytest.fixture(scope="session")
def results_by_step(installed, wheel, user_folder, tmp_path_factory) -> dict[str, list[tuple[int, str]]]:
    """(exit code, output) of each step, in order."""
    driver = tmp_path_factory.mktemp("bin") / "driver.py"  # as the installed script, not in the folder of the user
    shutil.copy(Path(__file__).with_name("driver.py"), driver)
    results = driver.with_name("results.json")
    taken = steps.steps(wheel)
    listed = listing(installed)
    done = subprocess.run(
        [*read_only(installed), sys.executable, str(driver), str(results)],
        input=json.dumps([step for _, step in taken]),
        cwd=user_folder,
        env=of_user(installed),
        capture_output=True,
        text=True,
        timeout=3000,
    )
    assert done.returncode == 0, done.stderr
    out: dict[str, list[tuple[int, str]]] = {}
    for (label, _), result in zip(taken, json.loads(results.read_text()), strict=True):
        out.setdefault(label, []).append((result[0], result[1]))
    out["changed"] = [(0, name) for name, _ in listed.items() ^ listing(installed).items()]
    return out
