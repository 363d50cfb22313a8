"""Parts of Triton below its public interface that the suite reads or replaces while it compiles.

A Triton that lacks one runs without what the part is for, and the head of the report says so: no
verdict depends on them. Functions of the interpreter are guarded by a digest of their source:
`conformance.engine.child.interpreting`.
"""

import sys
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Part:
    """An attribute of a module that Triton has loaded."""

    module: str
    path: str  # of attributes, with dots
    effect: str  # if there is none


PARTS = (
    Part(
        "triton.runtime.jit",
        "DependenciesFinder._update_hash",
        "processes may compile a kernel that another one has compiled",
    ),
    Part("triton.runtime.jit", "JITFunction.parse", "kernels take longer to compile"),
    Part("triton.runtime.jit", "KernelInterface", "kernels that no case launches are not named"),
    Part("triton.compiler.code_generator", "inspect", "kernels take longer to compile"),
    Part("triton.compiler.code_generator", "warnings", "kernels take longer to compile"),
    Part("triton.runtime.build", "_build", "each process builds launchers of its own"),
)


def missing() -> list[str]:
    """A sentence for each part that the loaded Triton lacks; none where no Triton is loaded."""
    version = getattr(sys.modules.get("triton"), "__version__", "")
    lacking = [part for part in PARTS if part.module in sys.modules and attribute(part) is None]
    return [f"Triton {version} has no {part.module}.{part.path}: {part.effect}" for part in lacking]


def attribute(part: Part) -> Any:
    """The attribute that the part is, or None."""
    value: Any = sys.modules.get(part.module)
    for name in part.path.split("."):
        value = getattr(value, name, None)
    return value
