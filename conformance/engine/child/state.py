"""Torch's global state, which a call must leave as it was."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

State = dict[str, Any]  # by name

# by name: the function that returns a state, and the one that sets it back
_EVERYWHERE: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "torch's random generator": (
        lambda: bytes(torch.get_rng_state().numpy()),
        lambda value: torch.set_rng_state(_tensor(value)),
    ),
    "the default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "the default device": (lambda: str(torch.get_default_device()), torch.set_default_device),
    "grad mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "the number of threads": (torch.get_num_threads, torch.set_num_threads),
    "the use of deterministic algorithms": (
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
    ),
    "the precision of float32 products": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
}
_ON_CUDA: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "the random generator of CUDA": (
        lambda: bytes(torch.cuda.get_rng_state().numpy()),
        lambda value: torch.cuda.set_rng_state(_tensor(value)),
    ),
    "the current device": (torch.cuda.current_device, torch.cuda.set_device),
    "the current stream": (torch.cuda.current_stream, torch.cuda.set_stream),
}


def taken() -> State:
    """The global state."""
    return {name: get() for name, (get, _) in _known().items()}


def restored(before: State, random: bool) -> str:
    """The name of the first state that differs from `before`, empty if none does. Sets all back.

    Args:
        random: whether the random generators may have advanced.
    """
    now, known = taken(), _known()
    wrong = [name for name, value in before.items() if now[name] != value and not (random and "generator" in name)]
    for name in wrong:
        known[name][1](before[name])
    return next(iter(wrong), "")


def _known() -> dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]]:
    return _EVERYWHERE | _ON_CUDA if torch.cuda.is_initialized() else _EVERYWHERE


def _tensor(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
