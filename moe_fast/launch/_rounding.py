"""Numbers on their way into a kernel and out, and the curves that several families compute."""

import triton
import triton.language as tl

from moe_fast.launch import backend

INTERPRETED = tl.constexpr(backend.INTERPRETED)


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """x in `dtype`, ties to even. Triton's interpreter (3.9) truncates float32 to bfloat16."""
    if INTERPRETED and dtype == tl.bfloat16:
        word = x.to(tl.float32).to(tl.uint32, bitcast=True)
        nearest = (word + 0x7FFF + ((word >> 16) & 1)) >> 16
        nearest = tl.where(x != x, 0x7FC0, nearest)  # the carry would turn a NaN into another number
        return nearest.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(dtype)


@triton.jit
def widened(x, dtype: tl.constexpr):
    """x in a dtype that holds it: bfloat16 has no direct way to float64."""
    if x.dtype == tl.bfloat16:
        x = x.to(tl.float32)
    return x.to(dtype)


@triton.jit
def number(bits, dtype: tl.constexpr):
    """A float64 that was passed as its bits, in `dtype`. Triton would pass a plain number as
    float32.
    """
    return tl.cast(bits, tl.int64).to(tl.float64, bitcast=True).to(dtype)


@triton.jit
def score_and_slope(x, SCORE: tl.constexpr):
    """σ(x) or √ln(1+exp x), and its derivative; no exponential here can overflow.

    With e = exp(-|x|) and r = ln(1+e) / e, which is 1 where 1+e rounds to 1:

        σ = (e or 1) / (1+e)                                σ' = e / (1+e)²
        √ln(1+exp x) = exp(x/2) √r, or √(x + e r)    its derivative = (exp(x/2) or 1) / (2 (1+e) √…)
    """
    # its score √e is still a number where e is far too small
    half = tl.exp(-0.5 * tl.abs(x)) if SCORE == "sqrtsoftplus" else x
    e = half * half if SCORE == "sqrtsoftplus" else tl.exp(-tl.abs(x))
    u = 1.0 + e
    if SCORE == "sigmoid":
        score = tl.where(x < 0, e, 1.0) / u
        slope = e / (u * u)
    else:
        lost = u == 1.0
        ratio = tl.where(lost, 1.0, tl.log(u)) / tl.where(lost, 1.0, u - 1.0)  # the error of u is in both, and cancels
        root = tl.sqrt(tl.where(x < 0, ratio, x + e * ratio))
        lift = tl.where(x < 0, half, 1.0)
        score = lift * root
        slope = lift / (2.0 * u * root)
    return score, slope
