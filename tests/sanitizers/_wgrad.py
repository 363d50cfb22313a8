"""A small grouped product, right or with a planted fault."""

import triton
import triton.language as tl


@triton.jit
def wgrad_kernel(
    d_out_ptr, rows_ptr, begin_ptr, out_ptr, num_outs, num_ins, size, LEFT_OUT: tl.constexpr, PAST: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """out[e, m, n] = Σ over e's rows p of d_out[p, m] · rows[p, n], of contiguous tensors.

    LEFT_OUT of an expert's last rows are not added; with PAST, one element is stored past the end.
    """
    expert, m, n = tl.program_id(0), tl.program_id(1) * BLOCK_M, tl.program_id(2) * BLOCK_N
    begin, end = tl.load(begin_ptr + expert), tl.load(begin_ptr + expert + 1)
    end = tl.where(end - begin > LEFT_OUT, end - LEFT_OUT, end)
    m_M, n_N = m + tl.arange(0, BLOCK_M), n + tl.arange(0, BLOCK_N)
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(begin, end, BLOCK_P):
        p_P = first + tl.arange(0, BLOCK_P)
        left_at = p_P[None, :] * num_outs + m_M[:, None]
        right_at = p_P[:, None] * num_ins + n_N[None, :]
        d_out = tl.load(d_out_ptr + left_at, (p_P < end)[None, :] & (m_M < num_outs)[:, None], 0.0)  # other rows
        rows = tl.load(rows_ptr + right_at, (p_P < end)[:, None] & (n_N < num_ins)[None, :], 0.0)
        sums += tl.dot(d_out.to(tl.float32), rows.to(tl.float32), input_precision="ieee")
    out_at = (expert * num_outs + m_M)[:, None] * num_ins + n_N[None, :]
    tl.store(out_ptr + out_at, sums, (m_M < num_outs)[:, None] & (n_N < num_ins)[None, :])  # inside the matrix
    if PAST:
        tl.store(out_ptr + size, 0.0)
