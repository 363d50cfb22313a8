"""The suite as a pytest plugin: one item per section of the plan, one session per worker.

    pytest --pyargs conformance -p conformance.plugin --moe-impl my_kernels.moe -n 4

`moe-conformance run` is the same run without pytest. A pytest run has the plugin only if it asks
for it: the package adds nothing to the runs of other projects. Every option begins with `--moe-`.
Without `--moe-impl` the plugin does nothing.
"""

import re
import signal
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from conformance.engine.collecting import uncollected
from conformance.engine.options import Options, flags

# pytest prints the class's name in front of the message
UsageExit = type("moe-conformance", (pytest.exit.Exception,), {"__doc__": "Ends the run with one sentence."})


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("moe-conformance")
    for flag, arguments in flags():
        if flag != "--seconds":  # pytest's items have no common end
            group.addoption(_as_pytest_flag(flag), **arguments)


def _as_pytest_flag(text: str) -> str:
    """The text with the command's flags renamed to the plugin's."""
    names = "|".join(flag.removeprefix("--") for flag, _ in flags())
    return re.sub(rf"(?<![\w-])--(?=({names})(?![\w-]))", "--moe-", text)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--moe-impl"):
        config.pluginmanager.register(Run(config), "moe-conformance-run")


class Run:
    """One pytest run that judges an implementation."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.session: Any = None
        self.verdict: Any = None
        self.unwritten: list[str] = []  # sentences on reports
        worker_input = getattr(config, "workerinput", {})
        self.worker = worker_input.get("workerid", "")
        self.ledgers = None if self.worker else tempfile.TemporaryDirectory(prefix="moe-conformance-ledger-")
        self.folder = Path(self.ledgers.name if self.ledgers else worker_input["conformance_folder"])

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput["conformance_folder"] = str(self.folder)

    def pytest_report_header(self) -> str:
        options = self.config.option
        return f"moe-conformance: {options.moe_impl}, profile {options.moe_profile}; each process first imports torch"

    def pytest_sessionstart(self) -> None:
        """Start the session.

        A controller of workers starts one too, so that an error stops the run once and not in every
        worker.
        """
        from conformance.engine.child import server

        server.start()  # it imports torch while this process does
        with uncollected():
            from conformance.core.case import CaseError
            from conformance.engine.run.session import Session
            from conformance.interface import UsageError

        controller = not self.worker and bool(self.config.getoption("numprocesses", None))
        if not self.worker:
            signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            options = Options.parsed(self.config.option, "moe_")
            if self.worker and not options.jobs:
                options = replace(options, jobs=1)
            folder = self.folder / "controller" if controller else self.folder
            self.session = Session(options, folder, self.worker or "main", progress=not (self.worker or controller))
            self.session.start()
            if controller:
                self.session.find_footprints()
                self.session.close()
        except (UsageError, CaseError) as error:
            raise UsageExit(_as_pytest_flag(str(error)), returncode=2) from None

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "section" in metafunc.fixturenames:
            metafunc.parametrize("section", self.session.plan, ids=lambda section: section.label)

    def pytest_exception_interact(self, call: pytest.CallInfo, report: Any) -> None:
        """An error outside of a failing section is an error of the suite."""
        if call.excinfo and not isinstance(call.excinfo.value, pytest.fail.Exception):
            self.session.problem(getattr(report, "nodeid", ""), call.excinfo.value)

    @pytest.hookimpl(trylast=True)  # when xdist has ended the workers
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        from conformance.report import report_text
        from conformance.report.delivery import exit_code, unwritten

        if self.session:
            if session.exitstatus != pytest.ExitCode.INTERRUPTED:
                self.session.find_footprints()
            self.session.close()
        failed_inside = session.exitstatus == pytest.ExitCode.INTERNAL_ERROR  # exit code 3
        if not self.ledgers or failed_inside or not any(self.folder.glob("*.jsonl")):
            return
        num_parts, selected = self.session.options.part[1], self.config.getoption("-k")
        interrupted = "a signal" if session.exitstatus == pytest.ExitCode.INTERRUPTED else ""
        self.verdict = self.session.verdict(
            self.folder, num_parts == 1 and not selected, interrupted, num_parts > 1 and not selected
        )
        self.unwritten = unwritten(self.session.options.report, partial(report_text, self.verdict))
        session.exitstatus = exit_code(self.verdict.exit_code, self.unwritten)
        self.ledgers.cleanup()

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.verdict:
            from conformance.report.terminal import annotations, lines

            terminalreporter.section("moe-conformance")
            sentences = [_as_pytest_flag(sentence) for sentence in self.unwritten]
            for line in [*lines(self.verdict), *annotations(self.verdict), *sentences]:
                terminalreporter.write_line(line)
