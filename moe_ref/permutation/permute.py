"""permute, unpermute and sort_chunks: rows in the order of their tokens, and rows in the order of
their experts.

Mirrors `permute`, `unpermute` and `sort_chunks_by_idxs` of megatron.core.transformer.moe.moe_utils,
and `moe_permute_and_pad_with_probs`, `moe_unpermute` and `moe_sort_chunks_by_index_with_probs` of
transformer_engine.pytorch. Differs: docs/differences.md#permutation.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_ref.config import Permuted, SortedChunks, check_permute, check_sort_chunks, check_unpermute, require
from moe_ref.permutation.rows import PADDING, take_rows
from moe_ref.rounding import accumulator_dtype, round_to

Cell = tuple[int, int]  # (token, expert): one entry of the routing map; the token is PADDING for a row of zeros


@dataclass(frozen=True)
class RowMap:
    """The cell of the routing map from which each permuted row came.

    Four tokens, three experts, align=2:

        routing_map = 1 0 1      expert 0 has tokens 0, 1      rows 0, 1
                      1 1 0      expert 1 has token 1          row 2, and row 3 of zeros
                      0 0 1      expert 2 has tokens 0, 2      rows 4, 5
                      0 0 0
        token_P     = 0 1 1 -1 0 2
        expert_P    = 0 0 1  1 2 2

    and `permute` returns tokens_per_expert = 2 2 2 and pad_offsets = 0 0 1 with it.
    """

    token_P: Tensor  # int64: the row's source token, or PADDING
    expert_P: Tensor  # int64: the expert whose segment holds the row, or PADDING past the last segment
    num_tokens: int
    num_experts: int


def permute(
    tokens_TH: Tensor, routing_map_TE: Tensor, *, probs: Tensor | None = None,
    align: int | None = None, capacity: int | None = None, num_rows: int | None = None,
) -> Permuted:  # fmt: skip
    """Copy each token once per expert it is routed to, by ascending expert, then token.

        for e in experts:
            for t in tokens:
                if routing_map[t, e]: rows.append(tokens[t]); row_probs.append(probs[t, e])

    `align`: rows of zeros extend each expert's segment to a multiple of it, with probability 0.
    `capacity`: each segment has exactly that many rows: the first routed tokens, then the first
    unrouted ones with their own values and probs, then rows of zeros. Other routed tokens are
    dropped. `num_rows`: the buffer is cut, or extended by zeros, to that many rows, whatever was
    routed.

    Args:
        tokens_TH: any dtype; copied bit by bit.
        routing_map_TE: bool, or integers 0 and 1.
        probs: [T,E] floating point, or None. A routed token of probability 0 is copied like any
            other.
        align, capacity, num_rows: rows. `capacity` excludes the others; `num_rows` is a multiple of
            `align`.

    Rounding: none. dtokens[t] = Σ over t's rows of drows, in fp32 (fp64 for fp64), rounded once.

    Raises:
        ValueError: see `moe_ref.config.check_permute`.
    """
    check_permute(tokens_TH, routing_map_TE, probs, align, capacity, num_rows)
    num_tokens, num_experts = routing_map_TE.shape
    routed = (routing_map_TE != 0).tolist()
    cells: list[Cell] = []
    pad_offsets, padding = [], 0
    for e in range(num_experts):
        segment = _segment([routed[t][e] for t in range(num_tokens)], e, align, capacity)
        cells += segment
        pad_offsets.append(padding)
        padding += segment.count((PADDING, e))
    buffer_cells = cells if num_rows is None else cells[:num_rows] + [(PADDING, PADDING)] * (num_rows - len(cells))
    rows_of_expert = Counter(e for _, e in buffer_cells)
    routed_cells = {(t, e) for t in range(num_tokens) for e in range(num_experts) if routed[t][e]}

    def integers(values: Sequence) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=tokens_TH.device)

    token_P, expert_P = integers(buffer_cells).reshape(-1, 2).unbind(1)
    cell_P = torch.where(token_P == PADDING, PADDING, token_P * num_experts + expert_P)
    return Permuted(
        rows=take_rows(tokens_TH, token_P),
        probs=None if probs is None else take_rows(probs.flatten(), cell_P),
        row_map=RowMap(token_P, expert_P, num_tokens, num_experts),
        tokens_per_expert=integers([rows_of_expert[e] for e in range(num_experts)]),
        pad_offsets=None if align is None else integers(pad_offsets),
        overflow=torch.tensor(not routed_cells <= set(buffer_cells), device=tokens_TH.device),
    )


def _segment(routed: list[bool], e: int, align: int | None, capacity: int | None) -> list[Cell]:
    """The rows of expert e: its routed tokens; with a capacity C of them, then unrouted ones; then
    zeros.
    """
    tokens = [t for t, wanted in enumerate(routed) if wanted]
    length = len(tokens)
    if capacity is not None:
        tokens = (tokens + [t for t, wanted in enumerate(routed) if not wanted])[:capacity]
        length = capacity
    if align is not None:
        length = -(-length // align) * align
    return [(t, e) for t in tokens] + [(PADDING, e)] * (length - len(tokens))


def unpermute(
    rows_PH: Tensor, row_map: RowMap, *, restore_shape: tuple[int, int] | None = None, probs: Tensor | None = None
) -> Tensor:
    """Add each token's rows together, back in token order.

        out[t] = Σ_{i: row i came from t} rows[i] · (probs[t, expert of i] if given, else 1)

    Padding rows and dropped tokens take no part: whatever padding rows hold, NaN included, is never
    read. A token without rows is exactly 0, also when no token was routed.

    Args:
        rows_PH: floating point, in the order of `permute`'s rows.
        row_map: as this implementation's `permute` returned it.
        restore_shape: (T, H), or None to take it from `row_map` and `rows_PH`.
        probs: [T,E] merging probabilities, or None. Only the entries that have a row are read.

    Returns:
        [T,H] in the dtype of `rows_PH`.

    Rounding: products and sums in fp32 (fp64 if rows or probs are), rows ascending, one rounding to
    the rows' dtype; drows too. dprobs[t, e] = Σ_h rows[i, h] · dout[t, h] in fp32, rounded once to
    the probs' dtype.

    Raises:
        ValueError: see `moe_ref.config.check_unpermute`.
    """
    check_unpermute(rows_PH, len(row_map.token_P), row_map.num_tokens, row_map.num_experts, restore_shape, probs)
    real = row_map.token_P != PADDING
    token_R, expert_R = row_map.token_P[real], row_map.expert_P[real]
    accumulator = accumulator_dtype(rows_PH.dtype if probs is None else torch.promote_types(rows_PH.dtype, probs.dtype))
    weighted_RH = rows_PH[real].to(accumulator)
    if probs is not None:
        weighted_RH = weighted_RH * probs[token_R, expert_R].to(accumulator)[:, None]
    zeros_TH = weighted_RH.new_zeros((row_map.num_tokens, rows_PH.shape[1]))
    return round_to(zeros_TH.index_add(0, token_R, weighted_RH), rows_PH.dtype)


def sort_chunks(rows_RH: Tensor, chunk_sizes: Tensor, order: Tensor, *, probs: Tensor | None = None) -> SortedChunks:
    """Cut the rows into consecutive chunks and put the chunks into another order.

        out      = cat(chunk[order[0]], chunk[order[1]], …)
        chunk[i] = rows[c_i : c_i + chunk_sizes[i]],   c_i = Σ_{j<i} chunk_sizes[j]

    Rows past the last chunk stay where they are.

    Args:
        rows_RH: any dtype; copied bit by bit.
        chunk_sizes: [S] integers ≥ 0, their sum at most R.
        order: [S] integers, a permutation of 0 … S-1.
        probs: [R] floating point, moved like the rows, or None.

    Raises:
        ValueError: see `moe_ref.config.check_sort_chunks`; also if a size is negative, the sizes
            sum to more than R, or `order` is no permutation. An implementation that must not read
            the device may declare those unchecked.
    """
    check_sort_chunks(rows_RH, chunk_sizes, order, probs)
    sizes, sequence, num_rows = chunk_sizes.tolist(), order.tolist(), len(rows_RH)
    require(all(size >= 0 for size in sizes), "chunk_sizes", sizes, "all ≥ 0")
    requirement = f"at most the {num_rows} rows together"
    require(sum(sizes) <= num_rows, "chunk_sizes", f"{sizes}, together {sum(sizes)}", requirement)
    require(sorted(sequence) == list(range(len(sizes))), "order", sequence, f"a permutation of 0 … {len(sizes) - 1}")
    *chunks, tail = torch.arange(num_rows, device=rows_RH.device).split([*sizes, num_rows - sum(sizes)])
    source = torch.cat([*(chunks[i] for i in sequence), tail])
    return SortedChunks(take_rows(rows_RH, source), None if probs is None else take_rows(probs, source))
