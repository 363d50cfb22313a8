"""Parts of Triton, torch and Python below their public interface that the suite reads or replaces.

Code that needs one asks `available` for it, and goes on without it where the answer is None: the
part is missing, or the version of its package is one that nobody has tried. The head of the report
then says what is lost. The functions of Triton's interpreter that the suite makes faster have a
digest of their source as their check: `fast_interpreter`.
"""

import re
import sys
from dataclasses import dataclass
from typing import Any

TRITON, TORCH, PYTHON = ((3, 6), (3, 9)), ((2, 11), (2, 15)), ((3, 11), (3, 14))


@dataclass(frozen=True)
class Part:
    """An attribute of a module, for the versions of its package from the first to the last."""

    module: str
    path: str  # of attributes, with dots
    versions: tuple[tuple[int, int], tuple[int, int]]
    effect: str  # if it is not available

    @property
    def package(self) -> str:
        return {TRITON: "triton", TORCH: "torch"}.get(self.versions, "python")


_MODES_STAY = "a mode that a call leaves behind is not noticed"
_PIPE = "a call can write into a pipe of the run"
_SLOW = "kernels take longer to compile"
_ADDRESSES = "an access outside of a kernel's tensors is not noticed in the interpreter"
PARTS = {
    f"{part.module}.{part.path}": part
    for part in (
        Part(
            "triton.runtime.jit",
            "DependenciesFinder._update_hash",
            TRITON,
            "processes may compile a kernel that another one has compiled",
        ),
        Part("triton.runtime.jit", "JITFunction.parse", TRITON, _SLOW),
        Part("triton.runtime.jit", "KernelInterface", TRITON, "kernels that no case launches are not named"),
        Part("triton.compiler.code_generator", "inspect", TRITON, _SLOW),
        Part("triton.compiler.code_generator", "warnings", TRITON, _SLOW),
        Part("triton.runtime.build", "_build", TRITON, "each process builds launchers of its own"),
        Part("triton.runtime.interpreter", "_interpreter", TRITON, _ADDRESSES),
        Part("triton.runtime.interpreter", "GridExecutor._init_args_hst", TRITON, _ADDRESSES),
        Part("triton.runtime.interpreter", "InterpreterBuilder.create_int_to_ptr", TRITON, _ADDRESSES),
        Part("torch", "_C._len_torch_function_stack", TORCH, _MODES_STAY),
        Part("torch", "_C._pop_torch_function_stack", TORCH, _MODES_STAY),
        Part("torch", "_GLOBAL_DEVICE_CONTEXT", TORCH, "a default device that a call sets is not set back"),
        Part("torch", "_C._len_torch_dispatch_stack", TORCH, _MODES_STAY),
        Part("torch.utils._python_dispatch", "_pop_mode", TORCH, _MODES_STAY),
        Part("torch", "_neg_view", TORCH, "inputs of the layout 'negated' are plain tensors"),
        Part("torch.cuda", "_sleep", TORCH, "inputs that come late on their stream come without a pause"),
        Part("torch.cuda", "_device_count_nvml", TORCH, "each process loads torch's compiler by itself"),
        Part(
            "torch.testing._internal.distributed.fake_pg",
            "FakeProcessGroup",
            TORCH,
            "a dispatcher that uses the default group in place of the group of its call is not noticed",
        ),
        Part(
            "multiprocessing.connection",
            "SocketListener",
            PYTHON,
            "rank 0 of a torchrun waits without a limit for ranks that never call",
        ),
        Part("multiprocessing.forkserver", "_forkserver", PYTHON, _PIPE),
        Part("multiprocessing.resource_tracker", "_resource_tracker", PYTHON, _PIPE),
    )
}


def available(name: str) -> Any:
    """The part of this name, or None.

    Example:
        >>> sleep = available("torch.cuda._sleep")
        >>> if sleep:
        ...     sleep(1000)
    """
    part = PARTS[name]
    first, last = part.versions
    return attribute(part) if first <= _release(version(part.package)) <= last else None


def missing() -> list[str]:
    """A sentence for each part that is not available, of the modules that are loaded."""
    lacking = [(name, part) for name, part in PARTS.items() if part.module in sys.modules and available(name) is None]
    return [_sentence(part) for _, part in lacking]


def attribute(part: Part) -> Any:
    """The attribute, whatever the version; None if there is none, or its module is not loaded."""
    value: Any = sys.modules.get(part.module)
    for name in part.path.split("."):
        value = getattr(value, name, None)
    return value


def version(package: str) -> str:
    """The version of a package that is loaded, or of Python."""
    if package == "python":
        return f"{sys.version_info.major}.{sys.version_info.minor}"
    return str(getattr(sys.modules.get(package), "__version__", ""))


def _release(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])


def _sentence(part: Part) -> str:
    package = f"{part.package.capitalize() if part.package != 'torch' else 'torch'} {version(part.package)}"
    verb = "has no" if attribute(part) is None else "is not known to have the same"
    return f"{package} {verb} {part.module}.{part.path}: {part.effect}"
