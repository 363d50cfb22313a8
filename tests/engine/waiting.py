"""Waits for what other processes do, however slow the machine is."""

import os
import time
from collections.abc import Callable, Iterable

BACKSTOP_SECONDS = 600.0  # ends a test whose claim never comes true; far above what a slow machine needs


def until(claim: Callable[[], object], seconds: float = BACKSTOP_SECONDS) -> bool:
    """Whether the claim comes true."""
    deadline = time.monotonic() + seconds
    while not (result := claim()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return bool(result)


def all_gone(processes: Iterable[int]) -> bool:
    """Whether the processes end, and are reaped: the forkserver takes a moment for that."""
    remaining = list(processes)
    return until(lambda: not any(os.path.exists(f"/proc/{process}") for process in remaining))
