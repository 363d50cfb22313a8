"""Block sizes and numbers of warps as data. Any power of two gives the same results. These are
fast, and the table of a GPU in `tables` replaces some of them.

A tile is [tokens, columns]. If the columns must be all the experts of a token, `tile_tokens`
shortens the tile instead.
"""

from dataclasses import fields, is_dataclass, replace
from typing import TypeVar

import torch

from moe_fast.launch import tables
from moe_fast.launch.backend import INTERPRETED
from moe_fast.launch.sizes import (
    ActivateQuantize,
    Fill,
    Grouped,
    GroupedTile,
    Metadata,
    PermuteQuantize,
    Quantize,
    Router,
    Symmetric,
    Tile,
    Tuning,
    Walk,
    WholeRows,
)

Sizes = TypeVar("Sizes")
UNSCALED = (
    "num_warps",
    "num_stages",
    "steps",
    "stages",
    "max_programs",
    "balance_programs",
    "programs",
    "layout_group",
    "pointer_columns",
    "pointer_codes",
)
CODED = ("scaled", "decoded", "decoded_wide")  # tiles of codes in `Grouped`
DOT_LEAST = 16  # least length of each side of tl.dot

# Measured on an H200 (docs/results/permutation.json): small programs, so that many on a
# multiprocessor wait for their lists at once.
GPU = Tuning(
    metadata=Metadata(
        tokens=128,
        elements=512,
        num_warps=8,
        max_programs=128,
        min_tokens=8,
        warp_elements=128,
        layout_experts=8,
        layout_step=512,
        layout_group=16,
        layout_warps=8,
    ),
    permute=Tile(tokens=1, columns=1024, num_warps=4),
    list_tokens=128,
    unpermute=Tile(tokens=1, columns=512, num_warps=1),
    unpermute_slots=2,
    prob_columns=256,
    unpermute_backward=Tile(tokens=1, columns=1024, num_warps=1),
    unpermute_backward_probs=WholeRows(tokens=4, elements=4096, num_warps=4),
    fill=Fill(lanes=1, rows=8, tail_lanes=64),
    sort_chunks=Tile(tokens=8, columns=512, num_warps=4),
    chunk_columns=128,
    multihot=Tile(tokens=32, columns=128, num_warps=4),
    multihot_rows=WholeRows(tokens=64, elements=4096, num_warps=4),
    topk=Router(tokens=32, elements=256, num_warps=8),
    topk_backward=Router(tokens=32, elements=256, num_warps=8),
    aux_scores=Router(tokens=32, elements=256, num_warps=8),
    z_loss=Router(tokens=32, elements=1024, num_warps=4, max_programs=1024),
    balance=Tile(tokens=32, columns=128, num_warps=4),
    balance_programs=512,
    loss_step=1024,
    drop=Tile(tokens=64, columns=32, num_warps=4),
    drop_column=Tile(tokens=8192, columns=1, num_warps=8),
    grouped=Grouped(
        by_rows=(
            GroupedTile(rows=16, columns=128, depth=128, num_warps=4, num_stages=4),
            GroupedTile(rows=64, columns=128, depth=64, num_warps=4, num_stages=4),
            GroupedTile(rows=128, columns=256, depth=64, num_warps=8, num_stages=3),
        ),
        wide=GroupedTile(rows=64, columns=64, depth=32, num_warps=8, num_stages=2),
        wgrad=GroupedTile(rows=128, columns=256, depth=64, num_warps=8, num_stages=3),
        wgrad_wide=GroupedTile(rows=64, columns=64, depth=32, num_warps=8, num_stages=2),
        scaled=GroupedTile(rows=128, columns=128, depth=128, num_warps=8, num_stages=4),
        decoded=GroupedTile(rows=128, columns=128, depth=64, num_warps=8, num_stages=3),
        decoded_wide=GroupedTile(rows=128, columns=32, depth=32, num_warps=8, num_stages=1),
        pointer_columns=128,
        pointer_codes=64,
        turn_columns=128,
        sums=Tile(tokens=32, columns=128, num_warps=4),
        plan_tiles=256,
        flatten=True,
        programs=None,
    ),
    activation=Tile(tokens=4, columns=256, num_warps=4),  # 16 bytes a lane; 256 divides nearly every model's width
    activation_backward=Tile(tokens=4, columns=256, num_warps=4),  # a warp walks along one row
    symmetric=Symmetric(tokens=1, columns=1024, lists=128, fill_rows=8, tail_lanes=64, unroll=4, group=4, num_warps=4),
    quantize=Quantize(
        rows=Walk(tokens=4, columns=512, num_warps=1, steps=1, stages=1),
        columns=Walk(tokens=32, columns=64, num_warps=2, steps=4, stages=1, registers=96),
        tall=Walk(tokens=128, columns=128, num_warps=4, steps=8, stages=1),
        groups=Walk(tokens=4, columns=512, num_warps=1, steps=4, stages=1),
        transformed=Walk(tokens=16, columns=64, num_warps=1, steps=8, stages=1, registers=96),
    ),
    permute_quantize=PermuteQuantize(
        scatter=Tile(tokens=1, columns=1024, num_warps=2),
        amax=Tile(tokens=1, columns=1024, num_warps=4),
        scales=Tile(tokens=128, columns=8, num_warps=4),
        gather=Walk(tokens=32, columns=64, num_warps=1, steps=1, stages=1, registers=128),
        tall=Walk(tokens=128, columns=128, num_warps=4, steps=4, stages=1),
        slab=8,
    ),
    activate_quantize=ActivateQuantize(
        rows=Walk(tokens=4, columns=512, num_warps=4, steps=4, stages=2),
        columns=Walk(tokens=128, columns=128, num_warps=8, steps=8, stages=1, registers=128),
        backward=Walk(tokens=128, columns=128, num_warps=8, steps=8, stages=1),
        low=Walk(tokens=32, columns=64, num_warps=2, steps=4, stages=1, registers=96),
        low_backward=Walk(tokens=32, columns=64, num_warps=2, steps=4, stages=1, registers=128),
        groups=Walk(tokens=8, columns=256, num_warps=4, steps=8, stages=1),
    ),
)

