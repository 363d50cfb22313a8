"""Confines the effects of an implementation to this process and its descendants."""

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from conformance.private_parts import available

WATCH_SECONDS = 0.25
LOG_BYTES = 2**20  # bytes of the log; a longer log is emptied
MEMORY_BYTES = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2  # resident bytes of one process
OUT_OF_MEMORY = 87  # exit code
ASKED, PLACE = ".asked", ".place"  # suffixes of the files next to the log: see `_say_where`


def isolate(log_path: str) -> None:
    """Make this process the leader of a session, which `processes.end` ends as a whole.

    Its output, and the traceback of a crash or a hang, go to a file that outlives it. A thread ends
    it with its parent, even during a case, so that a killed run frees the device.
    """
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # SIGINT: a run in the background ignores it
    _let_go(available("multiprocessing.forkserver._forkserver"), "_forkserver_alive_fd")
    _let_go(available("multiprocessing.resource_tracker._resource_tracker"), "_fd")
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # the parent asks where this process is: see `processes.where`
    # where the kernel runs out of memory, it kills this process before any other
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    threading.Thread(target=_watch, args=(log_path, os.getppid()), daemon=True).start()


def _let_go(owner: Any, name: str) -> None:
    """Close a pipe of a process of the whole run, which nonsense in the pipe would end."""
    file = getattr(owner, name, None)
    if file is not None:
        os.close(file)
        setattr(owner, name, None)


def _watch(log_path: str, server: int) -> None:
    """End this process when the forkserver, and so the run, ends, or when memory runs out."""
    while os.getppid() == server:
        with contextlib.suppress(OSError):
            if os.path.getsize(log_path) > LOG_BYTES:
                os.truncate(log_path, 0)
            if _resident() > MEMORY_BYTES:
                os._exit(OUT_OF_MEMORY)
        if os.path.exists(log_path + ASKED):
            with contextlib.suppress(Exception):
                _say_where(log_path)
        time.sleep(WATCH_SECONDS)
    os.killpg(0, signal.SIGKILL)


def _say_where(log_path: str) -> None:
    """Write the frames of all threads, the main one first, in the form of faulthandler."""
    frames = sys._current_frames()
    main = threading.main_thread().ident
    lines = []
    for thread in sorted(frames, key=lambda thread: thread != main):
        frame: FrameType | None = frames[thread]
        while frame:
            lines.append(f'  File "{frame.f_code.co_filename}", line {frame.f_lineno} in {frame.f_code.co_name}\n')
            frame = frame.f_back
    Path(log_path + ASKED).unlink()
    draft = Path(log_path + PLACE + ".draft")
    draft.write_text("".join(lines))
    draft.replace(log_path + PLACE)  # renamed only when complete, because the parent reads it as a whole


def _resident() -> int:
    """Bytes of this process in memory; raises OSError where the system does not say."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Python code inside the block that takes longer is ended by a TimeoutError."""

    def late(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"no answer within {seconds:g} s")

    earlier_handler = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, earlier_handler)
