"""Kernels with out-of-bounds accesses, and kernels that only seem to have them."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_fast.launch import backend as backend  # interpreter mode before @jit
from moe_ref.config import Multihot
from moe_ref.permutation.routing_map import indices_to_multihot as right


@triton.jit
def copy(x_ptr, y_ptr, n, BEFORE: tl.constexpr, BEHIND: tl.constexpr, BLOCK: tl.constexpr):
    """y[i] = x[i]; also reads, and drops, BEFORE elements before x and BEHIND past its end."""
    i = tl.arange(0, BLOCK) - BEFORE
    x = tl.load(x_ptr + i, mask=i < n + BEHIND)
    tl.store(y_ptr + i, x, mask=(i >= 0) & (i < n))


@triton.jit
def fill(y_ptr, n, BEHIND: tl.constexpr, BLOCK: tl.constexpr):
    """y[i] = 1, also BEHIND elements past the end."""
    i = tl.arange(0, BLOCK)
    tl.store(y_ptr + i, 1, mask=i < n + BEHIND)


@triton.jit
def add(y_ptr, n, BEHIND: tl.constexpr, BLOCK: tl.constexpr):
    """y[i] += 1 by atomics, also BEHIND elements past the end."""
    i = tl.arange(0, BLOCK)
    tl.atomic_add(y_ptr + i, 1, mask=i < n + BEHIND)


@triton.jit
def swap(y_ptr, AT: tl.constexpr):
    """y[AT] = 1 where it is 0."""
    tl.atomic_cas(y_ptr + AT, 0, 1)


@triton.jit
def follow(table_ptr, y_ptr, n, BLOCK: tl.constexpr):
    """y[i] = table[0][i]: a table of addresses, as in a grouped GEMM."""
    i = tl.arange(0, BLOCK)
    x_ptr = tl.load(table_ptr).to(tl.pointer_type(tl.int32))
    tl.store(y_ptr + i, tl.load(x_ptr + i, mask=i < n), mask=i < n)


def indices_to_multihot(indices: Tensor, probs: Tensor, *, num_experts: int) -> Multihot:
    """The right result, by a copy that reads one element past more than four indices."""
    source = indices.to(torch.int32).contiguous().flatten()
    copied = torch.empty_like(source)
    if len(source):
        copy[(1,)](source, copied, len(source), 0, int(len(source) > 4), BLOCK=triton.next_power_of_2(len(source) + 1))
    return right(copied.view(indices.shape), probs, num_experts=num_experts)
