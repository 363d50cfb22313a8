"""Parts of planted defects that only some calls show: by a combination of options, a size, a value.

The right function runs first in every call, so that illegal calls are refused as before.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from conformance.mutants.defect import Wrapper, with_values
from conformance.mutants.kinds.gradients import read_as_contiguous, with_backward

Where = Callable[..., Any]  # (*inputs, **settings) -> whether the defect shows
Wrong = Callable[..., Any]  # (function, its right result, *inputs, **settings) -> the result


def only(where: Where, wrong: Wrong) -> Wrapper:
    """The function, wrong where where(*inputs, **settings)."""

    def planted(function: Wrapper, *inputs: Any, **settings: Any) -> Any:
        right = function(*inputs, **settings)
        return wrong(function, right, *inputs, **settings) if where(*inputs, **settings) else right

    return planted


def always(*inputs: Any, **settings: Any) -> bool:
    return True


def given(*names: str) -> Where:
    """Whether the call gives all these settings, with a value other than None and False."""
    return lambda *inputs, **settings: all(_is_given(settings.get(name)) for name in names)


def _is_given(x: Any) -> bool:
    return x is not None and x is not False and not (isinstance(x, (tuple, list)) and not x)


def called_with(**changes: Any) -> Wrong:
    """The result of the call with other settings; a function makes one of the given one."""

    def wrong(function: Wrapper, right: Any, *inputs: Any, **settings: Any) -> Any:
        new = {name: x(settings.get(name)) if callable(x) else x for name, x in changes.items()}
        return function(*inputs, **settings | new)

    return wrong


def falsy(name: str, default: Any = None) -> Wrapper:
    """`setting or default`: a setting of 0 is taken for none."""
    return only(lambda *inputs, **settings: settings.get(name) == 0, called_with(**{name: default}))


def reads_flat(*names: str, place: int | None = None) -> Wrapper:
    """The settings, or the input at that place, are taken for contiguous."""

    def flat(x: Any) -> Any:
        return (
            with_values(x, lambda _: read_as_contiguous(x))
            if isinstance(x, Tensor) and x.requires_grad
            else (read_as_contiguous(x) if isinstance(x, Tensor) else x)
        )

    def wrong(function: Wrapper, right: Any, *inputs: Any, **settings: Any) -> Any:
        changed = [flat(x) if i == place else x for i, x in enumerate(inputs)]
        return function(*changed, **settings | {name: flat(settings[name]) for name in names if name in settings})

    def strided(*inputs: Any, **settings: Any) -> bool:
        seen = [x for i, x in enumerate(inputs) if i == place] + [settings.get(name) for name in names]
        return any(isinstance(x, Tensor) and not x.is_contiguous() for x in seen)

    return only(strided, wrong)


def cotangent_read_flat(function: Wrapper, *inputs: Any, **settings: Any) -> Any:
    """The backward takes the cotangent for contiguous."""
    out = function(*inputs, **settings)
    return with_backward(out, out.detach(), read_as_contiguous) if out.requires_grad else out


def in_place(change: Callable[..., None]) -> Wrapper:
    """The function, after which change(*inputs, **settings) writes to the caller's tensors."""

    def planted(function: Wrapper, *inputs: Any, **settings: Any) -> Any:
        out = function(*inputs, **settings)
        with torch.no_grad():
            change(*inputs, **settings)
        return out

    return planted


@contextmanager
def replaced(module: str, **wrong: Any) -> Iterator[None]:
    """The reference's module with these in the place of its own; each gets the right one first."""
    owner = import_module(module)
    right = {name: getattr(owner, name) for name in wrong}

    def planted(name: str) -> Any:
        return lambda *inputs, **settings: wrong[name](right[name], *inputs, **settings)

    try:
        for name in wrong:
            setattr(owner, name, planted(name))
        yield
    finally:
        for name, original in right.items():
            setattr(owner, name, original)


def inside(module: str, **wrong: Any) -> Wrong:
    """The function with other parts of the reference's module: of `moe_ref` alone."""

    def planted(function: Wrapper, right: Any, *inputs: Any, **settings: Any) -> Any:
        with replaced(module, **wrong):
            return function(*inputs, **settings)

    return planted
