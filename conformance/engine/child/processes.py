"""The parent's view of a child process: start, messages, end, and where it is."""

import contextlib
import os
import pickle
import re
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from conformance.engine.child.isolation import ASKED, MEMORY_BYTES, OUT_OF_MEMORY, PLACE
from conformance.engine.child.outcome import Outcome
from conformance.engine.child.sanitizer import explained

STDLIB = os.path.dirname(os.__file__)
INNOCENT = ("conformance/engine", "/torch/", "/triton/", '"<frozen ')  # frames never blamed for a crash
_main = threading.Lock()  # held while __main__ is hidden, which several threads may do
MESSAGE_SECONDS = 10  # seconds for the remaining bytes of a message that has begun
ENDING_SECONDS = 5  # seconds for a process that has closed its pipe to end
PLACE_SECONDS = 2.0  # seconds for a thread of a process to report where the others are
TRACEBACK_SECONDS = 0.2  # seconds for an interrupted process to write a traceback
FRAME = re.compile(r'File ("(.+)", line \d+ in .+)')  # a line of a traceback, as faulthandler writes it
MESSAGE_BYTES = 2**28
TRACEBACK_LINES = 16  # of an error that ends a process: eight frames or fewer
NO_MESSAGE = "it wrote into the pipe of the suite"
NO_MEMORY = "out of memory"


@contextlib.contextmanager
def plain_main() -> Iterator[None]:
    """Keep multiprocessing from running the program's main script again in the child."""
    main = sys.modules["__main__"]
    with _main:
        main_attributes = {name: getattr(main, name) for name in ("__file__", "__spec__") if hasattr(main, name)}
        try:
            main.__spec__ = None
            if "__file__" in main_attributes:
                del main.__file__
            yield
        finally:
            for name, value in main_attributes.items():
                setattr(main, name, value)


def expect_messages(pipe: Connection) -> None:
    """Bound the time that a read from the pipe may take once `poll` has said that it has data."""
    with socket.socket(fileno=os.dup(pipe.fileno())) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", MESSAGE_SECONDS, 0))


def started(context: Any, target: Callable[..., None], *arguments: Any) -> tuple[Any, Connection]:
    """A process that runs target(its end of a pipe, *arguments), and this end of the pipe."""
    pipe, child_pipe = context.Pipe()
    expect_messages(pipe)
    process = context.Process(target=target, args=(child_pipe, *arguments), daemon=True)
    with plain_main():
        process.start()
    child_pipe.close()
    return process, pipe


def received(pipe: Connection) -> tuple[Any, ...]:
    """The next message of a process.

    The implementation may write anything into every file that the process has.

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
    """How a process ended, or stopped talking to the suite, and its innermost frame."""
    process.join(ENDING_SECONDS)
    code = process.exitcode
    if code is None:
        return f"it closed the pipe of the suite{at(log_path)}"
    if code == OUT_OF_MEMORY:
        return f"{NO_MEMORY}: it held more than {MEMORY_BYTES / 2**30:.1f} GiB, half of the machine's"
    if code == -signal.SIGKILL:
        return f"{NO_MEMORY}, most likely: it ended by SIGKILL"
    error = uncaught(log_path) if code == 1 else ""  # Python's exit code for one
    cause = signal.Signals(-code).name if code < 0 else f"exit code {code}{error}"
    return f"{cause}{at(log_path)}"


def uncaught(log_path: str) -> str:
    """The last error that Python wrote into a log, if any, as ": KeyError: 'x' (file.py:3)", and
    below it the last frames of its traceback.
    """
    with contextlib.suppress(OSError):
        text = Path(log_path).read_text(errors="replace")
        _, begin, traceback = text.rpartition("Traceback (most recent call last):\n")
        frames = re.findall(r'^  File "(.*)", line (\d+)', traceback, re.MULTILINE)
        errors = [line for line in traceback.splitlines() if line and not line.startswith(" ")]
        if begin and frames and errors:
            frame_lines = [line for line in traceback.splitlines() if line.startswith("  ")][-TRACEBACK_LINES:]
            error = f": {errors[0]} ({os.path.basename(frames[-1][0])}:{frames[-1][1]})"
            return "\n".join([error, "Traceback (most recent call last):", *frame_lines, errors[0]])
    return ""


def where(process: Any, log_path: str) -> str:
    """The innermost frame of the implementation in a running process, as " at …", or an empty text.

    A thread of the process answers, unless native code holds the interpreter. Only then does
    faulthandler interrupt the process, because its walk through the frames sometimes crashes while
    Python code runs.
    """
    with contextlib.suppress(OSError):
        open(log_path + ASKED, "w").close()
    deadline = time.monotonic() + PLACE_SECONDS
    while time.monotonic() < deadline and process.is_alive():
        if os.path.exists(log_path + PLACE):
            return at(log_path + PLACE)
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGUSR1)
    time.sleep(TRACEBACK_SECONDS)
    return at(log_path)


def at(log_path: str) -> str:
    """The innermost frame of the implementation in the traceback in a log, as " at …", if any."""
    with contextlib.suppress(OSError), open(log_path, errors="replace") as log:
        for frame in filter(None, (FRAME.fullmatch(line.strip()) for line in log)):
            line = frame[1]
            if not any(path in line for path in INNOCENT) and (STDLIB not in line or "site-packages" in line):
                return f" at {line}"
    return ""
