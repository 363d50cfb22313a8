"""Score functions with their gradients, and integers that have the order of scores.

A tile is [tokens, columns], in float32 or float64, and has all the experts of a token.
"""

import triton
import triton.language as tl

from moe_fast.launch._rounding import score_and_slope


@triton.jit
def softmax(x):
    """exp(x_e - max x) / Σ_e exp(x_e - max x) over the columns; -∞ becomes 0."""
    power = tl.exp(x - tl.max(x, axis=1)[:, None])
    return power * (1.0 / tl.sum(power, axis=1))[:, None]


@triton.jit
def inverse_sum(s, among, normalise):
    """1 / (Σ s + 1e-20) over the columns `among`; 1 unless `normalise`."""
    return tl.where(normalise, 1.0 / (tl.sum(tl.where(among, s, 0.0), axis=1) + 1e-20), 1.0)[:, None]


@triton.jit
def weights_gradient(x, g, among, normalise, ACTIVATION: tl.constexpr):
    """The gradient dx of w = softmax(x), of s(x) / (Σ s + 1e-20), or of s(x), over the columns
    `among`. g is the gradient of w, and 0 in other columns.

    dx = w (g - Σ w g),   or s' / (Σ s + 1e-20) · (g - Σ w g),   or s' g
    """
    if ACTIVATION == "softmax":
        w = softmax(tl.where(among, x, -float("inf")))
        dx = w * (g - tl.sum(w * g, axis=1)[:, None])
    else:
        s, slope = score_and_slope(x, ACTIVATION)
        inverse = inverse_sum(s, among, normalise)
        common = tl.where(normalise, tl.sum(s * inverse * g, axis=1), 0.0)[:, None]
        dx = tl.where(among, slope * inverse * (g - common), 0.0)
    return dx


@triton.jit
def lowest(dtype: tl.constexpr):
    """The least integer. It lies below the key of -∞ by more than the number of slots."""
    return tl.full([], -(2**63) if dtype == tl.int64 else -(2**31), dtype)


@triton.jit
def out_of_choice(dtype: tl.constexpr):
    """The key of experts that cannot be chosen: above all marks, and below the key of -∞."""
    return lowest(dtype) + 65536


@triton.jit
def ordered(word, magnitude: tl.constexpr):
    """From the bits of a float, sign-extended, to an integer that has the order of the numbers; and
    back.
    """
    return tl.where(word < 0, word ^ magnitude, word)


@triton.jit
def key_of(x):
    """An integer that has the order of the scores, none of which is -0. The key of a NaN is at
    least that of -∞, and so is no mark.
    """
    is_float64: tl.constexpr = x.dtype == tl.float64
    key = ordered(x.to(tl.int64 if is_float64 else tl.int32, bitcast=True), 2**63 - 1 if is_float64 else 2**31 - 1)
    return tl.maximum(key, -(2**63) + 2**52 - 1 if is_float64 else -(2**31) + 2**23 - 1)  # the image of -∞


@triton.jit
def score_of(key):
    """The score of a key, the inverse of `key_of`."""
    is_float64: tl.constexpr = key.dtype == tl.int64
    return ordered(key, 2**63 - 1 if is_float64 else 2**31 - 1).to(
        tl.float64 if is_float64 else tl.float32, bitcast=True
    )
