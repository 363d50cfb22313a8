"""Calls that are known to be legal, because a call like them was checked before.

Checks read shapes, dtypes, devices and settings, but never values, so that all calls that are alike
in these pass or fail together. A layer checks the arguments of each of its stages in its first
call, and skips the checks in later calls like it.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ParamSpec

from torch import Tensor

from moe_fast.launch.operators import has_memory

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


def key_of(settings: Any, *tensors: Tensor | None, **options: Any) -> Key | None:
    """A key of everything that the checks of a call may read. `settings` are recognised by their
    identity, and must not change; options by their values. None for tensors without memory, whose
    sizes may be symbols.
    """
    if not has_memory():
        return None
    read = [None if x is None else (x.shape, x.dtype, x.device, x.requires_grad) for x in tensors]
    return id(settings), *read, *options.values()


@contextmanager
def checked_once(key: Key | None, settings: Any) -> Iterator[None]:
    """A context within which no check runs, if an earlier call with this key has ended without an
    error.
    """
    is_known = key in _passed
    token = _known.set(is_known)
    try:
        yield
    finally:
        _known.reset(token)
    if key is not None and not is_known:
        if len(_passed) >= MOST:
            _passed.clear()
        _passed[key] = settings  # kept alive, so that no other object gets its identity
