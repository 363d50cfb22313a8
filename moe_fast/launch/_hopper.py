"""Names in Gluon for operations of NVIDIA's Hopper, which differ between Triton 3.6 and 3.9."""

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
store_tile = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
# by pointers; what the mask leaves out becomes 0, and is not read
gather_tile = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
