"""Two other choices of block sizes, both honest: so small that everything spans several blocks, and so large that most things fit into one."""

from dataclasses import replace

from moe_fast import tuning
from moe_fast.tuning import INTERPRETER, Fill, GroupedTile, Metadata, Router, Symmetric, Tile, Walk, WholeRows

SMALL = replace(
    INTERPRETER,
    metadata=Metadata(tokens=4, elements=512, num_warps=2, max_programs=7),
    permute=Tile(tokens=4, columns=16, num_warps=2),
    list_tokens=4,
    unpermute=Tile(tokens=4, columns=16, num_warps=2),
    unpermute_slots=1,
    prob_columns=4,
    unpermute_backward=Tile(tokens=4, columns=16, num_warps=2),
    unpermute_backward_probs=WholeRows(tokens=4, elements=512, num_warps=2),
    fill=Fill(lanes=1, rows=2, tail_lanes=3),
    sort_chunks=Tile(tokens=4, columns=16, num_warps=2),
    chunk_columns=4,
    multihot=Tile(tokens=4, columns=4, num_warps=2),
    multihot_rows=WholeRows(tokens=4, elements=512, num_warps=2),
    topk=Router(tokens=2, elements=64, num_warps=2, warp_elements=32),
    topk_backward=Router(tokens=2, elements=64, num_warps=2, warp_elements=32),
    aux_scores=Router(tokens=2, elements=64, num_warps=2, warp_elements=32),
    z_loss=Router(tokens=2, elements=64, num_warps=2, max_programs=5),
    balance=Tile(tokens=8, columns=16, num_warps=2),
    balance_programs=9,
    loss_step=2,
    drop=Tile(tokens=8, columns=8, num_warps=2),
    drop_column=Tile(tokens=64, columns=4, num_warps=2),
    grouped=replace(
        INTERPRETER.grouped,
        by_rows=(GroupedTile(16, 16, 16, 2, 1), GroupedTile(16, 32, 32, 2, 1)),
        wide=GroupedTile(16, 16, 16, 2, 1),
        wgrad=GroupedTile(16, 32, 16, 2, 1),
        wgrad_wide=GroupedTile(16, 16, 16, 2, 1),
        decoded=replace(INTERPRETER.grouped.decoded, columns=16, depth=32),
        turn_columns=16,
        sums=Tile(tokens=4, columns=16, num_warps=2),
        plan_tiles=2,
        programs=5,
    ),
    activation=Tile(tokens=8, columns=16, num_warps=2),
    activation_backward=Tile(tokens=8, columns=16, num_warps=2),
    symmetric=Symmetric(tokens=4, columns=16, lists=4, fill_rows=2, tail_lanes=3, unroll=1, num_warps=2),
    quantize=replace(
        INTERPRETER.quantize,
        rows=Walk(tokens=2, columns=128, num_warps=2, steps=3, stages=2),
        columns=Walk(tokens=32, columns=32, num_warps=2, steps=3, stages=2),
        groups=Walk(tokens=2, columns=16, num_warps=2, steps=3, stages=2),
    ),
)
LARGE = replace(
    INTERPRETER,
    metadata=Metadata(tokens=256, elements=16384, num_warps=8, max_programs=64),
    permute=Tile(tokens=16, columns=512, num_warps=8),
    list_tokens=64,
    unpermute=Tile(tokens=32, columns=256, num_warps=8),
    unpermute_slots=8,
    prob_columns=64,
    unpermute_backward=Tile(tokens=16, columns=512, num_warps=8),
    unpermute_backward_probs=WholeRows(tokens=64, elements=8192, num_warps=8),
    fill=Fill(lanes=16, rows=16, tail_lanes=64),
    sort_chunks=Tile(tokens=16, columns=512, num_warps=8),
    chunk_columns=64,
    multihot=Tile(tokens=64, columns=64, num_warps=8),
    multihot_rows=WholeRows(tokens=64, elements=8192, num_warps=8),
    topk=Router(tokens=128, elements=32768, num_warps=8),
    topk_backward=Router(tokens=128, elements=32768, num_warps=8),
    aux_scores=Router(tokens=128, elements=32768, num_warps=8),
    z_loss=Router(tokens=128, elements=32768, num_warps=8, max_programs=64),
    balance=Tile(tokens=128, columns=128, num_warps=8),
    balance_programs=64,
    loss_step=128,
    drop=Tile(tokens=128, columns=64, num_warps=8),
    drop_column=Tile(tokens=4096, columns=4, num_warps=8),
    grouped=replace(
        INTERPRETER.grouped,
        by_rows=(GroupedTile(128, 128, 128, 8, 2),),
        wide=GroupedTile(64, 128, 32, 8, 2),
        wgrad=GroupedTile(128, 128, 128, 8, 2),
        wgrad_wide=GroupedTile(128, 64, 32, 8, 2),
        turn_columns=128,
        sums=Tile(tokens=128, columns=128, num_warps=8),
        plan_tiles=1024,
        programs=64,
    ),
    activation=Tile(tokens=128, columns=512, num_warps=8),
    activation_backward=Tile(tokens=128, columns=512, num_warps=8),
    symmetric=Symmetric(tokens=64, columns=256, lists=64, fill_rows=128, tail_lanes=1, unroll=4, num_warps=8),
    quantize=replace(
        INTERPRETER.quantize,
        rows=Walk(tokens=256, columns=256, num_warps=8, steps=1, stages=1),
        columns=Walk(tokens=256, columns=256, num_warps=8, steps=1, stages=1),
        groups=Walk(tokens=256, columns=512, num_warps=8, steps=1, stages=1),
    ),
)


def use(sizes: tuning.Tuning) -> None:
    """Run this process's kernels with these sizes."""
    tuning.INTERPRETER = tuning.GPU = sizes
