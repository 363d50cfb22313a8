"""Descriptors of tensors in memory, by which the copy engine of NVIDIA's Hopper moves tiles."""

from functools import cache

from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from moe_fast.launch import backend
from moe_fast.launch.operators import has_memory

DESCRIBED_BYTES = 16  # CUDA driver API, cuTensorMapEncodeTiled: the address and every stride are multiples


def have_descriptors(*tensors: Tensor) -> bool:
    """Whether descriptors can move tiles of these factors: their dtypes are of a matrix unit, and
    they satisfy `have_lines`.
    """
    for tensor in tensors:  # loops, not generators, because every launch of a product comes through here
        if tensor.itemsize > 2:
            return False
    return have_lines(*tensors)


def have_lines(*tensors: Tensor) -> bool:
    """Whether descriptors can move tiles of these tensors, of any dtype: rows begin at multiples of
    16 bytes, and no elements overlap.
    """
    return backend.has_descriptors(tensors[0].device) and all(map(_in_lines, tensors))


def _in_lines(tensor: Tensor) -> bool:
    *strides, along = tensor.stride()
    for stride in strides:
        if stride <= 0 or stride * tensor.itemsize % DESCRIBED_BYTES:
            return False
    if along != 1 or tensor.numel() == 0:
        return False
    # a tensor without memory has no address; results have the same shapes either way
    return not has_memory() or tensor.data_ptr() % DESCRIBED_BYTES == 0


def described(x: Tensor, block: list[int], swizzled: int = 128) -> TensorDescriptor:
    """A descriptor of the tensor. Tiles lie in shared memory as the matrix unit reads them, or with
    `swizzled` 0 in lines.
    """
    return TensorDescriptor.from_tensor(x, block, layout_of(swizzled, x.itemsize, len(block)))


@cache
def layout_of(swizzled: int, itemsize: int, rank: int) -> gl.NVMMASharedLayout:
    """The layout of a tile in shared memory. It is made once for all calls, because making it takes
    the host time.
    """
    return gl.NVMMASharedLayout(swizzle_byte_width=swizzled, element_bitwidth=8 * itemsize, rank=rank)
