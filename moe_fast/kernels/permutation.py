"""Rows to their experts and back. `moe_fast.metadata.RowMap` says where a token's rows are."""

import triton
import triton.language as tl

from moe_fast.kernels.rounding import rounded


@triton.jit
def count_slots(slots_ptr, base_ptr, stride_base_b, t, tokens_per_block, num_tokens, num_experts):
    """How many rows each token has, the most that one has, and where its list and its block's bases begin."""
    slots = tl.load(slots_ptr + t, mask=t < num_tokens, other=0)  # the last tile sticks out
    return slots, tl.max(slots, axis=0), t * num_experts, base_ptr + t // tokens_per_block * stride_base_b


@triton.jit
def load_slot(slot_expert_ptr, slot_rank_ptr, list_t, base_t_ptr, j, slots, num_rows):
    """The expert and the row of slot j of each token, and whether there is such a row."""
    live = j < slots  # a token with fewer slots has nothing there
    expert = tl.load(slot_expert_ptr + (list_t + j), mask=live, other=0).to(tl.int64)
    rank = tl.load(slot_rank_ptr + (list_t + j), mask=live, other=0)
    row = tl.load(base_t_ptr + expert, mask=live, other=0) + rank
    return expert, row, live & (row < num_rows)  # rows behind the buffer are dropped


