"""A pytest plugin: installs a shim before any collection, and writes each test's outcome as a line.

OUTWARD_SHIM is the module of the shim, OUTWARD_RECORD the file of the lines. A line is written at
once, so that a run which is stopped keeps what it has.
"""

import importlib
import json
import os
from typing import Any

import pytest

MOST_CHARACTERS = 3000  # of a message


def pytest_configure(config: pytest.Config) -> None:
    """Install the shim."""
    importlib.import_module(os.environ["OUTWARD_SHIM"]).install()
    if not hasattr(config, "workerinput"):  # a worker of pytest-xdist reports to the first process
        config.pluginmanager.register(Recorder(os.environ["OUTWARD_RECORD"]))


def pytest_collection_finish() -> None:
    """Let the shim give back what stood in for a device while the files were collected."""
    getattr(importlib.import_module(os.environ["OUTWARD_SHIM"]), "collected", lambda: None)()


class Recorder:
    """Writes the outcome of each test: its last phase that failed or was skipped, else the call."""

    def __init__(self, path: str) -> None:
        self.path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A line for the call, and for another phase that did not pass."""
        if report.when == "call" or report.outcome != "passed":
            self._write(test=report.nodeid, outcome=outcome(report), seconds=report.duration, text=text(report))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A line for a file that cannot be collected."""
        if report.outcome != "passed":
            self._write(test=report.nodeid, outcome=outcome(report), seconds=0, text=text(report))

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """The number of tests, where no workers collect."""
        if session.items:
            self._write(collected=len(session.items))

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        """The number of tests, as a worker collected them."""
        self._write(collected=len(ids))

    def _write(self, **values: Any) -> None:
        with open(self.path, "a") as file:
            file.write(json.dumps(values) + "\n")


def outcome(report: Any) -> str:
    """passed, failed, skipped, or the expected failure that a test file declares."""
    return "xfailed" if hasattr(report, "wasxfail") else str(report.outcome)


def text(report: Any) -> str:
    """Why a test failed or was skipped; the end of a long message says more than its beginning."""
    if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    return str(report.longrepr or "")[-MOST_CHARACTERS:]
