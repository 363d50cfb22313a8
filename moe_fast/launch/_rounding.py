"""The last step of a sum."""

import triton
import triton.language as tl

from moe_fast.launch import backend

INTERPRETED = tl.constexpr(backend.INTERPRETED)


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """x in `dtype`, to nearest, ties to even. Triton's interpreter (3.9) cuts float32 off where it should round to bfloat16."""
    if INTERPRETED and dtype == tl.bfloat16:
        word = x.to(tl.float32).to(tl.uint32, bitcast=True)
        nearest = (word + 0x7FFF + ((word >> 16) & 1)) >> 16
        nearest = tl.where(x != x, 0x7FC0, nearest)  # the carry would turn a NaN into another number
        return nearest.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(dtype)
