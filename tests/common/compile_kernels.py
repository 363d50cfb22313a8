"""Compiles recorded launches for a GPU that need not be there.

    TRITON_INTERPRET=0 python -m tests.common.compile_kernels LAUNCHES

LAUNCHES is a pickled list of `Launch`. Prints a line for each kernel that does not compile.
"""

import importlib
import pickle
import sys
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.common.launches import Constant, Launch

HOPPER = GPUTarget("cuda", 90, 32)


def compile_launch(launch: Launch) -> None:
    """Compile it to machine code; raises what Triton raises."""
    kernel = getattr(importlib.import_module(launch.module), launch.kernel)
    constants: dict[tuple[int, ...], Any] = {}

    def typed(argument: Any, path: tuple[int, ...]) -> Any:
        if isinstance(argument, Constant):
            constants[path] = triton.language.dtype(argument.value) if argument.is_dtype else argument.value
            return "constexpr"
        if isinstance(argument, tuple):
            parts = [typed(part, (*path, i)) for i, part in enumerate(argument)]
            return type(argument)(*parts) if hasattr(argument, "_fields") else tuple(parts)
        return argument

    signature = {name: typed(argument, (i,)) for i, (name, argument) in enumerate(launch.arguments.items())}
    triton.compile(ASTSource(kernel, signature, constants), target=HOPPER, options=launch.options)


def main(path: Path) -> int:
    failed = 0
    for launch in pickle.loads(path.read_bytes()):
        try:
            compile_launch(launch)
        except Exception as error:
            failed += 1
            print(f"{launch.kernel} does not compile: {error}\n  {launch.arguments}")
    return failed


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
