"""The token and the prob of each row, for callers that write no rows."""

import torch
from torch import Tensor

from moe_fast.launch import tuning
from moe_fast.launch.backend import bits, strided
from moe_fast.launch.operators import launch
from moe_fast.permutation._permute import place_kernel
from moe_fast.permutation.row_map import RowMap

NARROW = 2**31  # with fewer tokens, their numbers fit an int32


def place_rows(probs_TE: Tensor | None, lists: RowMap, row_map: RowMap) -> tuple[Tensor, Tensor | None]:
    """(source, probs by row): for each row its token and prob, or -1 and 0 for a row without a
    token.

    Args:
        lists: with bases, as `row_map.place` returns them.
        row_map: `lists.without_bases()`; its lists are written.
    """
    device, num_rows = row_map.slots_TE.device, row_map.num_rows
    sizes = tuning.for_device(device)
    # place_kernel writes all of it
    source_P = torch.empty(num_rows, dtype=torch.int32 if row_map.num_tokens < NARROW else torch.int64, device=device)
    probs_P = None if probs_TE is None else torch.empty(num_rows, dtype=probs_TE.dtype, device=device)
    programs, (list_blocks, *lanes) = row_map.programs(sizes.list_tokens, sizes.fill)
    launch(place_kernel, (programs,), source_P)(
        *strided(None if probs_TE is None else bits(probs_TE)),
        None if probs_P is None else bits(probs_P),
        source_P,
        row_map.slots_TE,
        *lists.arguments(),
        row_map.gap_2E,
        list_blocks,
        *lanes,
        row_map.num_tokens,
        row_map.num_experts,
        num_rows,
        BLOCK_G=sizes.fill.lanes,
        BLOCK_R=sizes.fill.rows,
        BLOCK_L=sizes.list_tokens,
    )
    return source_P, probs_P
