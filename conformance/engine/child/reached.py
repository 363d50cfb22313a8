"""The lines of an implementation's Python code that a case runs."""

import contextlib
import inspect
import os
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

from conformance.core.case import Case
from conformance.interface import Implementation


@contextlib.contextmanager
def reached(implementation: Implementation, case: Case, wanted: bool) -> Iterator[set[str]]:
    """The lines that run inside the block, as "file:line", of the function's top-level package.

    Other code only costs one call of the tracer per function. Nothing is traced if not `wanted`, or
    where the function is no Python code. Threads that the function starts are not traced.
    """
    lines: set[str] = set()
    home = _home(getattr(implementation.namespace, case.function, None)) if wanted else ""
    folder = os.path.dirname(home)

    def entered(frame: FrameType, event: str, argument: Any) -> Any:
        file = frame.f_code.co_filename
        if file != home and not file.startswith(home + os.sep):
            return None
        short = os.path.relpath(file, folder)

        def ran(frame: FrameType, event: str, argument: Any) -> Any:
            if event == "line":
                lines.add(f"{short}:{frame.f_lineno}")
            return ran

        return ran

    before = sys.gettrace()
    if home:
        sys.settrace(entered)
    try:
        yield lines
    finally:
        if home:
            sys.settrace(before)


def _home(function: Any) -> str:
    """The folder of the top-level package of the function, or its file outside any; "" if none."""
    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    place = code.co_filename if code else ""
    while place and os.path.exists(os.path.join(os.path.dirname(place), "__init__.py")):
        place = os.path.dirname(place)
    return place
