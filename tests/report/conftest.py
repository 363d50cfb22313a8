"""A folder with namespaces to judge, and the command in this process."""

from pathlib import Path

import pytest

from conformance.cli import main
from tests.report.cli_helpers import FILES, NAMESPACES


@pytest.fixture
def workdir(tmp_path, monkeypatch) -> Path:
    """A working directory with namespaces and files in it."""
    for name, text in NAMESPACES.items():
        (tmp_path / f"{name}.py").write_text(text)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    for name in ("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "PYTEST_ADDOPTS", "GITHUB_ACTIONS"):
        monkeypatch.setenv(name, "")
    return tmp_path


@pytest.fixture
def call(workdir, capfd):
    """call(*arguments) -> exit code, stdout, stderr"""

    def run(*arguments: str) -> tuple[int, str, str]:
        try:
            code = main(arguments)
        except SystemExit as left:  # argparse
            code = left.code
        printed = capfd.readouterr()
        return code, printed.out, printed.err

    return run
