"""Kernels that choose each token's experts and compute their weights, in one pass over the logits.

Keys are integers that have the order of the scores. The key of a chosen expert is replaced by a
mark, `lowest` + the slot, which is less than all keys. So no expert is chosen twice, even if all
scores are -∞, and the marks give the slot of each expert.
"""

import triton
import triton.language as tl

from moe_fast.launch._rounding import number, rounded, score_and_slope, widened
from moe_fast.launch.specialization import jit
from moe_fast.router._scores import inverse_sum, key_of, lowest, out_of_choice, score_of, softmax, weights_gradient

PAIRED = tl.constexpr(16)  # up to 16 groups are ranked at once, by comparing each pair
SLOT = tl.constexpr(0xFFFF)  # the bits of a mark that hold its slot; no column is as high


@triton.jit
def mark_in_order(key, column, count):
    """Mark the `count` largest keys of each row; among equal keys the one with the lower column."""
    for i in range(count):
        largest = tl.max(key, axis=1)
        first = tl.min(tl.where(key == largest[:, None], column[None, :], SLOT), axis=1)
        key = tl.where(column[None, :] == first[:, None], lowest(key.dtype) + i, key)
    return key


@triton.jit
def mark_largest(key, column, count, TIES_ARE_RARE: tl.constexpr):
    """As `mark_in_order`. If ties are rare, it first tries as if there were none, which takes half
    the instructions.
    """
    if TIES_ARE_RARE:
        marked = key
        largest = tl.max(key, axis=1)
        for i in range(count - 1):
            marked = tl.where(marked == largest[:, None], lowest(key.dtype) + i, marked)
            largest = tl.max(marked, axis=1)
        marked = tl.where(marked == largest[:, None], lowest(key.dtype) + count - 1, marked)
        num_marked = tl.sum((marked < out_of_choice(key.dtype)).to(tl.int32), axis=1)
        # more marks than slots, or too few keys for the slots
        tied = (num_marked > count) | (largest <= out_of_choice(key.dtype))
        if tl.max(tied.to(tl.int32), axis=0) > 0:
            marked = mark_in_order(key, column, count)
    else:
        marked = mark_in_order(key, column, count)
    return marked


