"""permute, unpermute and sort_chunks: rows in the order of their tokens, and rows in the order of their experts.

Mirrors `permute`, `unpermute` and `sort_chunks_by_idxs` of megatron.core.transformer.moe.moe_utils, and
`moe_permute_and_pad_with_probs`, `moe_unpermute` and `moe_sort_chunks_by_index_with_probs` of transformer_engine.pytorch.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_ref.config import Permuted, SortedChunks, check_permute, check_sort_chunks, check_unpermute, require
from moe_ref.rounding import accumulator_dtype, round_to

PADDING = -1  # the source token of a row that belongs to no token


@dataclass(frozen=True)
class RowMap:
    """Where each permuted row came from."""

    token_P: Tensor  # int64: the row's source token, or PADDING
    expert_P: Tensor  # int64: the expert whose segment holds the row, or PADDING behind the last segment
    num_tokens: int
    num_experts: int


class _TakeRows(torch.autograd.Function):
    """out[i] = x[source[i]], or 0 where source[i] is PADDING; a bit copy for every dtype.

    Its gradient is a sum, dx[t] = Σ_{i: source[i]=t} dout[i], which autograd would take in the storage dtype. This one
    takes it in the accumulator dtype, in ascending i, and rounds once.
    """

    @staticmethod
    def forward(ctx, x: Tensor, source: Tensor) -> Tensor:
        ctx.save_for_backward(source)
        ctx.num_tokens = x.shape[0]
        bits = x.view(torch.uint8) if x.element_size() == 1 else x  # fp8 cannot be indexed on every torch
        out = bits.new_zeros((source.shape[0], *x.shape[1:]))
        real = source != PADDING
        out[real] = bits[source[real]]
        return out.view(x.dtype)

    @staticmethod
    def backward(ctx, dout: Tensor) -> tuple[Tensor, None]:
        (source,) = ctx.saved_tensors
        return sum_rows(dout, source, ctx.num_tokens), None


def sum_rows(rows: Tensor, source: Tensor, num_tokens: int) -> Tensor:
    """out[t] = Σ_{i: source[i]=t} rows[i]: accumulated in the accumulator dtype in ascending i, rounded once."""
    real = source != PADDING
    acc = rows.new_zeros((num_tokens, *rows.shape[1:]), dtype=accumulator_dtype(rows.dtype))
    acc = acc.index_add(0, source[real], rows[real].to(acc.dtype))
    return round_to(acc, rows.dtype)


def permute(
    tokens_TH: Tensor,
    routing_map_TE: Tensor,
    *,
    probs: Tensor | None = None,
    align: int | None = None,
    capacity: int | None = None,
    num_rows: int | None = None,
) -> Permuted:
    """Copy each token once for every expert it is routed to, grouped by expert, tokens ascending inside an expert.

        rows  = [tokens[t] for e in experts for t in tokens if routing_map[t, e]]
        probs = [probs[t, e] for the same e and t]

    With `align` each expert's segment is extended to a multiple of `align` by rows of zeros with probability 0.

    With `capacity` (drop and pad) each expert has exactly C = `capacity` rows: its first C routed tokens, ascending; if
    there are fewer, its unrouted tokens, ascending, fill the rest with their own values and whatever probs[t, e] holds;
    if there are fewer than C tokens at all, rows of zeros follow. Routed tokens past the C-th are dropped.

    With `num_rows` the buffer has exactly that many rows, whatever was routed: rows whose place is `num_rows` or later are
    dropped, and rows behind the last segment are zero. Without it the buffer is as long as the segments together.

    Args:
        tokens_TH: any dtype; copied bit by bit.
        routing_map_TE: bool, or integers 0 and 1.
        probs: [T,E] floating point, or None. A routed token whose probability is 0 is copied like any other.
        align: rows; a positive integer or None. Not together with `capacity`.
        capacity: rows; a positive integer or None. Not together with `num_rows`.
        num_rows: rows; an integer ≥ 0, a multiple of `align`, or None.

    Returns:
        `Permuted`. `tokens_per_expert[e]` is the length of segment e inside the buffer, padding included: with
        start[e] the sum of the whole segments before e, it is min(max(num_rows - start[e], 0), whole segment).
        `pad_offsets[e]` is the padding of all whole segments before e. `overflow` says that a routed row was dropped.

    Rounding: none in the forward. dtokens[t] = Σ over t's rows of drows, accumulated in fp32 (fp64 for fp64), rounded once.

    Raises:
        ValueError: see `moe_ref.config.check_permute`.

    Source: moe_utils.permute; TE moe_permute_and_pad_with_probs (which writes zeros where a probability is 0: that is its
    policy, not this one's).
    """
    check_permute(tokens_TH, routing_map_TE, probs, align, capacity, num_rows)
    num_tokens, num_experts = routing_map_TE.shape
    routed_TE = routing_map_TE != 0
    segments = [_segment(routed_TE[:, e], align, capacity) for e in range(num_experts)]
    token_P = torch.cat(segments)
    expert_P = torch.repeat_interleave(
        torch.arange(num_experts, device=token_P.device),
        torch.tensor([len(s) for s in segments], device=token_P.device),
    )
    whole = torch.tensor([len(s) for s in segments], device=token_P.device)
    start = whole.cumsum(0) - whole
    routed = routed_TE.sum(0)

    if capacity is not None:
        overflow = (routed > capacity).any()
    else:
        limit = len(token_P) if num_rows is None else num_rows
        overflow = ((routed > 0) & (start + routed > limit)).any()
    if num_rows is not None:
        token_P, expert_P = _resize(token_P, num_rows), _resize(expert_P, num_rows)
    row_map = RowMap(token_P, expert_P, num_tokens, num_experts)

    return Permuted(
        rows=_TakeRows.apply(tokens_TH, token_P),
        probs=None if probs is None else _take_probs(probs, row_map),
        row_map=row_map,
        tokens_per_expert=torch.clamp(len(token_P) - start, min=torch.zeros_like(whole), max=whole),
        pad_offsets=None if align is None else start - (routed.cumsum(0) - routed),
        overflow=overflow,
    )


def _segment(routed_T: Tensor, align: int | None, capacity: int | None) -> Tensor:
    """The source token of each row of one expert's segment, PADDING for rows of zeros."""
    chosen = routed_T.nonzero().flatten()
    if capacity is not None:
        unchosen = (~routed_T).nonzero().flatten()
        return _resize(torch.cat([chosen, unchosen]), capacity)
    if align is not None:
        return _resize(chosen, -(-len(chosen) // align) * align)
    return chosen


def _resize(source: Tensor, length: int) -> Tensor:
    """`source` cut to `length`, or extended to it by PADDING."""
    missing = max(length - len(source), 0)
    return torch.cat([source[:length], source.new_full((missing,), PADDING)])


def _take_probs(probs_TE: Tensor, row_map: RowMap) -> Tensor:
    """out[i] = probs[token[i], expert[i]], or 0 for padding rows."""
    real = row_map.token_P != PADDING
    cell = torch.where(real, row_map.token_P * row_map.num_experts + row_map.expert_P, PADDING)
    return _TakeRows.apply(probs_TE.reshape(-1), cell)


def unpermute(
    rows_PH: Tensor, row_map: RowMap, *, restore_shape: tuple[int, int] | None = None, probs: Tensor | None = None
) -> Tensor:
    """Add each token's rows together, back in token order.

        out[t] = Σ_{i: row i came from token t} rows[i] · (probs[t, expert of i] if probs were given, else 1)

    The sum runs in ascending row order, that is in ascending expert. Padding rows and dropped rows take no part: whatever
    they hold, NaN included, is never read. A token without rows is exactly 0, also when nothing was routed at all.

    Args:
        rows_PH: floating point, in the order of `permute`'s rows.
        row_map: as this implementation's `permute` returned it.
        restore_shape: (T, H), or None to take it from `row_map` and `rows_PH`.
        probs: [T,E] merging probabilities, or None. Only the entries that have a row are read.

    Returns:
        [T,H] in the dtype of `rows_PH`.

    Rounding: products and sums in fp32 (fp64 if rows or probs are), one rounding to the rows' dtype. drows likewise;
    dprobs[t, e] = Σ_h rows[i, h] · dout[t, h] is summed in fp32, rounded once to the probs' dtype, and 0 elsewhere.

    Raises:
        ValueError: see `moe_ref.config.check_unpermute`.

    Source: moe_utils.unpermute; TE moe_unpermute.
    """
    check_unpermute(rows_PH, len(row_map.token_P), row_map.num_tokens, row_map.num_experts, restore_shape, probs)
    real = row_map.token_P != PADDING
    token_R, expert_R = row_map.token_P[real], row_map.expert_P[real]
    accumulator = accumulator_dtype(rows_PH.dtype if probs is None else torch.promote_types(rows_PH.dtype, probs.dtype))
    weighted = rows_PH[real].to(accumulator)
    if probs is not None:
        weighted = weighted * probs[token_R, expert_R].to(accumulator)[:, None]
    out = weighted.new_zeros((row_map.num_tokens, rows_PH.shape[1])).index_add(0, token_R, weighted)
    return round_to(out, rows_PH.dtype)


def sort_chunks(rows_RH: Tensor, chunk_sizes: Tensor, order: Tensor, *, probs: Tensor | None = None) -> SortedChunks:
    """Cut the rows into consecutive chunks and put the chunks into another order.

        out = cat(chunk[order[0]], chunk[order[1]], …),  chunk[i] = rows[c_i : c_i + chunk_sizes[i]],  c_i = Σ_{j<i} chunk_sizes[j]

    Rows behind the last chunk stay where they are.

    Args:
        rows_RH: any dtype; copied bit by bit.
        chunk_sizes: [S] integers ≥ 0, their sum at most R.
        order: [S] integers, a permutation of 0 … S-1.
        probs: [R] floating point, moved like the rows, or None.

    Raises:
        ValueError: see `moe_ref.config.check_sort_chunks`; also if a size is negative, the sizes sum to more than R, or
            `order` is no permutation. An implementation that must not read the device may declare those unchecked.

    Source: moe_utils.sort_chunks_by_idxs (which needs the sum to be R); TE moe_sort_chunks_by_index_with_probs.
    """
    check_sort_chunks(rows_RH, chunk_sizes, order, probs)
    sizes, sequence = chunk_sizes.tolist(), order.tolist()
    require(all(size >= 0 for size in sizes), "chunk_sizes", sizes, "all ≥ 0")
    require(
        sum(sizes) <= len(rows_RH),
        "chunk_sizes",
        f"{sizes}, together {sum(sizes)}",
        f"at most the {len(rows_RH)} rows together",
    )
    require(sorted(sequence) == list(range(len(sizes))), "order", sequence, f"a permutation of 0 … {len(sizes) - 1}")
    place = torch.arange(len(rows_RH), device=rows_RH.device)
    chunks = torch.split(place[: sum(sizes)], sizes)
    source = torch.cat([*(chunks[i] for i in sequence), place[sum(sizes) :]])
    return SortedChunks(_TakeRows.apply(rows_RH, source), None if probs is None else _TakeRows.apply(probs, source))
