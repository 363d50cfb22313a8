"""A kernel that moves chunks of rows into another order, and back."""

import triton
import triton.language as tl

from moe_fast.launch.specialization import jit


@triton.jit
def load_chunks(sizes_ptr, stride_sizes, order_ptr, stride_order, position, num_chunks, reordered):
    """(number, size) of the chunks at some positions of the new order, or without `reordered` of
    the old one.
    """
    there = position < num_chunks * reordered  # the last block sticks out
    listed = tl.load(order_ptr + position * stride_order, mask=there, other=-1).to(tl.int64)
    chunk = tl.where(reordered != 0, listed, position)
    # nor is there a chunk outside the block, nor in an order that is no permutation
    valid = (chunk >= 0) & (chunk < num_chunks)
    return chunk, tl.load(sizes_ptr + chunk * stride_sizes, mask=valid, other=0).to(tl.int64)


@jit(
    together=[("stride_rows_r", "num_columns")],
    along=["stride_rows_h"],
    do_not_specialize=["num_rows", "num_chunks", "stride_probs_r", "stride_sizes", "stride_order", "inverse"],
)
def sort_chunks_kernel(
    # rows and probs, as bits
    rows_ptr, stride_rows_r, stride_rows_h, probs_ptr, stride_probs_r,
    # chunks
    sizes_ptr, stride_sizes, order_ptr, stride_order,
    # results, contiguous
    out_ptr, out_probs_ptr,
    # sizes; 1 where the result is in the old order
    num_rows, num_columns, num_chunks, inverse,
    BLOCK_R: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Move BLOCK_R rows of the result: find each row's chunk, where the chunk begins in the result,
    and where it begins in the source.

    Illegal sizes make every bit of the result 1, which is a NaN in every floating-point format.
    """
    r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    chunk_R = tl.full([BLOCK_R], -1, tl.int64)  # -1: past the last chunk
    begin_R = tl.zeros([BLOCK_R], tl.int64)
    carry = tl.zeros([1], tl.int64)
    negative = tl.zeros([1], tl.int64)  # number of such sizes
    for first in range(0, num_chunks, BLOCK_S):
        chunk, size = load_chunks(
            sizes_ptr, stride_sizes, order_ptr, stride_order, first + tl.arange(0, BLOCK_S).to(tl.int64),
            num_chunks, 1 - inverse,
        )  # fmt: skip
        negative += tl.sum((size < 0).to(tl.int64), axis=0)
        end = carry + tl.cumsum(size, axis=0)
        begin = end - size
        here = (begin[None, :] <= r[:, None]) & (r[:, None] < end[None, :])
        chunk_R += tl.sum(tl.where(here, chunk[None, :] + 1, 0), axis=1)
        begin_R += tl.sum(tl.where(here, begin[None, :], 0), axis=1)
        carry += tl.sum(size, axis=0)
    is_wrong = (negative > 0) | (carry > num_rows)
    source = r - begin_R
    carry = tl.zeros([1], tl.int64)
    for first in range(0, num_chunks, BLOCK_S):
        chunk, size = load_chunks(
            sizes_ptr, stride_sizes, order_ptr, stride_order, first + tl.arange(0, BLOCK_S).to(tl.int64),
            num_chunks, inverse,
        )  # fmt: skip
        begin = carry + tl.cumsum(size, axis=0) - size
        here = (chunk[None, :] == chunk_R[:, None]) & (chunk_R >= 0)[:, None]
        source += tl.sum(tl.where(here, begin[None, :], 0), axis=1)
        carry += tl.sum(size, axis=0)
    readable = (source >= 0) & (source < num_rows)  # not where the last tile sticks out; illegal sizes stay in memory
    if rows_ptr is not None:
        for first in range(0, num_columns, BLOCK_H):
            h = first + tl.arange(0, BLOCK_H).to(tl.int64)
            in_row = (h < num_columns)[None, :]  # the last block sticks out
            row = tl.load(
                rows_ptr + source[:, None] * stride_rows_r + h[None, :] * stride_rows_h,
                mask=readable[:, None] & in_row,
                other=0,
            )
            row = tl.where(is_wrong[:, None], -1, row)
            tl.store(out_ptr + r[:, None] * num_columns + h[None, :], row, mask=(r < num_rows)[:, None] & in_row)
    if probs_ptr is not None:
        prob = tl.load(probs_ptr + source * stride_probs_r, mask=readable, other=0)
        prob = tl.where(is_wrong, -1, prob)
        tl.store(out_probs_ptr + r, prob, mask=r < num_rows)  # the last tile sticks out
