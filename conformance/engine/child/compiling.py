"""Watches Triton's compiler: which kernels a case compiles, each in one process at a time.

Ranks reach a kernel at the same time, and so do other children. The second one waits, then finds
the kernel in Triton's cache on disk.
"""

import fcntl
import os
import sys
import zlib
from typing import IO, Any


class Compiler:
    """`kernels` are the specialisations compiled or loaded since `take`."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._lock: IO[str] | None = None
        self._kernels: list[str] = []
        if "triton" in sys.modules:
            runtime = sys.modules["triton"].knobs.runtime
            runtime.jit_cache_hook, runtime.jit_post_compile_hook = self._begin, self._end

    def take(self) -> list[str]:
        """The kernels since the last call. Ends the turn of a compilation that failed."""
        self._release()
        kernels, self._kernels = self._kernels, []
        return kernels

    def _begin(self, *, key: str, fn: Any, **_: Any) -> bool:
        self._release()
        self._lock = open(os.path.join(self._folder, f"{_name(key, fn)}.lock"), "w")  # noqa: SIM115
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        return False  # compile it

    def _end(self, *, key: str, fn: Any, **_: Any) -> None:
        self._release()
        self._kernels.append(_name(key, fn))

    def _release(self) -> None:
        if self._lock:
            self._lock.close()  # and with it the lock
            self._lock = None


def _name(key: str, fn: Any) -> str:
    return f"{fn.name} {zlib.crc32(str(key).encode()):08x}"
