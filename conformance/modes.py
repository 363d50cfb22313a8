"""The state of the process, which a call must leave as it was.

Modes change what other code computes. Generators decide what is drawn later: only random functions
may advance them.
"""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from conformance.private_parts import available

TINY = sys.float_info.min


@dataclass(frozen=True)
class Mode:
    name: str
    read: Callable[[], Any]
    write: Callable[[Any], Any]


def _autocast() -> tuple[bool, ...]:
    return tuple(torch.is_autocast_enabled(device) for device in ("cpu", "cuda"))


def _set_autocast(enabled: tuple[bool, ...]) -> None:
    for device, device_enabled in zip(("cpu", "cuda"), enabled, strict=True):
        torch.set_autocast_enabled(device, device_enabled)


def _depth(kind: str) -> int:
    """The number of modes on torch's stack of this kind; 0 where torch does not tell."""
    length = available(f"torch._C._len_torch_{kind}_stack")
    return length() if length else 0


def _pop_function_modes(most: int) -> None:
    pop = available("torch._C._pop_torch_function_stack")
    default = available("torch._GLOBAL_DEVICE_CONTEXT")
    while pop and _depth("function") > most:
        if pop() is getattr(default, "device_context", None):
            default.device_context = None  # what `set_default_device` has set


def _pop_dispatch_modes(most: int) -> None:
    pop = available("torch.utils._python_dispatch._pop_mode")
    while pop and _depth("dispatch") > most:
        pop()


DETERMINISTIC = torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms
MODES: tuple[Mode, ...] = (
    # the stacks first: their modes may refuse what the others call; a default device is one of them
    Mode("stack of torch function modes", lambda: _depth("function"), _pop_function_modes),
    Mode("stack of torch dispatch modes", lambda: _depth("dispatch"), _pop_dispatch_modes),
    Mode("gradient mode", torch.is_grad_enabled, torch.set_grad_enabled),
    Mode("default dtype", torch.get_default_dtype, torch.set_default_dtype),
    Mode("autocast", _autocast, _set_autocast),
    Mode("choice of deterministic algorithms", *DETERMINISTIC),
    Mode("treatment of subnormal numbers", lambda: TINY * 0.5 == 0.0, torch.set_flush_denormal),
    Mode("precision of float32 products", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    Mode("number of threads", torch.get_num_threads, torch.set_num_threads),
    Mode("recursion limit", sys.getrecursionlimit, sys.setrecursionlimit),
    Mode("working directory", os.getcwd, os.chdir),
)


def _tensor(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _generator(name: str, module: Any) -> Mode:
    read = lambda: bytes(module.get_rng_state().numpy())  # noqa: E731
    return Mode(f"state of {name}'s generator", read, lambda content: module.set_rng_state(_tensor(content)))


GENERATORS = (_generator("torch", torch),)
ON_CUDA = (
    Mode("current device", torch.cuda.current_device, torch.cuda.set_device),
    Mode("current stream", torch.cuda.current_stream, torch.cuda.set_stream),
)
CUDA_GENERATORS = (_generator("CUDA", torch.cuda),)


class Modes:
    """The modes, and if asked for the generators, at one time."""

    def __init__(self, generators: bool = False) -> None:
        self._modes = MODES + GENERATORS if generators else MODES
        if torch.cuda.is_initialized():
            self._modes += ON_CUDA + CUDA_GENERATORS if generators else ON_CUDA
        self._values = [mode.read() for mode in self._modes]

    def restore(self) -> str:
        """Set the modes back; returns the name of the first that has changed, or ""."""
        changed = ""
        for mode, value in zip(self._modes, self._values, strict=True):
            if mode.read() != value:
                mode.write(value)
                changed = changed or mode.name
        return changed
