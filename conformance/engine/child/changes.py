"""Finds the changes of an implementation's source that would change the value of their expression.

A copy of the source (`conformance.mutants.comparing`) calls `compared` in place of each expression.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch

PLAIN = (int, float, str, type(None), torch.dtype, torch.device)  # values that are the same if they are equal

_different: set[str] = set()
_inside = threading.local()  # true while a change is computed, so that the expressions which it calls are not compared


def compared(original: Callable[[], Any], tested: bool, *changes: tuple[str, Callable[[], Any]]) -> Any:
    """The value of an expression; remembers the changes, by name, that have another value here.

    Args:
        tested: only the truth of the value is used.
    """
    value = original()
    if not getattr(_inside, "change", False):
        _inside.change = True
        try:
            _different.update(
                name for name, change in changes if name not in _different and not _same(value, change, tested)
            )
        finally:
            _inside.change = False
    return value


def take() -> set[str]:
    """The changes with another value since the last call."""
    names = set(_different)
    _different.clear()
    return names


def _same(value: Any, change: Callable[[], Any], tested: bool) -> bool:
    try:
        changed_value = change()
        return bool(value) == bool(changed_value) if tested else _equal(value, changed_value)
    except Exception:
        return False


def _equal(value: Any, second_value: Any) -> bool:
    if value is second_value:
        return True
    if type(value) is not type(second_value):
        return False
    if isinstance(value, tuple):
        return len(value) == len(second_value) and all(map(_equal, value, second_value))
    return isinstance(value, PLAIN) and repr(value) == repr(second_value)  # 0.0 is not -0.0
