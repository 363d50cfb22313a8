"""Triton's front end without what it does again for each kernel.

Triton 3.6 parses the source of every function that a kernel calls, and looks up the signature of
every operation, each time that it meets them; and it sets Python's filters of warnings anew for
each node of a source. Together that is a sixth of the front end's time.
"""

import contextlib
import inspect
import warnings
from functools import cache
from types import FunctionType, SimpleNamespace
from typing import Any


def parse_once(function_type: Any) -> None:
    """Let functions of Triton keep the tree of their source; nothing for a type that has none."""
    parse = getattr(function_type, "parse", None)
    if parse is None or hasattr(parse, "once"):
        return

    def once(self: Any) -> Any:
        kept = self.__dict__.get("_kept_tree")
        if kept is None or kept[0] != self._src:
            self._kept_tree = kept = self._src, parse(self)
        return kept[1]

    once.once = True  # type: ignore[attr-defined]
    function_type.parse = once


def look_up_once(generator: Any) -> None:
    """Let Triton's module `code_generator` keep the signatures of plain functions, which never
    change; a bound method would keep its tensor.
    """
    if not inspect.ismodule(getattr(generator, "inspect", None)):
        return
    kept = cache(inspect.signature)

    def signature(function: Any) -> inspect.Signature:
        return kept(function) if isinstance(function, FunctionType) else inspect.signature(function)

    generator.inspect = SimpleNamespace(**vars(inspect) | {"signature": signature})


def leave_filters(generator: Any) -> None:
    """Let Triton's module `code_generator` leave the filters of warnings as they are: those that it
    sets hide what `ast` says of old methods, which it does not call.
    """
    if not inspect.ismodule(getattr(generator, "warnings", None)):
        return
    same = contextlib.nullcontext()
    left = {"catch_warnings": lambda **_: same, "simplefilter": lambda *_, **__: None}
    generator.warnings = SimpleNamespace(**vars(warnings) | left)
