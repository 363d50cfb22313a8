"""The functions that count as run where a kernel of moe_fast is launched, as JSON by kernel.

Triton's interpreter must be off. Without a GPU a launch fails after it has begun.
"""

import contextlib
import json
import os
import pkgutil
from importlib import import_module
from typing import Any

import moe_fast
from conformance.engine.child.tracing import traced


def kernels() -> dict[str, Any]:
    """All kernels that are launched, by "module:name"."""
    names = [module.name for module in pkgutil.walk_packages(moe_fast.__path__, "moe_fast.")]
    modules = [import_module(name) for name in names if not name.startswith("moe_fast.te")]
    named = [(f"{module.__name__}:{name}", value) for module in modules for name, value in vars(module).items()]
    return {name: value for name, value in named if name.endswith("_kernel") and hasattr(value, "run")}


def launched(kernel: Any) -> list[str]:
    # a kernel in versions compares its arguments first
    count = kernel.fn.fn.__code__.co_argcount if hasattr(kernel, "together") else 0
    with traced(os.path.dirname(str(moe_fast.__file__))) as calls, contextlib.suppress(Exception):
        kernel[(1,)](*[1] * count)
    return sorted(calls)


if __name__ == "__main__":
    print(json.dumps({name: launched(kernel) for name, kernel in kernels().items()}))
