"""The parent's view of a child process: start, end, time limit."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

STDLIB = os.path.dirname(os.__file__)
INNOCENT = ("conformance/engine", "/torch/", "/triton/")  # frames never blamed for a crash
_main = threading.Lock()  # of __main__, which several threads may hide
PATIENCE = 10  # after a hang: time limit in multiples of the slowest answer


@dataclass
class Patience:
    """The time limit of a case in seconds: shorter for a function that has hung once."""

    case_seconds: float
    slowest: float = 0.0
    hung: set[str] = field(default_factory=set)  # functions

    def answered(self, seconds: float) -> None:
        self.slowest = max(self.slowest, seconds)

    def allowed(self, function: str) -> float:
        return min(self.case_seconds, max(PATIENCE * self.slowest, 2.0)) if function in self.hung else self.case_seconds


@contextlib.contextmanager
def plain_main() -> Iterator[None]:
    """Keep multiprocessing from running the program's main script again in the child."""
    main = sys.modules["__main__"]
    with _main:
        kept = {name: getattr(main, name) for name in ("__file__", "__spec__") if hasattr(main, name)}
        try:
            main.__spec__ = None
            if "__file__" in kept:
                del main.__file__
            yield
        finally:
            for name, value in kept.items():
                setattr(main, name, value)


def ending(process: Any, log_path: str) -> str:
    """The end of a process, and its innermost frame."""
    code = process.exitcode
    cause = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
    return f"{cause}{at(log_path)}"


def at(log_path: str) -> str:
    """The innermost frame of the implementation in the traceback in a log, as " at …", if any."""
    with contextlib.suppress(OSError), open(log_path, errors="replace") as log:
        frames = [line.strip() for line in log if line.lstrip().startswith("File ")]
        for line in frames:
            if not any(path in line for path in INNOCENT) and (STDLIB not in line or "site-packages" in line):
                return f" at {line.removeprefix('File ')}"
    return ""