@triton.jit
def fill_gaps(
    rows_ptr,
    probs_ptr,
    gap_ptr,
    first_lane,
    column,
    tail_lanes,
    num_experts,
    num_columns,
    num_rows,
    BLOCK_G: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Zeros in the rows without a token. A lane has those behind one expert, or a share of those behind all segments."""
    lane = tl.cast(first_lane, tl.int64) + tl.arange(0, BLOCK_G)
    gap = tl.minimum(lane, num_experts)
    end = tl.minimum(tl.load(gap_ptr + num_experts + 1 + gap), num_rows)
    begin = tl.load(gap_ptr + gap) + (lane - gap) * BLOCK_R
    step = tl.where(gap == num_experts, tail_lanes, 1) * BLOCK_R
    h = tl.cast(column, tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H)
    for i in range(tl.max((end - begin + step - 1) // step, axis=0)):
        row_GR = (begin + i * step)[:, None] + tl.arange(0, BLOCK_R)[None, :]
        row = tl.reshape(row_GR, [BLOCK_G * BLOCK_R])
        in_gap = tl.reshape(row_GR < end[:, None], [BLOCK_G * BLOCK_R])
        inside = in_gap[:, None] & (h < num_columns)[None, :]  # the last block sticks out
        tl.store(rows_ptr + row[:, None] * num_columns + h[None, :], tl.zeros([BLOCK_G * BLOCK_R, BLOCK_H], rows_ptr.dtype.element_ty), mask=inside)
        if probs_ptr is not None and column == 0:  # once a row
            tl.store(probs_ptr + row, tl.zeros([BLOCK_G * BLOCK_R], probs_ptr.dtype.element_ty), mask=in_gap)  # other lanes' gaps may be longer


@triton.jit(do_not_specialize=["tokens_per_block", "token_blocks", "first_lane", "tail_lanes", "num_tokens", "num_rows"])
def permute_kernel(
    # tokens and probs, as bits
    tokens_ptr,
    stride_tokens_t,
    stride_tokens_h,
    probs_ptr,
    stride_probs_t,
    stride_probs_e,
    # rows, contiguous
    rows_ptr,
    row_probs_ptr,
    # row map
    slot_expert_ptr,
    slot_rank_ptr,
    slots_ptr,
    base_ptr,
    stride_base_b,
    tokens_per_block,
    gap_ptr,
    # programs: blocks of tokens, then lanes that fill gaps
    token_blocks,
    first_lane,
    tail_lanes,
    # sizes
    num_tokens,
    num_experts,
    num_columns,
    num_rows,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Each token is read once and written to each of its rows; the last programs write the rows that have no token."""
    pid = tl.program_id(0)
    column = tl.program_id(1)
    if pid < token_blocks:
        t = pid.to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
        h = column.to(tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H)
        in_row = (h < num_columns)[None, :]  # the last block sticks out
        inside = (t < num_tokens)[:, None] & in_row  # and so does the last tile
        token = tl.load(tokens_ptr + t[:, None] * stride_tokens_t + h[None, :] * stride_tokens_h, mask=inside, other=0)
        slots, most, list_t, base_t_ptr = count_slots(slots_ptr, base_ptr, stride_base_b, t, tokens_per_block, num_tokens, num_experts)
        for j in range(most):
            expert, row, live = load_slot(slot_expert_ptr, slot_rank_ptr, list_t, base_t_ptr, j, slots, num_rows)
            tl.store(rows_ptr + row[:, None] * num_columns + h[None, :], token, mask=live[:, None] & in_row)  # dropped rows are not written
            if probs_ptr is not None and column == 0:  # once a row
                prob = tl.load(probs_ptr + t * stride_probs_t + expert * stride_probs_e, mask=live, other=0)  # only those with a row
                tl.store(row_probs_ptr + row, prob, mask=live)  # likewise
    else:
        lane = first_lane + (pid - token_blocks) * BLOCK_G
        fill_gaps(rows_ptr, row_probs_ptr, gap_ptr, lane, column, tail_lanes, num_experts, num_columns, num_rows, BLOCK_G, BLOCK_R, BLOCK_H)


@triton.jit(do_not_specialize=["tokens_per_block", "num_tokens", "num_rows"])
def unpermute_kernel(
    # rows to sum, merging probs, result
    rows_ptr,
    stride_rows_p,
    stride_rows_h,
    probs_ptr,
    stride_probs_t,
    stride_probs_e,
    out_ptr,
    # the gradient of permute's probs, as bits: that of the rows' probs to that of [T,E]
    row_dprobs_ptr,
    stride_row_dprobs,
    dprobs_ptr,
    # row map
    slot_expert_ptr,
    slot_rank_ptr,
    slots_ptr,
    base_ptr,
    stride_base_b,
    tokens_per_block,
    # sizes
    num_tokens,
    num_experts,
    num_columns,
    num_rows,
    ACCUMULATOR: tl.constexpr,
    ROWS_AS: tl.constexpr,  # holds rows exactly: bfloat16 has no direct way to and from float64
    PROBS_AS: tl.constexpr,  # likewise
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """A token's rows are summed in ascending expert. The programs behind the last column block move the gradient of the probs."""
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    column = tl.program_id(1)
    slots, most, list_t, base_t_ptr = count_slots(slots_ptr, base_ptr, stride_base_b, t, tokens_per_block, num_tokens, num_experts)
    in_time = (t < num_tokens)[:, None]  # the last tile sticks out
    if column < tl.cdiv(num_columns, BLOCK_H):
        if rows_ptr is not None:
            h = column.to(tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H)
            in_row = (h < num_columns)[None, :]  # the last block sticks out
            acc = tl.zeros([BLOCK_T, BLOCK_H], ACCUMULATOR)
            for j in range(most):
                expert, row, live = load_slot(slot_expert_ptr, slot_rank_ptr, list_t, base_t_ptr, j, slots, num_rows)
                inside = live[:, None] & in_row  # rows without a token are never read
                value = tl.load(rows_ptr + row[:, None] * stride_rows_p + h[None, :] * stride_rows_h, mask=inside, other=0.0).to(ROWS_AS).to(ACCUMULATOR)
                if probs_ptr is not None:
                    prob = tl.load(probs_ptr + t * stride_probs_t + expert * stride_probs_e, mask=live, other=0.0)  # only those with a row
                    value *= prob.to(PROBS_AS).to(ACCUMULATOR)[:, None]
                acc += value
            tl.store(out_ptr + t[:, None] * num_columns + h[None, :], rounded(acc.to(ROWS_AS), out_ptr.dtype.element_ty), mask=in_time & in_row)
    elif dprobs_ptr is not None:
        for first in range(0, num_experts, BLOCK_E):
            e = first + tl.arange(0, BLOCK_E).to(tl.int64)
            dprobs = tl.zeros([BLOCK_T, BLOCK_E], dprobs_ptr.dtype.element_ty)
            for j in range(most):
                expert, row, live = load_slot(slot_expert_ptr, slot_rank_ptr, list_t, base_t_ptr, j, slots, num_rows)
                dprob = tl.load(row_dprobs_ptr + row * stride_row_dprobs, mask=live, other=0)  # a dropped row has no gradient
                dprobs = tl.where((expert[:, None] == e[None, :]) & live[:, None], dprob[:, None], dprobs)
            tl.store(dprobs_ptr + t[:, None] * num_experts + e[None, :], dprobs, mask=in_time & (e < num_experts)[None, :])  # the last block sticks out


@triton.jit(do_not_specialize=["tokens_per_block", "token_blocks", "first_lane", "tail_lanes", "num_tokens", "num_rows"])
def unpermute_backward_kernel(
    # the gradient of the sums, and what was merged: rows and probs
    dout_ptr,
    stride_dout_t,
    stride_dout_h,
    rows_ptr,
    stride_rows_p,
    stride_rows_h,
    probs_ptr,
    stride_probs_t,
    stride_probs_e,
    # results, contiguous
    drows_ptr,
    dprobs_ptr,
    # row map
    slot_expert_ptr,
    slot_rank_ptr,
    slots_ptr,
    base_ptr,
    stride_base_b,
    tokens_per_block,
    gap_ptr,
    # programs: blocks of tokens, then lanes that fill gaps
    token_blocks,
    first_lane,
    tail_lanes,
    # sizes
    num_tokens,
    num_experts,
    num_columns,
    num_rows,
    ACCUMULATOR: tl.constexpr,
    ROWS_AS: tl.constexpr,  # holds rows exactly: bfloat16 has no direct way to and from float64
    PROBS_AS: tl.constexpr,  # likewise
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """drows[row] = dout[t] · p and dprobs[t, e] = Σ_h rows[row, h] · dout[t, h]. A program owns whole rows of both."""
    pid = tl.program_id(0)
    if pid < token_blocks:
        t = pid.to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
        e = tl.arange(0, BLOCK_E).to(tl.int64)
        slots, most, list_t, base_t_ptr = count_slots(slots_ptr, base_ptr, stride_base_b, t, tokens_per_block, num_tokens, num_experts)
        dprobs = tl.zeros([BLOCK_T, BLOCK_E], ACCUMULATOR)
        for j in range(most):
            expert, row, live = load_slot(slot_expert_ptr, slot_rank_ptr, list_t, base_t_ptr, j, slots, num_rows)
            if drows_ptr is not None:
                prob = tl.load(probs_ptr + t * stride_probs_t + expert * stride_probs_e, mask=live, other=0.0)  # only those with a row
                weight = prob.to(PROBS_AS).to(ACCUMULATOR)[:, None]
            dots = tl.zeros([BLOCK_T, BLOCK_H], ACCUMULATOR)
            for first in range(0, num_columns, BLOCK_H):
                h = first + tl.arange(0, BLOCK_H).to(tl.int64)
                inside = live[:, None] & (h < num_columns)[None, :]  # no padding, no dropped rows; the last block sticks out
                dout = tl.load(dout_ptr + t[:, None] * stride_dout_t + h[None, :] * stride_dout_h, mask=inside, other=0.0).to(ROWS_AS).to(ACCUMULATOR)
                if dprobs_ptr is not None:
                    value = tl.load(rows_ptr + row[:, None] * stride_rows_p + h[None, :] * stride_rows_h, mask=inside, other=0.0)
                    dots += dout * value.to(ROWS_AS).to(ACCUMULATOR)
                if drows_ptr is not None:
                    drow = rounded((dout * weight).to(ROWS_AS), drows_ptr.dtype.element_ty)
                    tl.store(drows_ptr + row[:, None] * num_columns + h[None, :], drow, mask=inside)
            if dprobs_ptr is not None:
                dprobs = tl.where((expert[:, None] == e[None, :]) & live[:, None], tl.sum(dots, axis=1)[:, None], dprobs)
        if dprobs_ptr is not None:
            inside = (t < num_tokens)[:, None] & (e < num_experts)[None, :]  # the last tile sticks out, and experts are padded to a power of two
            tl.store(dprobs_ptr + t[:, None] * num_experts + e[None, :], rounded(dprobs.to(PROBS_AS), dprobs_ptr.dtype.element_ty), mask=inside)
    elif drows_ptr is not None:
        lane = first_lane + (pid - token_blocks) * BLOCK_G
        for column in range(tl.cdiv(num_columns, BLOCK_H)):
            fill_gaps(drows_ptr, None, gap_ptr, lane, column, tail_lanes, num_experts, num_columns, num_rows, BLOCK_G, BLOCK_R, BLOCK_H)
