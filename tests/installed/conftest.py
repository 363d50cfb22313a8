"""The package as a user installs it: a wheel, in a folder of its own."""

import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("moe_ref", "moe_fast", "conformance")


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    subprocess.run(command, check=True, timeout=120)


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
    pip("wheel", "--no-deps", "--no-build-isolation", "-w", str(source / "wheels"), str(source))
    (built,) = (source / "wheels").iterdir()
    return built


@pytest.fixture(scope="session")
def installed(wheel, tmp_path_factory) -> Path:
    """The folder in which the wheel is installed."""
    folder = tmp_path_factory.mktemp("installed")
    pip("install", "--no-deps", "--no-index", "--no-compile", "--target", str(folder), str(wheel))
    return folder
