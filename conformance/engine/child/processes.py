"""The parent's view of a child process: start, messages, end, time limit."""

import contextlib
import os
import pickle
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from conformance.engine.child.isolation import MEMORY_BYTES, OUT_OF_MEMORY
from conformance.engine.child.runner import Outcome
from conformance.engine.child.sanitizer import explained

STDLIB = os.path.dirname(os.__file__)
INNOCENT = ("conformance/engine", "/torch/", "/triton/", '"<frozen ')  # frames never blamed for a crash
_main = threading.Lock()  # of __main__, which several threads may hide
PATIENCE = 10  # after a hang: time limit in multiples of the slowest answer
MESSAGE_SECONDS = 10  # for the rest of a message that has begun
ENDING_SECONDS = 5  # for a process that has closed its pipe to end
TRACEBACK_SECONDS = 0.2  # for a process to write where it is
MESSAGE_BYTES = 2**28
NO_MESSAGE = "it wrote into the pipe of the suite"
NO_MEMORY = "out of memory"


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


def expect_messages(pipe: Connection) -> None:
    """Bound the time that a read from the pipe may take once `poll` has said that it has data."""
    with socket.socket(fileno=os.dup(pipe.fileno())) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", MESSAGE_SECONDS, 0))


def received(pipe: Connection) -> tuple[Any, ...]:
    """The next message of a process, which may write anything into every file that it has.

    Raises:
        EOFError: the process has ended, or has written something else; its text then says so.
    """
    try:
        content = pipe.recv_bytes(MESSAGE_BYTES)
    except (EOFError, ConnectionResetError):
        raise EOFError from None
    except OSError:  # too long, or not complete in time
        raise EOFError(NO_MESSAGE) from None
    try:
        message = pickle.loads(content)
    except Exception:
        raise EOFError(NO_MESSAGE) from None
    if not isinstance(message, tuple) or not message or not isinstance(message[0], str):
        raise EOFError(NO_MESSAGE)
    return message


def kill(processes: Iterable[Any]) -> None:
    """Kill child processes, and the processes of their sessions, without waiting for their end."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()


def end(process: Any) -> None:
    """Kill a child process, and the processes of its session, and wait for its end."""
    kill([process])
    process.join()


def ended(reason: str) -> Outcome:
    """The outcome of a case whose process has ended with this `ending`."""
    return explained(Outcome("OOM" if reason.startswith(NO_MEMORY) else "CRASH", reason=reason))


def ending(process: Any, log_path: str) -> str:
    """The end of a process, or of its talk with the suite, and its innermost frame."""
    process.join(ENDING_SECONDS)
    code = process.exitcode
    if code is None:
        return f"it closed the pipe of the suite{at(log_path)}"
    if code == OUT_OF_MEMORY:
        return f"{NO_MEMORY}: it held more than {MEMORY_BYTES / 2**30:.1f} GiB, half of the machine's"
    if code == -signal.SIGKILL:
        return f"{NO_MEMORY}, most likely: it ended by SIGKILL"
    cause = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return f"{cause}{at(log_path)}"


def where(process: Any, log_path: str) -> str:
    """The innermost frame of the implementation in a process that runs, as " at …", if any."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGUSR1)
    time.sleep(TRACEBACK_SECONDS)
    return at(log_path)


def at(log_path: str) -> str:
    """The innermost frame of the implementation in the traceback in a log, as " at …", if any."""
    with contextlib.suppress(OSError), open(log_path, errors="replace") as log:
        frames = [line.strip() for line in log if line.lstrip().startswith("File ")]
        for line in frames:
            if not any(path in line for path in INNOCENT) and (STDLIB not in line or "site-packages" in line):
                return f" at {line.removeprefix('File ')}"
    return ""
