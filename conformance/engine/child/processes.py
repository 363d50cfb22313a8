"""What is known of a child process from outside: how to start it plainly, how it ended, and where it was."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

STDLIB, ELSEWHERE = (
    os.path.dirname(os.__file__),
    ("conformance/engine", "/torch/", "/triton/"),
)  # where the cause of a crash is not


PATIENCE = 10  # after one hang, a case hangs that takes so many times as long as the slowest before


@dataclass
class Patience:
    """How long cases are waited for. A function that has hung once will again: waiting as long each time would take hours."""

    case_seconds: float
    slowest: float = 0.0
    hung: set[str] = field(default_factory=set)  # functions

    def answered(self, seconds: float) -> None:
        self.slowest = max(self.slowest, seconds)

    def allowed(self, function: str) -> float:
        """Seconds for a case."""
        return min(self.case_seconds, max(PATIENCE * self.slowest, 2.0)) if function in self.hung else self.case_seconds


@contextlib.contextmanager
def plain_main() -> Iterator[None]:
    """Keep multiprocessing from running the program's main script again in the child, which needs nothing from it."""
    main = sys.modules["__main__"]
    kept = {name: getattr(main, name) for name in ("__file__", "__spec__") if hasattr(main, name)}
    try:
        main.__spec__ = None
        if "__file__" in kept:
            del main.__file__
        yield
    finally:
        for name, value in kept.items():
            setattr(main, name, value)


def manner(process: Any, log_path: str) -> str:
    """How a process ended, and where it was."""
    code = process.exitcode
    told = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
    return f"{told}{at(log_path)}"


def at(log_path: str) -> str:
    """Where a process was when it last wrote a traceback into its log, as " at …"; nothing if that says nothing."""
    with contextlib.suppress(OSError), open(log_path, errors="replace") as log:
        frames = [line.strip() for line in log if line.lstrip().startswith("File ")]
        mine = [
            line
            for line in frames
            if not any(place in line for place in ELSEWHERE) and (STDLIB not in line or "site-packages" in line)
        ]
        if mine:
            return f" at {mine[0].removeprefix('File ')}"
    return ""
