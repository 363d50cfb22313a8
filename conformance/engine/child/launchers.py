"""Triton's launchers: each is compiled once, by one process, and not optimised.

Triton 3.6 calls a kernel by a C extension, one per signature, which the C compiler makes when a
process first launches it. Optimisation doubles the compiler's time, and several processes make the
same one. Versions with one launcher for all signatures need none of this.
"""

import fcntl
import hashlib
import os
import shutil
import sys
from pathlib import Path
from typing import Any


def share_launchers(folder: str) -> None:
    """Keep the launchers of this process in `folder`, and take those of others from there.

    Does nothing for a Triton without launchers per signature, and where the implementation has
    chosen its own way to build them.
    """
    build: Any = sys.modules["triton.runtime.build"]
    knobs = sys.modules["triton"].knobs.build
    if not hasattr(sys.modules.get("triton.backends.nvidia.driver"), "make_launcher") or knobs.impl:
        return

    def shared(name: str, source: str, *places: Any) -> str:
        digest = hashlib.sha256(Path(source).read_bytes()).hexdigest()[:16]
        kept = os.path.join(folder, f"{name} {digest}.so")
        with open(f"{kept}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not os.path.exists(kept):
                knobs.impl = None
                try:
                    made = build._build(name, source, *places, ["-O0"])  # the last -O counts
                finally:
                    knobs.impl = shared
                shutil.copy(made, f"{kept}.new")
                os.replace(f"{kept}.new", kept)
        return kept

    knobs.impl = shared
