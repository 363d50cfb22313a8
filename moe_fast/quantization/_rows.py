"""Rows that are quantised on their way to other ranks, in blocks along rows, so that a scale
depends on its row alone.
"""

import triton
import triton.language as tl

from moe_fast.launch._rounding import number
from moe_fast.quantization._formats import as_float32, encoded
from moe_fast.quantization._quantize import block_scale
from moe_fast.quantization._tiles import block_amax, spread

BLOCK = tl.constexpr(128)  # columns that share a scale
FORMAT = tl.constexpr("e4m3")


@triton.jit
def encode_rows(token, epsilon, infinity, POWER_OF_TWO: tl.constexpr, HARDWARE: tl.constexpr):
    """(codes, stored scales) of a tile of whole blocks. Elements that do not exist must be 0."""
    x = as_float32(token)
    least, most = number(epsilon, tl.float32), number(infinity, tl.float32)
    multiplier, stored = block_scale(block_amax(x, 1, BLOCK), least, most, "amax", FORMAT, POWER_OF_TWO)
    return encoded(x * spread(multiplier, 1, BLOCK), FORMAT, HARDWARE), stored


@triton.jit
def blocks_of(column, num_columns, BLOCK_H: tl.constexpr):
    """(the blocks of a tile's columns, whether each exists)."""
    b = tl.cast(column, tl.int64) * (BLOCK_H // BLOCK) + tl.arange(0, BLOCK_H // BLOCK)
    return b, b * BLOCK < num_columns  # the last tile sticks out


@triton.jit
def fill_scales(
    scale_ptr, stride_scale_m, stride_scale_n, gap_ptr, lane, column, num_experts, num_columns, num_rows, epsilon,
    infinity,
    POWER_OF_TWO: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Write the scales of zeros into the padding after one expert's rows. The codes of zeros are
    zeros.
    """
    if lane < num_experts:
        b, in_row = blocks_of(column, num_columns, BLOCK_H)
        zero = tl.zeros([BLOCK_R, BLOCK_H // BLOCK], tl.float32)
        of_zeros = block_scale(
            zero, number(epsilon, tl.float32), number(infinity, tl.float32), "amax", FORMAT, POWER_OF_TWO
        )[1]
        begin = tl.load(gap_ptr + lane)
        end = tl.minimum(tl.load(gap_ptr + num_experts + 1 + lane), num_rows)
        for i in range(tl.cdiv(end - begin, BLOCK_R)):
            row = begin + i * BLOCK_R + tl.arange(0, BLOCK_R)
            in_bounds = (row < end)[:, None] & in_row[None, :]  # the last rows stick out
            tl.store(scale_ptr + row[:, None] * stride_scale_m + b[None, :] * stride_scale_n, of_zeros, mask=in_bounds)
