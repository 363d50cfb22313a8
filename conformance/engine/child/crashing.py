"""An implementation of every function, which kills its process when it is called: the doctor judges it."""

import ctypes
from collections.abc import Callable
from typing import Any

from conformance.catalogue import CONTRACTS


def _crash(*arguments: Any, **settings: Any) -> None:
    ctypes.string_at(1)


def __getattr__(name: str) -> Callable[..., None]:
    if name not in CONTRACTS:
        raise AttributeError(name)
    return _crash
