"""The lines of an implementation's Python code that a case runs."""

import contextlib
import inspect
import os
import sys
from collections import Counter
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

from conformance.interface import Implementation

CALLS = 16  # calls of one function that are traced


class LineCoverage:
    """Collects the lines, as "file:line", of the function's top-level package.

    Only inside `recording`: other code would pay for one call of the tracer per function, and the
    reference may be the package itself. A function is traced until all its lines have run, and in
    its first calls: an interpreted kernel runs its lines once per program. Nothing is traced where
    the function is no Python code, nor are threads that it starts.
    """

    def __init__(self, implementation: Implementation, function: str) -> None:
        self.lines: set[str] = set()
        self._home = _home(getattr(implementation.namespace, function, None))
        self._left: dict[CodeType, set[int]] = {}  # lines that have not run
        self._calls: Counter[CodeType] = Counter()

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        outer_trace = sys.gettrace()
        if self._home:
            sys.settrace(self._entered)
        try:
            yield
        finally:
            if self._home:
                sys.settrace(outer_trace)

    def _entered(self, frame: FrameType, event: str, argument: Any) -> Any:
        code, file = frame.f_code, frame.f_code.co_filename
        if file != self._home and not file.startswith(self._home + os.sep):
            return None
        if code not in self._left:
            self._left[code] = {line for _, _, line in code.co_lines() if line} - {code.co_firstlineno}
        unvisited_lines = self._left[code]
        self._calls[code] += 1
        if not unvisited_lines or self._calls[code] > CALLS:
            return None
        short = os.path.relpath(file, os.path.dirname(self._home))

        def ran(frame: FrameType, event: str, argument: Any) -> Any:
            if event == "line" and frame.f_lineno in unvisited_lines:
                unvisited_lines.discard(frame.f_lineno)
                self.lines.add(f"{short}:{frame.f_lineno}")
            return ran

        return ran


def _home(function: Any) -> str:
    """The folder of the function's top-level package, or its file; "" if it has no code."""
    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    path = code.co_filename if code else ""
    while path and os.path.exists(os.path.join(os.path.dirname(path), "__init__.py")):
        path = os.path.dirname(path)
    return path
