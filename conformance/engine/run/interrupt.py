"""Ends a run early with its verdict: SIGINT, SIGTERM and a time limit.

A signal is only noted while the run starts, ends or writes its reports. Inside `interruptible` it
raises KeyboardInterrupt. Python drops what is raised in a destructor or in a callback of the
garbage collector, so the run also calls `check` before each step. The first signal counts; later
ones change nothing.
"""

import contextlib
import signal
import time
from collections.abc import Iterator
from types import FrameType

_reason = ""  # why the run ends early; empty: it does not
_raising = False
_ends_at = 0.0  # by time.monotonic; 0: no limit
TIME_LIMIT = "the time limit"
NAMES = {signal.SIGINT: "SIGINT", signal.SIGTERM: "SIGTERM", signal.SIGALRM: TIME_LIMIT}


@contextlib.contextmanager
def noted() -> Iterator[None]:
    """Note signals inside the block, and do nothing else about them."""
    global _reason, _ends_at
    _reason, _ends_at = "", 0.0
    handlers = {number: signal.signal(number, _note) for number in NAMES}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        _reason, _ends_at = "", 0.0  # the next run in this process is another one


@contextlib.contextmanager
def raised() -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt inside the block, as SIGINT does."""
    handler = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)


def limit(seconds: float) -> None:
    """End the run `seconds` from now; 0: never."""
    global _ends_at
    _ends_at = time.monotonic() + seconds if seconds else 0.0


def reason() -> str:
    """The reason why the run ends early; empty if it does not."""
    return _reason


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """A signal raises KeyboardInterrupt here, also one that came before."""
    global _raising
    _raising = True
    try:
        check()
        if _ends_at:
            signal.setitimer(signal.ITIMER_REAL, max(_ends_at - time.monotonic(), 1e-3))
        yield
    finally:
        _raising = False
        signal.setitimer(signal.ITIMER_REAL, 0)


def check() -> None:
    """Raise KeyboardInterrupt inside `interruptible`, if a signal has come.

    Raises:
        KeyboardInterrupt: it has.
    """
    if _raising and _reason:
        raise KeyboardInterrupt


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Raise a signal's interrupt at the end of the block, when its new process has an owner."""
    global _raising
    was_raising, _raising = _raising, False
    yield
    _raising = was_raising
    check()


def _note(number: int, frame: FrameType | None) -> None:
    global _reason
    if not _reason:
        _reason = NAMES[signal.Signals(number)]
        check()
