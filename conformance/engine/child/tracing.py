"""Records which functions of a package run, including kernels that run on a GPU."""

import contextlib
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import torch


@contextlib.contextmanager
def traced(package: str) -> Iterator[set[str]]:
    """The package's functions that run inside the block, as "file:qualified name".

    Threads that start inside count too. A backward runs in the thread that asks for it. Python does
    not run a compiled kernel, so a launch counts for the kernel and all functions that it can call.
    """
    calls: set[str] = set()

    def called(frame: FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        if frame.f_code.co_filename.startswith(package):
            calls.add(label(frame.f_code))
        elif frame.f_code.co_qualname == "JITFunction.run" and "triton" in frame.f_code.co_filename:
            values = (frame.f_locals["self"], *frame.f_locals["args"], *frame.f_locals["kwargs"].values())
            calls.update(label(code) for code in _compiled(values, package))

    def label(code: CodeType) -> str:
        return f"{os.path.relpath(code.co_filename, os.path.dirname(package))}:{code.co_qualname}"

    if not package:
        yield calls
        return
    sys.setprofile(called)
    threading.setprofile(called)
    try:
        with torch.autograd.set_multithreading_enabled(False):
            yield calls
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def _compiled(values: Iterable[Any], package: str) -> set[CodeType]:
    """The functions of the package among these values, those that their code names, and so on."""
    package_functions: set[CodeType] = set()
    unvisited = list(values)
    while unvisited:
        for function in _functions(unvisited.pop()):
            code = function.__code__
            if code not in package_functions and code.co_filename.startswith(package):
                package_functions.add(code)
                unvisited += _named(function)
    return package_functions


def _functions(value: Any) -> Iterator[FunctionType]:
    """The Python function inside a kernel, or the methods of a class."""
    if isinstance(value, type):
        for method in vars(value).values():
            yield from _functions(method)
        return
    for _ in range(4):  # a kernel in versions holds one of Triton's kernels, which holds the function
        if isinstance(value, FunctionType):
            yield value
            return
        value = getattr(value, "fn", None)


def _named(function: FunctionType) -> Iterator[Any]:
    """The values of the names in a function's code, in its module or in modules that it imports."""
    code, module_names = function.__code__, function.__globals__
    for name in code.co_names:
        value = module_names.get(name)
        if isinstance(value, ModuleType):
            yield from (vars(value).get(attribute) for attribute in code.co_names)
        elif not isinstance(value, torch.Tensor):
            yield value
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # empty
            yield cell.cell_contents
