"""Kernels for the scores of all experts, the balancing loss and the z-loss.

A loss is summed in two stages, each in a fixed order: programs add up rows, and then one program
adds up the sums of the programs.
"""

import triton
import triton.language as tl

from moe_fast.launch._rounding import number, rounded, score_and_slope, widened
from moe_fast.launch.specialization import jit
from moe_fast.router._scores import inverse_sum, key_of, out_of_choice, softmax, weights_gradient
from moe_fast.router._selection import mark_largest


@triton.jit
def load_rows(x_ptr, stride_t, stride_e, t, e, real, dtype: tl.constexpr):
    """[BLOCK_T, BLOCK_E] of logits or gradients."""
    return tl.load(x_ptr + t[:, None] * stride_t + e * stride_e, mask=real, other=0.0).to(dtype)


@triton.jit
def load_padding(padding_ptr, stride_padding, t):
    """[BLOCK_T, 1] booleans: which tokens are padding."""
    padding = t < 0
    if padding_ptr is not None:
        padding = tl.load(padding_ptr + t * stride_padding) != 0
    return padding[:, None]


@jit(
    together=[("stride_logits_t", "num_experts")],
    along=["stride_logits_e"],
    do_not_specialize=["stride_padding", "num_tokens", "topk"],
)
def aux_scores_kernel(
    logits_ptr, stride_logits_t, stride_logits_e, padding_ptr, stride_padding,
    # results, contiguous
    scores_ptr, map_ptr,
    # sizes
    num_tokens, num_experts, topk,
    SCORE: tl.constexpr, ACCUMULATOR: tl.constexpr, TIES_ARE_RARE: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
):  # fmt: skip
    """For BLOCK_T tokens per program, the scores softmax(x), or s / (Σ_E s + 1e-20), and the map of
    the K largest; 0 and False for padding.
    """
    # the last tile repeats the last row
    t = tl.minimum(tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T), num_tokens - 1)
    column = tl.arange(0, BLOCK_E)
    e = column.to(tl.int64)[None, :]
    real = e < num_experts  # the block is a power of two
    x = load_rows(logits_ptr, stride_logits_t, stride_logits_e, t, e, real, ACCUMULATOR)
    if SCORE == "softmax":
        score = softmax(tl.where(real, x, -float("inf")))
    else:
        s, _ = score_and_slope(x, SCORE)
        score = s * inverse_sum(s, real, True)
    key = key_of(score)
    marked = mark_largest(tl.where(real, key, out_of_choice(key.dtype)), column, topk, TIES_ARE_RARE)
    valid = load_padding(padding_ptr, stride_padding, t) == 0
    chosen = (marked < out_of_choice(marked.dtype)) & valid
    cell = t[:, None] * num_experts + e
    tl.store(scores_ptr + cell, tl.where(valid, score, 0.0), mask=real)
    tl.store(map_ptr + cell, chosen.to(tl.uint8), mask=real)


