"""Launches of kernels that were compiled before for the same kinds of arguments.

At every launch Triton binds and specialises the arguments, and compares every constant that the
kernel reads. The kernels in Gluon have many constants, so that this takes most of a launch's time
on the host.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from moe_fast.launch import operators
from moe_fast.launch.backend import launch_on

ALIGNMENT = 16  # bytes; Triton specialises a kernel for addresses and integers that it divides
INT32 = range(-(1 << 31), 1 << 31)
_compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}


def launch(kernel: Any, grid: tuple[int]) -> Callable[..., None]:
    """`operators.launch` of a kernel whose first argument is a descriptor, and whose constants are
    all passed by keyword, after the other arguments.

    The first launch goes through Triton. Later launches whose arguments have the same dtypes and
    alignments, the same classes of integers and equal constants use the kernel that the first one
    compiled.
    """
    return _Launch(kernel, grid[0])


class _Launch:
    """One launch."""

    def __init__(self, kernel: Any, programs: int) -> None:
        self.kernel, self.programs = kernel, programs

    def __call__(self, *args: Any, **constants: Any) -> None:
        kernel, programs, like = self.kernel, self.programs, args[0].base
        if not (operators.has_memory() and programs):
            operators.launch(kernel, (programs,), like)  # nothing, or an error
            return
        key = (kernel, like.device, *map(_kind, args), *constants.values())
        if key in _compiled:
            compiled, constant_values = _compiled[key]
            with launch_on(like):
                compiled[programs, 1, 1](*args, *constant_values)
            return
        compiled = operators.launch(kernel, (programs,), like)(*args, **constants)
        _compiled[key] = compiled, tuple(constants[name] for name in kernel.arg_names[len(args) :])


def _kind(x: Any) -> Any:
    """Everything about an argument that Triton specialises a kernel for."""
    if isinstance(x, Tensor):
        return x.dtype, x.data_ptr() % ALIGNMENT == 0
    if type(x) is int:
        return 1 if x == 1 else (x % ALIGNMENT == 0, x in INT32)
    if isinstance(x, TensorDescriptor):
        return x.base.dtype, *x.block_shape, x.layout
    if isinstance(x, tuple):
        return tuple(map(_kind, x))
    return x
