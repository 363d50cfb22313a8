"""An activation of whole rows, with or without a gate, times the row's probability; and its
gradient.

A tile is [rows, columns of the result]. `LAYOUT` gives the columns of the gate u and the value v in
h, for column f of the result:

    single  u at f, no v                              halves  u at f, v at f + width
    pairs   u at 2f, v at 2f + 1                      blocks  u at f // s · 2s + f % s, v at s more

with s = `between`. Everything is computed in `ACCUMULATOR`, float32 or float64.
"""

from math import pi, sqrt

import triton
import triton.language as tl

from moe_fast.launch._rounding import number, rounded, score_and_slope, widened
from moe_fast.launch.specialization import jit
from moe_fast.quantization._formats import as_float32, decoded, encoded

TWO_ROOT = tl.constexpr(2 * sqrt(2 / pi))
CUBIC = tl.constexpr(0.044715)  # Hendrycks and Gimpel 2016, arXiv 1606.08415
SATURATED = tl.constexpr(30.0)  # σ is 0 or 1 there to the last bit of float64, and u³ is far from an overflow
ROOT_HALF = tl.constexpr(sqrt(0.5))
NORMAL = tl.constexpr(1 / sqrt(2 * pi))


@triton.jit
def within(x, least, most):
    """min(max(x, least), most), a NaN if x is one."""
    return tl.where(x > most, most, tl.where(x < least, least, x))


@triton.jit
def value_and_slope(u, alpha, CURVE: tl.constexpr):
    """f(u) and its derivative f'(u). Both are finite for every finite u, unless f(u) itself
    overflows; a NaN stays a NaN.

    sigmoid  u σ(αu)                              erf           u (1 + erf(u/√2)) / 2
    tanh     u (1 + tanh x) / 2 = u σ(2x)         relu          max(u, 0)
             x = √(2/π) (u + 0.044715 u³)         squared_relu  max(u, 0)²
    """
    if CURVE == "sigmoid":
        s, ds = score_and_slope(alpha * u, "sigmoid")
        value = u * s
        slope = s + alpha * (u * ds)  # where u is large ds is 0: α must not come before it
    elif CURVE == "tanh":
        near = within(u, -SATURATED, SATURATED)
        square = near * near * CUBIC
        s, ds = score_and_slope(near * TWO_ROOT * (1.0 + square), "sigmoid")
        value = u * s
        slope = s + near * TWO_ROOT * (1.0 + 3.0 * square) * ds
    elif CURVE == "erf":
        s = 0.5 * (1.0 + tl.erf(u * ROOT_HALF))
        value = u * s
        slope = s + u * tl.exp(-0.5 * u * u) * NORMAL
    else:
        value = tl.where(u <= 0, 0.0, u)
        slope = tl.where(u > 0, 1.0, 0.0)
        if CURVE == "squared_relu":
            slope = 2.0 * value
            value = value * value
    return value, slope


@triton.jit
def pair_column(first, BLOCK_F: tl.constexpr):
    """[2 · BLOCK_F]: the columns of h that hold the gates and values of BLOCK_F columns of the
    result, from column `first` on.
    """
    return (2 * first + tl.arange(0, 2 * BLOCK_F)).to(tl.int64)


@triton.jit
def gate_column(f, between, LAYOUT: tl.constexpr):
    """The column of the gate u in h."""
    if LAYOUT == "blocks":
        f = f // between * (2 * between) + f % between
    return f.to(tl.int64)


