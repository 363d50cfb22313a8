"""The factors of a product in low precision: values of codes, scales of blocks and of sums."""

import triton
import triton.language as tl

from moe_fast.quantization._formats import decoded, power_of_two
from moe_fast.quantization._quantize import INFINITE, spread

TILE_ROWS = 128
TILE = tl.constexpr(TILE_ROWS)
EXTREME = tl.constexpr(2.0**63)


@triton.jit
def factor(codes, FORMAT: tl.constexpr, FACTOR: tl.constexpr):
    """The values of codes, in FACTOR; None: the matrix unit takes the codes."""
    return codes if FACTOR is None else decoded(codes, FORMAT).to(FACTOR)


@triton.jit
def block_codes(row_ptrs, stride, block, blocks, live, COUNT: tl.constexpr):
    """The scales of COUNT blocks of each row, as they are stored; 0 past the last block."""
    b = block + tl.arange(0, COUNT)
    return tl.load(row_ptrs[:, None] + b[None, :] * stride, mask=live[:, None] & (b < blocks)[None, :], other=0)


@triton.jit
def scaled_factor(codes, stored, amax, block, blocks, RULE: tl.constexpr, FORMAT: tl.constexpr, FACTOR: tl.constexpr):
    """Code · block scale, without a finite amax; 0 past the last block (not 0 · ∞)."""
    scale = (
        power_of_two(stored)
        if RULE == "mxfp8"
        else decoded(stored, "e4m3") * tl.where(amax == INFINITE, amax, 1.0)[:, None]
    )
    b = block + tl.arange(0, stored.shape[1])
    scale = tl.where((b < blocks)[None, :], scale, 0.0)
    return (decoded(codes, FORMAT) * spread(scale, 1, codes.shape[1] // stored.shape[1])).to(FACTOR)


@triton.jit
def packed(codes):
    """E2M1 as the matrix unit reads it: two codes a byte, the even one in the low half."""
    low, high = tl.split(tl.reshape(codes, [codes.shape[0], codes.shape[1] // 2, 2]))
    return low | (high << 4)


@triton.jit
def add_scaled_by_hardware(
    acc, left, left_stored,
    left_format: tl.constexpr, right, right_stored, right_format: tl.constexpr, RULE: tl.constexpr,
):  # fmt: skip
    """acc + left · rightᵀ of codes whose scales the matrix unit multiplies in itself."""
    if RULE == "nvfp4":
        left, right = packed(left), packed(right)
        left_stored, right_stored = (
            left_stored.to(tl.float8e4nv, bitcast=True),
            right_stored.to(tl.float8e4nv, bitcast=True),
        )
    return tl.dot_scaled(left, left_stored, left_format, tl.trans(right), right_stored, right_format, acc)


@triton.jit
def add_blocks(
    acc, left, left_scale_ptrs, stride_left, left_amax, live_left, right, right_scale_ptrs, stride_right, right_amax,
    live_right, block, blocks,
    RULE: tl.constexpr, LEFT_FORMAT: tl.constexpr, RIGHT_FORMAT: tl.constexpr, FACTOR: tl.constexpr,
    SCALED_BY_HARDWARE: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """acc + left · rightᵀ of codes with stored scales of COUNT blocks each, from `block` on."""
    left_stored = block_codes(left_scale_ptrs, stride_left, block, blocks, live_left, COUNT)
    right_stored = block_codes(right_scale_ptrs, stride_right, block, blocks, live_right, COUNT)
    if SCALED_BY_HARDWARE:
        acc = add_scaled_by_hardware(acc, left, left_stored, LEFT_FORMAT, right, right_stored, RIGHT_FORMAT, RULE)
    else:
        left = scaled_factor(left, left_stored, left_amax, block, blocks, RULE, LEFT_FORMAT, FACTOR)
        right = scaled_factor(right, right_stored, right_amax, block, blocks, RULE, RIGHT_FORMAT, FACTOR)
        acc = tl.dot(left, tl.trans(right), acc, input_precision="ieee")
    return acc


@triton.jit
def add_codes(acc, left, right, FACTOR: tl.constexpr):
    """acc + left · rightᵀ. Hopper adds FP8 products with 14 bits: each 128 are added in float32."""
    return (
        tl.dot(left, tl.trans(right), acc, max_num_imprecise_acc=TILE)
        if FACTOR is None
        else tl.dot(left, tl.trans(right), acc, input_precision="ieee")
    )


@triton.jit
def codes_product(left, right):
    """left · rightᵀ, of a depth of 128."""
    return tl.dot(left, tl.trans(right), input_precision="ieee")


@triton.jit
def load_outer(ptr, stride_l, stride_r, expert, r, live, RULE: tl.constexpr):
    """The amax above each row's blocks, for NVFP4."""
    if RULE == "nvfp4":  # no early return: Triton compiles the code after it anyway
        amax = tl.load(ptr + expert.to(tl.int64) * stride_l + r * stride_r, mask=live, other=0.0).to(tl.float32)
    else:
        amax = live
    return amax


@triton.jit
def outer_scale(ptr, stride_l, stride_r, expert, r, live, share, RULE: tl.constexpr):
    """The factor of the sum per row: the group's scale, or amax · share unless that is infinite."""
    scale = tl.load(ptr + expert.to(tl.int64) * stride_l + r * stride_r, mask=live, other=0.0).to(tl.float32)
    return tl.where(scale == INFINITE, 1.0, scale * share) if RULE == "nvfp4" else scale


@triton.jit
def centred(scale):
    """(scale · 2^k, 2^-k), k = ±63 for scales far from 1: the product of two keeps its bits."""
    lift = tl.where(scale < 1 / EXTREME, EXTREME, tl.where(scale > EXTREME, 1 / EXTREME, 1.0))
    return scale * lift, tl.where(scale < 1 / EXTREME, 1 / EXTREME, tl.where(scale > EXTREME, EXTREME, 1.0))


@triton.jit
def times(acc, left, right):
    """acc_ij · left_i · right_j, without an overflow or underflow on the way."""
    left, left_back = centred(left)
    right, right_back = centred(right)
    return acc * (left[:, None] * right[None, :]) * (left_back[:, None] * right_back[None, :])
