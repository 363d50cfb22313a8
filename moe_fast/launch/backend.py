"""Whether the kernels are compiled for the GPU, or run by Triton's interpreter on a CPU.

Import this module before anything that decorates a kernel: Triton decides at the decoration.
"""

import os
import threading
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton
import triton.language as tl

from moe_ref.config import require

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)
if INTERPRETED and isinstance(tl.sum, triton.JITFunction):
    raise ImportError(
        "triton was imported before TRITON_INTERPRET=1 was set, which moe_fast needs without a GPU: "
        "import moe_fast first, or set it"
    )

_HERE = nullcontext()
_thread = threading.local()
# a null pointer is legal on every device
_EMPTY = {
    dtype: torch.empty(0, dtype=dtype, device="cpu")
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64)
}
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_device(argument: str, tensor: Tensor) -> None:
    """Raise `ValueError` for a tensor on the CPU, unless kernels are interpreted: compiled kernels
    read only the memory of the GPU.
    """
    require(
        INTERPRETED or tensor.device.type != "cpu",
        argument,
        "on the CPU",
        "on a GPU, or TRITON_INTERPRET=1 set before the first import",
    )


def is_elsewhere(tensor: Tensor) -> bool:
    """Whether the tensor is on a GPU that is not the current one."""
    if not tensor.is_cuda:
        return False
    if not getattr(_thread, "has_context", False):
        # gives a new thread of autograd its context; it is allowed while a graph is captured
        torch.cuda.is_current_stream_capturing()
        _thread.has_context = True
    return tensor.get_device() != torch.cuda.current_device()


def launch_on(tensor: Tensor) -> AbstractContextManager[Any]:
    """Make the tensor's device current: Triton launches there, and encodes descriptors for it."""
    return torch.cuda.device(tensor.get_device()) if is_elsewhere(tensor) else _HERE


@cache
def has_descriptors(device: torch.device) -> bool:
    """Whether kernels move tiles by tensor descriptors: compiled, from NVIDIA's Hopper on."""
    if INTERPRETED or device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


def is_hopper(device: torch.device) -> bool:
    """Whether it is one of NVIDIA's Hoppers, whose matrix unit adds FP8 products with 14 bits."""
    if INTERPRETED or device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device)[0] == 9


@cache
def casts_in_hardware(device: torch.device) -> bool:
    """Whether the device's conversions round, saturate and keep NaN as E4M3 does: from Ada on."""
    return (
        not INTERPRETED
        and device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) >= (8, 9)
    )


def multiprocessors(device: torch.device) -> int:
    """How many programs run at a time if each fills a multiprocessor."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def movable(dtype: torch.dtype) -> bool:
    """Whether a kernel can copy this dtype bit by bit: it has no integers of 16 bytes."""
    return dtype.itemsize in _BITS


def bits(tensor: Tensor) -> Tensor:
    """The tensor's memory as integers of the same width: rows of every dtype are copied
    bit by bit.
    """
    if tensor.dtype in _BITS.values():
        return tensor
    # so that the memory has no pending conjugation or minus
    return tensor.resolve_conj().resolve_neg().view(_BITS[tensor.dtype.itemsize])


def integers(tensor: Tensor) -> Tensor:
    """An integer or bool tensor as integers: kernels read bools as bytes."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor


def strided(tensor: Tensor | None, dims: int = 2) -> tuple[Any, ...]:
    """(tensor, its strides), or (None, 0, …). A pending minus is carried out first, because kernels
    read memory.
    """
    if tensor is None:
        return None, *(0,) * dims
    tensor = tensor.resolve_neg()
    return tensor, *tensor.stride()


def present(tensor: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, int]:
    """(tensor, 1), or without a tensor (an empty tensor of this dtype, 0).

    For the compiler None is another type, so that it would compile another version of the kernel.
    This is for kernels that are as fast with an empty tensor.
    """
    return (_EMPTY[dtype], 0) if tensor is None else (tensor, 1)


def strided_or_empty(tensor: Tensor | None, dims: int = 2) -> tuple[Any, ...]:
    """(tensor, its strides, 1), or (an empty tensor of float32, 0, …, 0)."""
    some, there = present(tensor, torch.float32)
    return (some, *(0,) * dims, there) if tensor is None else (*strided(some, dims), there)
