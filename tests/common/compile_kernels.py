"""Compiles recorded launches for a GPU, in a process where Triton compiles."""

import importlib
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from moe_fast.launch.specialization import Kernel
from tests.common.launches import Constant, Launch

HOPPER = GPUTarget("cuda", 90, 32)


def compile_launch(launch: Launch) -> None:
    """Compile it to machine code; raises what Triton raises."""
    kernel = getattr(importlib.import_module(launch.module), launch.kernel)
    kernel = kernel.fn if isinstance(kernel, Kernel) else kernel
    constants: dict[tuple[int, ...], Any] = {}

    def typed(argument: Any, path: tuple[int, ...]) -> Any:
        if isinstance(argument, Constant):
            constants[path] = triton.language.dtype(argument.value) if argument.is_dtype else argument.value
            return "constexpr"
        if isinstance(argument, tuple):
            fields = [typed(field, (*path, i)) for i, field in enumerate(argument)]
            return type(argument)(*fields) if hasattr(argument, "_fields") else tuple(fields)
        return argument

    signature = {name: typed(argument, (i,)) for i, (name, argument) in enumerate(launch.arguments.items())}
    triton.compile(ASTSource(kernel, signature, constants), target=HOPPER, options=launch.options)


def failures(launches: list[Launch]) -> str:
    """A line for each kernel that does not compile."""
    lines = []
    for launch in launches:
        try:
            compile_launch(launch)
        except Exception as error:
            lines.append(f"{launch.kernel} does not compile: {error}\n  {launch.arguments}")
    return "\n".join(lines)
