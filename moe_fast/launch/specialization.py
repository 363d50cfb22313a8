"""Kernels that are compiled for few classes of integers.

Triton compiles a kernel anew for each class of each integer: 1, divisible by 16, of 64 bits, other.
Loads and stores are wide where rows are contiguous and both their stride and their width are
divisible. Where either is not, the other's class changes nothing, and a width of 1 never does.
"""

from collections.abc import Callable, Sequence
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
    """A version of a kernel for whether rows are contiguous, and which groups are divisible."""

    def __init__(
        self, function: Callable[..., Any], together: Sequence[tuple[str, ...]], along: Sequence[str],
        never: Sequence[str],
    ) -> None:  # fmt: skip
        self._versions: dict[tuple[bool, ...], Any] = {}
        self._function, self._together, self._along, self._never = function, together, along, never
        self.__name__ = function.__name__
        self.fn = self._version(True, *(True for _ in together))  # what Triton calls the function of a wrapper
        place = self.fn.arg_names.index
        self._along_at = [place(name) for name in along]
        self._together_at = [[place(name) for name in group] for group in together]

    def run(self, *args: Any, **settings: Any) -> Any:
        contiguous = all(args[place] <= 1 for place in self._along_at)
        divisible = [not any(args[place] % DIVISOR for place in group) for group in self._together_at]
        return self._version(contiguous, *divisible).run(*args, **settings)

    def _version(self, contiguous: bool, *divisible: bool) -> Any:
        known = contiguous, *divisible
        if known not in self._versions:
            unknown = [name for group, are in zip(self._together, divisible, strict=True) if not are for name in group]
            maybe_one = [name for name in unknown if name.startswith("stride_") and not contiguous]
            never = [*self._never, *(name for name in unknown if name not in maybe_one)]
            jitted = triton.jit(
                self._function, do_not_specialize=never, do_not_specialize_on_alignment=[*self._along, *maybe_one]
            )
            self._versions[known] = jitted
        return self._versions[known]
