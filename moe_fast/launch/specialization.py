"""Kernels that are compiled for few classes of integers.

Triton compiles a kernel anew for each class of each integer argument: 1, divisible by 16, of 64
bits, or other. But only one distinction makes a kernel faster: whether rows are contiguous, and
their stride and their width are both divisible by 16, so that loads and stores are of whole lines.
If one of these does not hold, the others change little.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import triton
import triton.language as tl
from triton.runtime.jit import KernelInterface

DIVISOR = 16  # Triton specialises a kernel for integers that it divides
STRIDED = 0b11  # the bits of a version that knows neither the strides along rows nor the first group


def jit(
    *, together: Sequence[tuple[str, ...]], along: Sequence[str] = (), do_not_specialize: Sequence[str] = ()
) -> Callable[[Callable[..., Any]], "Kernel"]:
    """`triton.jit`, compiled in few versions. For each group of integers in `together` a version is
    compiled for the case that all of them are divisible by 16, and one for which nothing is known
    of them. `along` names the strides along the rows of the first group, 0 without a tensor: a
    version is compiled for the case that all of them are 1, and one for which nothing is known of
    these strides nor of the first group. A constant may stand among the strides: the number of
    columns that share an element.

    These arguments are positional in a launch.
    """

    def decorated(function: Callable[..., Any]) -> Kernel:
        return Kernel(function, together, along, do_not_specialize)

    return decorated


class Kernel(KernelInterface[Any]):
    """A kernel in several versions. `fn` is the version for which most is known, under the name by
    which Triton's wrappers call what they wrap.
    """

    def __init__(
        self, function: Callable[..., Any], together: Sequence[tuple[str, ...]], along: Sequence[str],
        never: Sequence[str],
    ) -> None:  # fmt: skip
        self.function, self.together, self.never = function, together, never
        # Triton refuses to leave constants unspecialised
        self.along = [name for name in along if function.__annotations__.get(name) is not tl.constexpr]
        self.__name__ = function.__name__
        self.fn = _version(self, 0)
        index_of = self.fn.arg_names.index
        self._along_at = [index_of(name) for name in along]
        self._together_at = [(index_of(name), 2 << i) for i, group in enumerate(together) for name in group]

    def run(self, *args: Any, **settings: Any) -> Any:
        unknown = 0  # every launch comes through here, and plain loops cost the least
        for index in self._along_at:
            if args[index] > 1:
                unknown = STRIDED
        for index, bit in self._together_at:
            if args[index] % DIVISOR:
                unknown |= bit
        return _version(self, unknown).run(*args, **settings)


@cache
def _version(kernel: Kernel, unknown: int) -> Any:
    """The version for a set of bits. Bit 0 of `unknown` is set if not all rows are contiguous, bit
    i + 1 if group i is not known to be divisible.
    """
    names = [name for i, group in enumerate(kernel.together) if unknown & 2 << i for name in group]
    return triton.jit(
        kernel.function,
        do_not_specialize=[*kernel.never, *names, *(kernel.along if unknown & 1 else ())],
        do_not_specialize_on_alignment=kernel.along,
    )
