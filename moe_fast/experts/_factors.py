"""The factors of a product in low precision: the values of codes, the scales of blocks, and the
factors of whole sums.
"""

import triton
import triton.language as tl

from moe_fast.quantization._formats import decoded, power_of_two
from moe_fast.quantization._quantize import INFINITE, spread

TILE_ROWS = 128
TILE = tl.constexpr(TILE_ROWS)
EXTREME = tl.constexpr(2.0**63)


@triton.jit
def factor(codes, FORMAT: tl.constexpr, FACTOR: tl.constexpr):
    """The values of codes in the dtype FACTOR; if it is None, the codes themselves, which the
    matrix unit multiplies.
    """
    return codes if FACTOR is None else decoded(codes, FORMAT).to(FACTOR)


@triton.jit
def block_codes(row_ptrs, stride, block, blocks, live, COUNT: tl.constexpr):
    """The scales of COUNT blocks of each row, as they are stored; 0 past the last block."""
    b = block + tl.arange(0, COUNT)
    return tl.load(row_ptrs[:, None] + b[None, :] * stride, mask=live[:, None] & (b < blocks)[None, :], other=0)


@triton.jit
def scaled_factor(codes, stored, amax, block, blocks, RULE: tl.constexpr, FORMAT: tl.constexpr, FACTOR: tl.constexpr):
    """Codes times their blocks' scales, without the amax above the blocks; 0 past the last block,
    where the product could be 0 · ∞.
    """
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
    """E2M1 codes as the matrix unit reads them: two in a byte, the even one in the low half."""
    low, high = tl.split(tl.reshape(codes, [codes.shape[0], codes.shape[1] // 2, 2]))
    return low | (high << 4)


@triton.jit
def add_scaled_by_hardware(
    acc, lhs, lhs_stored,
    lhs_format: tl.constexpr, rhs, rhs_stored, rhs_format: tl.constexpr, RULE: tl.constexpr,
):  # fmt: skip
    """acc + lhs · rhsᵀ, for codes whose scales the matrix unit itself multiplies in."""
    if RULE == "nvfp4":
        lhs, rhs = packed(lhs), packed(rhs)
        lhs_stored, rhs_stored = (
            lhs_stored.to(tl.float8e4nv, bitcast=True),
            rhs_stored.to(tl.float8e4nv, bitcast=True),
        )
    return tl.dot_scaled(lhs, lhs_stored, lhs_format, tl.trans(rhs), rhs_stored, rhs_format, acc)


@triton.jit
def add_blocks(
    acc, lhs, lhs_scale_ptrs, stride_lhs, lhs_amax, live_lhs, rhs, rhs_scale_ptrs, stride_rhs, rhs_amax,
    live_rhs, block, blocks,
    RULE: tl.constexpr, LHS_FORMAT: tl.constexpr, RHS_FORMAT: tl.constexpr, FACTOR: tl.constexpr,
    SCALED_BY_HARDWARE: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """acc + lhs · rhsᵀ, for COUNT blocks of codes from `block` on, each with a stored scale."""
    lhs_stored = block_codes(lhs_scale_ptrs, stride_lhs, block, blocks, live_lhs, COUNT)
    rhs_stored = block_codes(rhs_scale_ptrs, stride_rhs, block, blocks, live_rhs, COUNT)
    if SCALED_BY_HARDWARE:
        acc = add_scaled_by_hardware(acc, lhs, lhs_stored, LHS_FORMAT, rhs, rhs_stored, RHS_FORMAT, RULE)
    else:
        lhs = scaled_factor(lhs, lhs_stored, lhs_amax, block, blocks, RULE, LHS_FORMAT, FACTOR)
        rhs = scaled_factor(rhs, rhs_stored, rhs_amax, block, blocks, RULE, RHS_FORMAT, FACTOR)
        acc = tl.dot(lhs, tl.trans(rhs), acc, input_precision="ieee")
    return acc


@triton.jit
def add_codes(acc, lhs, rhs, FACTOR: tl.constexpr):
    """acc + lhs · rhsᵀ. Hopper adds FP8 products with 14 bits: sums of 128 are added in float32."""
    return (
        tl.dot(lhs, tl.trans(rhs), acc, max_num_imprecise_acc=TILE)
        if FACTOR is None
        else tl.dot(lhs, tl.trans(rhs), acc, input_precision="ieee")
    )


@triton.jit
def codes_product(lhs, rhs):
    """lhs · rhsᵀ, for a depth of 128."""
    return tl.dot(lhs, tl.trans(rhs), input_precision="ieee")


@triton.jit
def load_outer(ptr, stride_l, stride_r, expert, r, live, RULE: tl.constexpr):
    """For NVFP4, the amax above the blocks of each row."""
    if RULE == "nvfp4":  # no early return, because Triton compiles the code after it anyway
        amax = tl.load(ptr + expert.to(tl.int64) * stride_l + r * stride_r, mask=live, other=0.0).to(tl.float32)
    else:
        amax = live
    return amax


@triton.jit
def outer_scale(ptr, stride_l, stride_r, expert, r, live, share, RULE: tl.constexpr):
    """The factor of each row's sum: the scale of its group, or amax · share unless that is
    infinite.
    """
    scale = tl.load(ptr + expert.to(tl.int64) * stride_l + r * stride_r, mask=live, other=0.0).to(tl.float32)
    return tl.where(scale == INFINITE, 1.0, scale * share) if RULE == "nvfp4" else scale


@triton.jit
def centred(scale):
    """(scale · 2^k, 2^-k), with k = ±63 for scales far from 1 and 0 for others, so that the product
    of two scales keeps all its bits.
    """
    lift = tl.where(scale < 1 / EXTREME, EXTREME, tl.where(scale > EXTREME, 1 / EXTREME, 1.0))
    return scale * lift, tl.where(scale < 1 / EXTREME, 1 / EXTREME, tl.where(scale > EXTREME, EXTREME, 1.0))


@triton.jit
def times(acc, lhs, rhs):
    """acc_ij · lhs_i · rhs_j, without an overflow or underflow of lhs_i · rhs_j."""
    lhs, lhs_inverse = centred(lhs)
    rhs, rhs_inverse = centred(rhs)
    return acc * (lhs[:, None] * rhs[None, :]) * (lhs_inverse[:, None] * rhs_inverse[None, :])
