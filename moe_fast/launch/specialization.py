"""Kernels that are compiled for few classes of integers.

Triton compiles a kernel anew for each class of each integer: 1, divisible by 16, of 64 bits, other.
Loads and stores are wide where rows are contiguous and both their stride and their width are
divisible. Where either is not, the other's class changes nothing, and a width of 1 never does.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import triton
from triton.runtime.jit import KernelInterface

DIVISOR = 16  # that Triton specialises integers for


def jit(
    *, together: Sequence[tuple[str, ...]], along: Sequence[str] = (), do_not_specialize: Sequence[str] = ()
) -> Callable[[Callable[..., Any]], "Kernel"]:
    """`triton.jit` of a kernel that knows of each group of integers `together` that all of them are
    divisible, or nothing. Strides `along` rows, 0 for no tensor, are known if they are 1; unless
    all of these rows are contiguous, so are the strides in groups, which then may be the
    contiguous ones.

    These arguments are positional in a launch, and strides are named so.
    """

    def decorated(function: Callable[..., Any]) -> Kernel:
        return Kernel(function, together, along, do_not_specialize)

    return decorated


class Kernel(KernelInterface[Any]):
    """A kernel in versions; `fn` knows most, as Triton's wrappers call what they wrap."""

    def __init__(
        self, function: Callable[..., Any], together: Sequence[tuple[str, ...]], along: Sequence[str],
        never: Sequence[str],
    ) -> None:  # fmt: skip
        self.function, self.together, self.along, self.never = function, together, along, never
        self.__name__ = function.__name__
        self.fn = _version(self, 0)
        place = self.fn.arg_names.index
        self._along_at = [place(name) for name in along]
        self._together_at = [(place(name), 2 << i) for i, group in enumerate(together) for name in group]

    def run(self, *args: Any, **settings: Any) -> Any:
        unknown = 0  # every launch comes by here: plain loops cost least
        for place in self._along_at:
            if args[place] > 1:
                unknown = 1
        for place, bit in self._together_at:
            if args[place] % DIVISOR:
                unknown |= bit
        return _version(self, unknown).run(*args, **settings)


@cache
def _version(kernel: Kernel, unknown: int) -> Any:
    """Bit 0 of `unknown` is set if not all rows are contiguous, bit i + 1 if group i is not
    divisible.
    """
    names = [name for i, group in enumerate(kernel.together) if unknown & 2 << i for name in group]
    maybe_one = [name for name in names if name.startswith("stride_") and unknown & 1]
    return triton.jit(
        kernel.function,
        do_not_specialize=[*kernel.never, *(name for name in names if name not in maybe_one)],
        do_not_specialize_on_alignment=[*kernel.along, *maybe_one],
    )