@triton.jit
def load_gate_and_value(
    h_ptr, stride_p, stride_f, p, num_rows, first, width, between,
    LAYOUT: tl.constexpr, dtype: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """u and v in `dtype`, and 0 outside h. Without a gate both are h. An h of bytes holds E4M3
    codes.
    """
    row = h_ptr + p[:, None] * stride_p
    if LAYOUT == "pairs":
        column = pair_column(first, BLOCK_F)[None, :]
        in_bounds = (p < num_rows)[:, None] & (column < 2 * width)  # the last tiles stick out on both sides
        x = tl.load(row + column * stride_f, mask=in_bounds, other=0.0)
        u, v = tl.split(tl.reshape(x, [p.shape[0], BLOCK_F, 2]))
    else:
        f = first + tl.arange(0, BLOCK_F)
        in_bounds = (p < num_rows)[:, None] & (f < width)[None, :]  # the last tiles stick out on both sides
        gate_ptrs = row + gate_column(f, between, LAYOUT)[None, :] * stride_f
        u = tl.load(gate_ptrs, mask=in_bounds, other=0.0)
        v = u
        if LAYOUT != "single":
            v = tl.load(gate_ptrs + tl.cast(between, tl.int64) * stride_f, mask=in_bounds, other=0.0)
    if h_ptr.dtype.element_ty == tl.uint8:
        u = decoded(u, "e4m3")
        v = decoded(v, "e4m3")
    return widened(u, dtype), widened(v, dtype)


@triton.jit
def store_gate_and_value(
    h_ptr, du, dv, p, num_rows, first, width, between, LAYOUT: tl.constexpr, BLOCK_F: tl.constexpr
):
    """Store the tiles du and dv in a contiguous h of their dtype; without a gate only du."""
    if LAYOUT == "pairs":
        column = pair_column(first, BLOCK_F)[None, :]
        in_bounds = (p < num_rows)[:, None] & (column < 2 * width)  # the last tiles stick out on both sides
        tl.store(
            h_ptr + p[:, None] * (2 * width) + column,
            tl.reshape(tl.join(du, dv), [p.shape[0], 2 * BLOCK_F]),
            mask=in_bounds,
        )
    else:
        f = first + tl.arange(0, BLOCK_F)
        in_bounds = (p < num_rows)[:, None] & (f < width)[None, :]  # the last tiles stick out on both sides
        row_width = width if LAYOUT == "single" else 2 * width
        gate_ptrs = h_ptr + p[:, None] * row_width + gate_column(f, between, LAYOUT)[None, :]
        tl.store(gate_ptrs, du, mask=in_bounds)
        if LAYOUT != "single":
            tl.store(gate_ptrs + between, dv, mask=in_bounds)


@triton.jit
def load_probs(probs_ptr, stride_probs, has_probs, p, num_rows, dtype: tl.constexpr):
    """[rows of a tile, 1]: the rows' probabilities, or 1 without probs."""
    in_bounds = p < num_rows * has_probs  # the last tile sticks out
    return widened(tl.load(probs_ptr + p * stride_probs, mask=in_bounds, other=1.0), dtype)[:, None]


@triton.jit
def rows_of_experts(totals_ptr, has_totals, num_rows):
    """How many rows belong to experts, by the totals of a plan; all rows if there is no plan, or if
    the plan is illegal (-1).
    """
    if totals_ptr is not None:
        end = tl.load(totals_ptr + 1, mask=has_totals != 0, other=-1)
        num_rows = tl.where((end < 0) | (end > num_rows), num_rows, end)
    return num_rows


@jit(
    together=[("stride_h_p", "width"), ("between",)],
    along=["stride_h_f"],
    do_not_specialize=["stride_probs", "has_probs", "num_rows", "column_programs", "offset", "clamp", "alpha"],
)
def activation_kernel(
    h_ptr, stride_h_p, stride_h_f, probs_ptr, stride_probs, has_probs,
    # result, contiguous
    out_ptr,
    # the E4M3 codes of h, contiguous bytes; may be left out
    codes_ptr,
    # the totals of a plan of the products; may be left out
    totals_ptr,
    # sizes; `column_programs` programs share a row
    num_rows, width, between, column_programs,
    # numbers, as the bits of a float64: 0, or an integer of 64 bits
    offset: tl.int64, clamp: tl.int64, alpha: tl.int64,
    CURVE: tl.constexpr, LAYOUT: tl.constexpr, CLAMPED: tl.constexpr, ROUND_FIRST: tl.constexpr,
    ACCUMULATOR: tl.constexpr, HARDWARE: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """out = f(u) · (v + offset) · p, or without a gate f(u) · p. Each program computes one tile,
    and its E4M3 codes of h if they are wanted.
    """
    num_rows = rows_of_experts(totals_ptr, 1, num_rows)
    p = (tl.program_id(0) // column_programs).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
    first = tl.program_id(0) % column_programs * BLOCK_F
    u, v = load_gate_and_value(
        h_ptr, stride_h_p, stride_h_f, p, num_rows, first, width, between, LAYOUT, ACCUMULATOR, BLOCK_F
    )
    if codes_ptr is not None:
        code_u = encoded(as_float32(u), "e4m3", HARDWARE)
        code_v = encoded(as_float32(v), "e4m3", HARDWARE)
        store_gate_and_value(codes_ptr, code_u, code_v, p, num_rows, first, width, between, LAYOUT, BLOCK_F)
    if CLAMPED:
        bound = number(clamp, ACCUMULATOR)
        u = within(u, -float("inf"), bound)
        v = within(v, -bound, bound)
    act, _ = value_and_slope(u, number(alpha, ACCUMULATOR), CURVE)
    if LAYOUT != "single":
        act = act * (v + number(offset, ACCUMULATOR))
    if ROUND_FIRST:
        act = widened(rounded(act, out_ptr.dtype.element_ty), ACCUMULATOR)
    act = act * load_probs(probs_ptr, stride_probs, has_probs, p, num_rows, ACCUMULATOR)
    f = first + tl.arange(0, BLOCK_F)
    in_bounds = (p < num_rows)[:, None] & (f < width)[None, :]  # the last tiles stick out on both sides
    tl.store(out_ptr + p[:, None] * width + f[None, :], rounded(act, out_ptr.dtype.element_ty), mask=in_bounds)


@jit(
    together=[("stride_d_out_p", "stride_h_p", "width"), ("between",)],
    along=["stride_d_out_f", "stride_h_f"],
    do_not_specialize=[
        *("stride_probs", "has_probs", "has_totals", "num_rows", "column_programs"),
        *("tiles", "offset", "clamp", "alpha"),
        "has_d_probs",
    ],
)
def activation_backward_kernel(
    d_out_ptr, stride_d_out_p, stride_d_out_f, h_ptr, stride_h_p, stride_h_f, probs_ptr, stride_probs, has_probs,
    # results, contiguous; either may be left out
    d_h_ptr, d_probs_ptr, has_d_probs,
    # the totals of a plan of the products, if there is one
    totals_ptr, has_totals,
    # sizes; `column_programs` programs share a row, `tiles` tiles each; one if d_probs are wanted
    num_rows, width, between, column_programs, tiles,
    # numbers, as the bits of a float64: 0, or an integer of 64 bits
    offset: tl.int64, clamp: tl.int64, alpha: tl.int64,
    CURVE: tl.constexpr, LAYOUT: tl.constexpr, CLAMPED: tl.constexpr, ROUND_FIRST: tl.constexpr,
    ACCUMULATOR: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """The gradients, with g = d_out · p:

        du = g f'(u) (v + offset)      dv = g f(u)      dp = Σ_f d_out f(u) (v + offset)

    A program computes `tiles` tiles of the same rows side by side. Past the experts' rows dp is 0,
    and du and dv are not written.
    """
    p = (tl.program_id(0) // column_programs).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
    in_probs = p < num_rows  # the last tile sticks out
    num_rows = rows_of_experts(totals_ptr, has_totals, num_rows)
    real = p < num_rows  # as above
    bound = number(clamp, ACCUMULATOR)
    prob = load_probs(probs_ptr, stride_probs, has_probs, p, num_rows, ACCUMULATOR)
    total = tl.zeros([BLOCK_P, BLOCK_F], ACCUMULATOR)
    for i in range(tiles):
        first = (tl.program_id(0) % column_programs * tiles + i) * BLOCK_F
        u, v = load_gate_and_value(
            h_ptr, stride_h_p, stride_h_f, p, num_rows, first, width, between, LAYOUT, ACCUMULATOR, BLOCK_F
        )
        f = (first + tl.arange(0, BLOCK_F)).to(tl.int64)[None, :]
        in_bounds = real[:, None] & (f < width)  # the last tiles stick out on both sides
        d_out = widened(
            tl.load(d_out_ptr + p[:, None] * stride_d_out_p + f * stride_d_out_f, mask=in_bounds, other=0.0),
            ACCUMULATOR,
        )
        if CLAMPED:
            free_u = u <= bound  # the bounds themselves are free
            free_v = tl.abs(v) <= bound
            u = within(u, -float("inf"), bound)
            v = within(v, -bound, bound)
        value, slope = value_and_slope(u, number(alpha, ACCUMULATOR), CURVE)
        shifted = v + number(offset, ACCUMULATOR) if LAYOUT != "single" else 1.0
        act = value * shifted
        g = d_out * prob
        if ROUND_FIRST:
            act = widened(rounded(act, d_out_ptr.dtype.element_ty), ACCUMULATOR)
            g = widened(rounded(g, d_out_ptr.dtype.element_ty), ACCUMULATOR)
        if has_d_probs:
            total += d_out * act
        if d_h_ptr is not None:
            du = g * slope * shifted
            dv = g * value
            if CLAMPED:
                du = tl.where(free_u, du, 0.0)
                dv = tl.where(free_v, dv, 0.0)
            du = rounded(du, d_h_ptr.dtype.element_ty)
            dv = rounded(dv, d_h_ptr.dtype.element_ty)
            store_gate_and_value(d_h_ptr, du, dv, p, num_rows, first, width, between, LAYOUT, BLOCK_F)
    if has_d_probs:
        tl.store(d_probs_ptr + p, rounded(tl.sum(total, axis=1), d_probs_ptr.dtype.element_ty), mask=in_probs)