# A step costs the same whatever its tile, so tiles are large; yet a hundred tokens still span
# several.
INTERPRETER = Tuning(
    metadata=Metadata(tokens=32, elements=8192, num_warps=4, max_programs=3),
    permute=Tile(tokens=32, columns=128, num_warps=4),
    list_tokens=16,
    unpermute=Tile(tokens=32, columns=128, num_warps=4),
    unpermute_slots=2,
    prob_columns=16,
    unpermute_backward=Tile(tokens=32, columns=128, num_warps=4),
    unpermute_backward_probs=WholeRows(tokens=32, elements=8192, num_warps=4),
    fill=Fill(lanes=8, rows=8, tail_lanes=8),
    sort_chunks=Tile(tokens=32, columns=128, num_warps=4),
    chunk_columns=16,
    multihot=Tile(tokens=32, columns=16, num_warps=4),
    multihot_rows=WholeRows(tokens=32, elements=8192, num_warps=4),
    topk=Router(tokens=64, elements=16384, num_warps=4),
    topk_backward=Router(tokens=64, elements=16384, num_warps=4),
    aux_scores=Router(tokens=64, elements=16384, num_warps=4),
    z_loss=Router(tokens=32, elements=8192, num_warps=4, max_programs=3),
    balance=Tile(tokens=32, columns=64, num_warps=4),
    balance_programs=6,
    loss_step=2,
    drop=Tile(tokens=64, columns=64, num_warps=4),
    drop_column=Tile(tokens=128, columns=64, num_warps=4),
    grouped=Grouped(
        by_rows=(
            GroupedTile(rows=16, columns=64, depth=64, num_warps=4, num_stages=1),
            GroupedTile(rows=64, columns=64, depth=64, num_warps=4, num_stages=1),
        ),
        wide=GroupedTile(rows=32, columns=64, depth=64, num_warps=4, num_stages=1),
        wgrad=GroupedTile(rows=64, columns=64, depth=32, num_warps=4, num_stages=1),
        wgrad_wide=GroupedTile(rows=64, columns=64, depth=32, num_warps=4, num_stages=1),
        scaled=GroupedTile(rows=128, columns=128, depth=128, num_warps=4, num_stages=1),
        decoded=GroupedTile(rows=128, columns=64, depth=64, num_warps=4, num_stages=1),
        decoded_wide=GroupedTile(rows=128, columns=64, depth=64, num_warps=4, num_stages=1),
        pointer_columns=1024,
        pointer_codes=1024,
        turn_columns=64,
        sums=Tile(tokens=32, columns=64, num_warps=4),
        plan_tiles=16,
        flatten=False,
        programs=3,
    ),
    activation=Tile(tokens=32, columns=128, num_warps=4),
    activation_backward=Tile(tokens=32, columns=128, num_warps=4),
    symmetric=Symmetric(tokens=32, columns=256, lists=16, fill_rows=64, tail_lanes=2, unroll=2, group=4, num_warps=4),
    quantize=Quantize(
        rows=Walk(tokens=128, columns=256, num_warps=4, steps=2, stages=1),
        columns=Walk(tokens=128, columns=256, num_warps=4, steps=2, stages=1),
        tall=Walk(tokens=128, columns=256, num_warps=4, steps=2, stages=1),
        groups=Walk(tokens=64, columns=256, num_warps=4, steps=2, stages=1),
        transformed=Walk(tokens=64, columns=256, num_warps=4, steps=2, stages=1),
    ),
    permute_quantize=PermuteQuantize(
        scatter=Tile(tokens=32, columns=128, num_warps=4),
        amax=Tile(tokens=32, columns=128, num_warps=4),
        scales=Tile(tokens=128, columns=4, num_warps=4),
        gather=Walk(tokens=64, columns=128, num_warps=4, steps=2, stages=1),
        tall=Walk(tokens=128, columns=128, num_warps=4, steps=2, stages=1),
        slab=2,
    ),
    activate_quantize=ActivateQuantize(
        rows=Walk(tokens=128, columns=256, num_warps=4, steps=2, stages=1),
        columns=Walk(tokens=128, columns=256, num_warps=4, steps=2, stages=1),
        backward=Walk(tokens=128, columns=256, num_warps=4, steps=2, stages=1),
        low=Walk(tokens=128, columns=256, num_warps=4, steps=2, stages=1),
        low_backward=Walk(tokens=128, columns=256, num_warps=4, steps=2, stages=1),
        groups=Walk(tokens=64, columns=256, num_warps=4, steps=2, stages=1),
    ),
)


