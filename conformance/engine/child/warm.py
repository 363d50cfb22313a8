"""What Triton does once, done before a process has its first case.

In each process Triton hashes itself. For all processes together, one builds the C extension of its
driver and the compiled headers of launchers. That takes seconds, while the other processes draw
cases; left to the first kernels, every process would wait for it.
"""

import contextlib
import fcntl
import os
import sys
from typing import Any


def warm_up(folder: str) -> None:
    """Prepare Triton's compiler, where it compiles; what one process builds is kept in `folder`.

    What fails here fails again with the implementation's first kernel, which then reports it.
    """
    triton: Any = sys.modules.get("triton")
    if triton is None or triton.knobs.runtime.interpret:
        return
    with contextlib.suppress(Exception):
        triton.runtime.cache.triton_key()
    with open(os.path.join(folder, "warm.lock"), "a") as lock, contextlib.suppress(Exception):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.getsize(lock.name) == 0:
            lock.write("done")
            _empty_kernel(triton)[(1,)]()


def _empty_kernel(triton: Any) -> Any:
    def nothing():  # type: ignore[no-untyped-def]
        pass

    return triton.jit(nothing)
