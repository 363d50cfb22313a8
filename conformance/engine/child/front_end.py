"""Makes Triton's front end faster, by keeping what it computes anew for each kernel.

Triton 3.6 parses the source of every function that a kernel calls, and looks up the signature of
every operation, each time that it meets them. It also sets Python's filters of warnings anew for
each node of a source. Together this is a sixth of the front end's time.
"""

import contextlib
import inspect
import warnings
from functools import cache
from types import FunctionType, SimpleNamespace
from typing import Any


def parse_once(function_type: Any) -> None:
    """Keep the syntax tree of each Triton function. A type without a tree stays as it is."""
    parse = getattr(function_type, "parse", None)
    if parse is None or hasattr(parse, "once"):
        return

    def once(self: Any) -> Any:
        cached_tree = self.__dict__.get("_kept_tree")
        if cached_tree is None or cached_tree[0] != self.src:
            self._kept_tree = cached_tree = self.src, parse(self)
        return cached_tree[1]

    once.once = True  # type: ignore[attr-defined]
    function_type.parse = once


def look_up_once(generator: Any) -> None:
    """Keep the signatures of plain functions in Triton's module `code_generator`, because they
    never change. Those of bound methods are not kept, because a method would keep its tensor alive.
    """
    if not inspect.ismodule(getattr(generator, "inspect", None)):
        return
    cached_signature = cache(inspect.signature)

    def signature(function: Any) -> inspect.Signature:
        return cached_signature(function) if isinstance(function, FunctionType) else inspect.signature(function)

    generator.inspect = SimpleNamespace(**vars(inspect) | {"signature": signature})


def leave_filters(generator: Any) -> None:
    """Keep Triton's module `code_generator` from setting filters of warnings.

    Its filters hide what `ast` says of deprecated methods, which it does not call.
    """
    if not inspect.ismodule(getattr(generator, "warnings", None)):
        return
    same = contextlib.nullcontext()
    no_filters = {"catch_warnings": lambda **_: same, "simplefilter": lambda *_, **__: None}
    generator.warnings = SimpleNamespace(**vars(warnings) | no_filters)
