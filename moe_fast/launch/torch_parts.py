"""The parts of torch below its public interface that moe_fast reads, in one place.

They were read in torch 2.11 to 2.14. Each function says what happens with a torch that has no such
part: moe_fast still computes the same numbers.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

_mode = getattr(torch._C, "_get_dispatch_mode", lambda key: None)
_FAKE = getattr(getattr(torch._C, "_TorchDispatchModeKey", None), "FAKE", None)
_transforms_are_active = getattr(torch._C, "_are_functorch_transforms_active", lambda: True)


def mode_of_tensors_without_memory() -> Any | None:
    """The mode in which a compiler traces operators on tensors without memory; None outside of one.

    A torch without `_get_dispatch_mode` looks as if it never traced: `torch.compile` of a function
    then fails with the compiler's own error.
    """
    return _mode(_FAKE)


def has_memory() -> bool:
    """Whether tensors have memory. While a graph is traced they have none, and no kernel is
    launched.
    """
    return _mode(_FAKE) is None


def derivatives_are_recorded() -> bool:
    """Whether autograd, a transform of torch.func or forward-mode differentiation sees the call.

    A torch that does not tell counts as one that does: a call then records what a backward needs.
    """
    return torch.is_grad_enabled() or _transforms_are_active() or getattr(forward_ad, "_current_level", 0) >= 0


def nonstrict_trace(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as one call that a compiler traces by running it.

    Raises:
        ImportError: torch has it nowhere; the compiler reports it.
    """
    if hasattr(torch.compiler, "nonstrict_trace"):
        return torch.compiler.nonstrict_trace(function)
    from torch._dynamo import nonstrict_trace

    return nonstrict_trace(function)


def shared_storage(memory: Tensor) -> tuple[Any, ...]:
    """What another process needs to open the storage of a tensor on a GPU.

    Raises:
        ValueError: torch offers no such thing.
    """
    share = getattr(memory.untyped_storage(), "_share_cuda_", None)
    if share is None:
        raise ValueError(f"group: ranks that share a GPU need torch 2.11 to 2.14, this is {torch.__version__}")
    return tuple(share()[1:])


def opened_storage(device: torch.device, storage: tuple[Any, ...]) -> torch.UntypedStorage:
    """The storage of another process, for kernels on a device: see `shared_storage`."""
    return torch.UntypedStorage._new_shared_cuda(device.index, *storage)