@jit(
    together=[("stride_dscores_t", "stride_logits_t", "num_experts")],
    along=["stride_dscores_e", "stride_logits_e"],
    do_not_specialize=["stride_padding", "num_tokens"],
)
def aux_scores_backward_kernel(
    dscores_ptr, stride_dscores_t, stride_dscores_e, logits_ptr, stride_logits_t, stride_logits_e,
    padding_ptr, stride_padding,
    # result, contiguous
    dlogits_ptr,
    # sizes
    num_tokens, num_experts,
    SCORE: tl.constexpr, ACCUMULATOR: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """The gradient of the logits for BLOCK_T tokens per program. The scores are computed again."""
    # the last tile repeats the last row
    t = tl.minimum(tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T), num_tokens - 1)
    e = tl.arange(0, BLOCK_E).to(tl.int64)[None, :]
    real = e < num_experts  # the block is a power of two
    x = load_rows(logits_ptr, stride_logits_t, stride_logits_e, t, e, real, ACCUMULATOR)
    g = load_rows(dscores_ptr, stride_dscores_t, stride_dscores_e, t, e, real, ACCUMULATOR)
    dx = tl.where(load_padding(padding_ptr, stride_padding, t), 0.0, weights_gradient(x, g, real, True, SCORE))
    tl.store(dlogits_ptr + t[:, None] * num_experts + e, rounded(dx, dlogits_ptr.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["stride_count", "num_rows", "num_columns", "tiles"])
def balance_kernel(
    scores_ptr, stride_scores_r, stride_scores_c, count_ptr, stride_count,
    # for each program
    partial_ptr,
    # sizes
    num_rows, num_columns, tiles,
    ACCUMULATOR: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Σ_j count[j] · Σ_r scores[r, j]: program (i, j) sums `tiles` tiles of rows, for block j of
    the columns.
    """
    c = tl.program_id(1).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
    in_row = c < num_columns  # the last block sticks out
    total = tl.zeros([BLOCK_R, BLOCK_C], ACCUMULATOR)
    for i in range(tiles):
        r = (tl.program_id(0).to(tl.int64) * tiles + i) * BLOCK_R + tl.arange(0, BLOCK_R)
        in_bounds = (r < num_rows)[:, None] & in_row[None, :]  # the last tile sticks out
        total += widened(
            tl.load(
                scores_ptr + r[:, None] * stride_scores_r + c[None, :] * stride_scores_c, mask=in_bounds, other=0.0
            ),
            ACCUMULATOR,
        )
    # the last block sticks out
    count = widened(tl.load(count_ptr + c * stride_count, mask=in_row, other=0), ACCUMULATOR)
    program = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    tl.store(partial_ptr + program, tl.sum(tl.sum(total, axis=0) * count, axis=0))


@triton.jit(do_not_specialize=["stride_count", "num_rows", "num_columns"])
def balance_backward_kernel(
    dloss_ptr, factor_ptr, count_ptr, stride_count,
    # result, contiguous
    dscores_ptr,
    # sizes
    num_rows, num_columns,
    ACCUMULATOR: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """dscores[r, j] = dloss · factor · count[j]. A program writes one tile."""
    r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    c = tl.program_id(1).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
    # the last block sticks out
    count = widened(tl.load(count_ptr + c * stride_count, mask=c < num_columns, other=0), ACCUMULATOR)
    g = rounded(tl.load(dloss_ptr) * tl.load(factor_ptr) * count, dscores_ptr.dtype.element_ty)
    in_bounds = (r < num_rows)[:, None] & (c < num_columns)[None, :]  # the last tiles stick out on both sides
    tl.store(
        dscores_ptr + r[:, None] * num_columns + c[None, :],
        tl.broadcast_to(g[None, :], [BLOCK_R, BLOCK_C]),
        mask=in_bounds,
    )


@triton.jit
def log_sum_exp(x):
    """[BLOCK_T, 1]: ln Σ_e exp x_e, and -∞ for a row in which every number is -∞."""
    top = tl.max(x, axis=1)[:, None]
    top = tl.where(top == -float("inf"), 0.0, top)  # because -∞ - (-∞) is a NaN
    return top + tl.log(tl.sum(tl.exp(x - top), axis=1))[:, None]


@jit(
    together=[("stride_logits_t", "num_experts")],
    along=["stride_logits_e"],
    do_not_specialize=["stride_padding", "num_tokens", "tiles"],
)
def z_loss_kernel(
    logits_ptr, stride_logits_t, stride_logits_e, padding_ptr, stride_padding,
    # for each program
    partial_ptr, valid_ptr,
    # sizes
    num_tokens, num_experts, tiles,
    ACCUMULATOR: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Σ_t (ln Σ_e exp x_te)² over the valid tokens of `tiles` tiles per program, and the number of
    these tokens.
    """
    e = tl.arange(0, BLOCK_E).to(tl.int64)[None, :]
    real = e < num_experts  # the block is a power of two
    total = tl.zeros([BLOCK_T, 1], ACCUMULATOR)
    num_valid = tl.zeros([BLOCK_T, 1], tl.int32)
    for i in range(tiles):
        t = (tl.program_id(0).to(tl.int64) * tiles + i) * BLOCK_T + tl.arange(0, BLOCK_T)
        row = tl.minimum(t, num_tokens - 1)  # the last tile repeats the last row, and does not count it
        valid = (load_padding(padding_ptr, stride_padding, row) == 0) & (t < num_tokens)[:, None]
        x = load_rows(logits_ptr, stride_logits_t, stride_logits_e, row, e, real, ACCUMULATOR)
        lse = log_sum_exp(tl.where(real, x, -float("inf")))
        total += tl.where(valid, lse * lse, 0.0)
        num_valid += valid.to(tl.int32)
    tl.store(partial_ptr + tl.program_id(0), tl.sum(tl.sum(total, axis=1), axis=0))
    tl.store(valid_ptr + tl.program_id(0), tl.sum(tl.sum(num_valid, axis=1), axis=0))


@jit(
    together=[("stride_logits_t", "num_experts")],
    along=["stride_logits_e"],
    do_not_specialize=["stride_padding", "num_tokens"],
)
def z_loss_backward_kernel(
    dloss_ptr, factor_ptr, logits_ptr, stride_logits_t, stride_logits_e, padding_ptr, stride_padding,
    # result, contiguous
    dlogits_ptr,
    # sizes
    num_tokens, num_experts,
    ACCUMULATOR: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """dx_te = dloss · factor · 2 · lse_t · softmax(x)_te, and 0 for padding, for BLOCK_T tokens per
    program.
    """
    # the last tile repeats the last row
    t = tl.minimum(tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T), num_tokens - 1)
    e = tl.arange(0, BLOCK_E).to(tl.int64)[None, :]
    real = e < num_experts  # the block is a power of two
    x = tl.where(real, load_rows(logits_ptr, stride_logits_t, stride_logits_e, t, e, real, ACCUMULATOR), -float("inf"))
    dx = tl.load(dloss_ptr) * tl.load(factor_ptr) * 2.0 * log_sum_exp(x) * softmax(x)
    dx = tl.where(load_padding(padding_ptr, stride_padding, t), 0.0, dx)
    tl.store(dlogits_ptr + t[:, None] * num_experts + e, rounded(dx, dlogits_ptr.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["total", "coeff", "num_partials"])
def finish_loss_kernel(
    # sums of the first stage's programs
    partial_ptr, valid_ptr,
    # how many tokens share the loss, if it is no mean over valid ones: a tensor of one, or a number
    total_ptr, total: tl.int64, coeff: tl.int64, loss_ptr, factor_ptr, num_partials,
    ACCUMULATOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The loss, factor · Σ partial, by one program: factor = coeff / max(n, 1) for n valid tokens,
    or coeff / N² for N tokens, or 0 if N is 0.
    """
    lane = tl.arange(0, BLOCK)
    partial = tl.zeros([BLOCK], ACCUMULATOR)
    valid = tl.zeros([BLOCK], tl.int32)
    for first in range(0, num_partials, BLOCK):
        in_bounds = first + lane < num_partials  # the last step sticks out
        partial += tl.load(partial_ptr + first + lane, mask=in_bounds, other=0.0)
        if valid_ptr is not None:
            valid += tl.load(valid_ptr + first + lane, mask=in_bounds, other=0)
    factor = number(coeff, ACCUMULATOR)
    if valid_ptr is not None:
        factor = factor / tl.maximum(tl.sum(valid, axis=0), 1).to(ACCUMULATOR)
    else:
        n = widened(tl.load(total_ptr), ACCUMULATOR) if total_ptr is not None else number(total, ACCUMULATOR)
        tokens = tl.where(n > 0, n, 1.0)
        factor = tl.where(n > 0, factor / tokens / tokens, 0.0)
    tl.store(loss_ptr, factor * tl.sum(partial, axis=0))
    tl.store(factor_ptr, factor)
