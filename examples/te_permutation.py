"""A small adapter of Transformer Engine's permutation: its own functions, as its users call them.

    TE_WHEEL=te moe-conformance run --impl examples.te_permutation

Without TE_WHEEL the installed package is judged, on a GPU. `moe_fast.te` has the whole package.
"""

import os
from typing import Any

from torch import Tensor

from moe_ref.config import Permuted, SortedChunks, check_permute, check_sort_chunks, check_unpermute

if os.environ.get("TE_WHEEL"):  # see examples/te_kernels_on_a_cpu.py
    from examples.te_kernels_on_a_cpu import te
else:
    import transformer_engine as te
    import transformer_engine.pytorch

# probabilities are those of the router, in float32
scope = {"permute": 'probs in ("", float32)', "unpermute": 'probs in ("", float32)'}


def declares(function: str) -> dict[str, Any]:
    """Sizes and order are not checked; rows of probability 0 are not stored."""
    return {"permute": {"zero_prob_rows": "zero"}, "sort_chunks": {"unchecked": ("chunk_sizes", "order")}}.get(
        function, {}
    )


def permute(tokens: Tensor, routing_map: Tensor, *, probs: Tensor | None = None) -> Permuted:
    """`moe_permute` and `moe_permute_with_probs` of a mask."""
    check_permute(tokens, routing_map, probs, None, None, None)
    mask = (routing_map != 0).int()
    counts, row_probs = mask.sum(0), None
    if probs is None:
        rows, row_map = te.pytorch.moe_permute(tokens, mask, int(counts.sum()), map_type="mask")
    else:
        rows, row_probs, row_map = te.pytorch.moe_permute_with_probs(tokens, probs, mask, int(counts.sum()))
    return Permuted(rows, row_probs, (row_map, mask, tokens.shape), counts, None, counts.sum() < 0)


def unpermute(rows: Tensor, row_map: Any, *, probs: Tensor | None = None) -> Tensor:
    """`moe_unpermute` of a mask."""
    te_map, mask, shape = row_map
    check_unpermute(rows, int(mask.sum()), *mask.shape, None, probs)
    restored = (shape[0], rows.shape[1])
    return te.pytorch.moe_unpermute(rows, te_map, merging_probs=probs, restore_shape=restored, map_type="mask")


def sort_chunks(rows: Tensor, chunk_sizes: Tensor, order: Tensor, *, probs: Tensor | None = None) -> SortedChunks:
    """`moe_sort_chunks_by_index`, with and without probabilities."""
    check_sort_chunks(rows, chunk_sizes, order, probs)
    if probs is None:
        return SortedChunks(te.pytorch.moe_sort_chunks_by_index(rows, chunk_sizes, order), None)
    return SortedChunks(*te.pytorch.moe_sort_chunks_by_index_with_probs(rows, probs, chunk_sizes, order))
