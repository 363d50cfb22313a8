"""NVFP4 with "four over six": the largest value of a block becomes 6 or 4, whichever gives the
smaller error.
"""

import triton
import triton.language as tl

from moe_fast.quantization._formats import E2M1_MAX, FLOAT32_MAX, decoded, encoded
from moe_fast.quantization._quantize import over
from moe_fast.quantization._tiles import load_tile, spread

SIZE = tl.constexpr(16)  # of a block


@triton.jit
def multiplier_of(stored, encoding):
    """m = 1 / (d · (1/S)), at most the largest float32, of blocks with scale codes `stored`."""
    return tl.minimum(over(1.0, decoded(stored, "e4m3") * over(1.0, encoding)), FLOAT32_MAX)


@triton.jit
def error_of(x, scale, multiplier, outer_amax, largest, ERROR: tl.constexpr):
    """|q·d·A/(6·largest) - x|, or its square, of one element of each block."""
    code = encoded(x * multiplier, "e2m1", False)
    product = decoded(code, "e2m1") * scale * outer_amax
    difference = tl.div_rn(product, tl.full(product.shape, E2M1_MAX * largest, tl.float32)) - x
    return difference * difference if ERROR == "mse" else tl.abs(difference)


@triton.jit
def sum_of_sixteen(total, AXIS: tl.constexpr):
    """[a, 16, b] or [a, b, 16] to [a, b], by a tree whose first step adds numbers 8 apart."""
    a: tl.constexpr = total.shape[0]
    b: tl.constexpr = total.shape[3 - AXIS]
    for i in tl.static_range(4):
        total = tl.sum(tl.reshape(total, [a, 2, 8 >> i, b] if AXIS == 1 else [a, b, 2, 8 >> i]), axis=AXIS)
    return tl.reshape(total, [a, b])


@triton.jit
def better_of_two(
    x_ptr, stride_m, stride_n, amax, outer_amax, encoding, first, owned, column, num_columns, largest,
    ERROR: tl.constexpr, HARDWARE: tl.constexpr, BY_ROWS: tl.constexpr, SQUARE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The number that becomes d when it is rounded, for each block. The block's largest value
    becomes 6, or 4 by a d that is 1.5 times as large, whichever gives the smaller error; 6 if the
    errors are equal.

        d₆ = E4M3(amax / 6 · S),   d₄ = E4M3(amax / 6 · S · 1.5)

    The errors are added in ascending order along a block's row (with BY_ROWS false along its
    column); of a square block these sums are then added by a tree.
    """
    base = tl.div_rn(amax, tl.full(amax.shape, E2M1_MAX, tl.float32)) * encoding
    six = encoded(base, "e4m3", HARDWARE)
    four = encoded(base * 1.5, "e4m3", HARDWARE)
    m: tl.constexpr = BLOCK_M if BY_ROWS else BLOCK_M // SIZE
    n: tl.constexpr = BLOCK_N // SIZE if BY_ROWS else BLOCK_N
    scale_six = spread(decoded(six, "e4m3"), m // six.shape[0], n // six.shape[1])
    scale_four = spread(decoded(four, "e4m3"), m // six.shape[0], n // six.shape[1])
    multiplier_six = spread(multiplier_of(six, encoding), m // six.shape[0], n // six.shape[1])
    multiplier_four = spread(multiplier_of(four, encoding), m // six.shape[0], n // six.shape[1])
    errs_six = tl.zeros([m, n], tl.float32)
    errs_four = tl.zeros([m, n], tl.float32)
    row = first + tl.arange(0, m) * (BLOCK_M // m)
    block_column = column + tl.arange(0, n) * (BLOCK_N // n)
    for i in range(SIZE):  # the first, the second, … of each block
        if BY_ROWS:
            x = load_tile(x_ptr, stride_m, stride_n, row, owned, block_column + i, num_columns)
        else:
            x = load_tile(x_ptr, stride_m, stride_n, row + i, owned, block_column, num_columns)
        errs_six += error_of(x, scale_six, multiplier_six, outer_amax, largest, ERROR)
        errs_four += error_of(x, scale_four, multiplier_four, outer_amax, largest, ERROR)
    if SQUARE:
        a: tl.constexpr = BLOCK_M // SIZE
        b: tl.constexpr = BLOCK_N // SIZE
        errs_six = sum_of_sixteen(tl.reshape(errs_six, [a, SIZE, b] if BY_ROWS else [a, b, SIZE]), 1 if BY_ROWS else 2)
        errs_four = sum_of_sixteen(
            tl.reshape(errs_four, [a, SIZE, b] if BY_ROWS else [a, b, SIZE]), 1 if BY_ROWS else 2
        )
    # The number is chosen, not the code: ptxas 12.8 and 12.9 store a code too early if the kernel
    # also decodes it.
    return tl.where(errs_four < errs_six, base * 1.5, base)  # the first one if an error is a NaN
