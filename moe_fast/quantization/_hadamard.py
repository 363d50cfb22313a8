"""The Hadamard transform of 16 neighbouring rows, and its adjoint. Both are orthogonal.

    y_j = Σ_i x_i · sign_i · H_ij / 4,   H_ij = (-1)^(number of ones in i & j)

Products are exact. The sixteen are added in ascending order, from 0, in float32; a butterfly would
take a quarter of the steps, but add in another order. A program holds the sixteen sums of a column
in its own registers, and so reads each row once.
"""

import triton
import triton.language as tl

from moe_fast.launch._rounding import rounded
from moe_fast.quantization._formats import as_float32
from moe_fast.quantization._tiles import ending

SIZE = tl.constexpr(16)
NEGATIVE = tl.constexpr(0xD7E8)  # a bit for each i with sign_i = -1
ODD = tl.constexpr(0x6996)  # a bit for each number below 16 with an odd number of ones


@triton.jit
def hadamard_sums(
    x_ptr, stride_m, stride_n, first, end, column, num_columns,
    ADJOINT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """(the transform as [blocks, 16, columns] in float32, max |x| of each block). Rows from `end`
    on count as 0.
    """
    block = (tl.arange(0, BLOCK_M // SIZE) * SIZE)[:, None, None]
    n = tl.arange(0, BLOCK_N)[None, None, :]
    j = tl.arange(0, SIZE)[None, :, None]
    corner = x_ptr + first * stride_m + column * stride_n
    there = n < (num_columns - column).to(tl.int32)
    total = tl.zeros([BLOCK_M // SIZE, SIZE, BLOCK_N], tl.float32)
    largest = tl.zeros([BLOCK_M // SIZE, 1, BLOCK_N], tl.float32)
    for i in tl.static_range(SIZE):
        in_bounds = (block + i < ending(first, end, BLOCK_M)) & there  # a tile sticks out of its group and of x
        ptrs = corner + (block + i).to(tl.int64) * stride_m + n.to(tl.int64) * stride_n
        x = as_float32(tl.load(ptrs, mask=in_bounds, other=0.0))
        largest = tl.maximum(largest, tl.abs(x))  # ignores NaN
        quarter = x * 0.25
        negative = (
            (tl.full([], ODD, tl.int32) >> (i & j)) ^ (tl.full([], NEGATIVE, tl.int32) >> (j if ADJOINT else i))
        ) & 1
        total = tl.where(negative == 1, total - quarter, total + quarter)
    return total, largest


@triton.jit
def hadamard_tile(
    x_ptr, stride_m, stride_n, first, end, column, num_columns,
    ADJOINT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A tile of the transform, [rows, columns], rounded to the dtype of x. Rows from `end` on count
    as 0. With ADJOINT sign_j replaces sign_i.
    """
    total, _ = hadamard_sums(x_ptr, stride_m, stride_n, first, end, column, num_columns, ADJOINT, BLOCK_M, BLOCK_N)
    return as_float32(rounded(tl.reshape(total, [BLOCK_M, BLOCK_N]), x_ptr.dtype.element_ty))


@triton.jit(do_not_specialize=["num_rows", "column_programs", "steps"])
def hadamard_adjoint_kernel(
    d_ptr, stride_m, stride_n,
    # result, contiguous
    out_ptr,
    # sizes; `column_programs` programs share the columns of a tile of rows, `steps` tiles each
    num_rows, num_columns, column_programs, steps,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The adjoint of the transform. A program computes `steps` tiles side by side. Groups do not
    matter, because they consist of whole blocks of 16 rows.
    """
    first = (tl.program_id(0) // column_programs).to(tl.int64) * BLOCK_M
    begin = (tl.program_id(0) % column_programs).to(tl.int64) * (steps * BLOCK_N)
    row = first + tl.arange(0, BLOCK_M)
    for i in range(steps):
        column = begin + i * BLOCK_N
        n = column + tl.arange(0, BLOCK_N)
        value = hadamard_tile(d_ptr, stride_m, stride_n, first, num_rows, column, num_columns, True, BLOCK_M, BLOCK_N)
        in_bounds = (row < num_rows)[:, None] & (n < num_columns)[None, :]  # a tile sticks out of x
        tl.store(
            out_ptr + row[:, None] * num_columns + n[None, :], rounded(value, out_ptr.dtype.element_ty), mask=in_bounds
        )
