"""Kernels for blocks whose codes and scales depend on the block alone: scaling by amax, and MXFP8.

Every quotient is rounded once, and no product is fused with a sum.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from moe_fast.launch._rounding import number, rounded
from moe_fast.launch.specialization import jit
from moe_fast.quantization._formats import INFINITY, LARGEST_POWER, encoded, encoded_up, power_of_two
from moe_fast.quantization._tiles import (
    block_amax,
    load_tile_from,
    place_of_tile,
    spread,
    store_blocks,
    store_tile,
    store_turned,
)

E4M3_MAX = tl.constexpr(448.0)  # OCP OFP8 1.0
E5M2_MAX = tl.constexpr(57344.0)
INFINITE = tl.constexpr(float("inf"))


class FormPointers(NamedTuple):
    """The memory of a `Form` of blocks as one argument of a kernel. Codes are contiguous. Scales
    and amax have the same strides, which are separate arguments. Each pointer may be None, and all
    are None without a form.
    """

    codes_ptr: Any
    scale_ptr: Any
    amax_ptr: Any
    turned_ptr: Any  # codes as `Form.turned_NT`


@triton.jit
def over(numerator, denominator):
    """numerator / denominator, rounded once; on a GPU `/` is an approximation."""
    return tl.div_rn(numerator, denominator)


@triton.jit
def fitting_scale(amax, epsilon, infinity, format_max, POWER_OF_TWO: tl.constexpr):
    """format_max / max(amax, ε); 1 if the maximum is 0 or ∞, and `infinity` on overflow. With
    POWER_OF_TWO it is rounded down to a power of two.
    """
    a = tl.maximum(amax, epsilon)
    s = over(format_max, tl.where((a == 0) | (a == INFINITE), format_max, a))
    s = tl.where(s == INFINITE, infinity, s)
    if POWER_OF_TWO:
        s = (s.to(tl.int32, bitcast=True) & -0x800000).to(tl.float32, bitcast=True)  # the mantissa becomes 0
    return s


@triton.jit
def fitting_power(amax, epsilon, infinity, FORMAT: tl.constexpr):
    """The power of two to which `fitting_scale` rounds down, as an E8M0 code, computed from bits
    alone. format_max is 1.75 · 2^p.

    With a = (1 + f) · 2^E the quotient is less than 2^(p - E), in float32 too, exactly where f >
    0.75.
    """
    bits = tl.maximum(amax, epsilon).to(tl.int32, bitcast=True)
    above = (bits & 0x7FFFFF) > 0x600000
    code = (254 + (8 if FORMAT == "e4m3" else 15)) - (bits >> 23) - above.to(tl.int32)
    code = tl.where(code > LARGEST_POWER, infinity.to(tl.int32, bitcast=True) >> 23, code)  # subnormals too
    return tl.where((bits == 0) | (bits == INFINITY), 127, code)


@triton.jit
def block_scale(amax, epsilon, infinity, RULE: tl.constexpr, FORMAT: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """(multiplier, stored scale) of blocks.

    amax   s = format_max / amax                 1/s
    mxfp8  2^(127 - e)                           e = E8M0(amax · (1/format_max))
    """
    FORMAT_MAX: tl.constexpr = E4M3_MAX if FORMAT == "e4m3" else E5M2_MAX
    if RULE == "amax" and POWER_OF_TWO:  # the quotients would take as long as everything else
        code = fitting_power(amax, epsilon, infinity, FORMAT)
        multiplier = power_of_two(code)
        stored = power_of_two(254 - code)
    elif RULE == "amax":
        multiplier = fitting_scale(amax, epsilon, infinity, FORMAT_MAX, False)
        stored = over(1.0, multiplier)
    else:
        stored = encoded_up(amax * (1 / FORMAT_MAX))
        multiplier = power_of_two(254 - stored)  # 2^(127 - e), e at most 254
    return multiplier, stored


@triton.jit
def apart(x, positive):
    """x, in a way that the compiler cannot recognise as x. Codes that are stored in two orders are
    computed twice: if they are computed once, ptxas 12.8 reads bytes of one order before they are
    written.
    """
    return tl.where(positive < 0, 0.0, x)


@triton.jit
def quantize_blocks(
    x, form, stride_m, stride_n, tile, first, written, column, num_columns, epsilon, infinity,
    RULE: tl.constexpr, FORMAT: tl.constexpr, POWER_OF_TWO: tl.constexpr, HARDWARE: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, tiles=None,
):  # fmt: skip
    """Compute and store one form of a tile: codes, scales of blocks, and amax. Blocks that span
    rows, of rule "amax", are as high as a tile. There are `tiles` tiles along the rows, which only
    transposed codes need.
    """
    amax = block_amax(x, BLOCK_R, BLOCK_C)
    multiplier, stored = block_scale(amax, epsilon, infinity, RULE, FORMAT, POWER_OF_TWO)
    code = encoded(x * spread(multiplier, BLOCK_R, BLOCK_C), FORMAT, HARDWARE)
    if form.codes_ptr is not None:
        store_tile(form.codes_ptr, code, first, written, column, num_columns)
    if form.turned_ptr is not None:
        if form.codes_ptr is not None:
            code = encoded(x * spread(apart(multiplier, infinity), BLOCK_R, BLOCK_C), FORMAT, HARDWARE)
        store_turned(form.turned_ptr, code, tile, tiles, column, num_columns)
    block = tile if RULE == "amax" and BLOCK_R > 1 else first // BLOCK_R
    stored = stored.to(form.scale_ptr.dtype.element_ty)
    store_blocks(
        form.scale_ptr, stride_m, stride_n, stored, block, first, written, column, num_columns, BLOCK_R, BLOCK_C
    )
    if form.amax_ptr is not None:
        exact = rounded(amax, form.amax_ptr.dtype.element_ty)  # exact: it is a number of that dtype
        store_blocks(
            form.amax_ptr, stride_m, stride_n, exact, block, first, written, column, num_columns, BLOCK_R, BLOCK_C
        )


@triton.jit
def quantize_forms(
    x, row_form, stride_row_m, stride_row_n, column_form, stride_column_m, stride_column_n,
    tile, first, written, column, num_columns, epsilon, infinity,
    RULE: tl.constexpr, FORMAT: tl.constexpr, POWER_OF_TWO: tl.constexpr, HARDWARE: tl.constexpr,
    BLOCK: tl.constexpr, SQUARE: tl.constexpr, tiles=None,
):  # fmt: skip
    """Compute and store the forms of a tile with blocks of 1 × BLOCK (with SQUARE of BLOCK × BLOCK)
    and of BLOCK × 1; either form may be absent.
    """
    if row_form.scale_ptr is not None:
        quantize_blocks(
            x, row_form, stride_row_m, stride_row_n, tile, first, written, column, num_columns, epsilon, infinity,
            RULE, FORMAT, POWER_OF_TWO, HARDWARE, BLOCK if SQUARE else 1, BLOCK, tiles,
        )  # fmt: skip
    if column_form.scale_ptr is not None:
        quantize_blocks(
            x, column_form, stride_column_m, stride_column_n, tile, first, written, column, num_columns, epsilon,
            infinity, RULE, FORMAT, POWER_OF_TWO, HARDWARE, BLOCK, 1, tiles,
        )  # fmt: skip


@jit(
    together=[("stride_x_m", "num_columns")],
    along=["stride_x_n"],
    do_not_specialize=[
        *("stride_row_m", "stride_row_n", "stride_column_m", "stride_column_n", "stride_splits"),
        *("num_rows", "num_groups", "column_programs", "steps", "epsilon", "infinity"),
    ],
)
def quantize_blocks_kernel(
    x_ptr, stride_x_m, stride_x_n, splits_ptr, stride_splits,
    # results; either form may be left out
    row_form, stride_row_m, stride_row_n, column_form, stride_column_m, stride_column_n,
    # sizes; `column_programs` programs share the columns of a tile of rows, `steps` tiles each
    num_rows, num_columns, num_groups, column_programs, steps,
    # numbers, as the bits of a float64: 0, or an integer of 64 bits
    epsilon: tl.int64, infinity: tl.int64,
    RULE: tl.constexpr, FORMAT: tl.constexpr, POWER_OF_TWO: tl.constexpr, HARDWARE: tl.constexpr,
    ALIGNED: tl.constexpr, BLOCK: tl.constexpr, SQUARE: tl.constexpr,
    WHOLE: tl.constexpr,  # also write the tiles past the last group
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_G: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Blocks of 1 × BLOCK, BLOCK × 1, or both from one load; with SQUARE blocks of BLOCK × BLOCK,
    as the form by rows. A program quantises `steps` tiles side by side.
    """
    tile = tl.program_id(0) // column_programs
    _, first, read, owned, written = place_of_tile(
        splits_ptr, stride_splits, num_rows, num_groups, tile, ALIGNED, BLOCK_M, BLOCK_G
    )
    row = first + tl.arange(0, BLOCK_M)
    least = number(epsilon, tl.float32)
    most = number(infinity, tl.float32)
    begin = (tl.program_id(0) % column_programs).to(tl.int64) * (steps * BLOCK_N)
    end = written if WHOLE else owned
    for i in tl.range(0, tl.where(first < end, steps, 0), num_stages=STAGES):
        column = begin + i * BLOCK_N
        x = load_tile_from(x_ptr, stride_x_m, stride_x_n, first, read, column, num_columns, BLOCK_M, BLOCK_N)
        if not ALIGNED:  # noqa: SIM102 - known to the compiler; what follows is not
            if first + BLOCK_M > owned:  # so in few tiles
                x = tl.where((row < owned)[:, None], x, 0.0)
        quantize_forms(
            x, row_form, stride_row_m, stride_row_n, column_form, stride_column_m, stride_column_n, tile, first,
            written, column, num_columns, least, most, RULE, FORMAT, POWER_OF_TWO, HARDWARE, BLOCK, SQUARE,
            tl.num_programs(0) // column_programs,
        )  # fmt: skip
