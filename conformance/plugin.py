"""The suite as a pytest plugin: options, parametrization, one session a worker, and the verdict at the end.

    pytest --pyargs conformance --impl my_kernels.moe --profile gate -n 4

Without `--impl` the plugin does nothing.
"""

import contextlib
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

OPTIONS = (
    ("--impl", {"help": "the namespace to judge: package.module or package.module:attribute"}),
    ("--profile", {"default": "gate", "choices": ("smoke", "gate", "nightly"), "help": "how much to test"}),
    ("--device", {"default": "auto", "choices": ("auto", "cpu", "cuda"), "help": "where to run the implementation"}),
    ("--run-seed", {"type": int, "default": 0, "help": "seed of the drawn cases"}),
    (
        "--jobs",
        {
            "type": int,
            "default": 0,
            "help": "child processes of one worker (default: 2 on a CPU, 6 on a GPU, 1 under xdist)",
        },
    ),
    ("--case-seconds", {"type": float, "default": 60.0, "help": "a case that takes longer hangs"}),
    (
        "--corpus",
        {"default": ".moe-conformance", "help": "folder of kept cases: run first, and where failing cases are saved"},
    ),
    ("--waivers", {"default": "", "help": "TOML file of known differences"}),
    ("--baseline", {"default": "", "help": "an earlier JSON report; what it had must not get worse"}),
    ("--shard", {"default": "", "help": "i/n: run the i-th of n parts (from 1)"}),
    (
        "--report",
        {"action": "append", "default": [], "help": "write the verdict to this file: .json, .xml (junit) or .md"},
    ),
    ("--replay", {"default": "", "help": "run this one case only: an id, a file or JSON text"}),
)


# pytest prints the class's name in front of the message
UsageExit = type("moe-conformance", (pytest.exit.Exception,), {"__doc__": "Ends the run with one sentence."})


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("moe-conformance")
    for flag, how in OPTIONS:
        group.addoption(flag, **how)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--impl"):
        config.pluginmanager.register(Run(config), "moe-conformance-run")