EXPERT_LANES = 8 if INTERPRETED else 32  # least lanes for a list of experts: a warp has no fewer
DEFAULTS = GPU  # for a GPU for which there is no table
_found: dict[torch.device, Tuning] = {}


def ceil_div(a: int, b: int) -> int:
    """⌈a/b⌉. triton.cdiv takes microseconds on the host."""
    return -(-a // b)


def at_least(n: int, least: int) -> int:
    """max(n, least); n may be a number of a compiled graph that stands for many."""
    return torch.sym_max(n, least) if isinstance(n, torch.SymInt) else max(n, least)


def power_of_two(n: int, least: int = 1) -> int:
    """The least power of two that is at least n, and at least `least`.

    A `least` of a few lanes costs no time, and one kernel then serves all smaller blocks.
    """
    n = int(n)  # a compiled graph is made for this number only
    return max(1 << (n - 1).bit_length() if n > 1 else 1, least)


def for_device(device: torch.device) -> Tuning:
    """The sizes for kernels that run on `device`: those of its table, unless `GPU` was replaced."""
    if INTERPRETED or device.type == "cpu":
        return INTERPRETER
    if GPU is not DEFAULTS:
        return GPU
    if device not in _found:
        _found[device] = tables.with_table(GPU, tables.nearest(tables.Gpu.of(device), tables.measured()))
    return _found[device]


def scaled(sizes: Sizes, factor: float) -> Sizes:
    """The sizes, with every length multiplied by `factor`, and at least 1. Warps, stages and
    numbers of programs stay.

    Tiles of codes (CODED) stay too: they are as long as the blocks of block scaling.
    """
    least = DOT_LEAST if isinstance(sizes, GroupedTile) else 1

    def changed(name: str, value: object) -> object:
        if name in UNSCALED or (isinstance(sizes, Grouped) and name in CODED):
            return value
        if isinstance(value, tuple):
            return tuple(scaled(item, factor) for item in value)
        if is_dataclass(value):
            return scaled(value, factor)
        return max(least, int(value * factor)) if isinstance(value, int) and not isinstance(value, bool) else value

    return replace(sizes, **{f.name: changed(f.name, getattr(sizes, f.name)) for f in fields(sizes)})  # type: ignore
