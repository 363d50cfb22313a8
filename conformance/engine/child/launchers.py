"""Triton's launchers: each is built once for all processes, with a compiled header, not optimised.

Triton 3.6 calls a kernel by a C extension, one per signature, which the C compiler makes when a
process first launches it. Its time is half optimisation and a third Python's header, and several
processes make the same one. Versions with one launcher for all signatures need none of this.
"""

import fcntl
import hashlib
import os
import shutil
import sys
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from typing import Any

from conformance.private_parts import available

PLAIN = "-O0"  # of two options -O the last one counts


def share_launchers(folder: str) -> None:
    """Keep the launchers of this process in `folder`, and take those of others from there.

    Does nothing for a Triton without launchers per signature, and where the implementation has
    chosen its own way to build them.
    """
    build: Any = sys.modules.get("triton.runtime.build")
    knobs = sys.modules["triton"].knobs.build
    per_signature = hasattr(sys.modules.get("triton.backends.nvidia.driver"), "make_launcher")
    if not per_signature or not available("triton.runtime.build._build") or knobs.impl:
        return

    def built(name: str, source: str, *places: Any) -> str:
        text = Path(source).read_text()
        begin = "".join(takewhile(lambda line: line.startswith("#") or line.isspace(), text.splitlines(True)))

        def compiled(path: str, *flags: str) -> str:
            knobs.impl = None
            try:
                return str(build._build(name, path, *places, [PLAIN, *flags]))
            finally:
                knobs.impl = built

        def precompiled(header: str) -> str:
            Path(header).write_text(begin)
            return compiled(header)

        header = _once(folder, begin, ".h", precompiled, made=".gch")
        return _once(folder, text, ".so", lambda _: compiled(source, "-include", header))

    knobs.impl = built


def _once(folder: str, text: str, suffix: str, make: Callable[[str], str], made: str = "") -> str:
    """The path in `folder` of what is made of this text. One process calls `make` with it, and the
    file that this returns is kept there, with `made` at the end of its name.
    """
    path = os.path.join(folder, hashlib.sha256(text.encode()).hexdigest()[:16] + suffix)
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not os.path.exists(path + made):
            shutil.copy(make(path), f"{path}.new")
            os.replace(f"{path}.new", path + made)
    return path
