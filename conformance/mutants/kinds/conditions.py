"""Parts of planted defects that only some calls show: by a combination of options, a size, a value.

The right function runs first in every call, so that illegal calls are refused as before.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from conformance.mutants.defect import Wrapper, with_values
from conformance.mutants.kinds.gradients import read_as_contiguous, with_backward

Where = Callable[..., Any]  # (*inputs, **settings) -> whether the defect shows
Mistake = Callable[..., Any]  # (function, its right result, *inputs, **settings) -> the result


def only(where: Where, mistake: Mistake) -> Wrapper:
    """The function, with the mistake where where(*inputs, **settings)."""

    def planted(function: Wrapper, *inputs: Any, **settings: Any) -> Any:
        result = function(*inputs, **settings)
        return mistake(function, result, *inputs, **settings) if where(*inputs, **settings) else result

    return planted


def called_with(**changes: Any) -> Mistake:
    """The result of the call with other settings; a function makes one of the caller's."""

    def mistake(function: Wrapper, result: Any, *inputs: Any, **settings: Any) -> Any:
        new = {name: x(settings.get(name)) if callable(x) else x for name, x in changes.items()}
        return function(*inputs, **settings | new)

    return mistake


def falsy(name: str, default: Any = None) -> Wrapper:
    """`setting or default`: a setting of 0 is taken for none."""
    return only(lambda *inputs, **settings: settings.get(name) == 0, called_with(**{name: default}))


def reads_flat(*names: str, position: int | None = None) -> Wrapper:
    """The settings, or the input at that place, are taken for contiguous."""

    def flat(x: Any) -> Any:
        if isinstance(x, Tensor) and x.requires_grad:
            return with_values(x, lambda _: read_as_contiguous(x))
        return read_as_contiguous(x) if isinstance(x, Tensor) else x

    def mistake(function: Wrapper, result: Any, *inputs: Any, **settings: Any) -> Any:
        changed = [flat(x) if i == position else x for i, x in enumerate(inputs)]
        return function(*changed, **settings | {name: flat(settings[name]) for name in names if name in settings})

    def strided(*inputs: Any, **settings: Any) -> bool:
        tensors = [x for i, x in enumerate(inputs) if i == position] + [settings.get(name) for name in names]
        return any(isinstance(x, Tensor) and not x.is_contiguous() for x in tensors)

    return only(strided, mistake)


def cotangent_read_flat(function: Wrapper, *inputs: Any, **settings: Any) -> Any:
    """The backward takes the cotangent for contiguous."""
    out = function(*inputs, **settings)
    return with_backward(out, out.detach(), read_as_contiguous) if out.requires_grad else out
