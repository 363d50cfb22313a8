"""The source code that a patch was written for."""

import hashlib
import importlib
import inspect
from collections.abc import Iterable
from operator import attrgetter
from typing import Any


def digest(names: Iterable[str]) -> str:
    """A digest of the functions' source code; "" if one is missing.

    A name is `module:attribute.attribute`.
    """
    total = hashlib.sha256()
    try:
        for name in names:
            total.update(inspect.getsource(_function(name)).encode())
    except (ImportError, AttributeError, OSError, TypeError):
        return ""
    return total.hexdigest()[:16]


def _function(name: str) -> Any:
    module, _, path = name.partition(":")
    function = attrgetter(path)(importlib.import_module(module))
    return function.fget if isinstance(function, property) else function