class Run:
    """One pytest run that judges an implementation."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.started = time.monotonic()
        self.session: Any = None
        self.verdict: Any = None
        given = getattr(config, "workerinput", {})
        self.worker = given.get("workerid", "")
        self.own_folder = None if self.worker else tempfile.TemporaryDirectory(prefix="moe-conformance-ledger-")
        self.folder = Path(given["conformance_folder"] if self.worker else self.own_folder.name)  # type: ignore[union-attr]

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput["conformance_folder"] = str(self.folder)

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Check everything that the user gave before a case is run."""
        from conformance.core.case import CaseError
        from conformance.interface import UsageError

        try:
            self._check_options()
            spread = self.config.getoption("numprocesses", None)
            if self.worker or not spread:
                self._start()
            else:
                self._preflight()
        except (UsageError, CaseError) as error:
            raise UsageExit(str(error), returncode=2) from None

    def _check_options(self) -> None:
        from conformance.interface import UsageError
        from conformance.report import check_path

        self.reports = [check_path(path) for path in self.config.getoption("--report")]
        self.baseline = _baseline(self.config.getoption("--baseline"))
        shard = self.config.getoption("--shard")
        try:
            self.part, self.parts = (int(x) for x in shard.split("/")) if shard else (1, 1)
        except ValueError:
            raise UsageError(f"--shard is {shard!r}; it must be i/n, such as 2/4") from None
        if not 1 <= self.part <= self.parts:
            raise UsageError(f"--shard is {shard!r}; the first number must be from 1 to the second")
        jobs, seconds = self.config.getoption("--jobs"), self.config.getoption("--case-seconds")
        if jobs < 0:
            raise UsageError(f"--jobs is {jobs}; it must be 0 or more")
        if not 0 < seconds < float("inf"):
            raise UsageError(f"--case-seconds is {seconds}; it must be above 0")
        kept = Path(self.config.getoption("--corpus"))
        if kept.exists() and not kept.is_dir():
            raise UsageError(f"--corpus {kept}: is no folder")

    def options(self) -> Any:
        from conformance.engine.run.session import Options

        get = self.config.getoption
        return Options(
            implementation=get("--impl"),
            profile=get("--profile"),
            device=get("--device"),
            seed=get("--run-seed"),
            jobs=get("--jobs") or (1 if self.worker else _default_jobs(get("--device"))),
            corpus=get("--corpus"),
            waivers=get("--waivers"),
            case_seconds=get("--case-seconds"),
        )

    def _start(self) -> None:
        from conformance.engine.run.session import Session

        self.session = Session(self.options(), self.folder, self.worker or "main", progress=not self.worker)
        self.session.start()
        if replay := self.config.getoption("--replay"):
            from conformance.engine.run.corpus import find

            self.session.corpus = [find(replay, Path(self.config.getoption("--corpus")))]

    def _preflight(self) -> None:
        """Fail in the controller, once, rather than in every worker."""
        from conformance.engine.run.session import Session

        with tempfile.TemporaryDirectory() as scratch:
            trial = Session(self.options(), Path(scratch), "preflight")
            with contextlib.closing(trial):
                trial.start()

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "section" not in metafunc.fixturenames:
            return
        from conformance.engine.choose.plan import Section, sections
        from conformance.engine.choose.profiles import PROFILES

        all_of_them = (
            [Section("corpus")]
            if self.config.getoption("--replay")
            else sections(PROFILES[self.config.getoption("--profile")])
        )
        metafunc.parametrize("section", all_of_them, ids=lambda section: section.label)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        mine = [item for item in items if "section" in getattr(item, "fixturenames", ())]
        dropped = [item for index, item in enumerate(mine) if index % self.parts != self.part - 1]
        items[:] = [item for item in items if item not in dropped]

    def pytest_exception_interact(self, call: pytest.CallInfo, report: Any) -> None:
        """Whatever a test raises beside a failure of its own is an error of the suite, and must not pass for a verdict."""
        excinfo = call.excinfo
        if self.session and excinfo is not None and not isinstance(excinfo.value, pytest.fail.Exception):
            self.session.ledger.write(
                "problem", text=f"{getattr(report, 'nodeid', '')}: {excinfo.typename}: {excinfo.value}"
            )

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.session:
            self.session.close()
        if self.worker or not any(self.folder.glob("*.jsonl")):
            return
        from conformance import report
        from conformance.engine.run.verdict import assemble

        get = self.config.getoption
        seconds = time.monotonic() - self.started
        whole = self.parts == 1 and not get("--replay") and not get("-k") and session.exitstatus in (0, 1)
        self.verdict = assemble(
            self.folder,
            get("--impl"),
            get("--profile"),
            get("--run-seed"),
            seconds,
            self._waiver_names(),
            whole,
            self.baseline,
        )
        for path in self.reports:
            report.write(self.verdict, path)
        session.exitstatus = self.verdict.exit_code
        assert self.own_folder is not None
        self.own_folder.cleanup()

    def _waiver_names(self) -> list[str]:
        import datetime

        from conformance.engine.run.waivers import read_waivers

        path = self.config.getoption("--waivers")
        return [waiver.name for waiver in read_waivers(Path(path), datetime.date.today())] if path else []

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.verdict:
            from conformance.report.terminal import annotations, lines

            terminalreporter.section("moe-conformance")
            for line in [*lines(self.verdict), *annotations(self.verdict)]:
                terminalreporter.write_line(line)


def _default_jobs(device: str) -> int:
    import torch

    return 6 if device != "cpu" and torch.cuda.is_available() else min(os.cpu_count() or 1, 2)


def _baseline(path: str) -> dict[str, Any] | None:
    from conformance.interface import UsageError

    if not path:
        return None
    try:
        content = json.loads(Path(path).read_text())
        for function in content["functions"].values():  # what a comparison will read
            _ = function["status"], function["without"], function["counts"].items(), function["cases"] + 0
    except FileNotFoundError:
        raise UsageError(f"--baseline {path}: there is no such file") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"--baseline {path}: not a JSON report of moe-conformance ({error})") from None
    return content
