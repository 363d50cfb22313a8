"""Calls that are known to be legal, because a call like them was checked before.

Checks read shapes, dtypes, devices and settings, but never values, so that all calls that are alike
in these pass or fail together. A layer checks the arguments of each of its stages in its first
call, and skips the checks in later calls like it.
"""

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, ParamSpec

P = ParamSpec("P")
Key = tuple[Any, ...]
MOST = 256  # calls that are remembered
_passed: dict[Key, Any] = {}
_known: ContextVar[bool] = ContextVar("within a call that is known to be legal", default=False)


def unless_known(check: Callable[P, None]) -> Callable[P, None]:
    """Decorate a check of shapes, dtypes, devices and settings: it is skipped within a call that is
    known to be legal.
    """

    @functools.wraps(check)
    def checked(*args: P.args, **kwargs: P.kwargs) -> None:
        if not _known.get():
            check(*args, **kwargs)

    return checked


class CheckedOnce:
    """A context within which no check runs, if an earlier call with this key has ended without an
    error. The key is made of everything that the checks may read; without one they always run.
    """

    def __init__(self, key: Key | None, settings: Any) -> None:
        self.key, self.settings, self.is_known = key, settings, key in _passed

    def __enter__(self) -> None:
        self.token = _known.set(self.is_known)

    def __exit__(self, error: Any, *_: Any) -> None:
        _known.reset(self.token)
        if error is None and self.key is not None and not self.is_known:
            if len(_passed) >= MOST:
                _passed.clear()
            _passed[self.key] = self.settings  # kept alive, so that no other object gets its identity
