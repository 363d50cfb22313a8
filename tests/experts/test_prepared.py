"""Later launches of a kernel go past Triton's binding only where it would find the same kernel."""

import pytest
import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from moe_fast.launch import prepared
from moe_fast.launch.descriptors import layout_of
from tests.common.fast import interpreted

pytestmark = interpreted
MEMORY = torch.zeros(64, 64, dtype=torch.bfloat16)


class Kernel:
    """Compiles for each launch through Triton, and notes with which arguments it runs."""

    arg_names = ("desc", "x_ptr", "n", "pair", "BLOCK", "num_warps")

    def __init__(self) -> None:
        self.compiled, self.ran = 0, []

    def __getitem__(self, grid):
        def launched(*args, **constants):
            self.compiled += 1
            self.ran.append((grid, args, tuple(constants.values())[:2]))
            return Compiled(self)

        return launched


class Compiled:
    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *args: self.kernel.ran.append((grid[:1], args[:4], args[4:]))


def arguments(block=(8, 64), swizzled=128, x=MEMORY[0], n=32, pair=(None, 3), constant=4):
    desc = TensorDescriptor.from_tensor(MEMORY, [*block], layout_of(swizzled, 2, 2))
    return (desc, x, n, pair), {"BLOCK": constant, "num_warps": 8, "maxnreg": 64}


OTHERS = {
    "block": {"block": (16, 64)},
    "layout": {"swizzled": 64},
    "dtype": {"x": MEMORY[0].view(torch.int16)},
    "address": {"x": MEMORY[0, 1:]},
    "one": {"n": 1},
    "odd": {"n": 33},
    "long": {"n": 1 << 40},
    "present": {"pair": (MEMORY, 3)},
    "constant": {"constant": 8},
}


def launched(kernel: Kernel, programs: int, **changes) -> None:
    args, constants = arguments(**changes)
    prepared.launch(kernel, (programs,))(*args, **constants)


@pytest.mark.parametrize("changes", OTHERS.values(), ids=OTHERS)
def test_a_launch_for_which_triton_would_compile_anew_goes_through_triton(changes):
    kernel = Kernel()
    launched(kernel, 3)
    launched(kernel, 3, **changes)
    assert kernel.compiled == 2
    launched(kernel, 3, **changes)
    assert kernel.compiled == 2


def test_a_launch_alike_has_its_own_arguments_programs_and_all_constants():
    """Another address of the same alignment, another multiple of 16, other programs."""
    kernel, x = Kernel(), MEMORY[1]
    launched(kernel, 3)
    launched(kernel, 5, x=x, n=64)
    (_, first, constants), (grid, args, second_constants) = kernel.ran
    assert kernel.compiled == 1 and grid == (5,) and constants == second_constants == (4, 8)
    assert args[1] is x and args[2] == 64 and args[3] == first[3]