@triton.jit
def only_best_groups(
    key, num_groups, group_topk, counted,
    ACCUMULATOR: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Exclude experts outside the `group_topk` groups with the largest sums of `counted` keys."""
    by_group = tl.reshape(key, [BLOCK_T, BLOCK_G, BLOCK_S])
    remaining_keys = by_group
    total = tl.zeros([BLOCK_T, BLOCK_G], ACCUMULATOR)
    missing = tl.zeros([BLOCK_T, BLOCK_G], tl.int32) + counted
    for _ in range(counted - 1):
        largest = tl.max(remaining_keys, axis=2)
        equal = remaining_keys == largest[:, :, None]
        taken = tl.minimum(tl.sum(equal.to(tl.int32), axis=2), missing)
        total += tl.where(taken > 0, score_of(largest) * taken.to(ACCUMULATOR), 0.0)  # because 0 · -∞ is a NaN
        missing -= taken
        remaining_keys = tl.where(equal, lowest(key.dtype), remaining_keys)
    total += tl.where(missing > 0, score_of(tl.max(remaining_keys, axis=2)), 0.0)  # at most one is missing
    group = tl.arange(0, BLOCK_G)
    group_key = key_of(total)
    # the block is a power of two
    group_key = tl.where((group < num_groups)[None, :], group_key, out_of_choice(group_key.dtype))
    if BLOCK_G <= PAIRED:
        better = group_key[:, None, :] > group_key[:, :, None]
        ranks_higher = better | (
            (group_key[:, None, :] == group_key[:, :, None]) & (group[None, :] < group[:, None])[None, :, :]
        )
        is_best = tl.sum(ranks_higher.to(tl.int32), axis=2) < group_topk
    else:
        is_best = mark_in_order(group_key, group, group_topk) < out_of_choice(group_key.dtype)
    return tl.reshape(tl.where(is_best[:, :, None], by_group, out_of_choice(key.dtype)), [BLOCK_T, BLOCK_G * BLOCK_S])


@triton.jit
def mark_precomputed(expert_ptrs, stride, e, topk):
    """Marks as those of `mark_largest`, for the experts that are listed for each token."""
    marked = tl.zeros([expert_ptrs.shape[0], e.shape[0]], tl.int32)
    for i in range(topk):
        expert = tl.load(expert_ptrs + tl.cast(i, tl.int64) * stride)
        marked = tl.where(e[None, :] == expert[:, None], lowest(tl.int32) + i, marked)
    return marked


@jit(
    together=[("stride_logits_t", "num_experts"), ("group_size",)],
    along=["stride_logits_e", "stride_bias"],
    do_not_specialize=[
        *(
            "stride_precomputed_t",
            "stride_precomputed_k",
            "scale",
            "num_tokens",
            "topk",
            "num_groups",
            "group_topk",
            "counted",
        ),
    ],
)
def topk_kernel(
    # logits, their bias, or precomputed indices
    logits_ptr, stride_logits_t, stride_logits_e, bias_ptr, stride_bias,
    precomputed_ptr, stride_precomputed_t, stride_precomputed_k,
    # results, contiguous: probs and map [T,E], or probs [T,K], with indices unless precomputed
    probs_ptr, indices_ptr, map_ptr,
    # settings and sizes
    scale, num_tokens, num_experts, topk, num_groups, group_size, group_topk, counted,
    SCORE: tl.constexpr, ACCUMULATOR: tl.constexpr, TIES_ARE_RARE: tl.constexpr,
    RAGGED: tl.constexpr,  # the columns are more than the experts
    BLOCK_T: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Choose the experts of BLOCK_T tokens per program, and compute their weights.

    Columns are numbered by group, so that each group begins at a power of two; there is at least
    one group.
    """
    # the last tile repeats the last row
    t = tl.minimum(tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T), num_tokens - 1)
    column = tl.arange(0, BLOCK_G * BLOCK_S)
    e = column.to(tl.int64)
    real = tl.full([1, BLOCK_G * BLOCK_S], True, tl.int1)
    if RAGGED:
        e = (column // BLOCK_S * group_size + column % BLOCK_S).to(tl.int64)
        # the blocks are powers of two
        real = ((column % BLOCK_S < group_size) & (column // BLOCK_S < num_groups))[None, :]
    x = tl.load(logits_ptr + t[:, None] * stride_logits_t + e[None, :] * stride_logits_e, mask=real, other=0.0).to(
        ACCUMULATOR
    )
    if SCORE == "pre_softmax":
        s = softmax(tl.where(real, x, -float("inf")))
    elif SCORE == "softmax":
        s = x + 0.0  # -0 becomes +0: they are equal, and so must be their keys
    else:
        s, _ = score_and_slope(x, SCORE)
    if precomputed_ptr is not None:
        marked = mark_precomputed(precomputed_ptr + t * stride_precomputed_t, stride_precomputed_k, e, topk)
    else:
        biased = s
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + e[None, :] * stride_bias, mask=real, other=0.0)
            biased += widened(bias, ACCUMULATOR)
        key = key_of(biased)
        key = tl.where(real, key, out_of_choice(key.dtype))
        if BLOCK_G > 1:
            key = only_best_groups(key, num_groups, group_topk, counted, ACCUMULATOR, BLOCK_T, BLOCK_G, BLOCK_S)
        marked = mark_largest(key, column, topk, TIES_ARE_RARE)
    chosen = marked < out_of_choice(marked.dtype)
    legal = tl.full([BLOCK_T, 1], True, tl.int1)
    if precomputed_ptr is not None:  # if an index is repeated or out of range, the token's probs are NaN
        chosen = chosen & real
        legal = (tl.sum(chosen.to(tl.int32), axis=1) == topk)[:, None]
    if SCORE == "softmax":
        s = softmax(tl.where(chosen, s, -float("inf")))
    elif SCORE != "pre_softmax":
        s = s * inverse_sum(s, chosen, topk > 1)
    s = s * number(scale, ACCUMULATOR)
    if map_ptr is not None:
        cell = t[:, None] * num_experts + e[None, :]
        tl.store(probs_ptr + cell, in_map(s, chosen, legal, probs_ptr.dtype.element_ty), mask=real)
        tl.store(map_ptr + cell, chosen.to(tl.uint8), mask=real)
    else:
        weight = rounded(s, probs_ptr.dtype.element_ty)
        # one 32-bit integer per expert, so that only it changes its layout for the stores
        slot = tl.where(chosen, marked & SLOT, topk).to(tl.int32).to(tl.int64)
        store_slots(probs_ptr, indices_ptr, t, e, slot, weight, legal, topk, precomputed_ptr is not None)


@triton.jit
def in_map(weight, chosen, legal, dtype: tl.constexpr):
    """The weights rounded to `dtype`: 0 where no expert is chosen, NaN for an illegal token.

    The constants come first, because before Triton 3.9 the interpreter has no constants of
    bfloat16.
    """
    return rounded(tl.where(legal, tl.where(chosen, weight, 0.0), float("nan")), dtype)


@triton.jit
def store_slots(probs_ptr, indices_ptr, t, e, slot, weight, legal, topk, MAY_BE_ILLEGAL: tl.constexpr):
    """Store the probability and the index of each chosen expert in its slot; for an illegal token
    NaN.
    """
    tl.store((probs_ptr + t * topk)[:, None] + slot, weight, mask=(slot < topk) & legal)
    if MAY_BE_ILLEGAL:
        no_weight = tl.full([weight.shape[0], 1], float("nan"), tl.float32).to(weight.dtype)
        for i in range(topk):
            tl.store((probs_ptr + t * topk + i)[:, None], no_weight, mask=legal == 0)
    if indices_ptr is not None:
        expert = tl.broadcast_to(e[None, :], weight.shape)
        tl.store((indices_ptr + t * topk)[:, None] + slot, expert, mask=slot < topk)


@jit(
    together=[("stride_logits_t", "num_experts")],
    along=["stride_logits_e", "stride_dprobs_x"],
    do_not_specialize=["stride_dprobs_t", "stride_indices_t", "stride_indices_k", "scale", "num_tokens", "topk"],
)
def topk_backward_kernel(
    # the gradient of the probs: of [T,K], with the indices, or of [T,E], with the contiguous map
    dprobs_ptr, stride_dprobs_t, stride_dprobs_x, indices_ptr, stride_indices_t, stride_indices_k, map_ptr,
    # logits, and their gradient, contiguous
    logits_ptr, stride_logits_t, stride_logits_e, dlogits_ptr,
    # settings and sizes
    scale, num_tokens, num_experts, topk,
    SCORE: tl.constexpr, ACCUMULATOR: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """The gradient of the logits of BLOCK_T tokens per program. The scores are computed again, the
    choice is not.
    """
    # the last tile repeats the last row
    t = tl.minimum(tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T), num_tokens - 1)
    e = tl.arange(0, BLOCK_E).to(tl.int64)[None, :]
    real = e < num_experts  # the block is a power of two
    x = tl.load(logits_ptr + t[:, None] * stride_logits_t + e * stride_logits_e, mask=real, other=0.0).to(ACCUMULATOR)
    cell = t[:, None] * num_experts + e
    if map_ptr is not None:
        chosen = tl.load(map_ptr + cell, mask=real, other=0) != 0
        g = tl.load(dprobs_ptr + t[:, None] * stride_dprobs_t + e * stride_dprobs_x, mask=chosen, other=0.0).to(
            ACCUMULATOR
        )  # with `else 0` they would be constants
    else:
        chosen = tl.zeros([BLOCK_T, BLOCK_E], tl.int32) != 0
        g = tl.zeros([BLOCK_T, BLOCK_E], ACCUMULATOR)
        for i in range(topk):
            k = tl.cast(i, tl.int64)
            index = tl.load(indices_ptr + t * stride_indices_t + k * stride_indices_k)
            dprob = tl.load(dprobs_ptr + t * stride_dprobs_t + k * stride_dprobs_x)
            hit = e == index[:, None]
            chosen = chosen | hit
            g = tl.where(hit, dprob[:, None].to(ACCUMULATOR), g)
    g = g * number(scale, ACCUMULATOR)
    among = real if SCORE == "pre_softmax" else chosen
    dx = weights_gradient(x, g, among, topk > 1, "softmax" if SCORE == "pre_softmax" else SCORE)
    tl.store(dlogits_ptr + cell, rounded(dx, dlogits_ptr.dtype.element_ty), mask=real)
