"""moe_fast with large blocks, so that most things fit into one."""

from dataclasses import replace

import moe_fast
from moe_fast import *  # noqa: F403  (the same namespace, with other sizes)
from moe_fast import tuning

__all__ = moe_fast.__all__

LARGE = replace(
    tuning.INTERPRETER,
    metadata=tuning.Metadata(tokens=256, elements=16384, num_warps=8, max_programs=64),
    permute=tuning.Tile(tokens=16, columns=512, num_warps=8),
    unpermute=tuning.Tile(tokens=32, columns=256, num_warps=8),
    prob_columns=64,
    unpermute_backward=tuning.Tile(tokens=16, columns=512, num_warps=8),
    unpermute_backward_probs=tuning.WholeRows(tokens=64, elements=8192, num_warps=8),
    fill=tuning.Fill(lanes=16, rows=16, tail_lanes=64),
    sort_chunks=tuning.Tile(tokens=16, columns=512, num_warps=8),
    chunk_columns=64,
    multihot=tuning.Tile(tokens=64, columns=64, num_warps=8),
    multihot_rows=tuning.WholeRows(tokens=64, elements=8192, num_warps=8),
    topk=tuning.Router(tokens=128, elements=32768, num_warps=8),
    topk_backward=tuning.Router(tokens=128, elements=32768, num_warps=8),
    aux_scores=tuning.Router(tokens=128, elements=32768, num_warps=8),
    z_loss=tuning.Router(tokens=128, elements=32768, num_warps=8, max_programs=64),
    balance=tuning.Tile(tokens=128, columns=128, num_warps=8),
    balance_programs=64,
    loss_step=128,
    drop=tuning.Tile(tokens=128, columns=64, num_warps=8),
    drop_column=tuning.Tile(tokens=4096, columns=4, num_warps=8),
    grouped=tuning.Grouped(
        by_rows=(tuning.GroupedTile(128, 128, 128, 8, 2),),
        wide=tuning.GroupedTile(64, 128, 32, 8, 2),
        wgrad=tuning.GroupedTile(128, 128, 128, 8, 2),
        wgrad_wide=tuning.GroupedTile(128, 64, 32, 8, 2),
        sums=tuning.Tile(tokens=128, columns=128, num_warps=8),
        plan_tiles=1024,
        flatten=False,
        programs=64,
    ),
    activation=tuning.Tile(tokens=128, columns=512, num_warps=8),
    activation_backward=tuning.Tile(tokens=128, columns=512, num_warps=8),
    quantize=tuning.Quantize(
        rows=tuning.Walk(tokens=256, columns=256, num_warps=8, steps=1, stages=1),
        columns=tuning.Walk(tokens=256, columns=256, num_warps=8, steps=1, stages=1),
        groups=tuning.Walk(tokens=256, columns=512, num_warps=8, steps=1, stages=1),
    ),
)
tuning.INTERPRETER = tuning.GPU = LARGE
