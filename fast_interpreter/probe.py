"""Whether Triton's interpreter runs here: that of Triton 3.6 stops at numbers of numpy 2.4."""

import sys
from importlib.metadata import version
from typing import Any

import torch
import triton
import triton.language as tl

NOT_OF_USERS = ("triton", "torch", "fast_interpreter")  # packages with kernels that none of them launches here


@triton.jit
def sum_kernel(x_ptr: Any, out_ptr: Any, n: Any) -> None:
    total = 0.0
    for i in range(n):
        total += tl.load(x_ptr + i)
    tl.store(out_ptr, total)


def broken() -> str:
    """Why the kernels that are imported cannot run in the interpreter; empty: they can, or there
    are none.
    """
    interpreted = type(sum_kernel)
    if interpreted.__name__ != "InterpretedFunction":
        return ""
    try:
        sum_kernel[(1,)](torch.ones(3), torch.empty(1), 3)
    except Exception as error:
        if any(isinstance(x, interpreted) for x in _of_users()):
            message = " ".join(str(error).split())
            return (
                f"Triton {version('triton')}'s interpreter does not run with numpy {version('numpy')}: "
                f"{type(error).__name__}: {message}; Triton 3.6 needs numpy 2.3 or older"
            )
    return ""


def _of_users() -> list[object]:
    """What the modules of other packages hold."""
    modules = [x for name, x in sys.modules.items() if name.partition(".")[0] not in NOT_OF_USERS]
    return [value for module in modules for value in getattr(module, "__dict__", {}).values()]
