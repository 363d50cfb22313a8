"""Does once, before the first case of a process, what Triton does once.

In each process Triton computes a digest of its own files. One process builds the C extension of the
driver and the compiled headers of launchers for all processes. This takes seconds, and happens
while other processes draw cases; otherwise every process would wait for it at its first kernel.
"""

import contextlib
import fcntl
import os
import sys
from typing import Any


def warm_up(folder: str) -> None:
    """Prepare Triton's compiler, if kernels are compiled.

    What one process builds is stored in `folder`. An error is ignored here, because the
    implementation's first kernel fails in the same way and reports it.
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

            def nothing():  # type: ignore[no-untyped-def]
                pass

            triton.jit(nothing)[(1,)]()
