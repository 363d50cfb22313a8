"""Watches Triton's compiler: which kernels a case compiles, each in one process at a time.

Ranks reach a kernel at the same time, and so do other children. The second one waits, then finds
the kernel in Triton's cache on disk.
"""

import fcntl
import inspect
import os
import re
import sys
import zlib
from typing import IO, Any

from conformance.engine.child import configurations
from conformance.engine.child.front_end import leave_filters, look_up_once, parse_once
from conformance.engine.child.launchers import share_launchers
from conformance.private_parts import available


class Compiler:
    """`kernels` are the specialisations compiled or loaded since `take`."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._lock: IO[str] | None = None
        self._kernels: list[str] = []
        if "triton" in sys.modules:
            runtime = sys.modules["triton"].knobs.runtime
            runtime.jit_cache_hook, runtime.jit_post_compile_hook = self._begin, self._end
            configurations.install()
            jit: Any = sys.modules.get("triton.runtime.jit")
            if available("triton.runtime.jit.DependenciesFinder._update_hash"):
                hash_callees_first(jit.DependenciesFinder)
            if available("triton.runtime.jit.JITFunction.parse"):
                parse_once(getattr(jit, "JITCallable", jit.JITFunction))
            generator = sys.modules.get("triton.compiler.code_generator")  # later versions load it late
            if available("triton.compiler.code_generator.inspect"):
                look_up_once(generator)
            if available("triton.compiler.code_generator.warnings"):
                leave_filters(generator)
            share_launchers(folder)

    def take(self) -> list[str]:
        """The kernels since the last call. Ends the turn of a compilation that failed."""
        self._release()
        kernels, self._kernels = self._kernels, []
        return kernels

    def _begin(self, *, key: str, fn: Any, **_: Any) -> bool:
        self._release()
        self._lock = open(os.path.join(self._folder, f"{_name(key, fn)}.lock"), "w")  # noqa: SIM115
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        configurations.watch(getattr(fn, "jit_function", None))
        return False  # compile it

    def _end(self, *, key: str, fn: Any, **_: Any) -> None:
        self._release()
        self._kernels.append(_name(key, fn))

    def _release(self) -> None:
        if self._lock:
            self._lock.close()  # and with it the lock
            self._lock = None


def kernels_of(package: str) -> list[str]:
    """The names of the kernels of a package: Triton functions in its modules that are loaded, which
    no other one of them calls. Without a compiler there are none.
    """
    jit: Any = sys.modules.get("triton.runtime.jit")
    jit = jit if available("triton.runtime.jit.KernelInterface") and hasattr(jit, "JITFunction") else None
    sources: dict[tuple[str, str], str] = {}
    for name, module in list(sys.modules.items()) if jit else ():
        for value in list(vars(module).values()) if f"{name}.".startswith(f"{package}.") else ():
            while isinstance(value, jit.KernelInterface) and not isinstance(value, jit.JITFunction):
                value = value.fn  # of a tuner
            if isinstance(value, jit.JITFunction) and value.fn.__module__ == name:
                sources[name, value.fn.__qualname__] = inspect.getsource(value.fn)
    words = {place: set(re.findall(r"\w+", source)) for place, source in sources.items()}
    return sorted({name for place, name in sources if all(name not in words[x] for x in words if x[1] != name)})


def hash_callees_first(finder: Any) -> None:
    """Make the hash of a kernel, by which Triton's cache knows it, the same in every process.

    A hash covers the constants that the kernel and its callees read. Triton 3.6 merges a callee's
    constants before it has looked for them, so a caller's hash depends on which kernels the process
    met before, and most kernels were compiled several times. Here the callee is hashed first, as
    later versions of Triton do.

    Args:
        finder: Triton's `DependenciesFinder`, patched once; unchanged where it has another form.
    """
    update = getattr(finder, "_update_hash", None)
    if update is None or hasattr(update, "callees_first"):
        return

    def callees_first(self: Any, func: Any) -> None:
        func.cache_key  # noqa: B018  (computes the hash, and finds the constants)
        update(self, func)

    callees_first.callees_first = True  # type: ignore[attr-defined]
    finder._update_hash = callees_first


def _name(key: str, fn: Any) -> str:
    return f"{fn.name} {zlib.crc32(str(key).encode()):08x}"
