"""Modes of the process, which change what other code computes: a call must not change them."""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._device import DeviceContext

TINY = sys.float_info.min


@dataclass(frozen=True)
class Mode:
    name: str
    read: Callable[[], Any]
    write: Callable[[Any], Any]


def _autocast() -> tuple[bool, ...]:
    return tuple(torch.is_autocast_enabled(device) for device in ("cpu", "cuda"))


def _set_autocast(enabled: tuple[bool, ...]) -> None:
    for device, each in zip(("cpu", "cuda"), enabled, strict=True):
        torch.set_autocast_enabled(device, each)


def _pop_function_modes(most: int) -> None:
    while torch._C._len_torch_function_stack() > most:
        if isinstance(torch._C._pop_torch_function_stack(), DeviceContext):
            torch._GLOBAL_DEVICE_CONTEXT.device_context = None  # what `set_default_device` has set


def _pop_dispatch_modes(most: int) -> None:
    while torch._C._len_torch_dispatch_stack() > most:
        torch.utils._python_dispatch._pop_mode()


MODES = (
    # the stacks first: their modes may refuse what the others call; a default device is one of them
    Mode("stack of torch function modes", torch._C._len_torch_function_stack, _pop_function_modes),
    Mode("stack of torch dispatch modes", torch._C._len_torch_dispatch_stack, _pop_dispatch_modes),
    Mode("gradient mode", torch.is_grad_enabled, torch.set_grad_enabled),
    Mode("default dtype", torch.get_default_dtype, torch.set_default_dtype),
    Mode("autocast", _autocast, _set_autocast),
    Mode(
        "choice of deterministic algorithms",
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
    ),
    Mode("treatment of subnormal numbers", lambda: TINY * 0.5 == 0.0, torch.set_flush_denormal),
    Mode("recursion limit", sys.getrecursionlimit, sys.setrecursionlimit),
    Mode("working directory", os.getcwd, os.chdir),
)


class Modes:
    """The modes at one time."""

    def __init__(self) -> None:
        self._values = [mode.read() for mode in MODES]

    def restore(self) -> str:
        """Set the modes back; returns the name of the first that has changed, or ""."""
        changed = ""
        for mode, value in zip(MODES, self._values, strict=True):
            if mode.read() != value:
                mode.write(value)
                changed = changed or mode.name
        return changed
