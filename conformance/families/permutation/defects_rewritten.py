"""Mistakes in permutations that two conditions together invite, as changes of the reference's
source.
"""

from conformance.core.rewritten import series

PERMUTE = "permutation/permute.py"
ROWS = "permutation/rows.py"
MAPS = "permutation/routing_map.py"

DEFECTS = series(
    56,
    (
        (
            "with a capacity the probs of fillers have no gradient",
            "permute",
            PERMUTE,
            "take_rows(probs.flatten(), cell_P)",
            "take_rows((probs if capacity is None else torch.where(routing_map_TE != 0, probs,"
            " probs.detach())).flatten(),"
            " cell_P)",
        ),
        (
            "with a capacity the last expert's overflow is not seen",
            "permute",
            PERMUTE,
            "asked = {(t, e) for t in range(num_tokens) for e in range(num_experts) if routed[t][e]}",
            "asked = {(t, e) for t in range(num_tokens) for e in range(num_experts) if routed[t][e]"
            " and (capacity is None or num_experts == 1 or e < num_experts - 1)}",
        ),
        (
            "pad offsets are of the rows that a budget kept",
            "permute",
            PERMUTE,
            "    rows_of_expert = Counter(e for _, e in kept)",
            "    rows_of_expert = Counter(e for _, e in kept)\n"
            "    pad_offsets = [sum(kept.count((PADDING, j)) for j in range(e)) for e in range(num_experts)]",
        ),
        (
            "a token with more than eight rows is summed in their dtype",
            "permute",
            ROWS,
            "    real = source != PADDING\n    total",
            "    if rows.dtype == torch.bfloat16 and torch.bincount(source[source != PADDING],"
            " minlength=1).max() > 8:\n"
            "        total = rows.new_zeros((num_tokens, *rows.shape[1:]))\n"
            "        for token, row in zip(source.tolist(), rows.unbind(0), strict=True):\n"
            "            total = total if token == PADDING else"
            " total.index_put((torch.tensor(token),), total[token] + row)\n"
            "        return total\n"
            "    real = source != PADDING\n    total",
        ),
        (
            "rows of single bytes move two at a time: an odd last column is lost",
            "permute",
            ROWS,
            "        real = source != PADDING\n        out = bits",
            "        if bits.element_size() == 1 and bits.dim() == 2 and bits.shape[1] % 2 and len(source) > 64:\n"
            "            bits = torch.cat([bits[:, :-1], torch.zeros_like(bits[:, -1:])], 1)\n"
            "        real = source != PADDING\n        out = bits",
        ),
        (
            "aligned rows pass through float32: a signalling NaN becomes quiet",
            "permute",
            PERMUTE,
            "rows=take_rows(tokens_TH, token_P)",
            "rows=take_rows(tokens_TH if align is None or tokens_TH.dtype != torch.float16 or tokens_TH.requires_grad"
            " else tokens_TH.float().half(), token_P)",
        ),
        (
            "rows of an extended budget repeat the last token's prob",
            "permute",
            PERMUTE,
            "torch.where(token_P == PADDING, PADDING, token_P * num_experts + expert_P)",
            "torch.where((token_P == PADDING) & ((expert_P != PADDING) | (num_tokens * num_experts == 0)), PADDING,"
            " (token_P * num_experts + expert_P).clamp(min=0))",
        ),
        (
            "a budget that ends inside the padding of a segment counts that segment's real rows alone",
            "permute",
            PERMUTE,
            "rows_of_expert = Counter(e for _, e in kept)",
            "rows_of_expert = Counter(e for t, e in kept if num_rows is None or t != PADDING or"
            " len(cells) <= num_rows)",
        ),
        (
            "of merging probs the gradient is rounded to the dtype of the rows",
            "unpermute",
            PERMUTE,
            "weighted_RH = weighted_RH * probs[token_R, expert_R].to(accumulator)[:, None]",
            "read_R = probs[token_R, expert_R]\n"
            "        if read_R.requires_grad and restore_shape is None:\n"
            "            read_R.register_hook(lambda g: g.to(rows_PH.dtype).to(g.dtype))\n"
            "        weighted_RH = weighted_RH * read_R.to(accumulator)[:, None]",
        ),
        (
            "merging probs are rounded to the dtype of the rows",
            "unpermute",
            PERMUTE,
            "probs[token_R, expert_R].to(accumulator)[:, None]",
            "probs[token_R, expert_R].to(rows_PH.dtype).to(accumulator)[:, None]",
        ),
        (
            "a row whose merging prob is 0 is skipped, and its prob has no gradient",
            "unpermute",
            PERMUTE,
            "    weighted_RH = rows_PH[real].to(accumulator)\n",
            "    weighted_RH = rows_PH[real].to(accumulator)\n"
            "    if probs is not None:\n"
            "        weighted_RH = torch.where(probs[token_R, expert_R][:, None] == 0, 0, weighted_RH)\n",
        ),
        (
            "probs past the last chunk are not moved",
            "sort_chunks",
            PERMUTE,
            "take_rows(probs, source))",
            "take_rows(probs, torch.cat([source[: sum(sizes)], torch.full_like(rest, PADDING)])))",
        ),
        (
            "chunks in order return what they were given",
            "sort_chunks",
            PERMUTE,
            "    return SortedChunks(take_rows",
            "    if sequence == sorted(sequence) and len(sizes) > 1:\n"
            "        return SortedChunks(rows_RH, probs)\n"
            "    return SortedChunks(take_rows",
        ),
        (
            "the starts of more than 128 chunks are summed in blocks",
            "sort_chunks",
            PERMUTE,
            "    *chunks, rest = ",
            "    if len(sizes) > 128:\n        sequence = sequence[:128] + sorted(sequence[128:])\n "
            "   *chunks, rest = ",
        ),
        (
            "an alignment is taken for a power of two",
            "pad_routing_map",
            MAPS,
            "missing = -int(routed_T.sum()) % align",
            "missing = -int(routed_T.sum()) & (align - 1)",
        ),
        (
            "unrouted tokens are counted within blocks of 128",
            "pad_routing_map",
            MAPS,
            "rank_T = (~routed_T).cumsum(0)",
            "rank_T = torch.cat([part.cumsum(0) for part in (~routed_T).split(128)])",
        ),
        (
            "an expert that nobody chose and that cannot be filled is not reported",
            "pad_routing_map",
            MAPS,
            "padded_TE.sum(0) % align != 0)",
            "(padded_TE.sum(0) % align != 0) & ((routing_map_TE != 0).sum(0) > 1))",
        ),
        (
            "every slot that names an expert has the gradient of its prob",
            "indices_to_multihot",
            MAPS,
            "torch.where(hit_TE, prob_T[:, None], out_TE)",
            "torch.where(hit_TE, prob_T[:, None] + torch.where(hit_TE, out_TE - out_TE.detach(), 0), out_TE)",
        ),
        (
            "an expert named twice in 8 slots or more has the first one's prob",
            "indices_to_multihot",
            MAPS,
            "torch.where(hit_TE, prob_T[:, None], out_TE)",
            "torch.where(hit_TE & ((out_TE == 0) | (indices_TK.shape[1] < 8)), prob_T[:, None], out_TE)",
        ),
        (
            "a prob is found by a sum: -0 becomes 0",
            "multihot_to_indices",
            MAPS,
            "    return torch.where(\n        here_TE.any(1),",
            "    if values_TE.shape[1] > 32:\n        return torch.where(here_TE, values_TE, 0).sum(1)\n"
            "    return torch.where(\n        here_TE.any(1),",
        ),
        (
            "overflow is of the last token of a block",
            "multihot_to_indices",
            MAPS,
            "(routed_TE.sum(1) > topk).any()",
            "(routed_TE.sum(1) > topk)[: max(len(routed_TE) // 2 * 2, 1)].any()",
        ),
        (
            "rows of float64 are added in float32 where probs are float32",
            "unpermute",
            PERMUTE,
            "accumulator_dtype(rows_PH.dtype if probs is None else torch.promote_types(rows_PH.dtype, probs.dtype))",
            "accumulator_dtype(rows_PH.dtype if probs is None else probs.dtype)",
        ),
        (
            "the gradient of float64 tokens is added in float32",
            "permute",
            ROWS,
            "dtype=accumulator_dtype(rows.dtype))",
            "dtype=torch.float32)",
        ),
        (
            "the order of chunks has the width of their sizes: int32 sizes, int64 order",
            "sort_chunks",
            PERMUTE,
            "sizes, sequence, num_rows = chunk_sizes.tolist(), order.tolist(), len(rows_RH)",
            "sizes, sequence, num_rows = chunk_sizes.tolist(), order.tolist(), len(rows_RH)\n"
            "    if chunk_sizes.dtype != order.dtype and len(sequence) > 2:\n"
            "        sequence = sequence[::-1]",
        ),
        (
            "an aligned capacity of more than the tokens is filled from the first again",
            "permute",
            PERMUTE,
            "    if align is not None:\n        length",
            "    if capacity is not None and capacity > len(routed) > 0:\n"
            "        tokens = (tokens * capacity)[:capacity] if len(tokens) == len(routed) and"
            " len(routed) == 1 else tokens\n"
            "    if align is not None:\n        length",
        ),
        (
            "a budget of no rows has an offset",
            "permute",
            PERMUTE,
            "pad_offsets=None if align is None else integers(pad_offsets)",
            "pad_offsets=None if align is None else integers(pad_offsets if num_rows != 0 else [0] * num_experts)",
        ),
    ),
)
