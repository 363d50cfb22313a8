"""The form in which kernels take numbers, and the dtype in which they compute."""

import struct

import torch
import triton.language as tl
from torch import Tensor

# Products and sums round one by one. The compiler may compute a value twice, for two layouts; with
# a fused multiply-add in one of them only, they differ by a bit, and a maximum is not found again
# among the keys that it was taken of.
NO_FP_FUSION = {"enable_fp_fusion": False}


def accumulator(*tensors: Tensor | None) -> tl.dtype:
    """float64 if one of the tensors is, else float32."""
    for x in tensors:
        if x is not None and x.dtype == torch.float64:
            return tl.float64
    return tl.float32


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b by torch, in the dtype of a and b, also where `torch.autocast` would round the factors.

    Sums are float32 for 16-bit factors.
    """
    if not torch.is_autocast_enabled(a.device.type):
        return _product(a, b)
    with torch.autocast(a.device.type, enabled=False):
        return _product(a, b)


def _product(a: Tensor, b: Tensor) -> Tensor:
    if a.itemsize > 2:
        return a @ b
    # a @ b may cut a long sum, and add up the parts in the factors' dtype:
    # torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    # `out_dtype` has no second derivative, no empty factors, and is a GPU's.
    if torch.is_grad_enabled() or not (a.is_cuda and a.numel() and b.numel()):
        return (a.float() @ b.float()).to(a.dtype)
    return torch.mm(a, b, out_dtype=torch.float32).to(a.dtype)


def number_bits(x: float) -> int:
    """The bits of a float64 as an integer: Triton would pass a float as float32."""
    if isinstance(x, torch.SymInt):
        return 0  # it stands for many numbers in a compiled graph, and no kernel is launched with it
    return struct.unpack("<q", struct.pack("<d", x))[0]
