"""Lets only one process at a time have worlds on this machine's GPUs, because ranks that wait for
each other there need the GPUs for themselves. All pools of a process share its turn.
"""

import fcntl
import os
import tempfile
import threading
from typing import Any

PATH = os.path.join(tempfile.gettempdir(), "moe-conformance-gpus.lock")

_mutex = threading.Lock()
_held: Any = None
_holders = 0


def take() -> None:
    """Wait until no other process has worlds on GPUs."""
    global _held, _holders
    with _mutex:
        if not _holders:
            _held = open(PATH, "w")  # noqa: SIM115  (held until the last one gives it back)
            fcntl.flock(_held, fcntl.LOCK_EX)
        _holders += 1


def give_back() -> None:
    """Called once for each `take`."""
    global _held, _holders
    with _mutex:
        _holders -= 1
        if not _holders:
            _held.close()
            _held = None
