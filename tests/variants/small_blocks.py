"""moe_fast with the smallest blocks that make sense, so that everything spans several."""

from dataclasses import replace

import moe_fast
from moe_fast import *  # noqa: F403  (the same namespace, with other sizes)
from moe_fast import tuning

__all__ = moe_fast.__all__

SMALL = replace(
    tuning.INTERPRETER,
    metadata=tuning.Metadata(tokens=16, elements=2048, num_warps=2, max_programs=7),
    permute=tuning.Tile(tokens=16, columns=64, num_warps=2),
    unpermute=tuning.Tile(tokens=8, columns=64, num_warps=2),
    prob_columns=8,
    unpermute_backward=tuning.Tile(tokens=16, columns=64, num_warps=2),
    unpermute_backward_probs=tuning.WholeRows(tokens=16, elements=4096, num_warps=2),
    fill=tuning.Fill(lanes=4, rows=4, tail_lanes=3),
    sort_chunks=tuning.Tile(tokens=16, columns=64, num_warps=2),
    chunk_columns=8,
    multihot=tuning.Tile(tokens=16, columns=8, num_warps=2),
    multihot_rows=tuning.WholeRows(tokens=16, elements=4096, num_warps=2),
    topk=tuning.Router(tokens=2, elements=64, num_warps=2, warp_elements=32),
    topk_backward=tuning.Router(tokens=2, elements=64, num_warps=2, warp_elements=32),
    aux_scores=tuning.Router(tokens=2, elements=64, num_warps=2, warp_elements=32),
    z_loss=tuning.Router(tokens=2, elements=64, num_warps=2, max_programs=5),
    balance=tuning.Tile(tokens=8, columns=16, num_warps=2),
    balance_programs=9,
    loss_step=2,
    drop=tuning.Tile(tokens=8, columns=8, num_warps=2),
    drop_column=tuning.Tile(tokens=64, columns=4, num_warps=2),
    grouped=tuning.Grouped(
        by_rows=(tuning.GroupedTile(16, 16, 16, 2, 1), tuning.GroupedTile(16, 32, 32, 2, 1)),
        wide=tuning.GroupedTile(16, 16, 16, 2, 1),
        wgrad=tuning.GroupedTile(16, 32, 16, 2, 1),
        wgrad_wide=tuning.GroupedTile(16, 16, 16, 2, 1),
        sums=tuning.Tile(tokens=4, columns=16, num_warps=2),
        plan_tiles=2,
        flatten=False,
        programs=5,
    ),
    activation=tuning.Tile(tokens=8, columns=16, num_warps=2),
    activation_backward=tuning.Tile(tokens=8, columns=16, num_warps=2),
    quantize=tuning.Quantize(
        rows=tuning.Walk(tokens=2, columns=32, num_warps=2, steps=3, stages=2),
        columns=tuning.Walk(tokens=16, columns=16, num_warps=2, steps=3, stages=2),
        groups=tuning.Walk(tokens=2, columns=16, num_warps=2, steps=3, stages=2),
    ),
)
tuning.INTERPRETER = tuning.GPU = SMALL
