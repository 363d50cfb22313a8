"""`permute` without its rows: their codes, and the places of tokens."""

import torch
from torch import Tensor

from moe_fast.experts.token_linear import RowsOfTokens
from moe_fast.fused.permute_and_quantize import Place, Work
from moe_fast.permutation.row_map import Tiles, place
from moe_fast.quantization.quantized import Quantized
from moe_ref.config import Permuted, Recipe


def rows_of_tokens(
    tokens_TH: Tensor, routing_map_TE: Tensor, recipe: Recipe, *, probs: Tensor, num_rows: int, tile_rows: int | None
) -> tuple[RowsOfTokens, Permuted, Tiles | None]:
    """(the rows, `permute`'s other results, the segments in tiles of `tile_rows`)."""
    lists, slots, tiles = place(routing_map_TE, None, num_rows, tile_rows)
    work = Work(tokens_TH.detach(), probs, recipe, "input", lists, slots.tokens_per_expert)
    by_rows, _, _ = work.done(True, False, None)
    row_map, source, row_probs = work.row_map, work.source, work.row_probs
    assert source is not None and row_probs is not None
    rows = tokens_TH.new_empty(()).expand(num_rows, tokens_TH.shape[1])  # no memory
    if torch.is_grad_enabled() and (tokens_TH.requires_grad or probs.requires_grad):
        rows, row_probs = Place.apply(tokens_TH, probs, row_probs, row_map)
    counts = slots.tokens_per_expert
    codes = Quantized(recipe, work.format, tokens_TH.dtype, counts, None, by_rows, None)
    permuted = Permuted(None, row_probs, row_map, counts, None, slots.overflow)  # type: ignore[arg-type]
    return RowsOfTokens(rows, codes, tokens_TH, row_map, source), permuted, tiles
