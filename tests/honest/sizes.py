"""Other legal block sizes: 1/8 of the interpreter's (problems span several blocks), 4 times them
(most fit into one), on a GPU several times the fast sizes, within registers and shared memory."""

from dataclasses import fields, is_dataclass, replace
from typing import TypeVar

from moe_fast.launch import tuning
from moe_fast.launch.tuning import GPU, INTERPRETER, Fill, GroupedTile, Router, Symmetric, Tile, Walk, WholeRows, scaled

Sizes = TypeVar("Sizes")
_small, _large = scaled(INTERPRETER, 1 / 8), scaled(INTERPRETER, 4)
SMALL = replace(
    _small,
    metadata=replace(_small.metadata, max_programs=7),
    fill=Fill(lanes=1, rows=2, tail_lanes=3),  # lanes do not divide the tail
    z_loss=replace(_small.z_loss, max_programs=5),
    balance_programs=9,
    # several column tiles and K steps
    grouped=replace(
        _small.grouped, decoded_wide=replace(INTERPRETER.grouped.decoded_wide, columns=16, depth=32), programs=5
    ),
    symmetric=replace(_small.symmetric, tail_lanes=3),
    quantize=replace(
        _small.quantize,
        **{f.name: replace(getattr(_small.quantize, f.name), steps=3, stages=2) for f in fields(_small.quantize)},
    ),
)
LARGE = replace(
    _large,
    metadata=replace(_large.metadata, max_programs=64),
    z_loss=replace(_large.z_loss, max_programs=64),
    balance_programs=64,
    grouped=replace(_large.grouped, by_rows=_large.grouped.by_rows[1:], pointer_columns=32, programs=64),
    symmetric=replace(_large.symmetric, tail_lanes=1),
    quantize=scaled(INTERPRETER.quantize, 2),  # the interpreter computes whole tiles: slow
    activate_quantize=scaled(INTERPRETER.activate_quantize, 2),
)
LARGE_ON_GPU = replace(
    GPU,
    metadata=replace(GPU.metadata, tokens=256, elements=2048, max_programs=16, layout_experts=32),
    permute=Tile(tokens=4, columns=1024, num_warps=8),
    list_tokens=512,
    unpermute=Tile(tokens=4, columns=512, num_warps=4),
    unpermute_slots=8,
    prob_columns=1024,
    unpermute_backward=Tile(tokens=4, columns=1024, num_warps=4),
    unpermute_backward_probs=WholeRows(tokens=8, elements=8192, num_warps=8),
    fill=Fill(lanes=4, rows=32, tail_lanes=256),
    sort_chunks=Tile(tokens=16, columns=512, num_warps=8),
    chunk_columns=512,
    multihot=Tile(tokens=64, columns=128, num_warps=8),
    multihot_rows=WholeRows(tokens=128, elements=8192, num_warps=8),
    topk=Router(tokens=64, elements=2048, num_warps=8),
    topk_backward=Router(tokens=64, elements=2048, num_warps=8),
    aux_scores=Router(tokens=64, elements=2048, num_warps=8),
    z_loss=Router(tokens=64, elements=4096, num_warps=8, max_programs=64),
    balance=Tile(tokens=64, columns=128, num_warps=8),
    balance_programs=32,
    loss_step=4096,
    drop=Tile(tokens=128, columns=32, num_warps=8),
    drop_column=Tile(tokens=16384, columns=1, num_warps=8),
    grouped=replace(
        GPU.grouped,
        by_rows=(GroupedTile(rows=128, columns=128, depth=128, num_warps=8, num_stages=2),),
        wide=GroupedTile(rows=64, columns=128, depth=32, num_warps=8, num_stages=2),
        wgrad=GroupedTile(rows=128, columns=128, depth=128, num_warps=8, num_stages=2),
        wgrad_wide=GroupedTile(rows=128, columns=64, depth=32, num_warps=8, num_stages=2),
        turn_columns=256,
        sums=Tile(tokens=64, columns=128, num_warps=8),
        plan_tiles=1024,
        programs=64,
    ),
    activation=Tile(tokens=16, columns=256, num_warps=8),
    activation_backward=Tile(tokens=16, columns=256, num_warps=8),
    symmetric=Symmetric(
        tokens=4, columns=1024, lists=512, fill_rows=32, tail_lanes=256, unroll=4, group=8, num_warps=8
    ),
    quantize=replace(
        GPU.quantize,
        rows=Walk(tokens=16, columns=512, num_warps=8, steps=1, stages=1),
        columns=Walk(tokens=64, columns=128, num_warps=8, steps=1, stages=1),
        groups=Walk(tokens=16, columns=512, num_warps=8, steps=1, stages=1),
        transformed=Walk(tokens=32, columns=128, num_warps=4, steps=1, stages=1),
    ),
    activate_quantize=replace(
        GPU.activate_quantize,
        rows=Walk(tokens=16, columns=512, num_warps=8, steps=1, stages=1),
        groups=Walk(tokens=16, columns=512, num_warps=8, steps=1, stages=1),
    ),
)


def with_one_tactic(sizes: Sizes, index: int) -> Sizes:
    """The same with one choice of each table: every problem takes it, whatever its size."""

    def chosen(value: object) -> object:
        if isinstance(value, tuple):
            return (value[index],)
        return with_one_tactic(value, index) if is_dataclass(value) else value

    return replace(sizes, **{f.name: chosen(getattr(sizes, f.name)) for f in fields(sizes)})  # type: ignore


def use(interpreted: tuning.Tuning, compiled: tuning.Tuning) -> None:
    """Sets the block sizes of this process's kernels."""
    tuning.INTERPRETER, tuning.GPU = interpreted, compiled
