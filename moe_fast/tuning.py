"""Block sizes and warps as data. Any power of two gives the same results; these are fast.

A tile is [tokens, columns]. Where the columns must be all the experts of a token, `tile_tokens` shortens the tile instead.
"""

from dataclasses import dataclass

import torch

from moe_fast.backend import INTERPRETED


@dataclass(frozen=True)
class Tile:
    """One [tokens, columns] tile a step."""

    tokens: int
    columns: int
    num_warps: int


@dataclass(frozen=True)
class WholeRows:
    """Tiles of whole rows: as many tokens as keep the tile within `elements`, but no more than `tokens`."""

    tokens: int
    elements: int
    num_warps: int

    def tile_tokens(self, width: int) -> int:
        """Tokens of a tile whose rows have `width` elements, a power of two."""
        return max(1, min(self.tokens, self.elements // width))


@dataclass(frozen=True)
class Metadata(WholeRows):
    """The walk over the routing map, and the sum over its blocks that the last program takes."""

    max_programs: int


@dataclass(frozen=True)
class Fill:
    """Zeros in rows without a token: so many rows a step in each of a program's lanes."""

    lanes: int
    rows: int
    tail_lanes: int  # lanes that share the rows behind the last segment


@dataclass(frozen=True)
class Tuning:
    """The sizes of every kernel family."""

    metadata: Metadata
    permute: Tile  # also unpermute's backward without probs
    unpermute: Tile
    prob_columns: int  # experts a step of the probs' gradient
    unpermute_backward: Tile
    unpermute_backward_probs: WholeRows  # bounds the tokens above: their rows of dprobs stay in registers
    fill: Fill  # with the columns of permute or unpermute_backward
    sort_chunks: Tile
    chunk_columns: int  # chunks a step of the search
    multihot: Tile  # columns are experts or slots
    multihot_rows: WholeRows


# Chosen for an H200, not measured: accesses of 16 bytes, and programs for all 132 multiprocessors at a few thousand tokens.
GPU = Tuning(
    metadata=Metadata(tokens=128, elements=4096, num_warps=8, max_programs=128),
    permute=Tile(tokens=4, columns=1024, num_warps=4),
    unpermute=Tile(tokens=4, columns=512, num_warps=4),
    prob_columns=256,
    unpermute_backward=Tile(tokens=4, columns=512, num_warps=4),
    unpermute_backward_probs=WholeRows(tokens=4, elements=4096, num_warps=4),
    fill=Fill(lanes=1, rows=8, tail_lanes=256),
    sort_chunks=Tile(tokens=8, columns=512, num_warps=4),
    chunk_columns=128,
    multihot=Tile(tokens=32, columns=128, num_warps=4),
    multihot_rows=WholeRows(tokens=64, elements=4096, num_warps=4),
)

# A step costs the same whatever its tile, so tiles are large; yet a hundred tokens still span several.
INTERPRETER = Tuning(
    metadata=Metadata(tokens=32, elements=8192, num_warps=4, max_programs=3),
    permute=Tile(tokens=32, columns=128, num_warps=4),
    unpermute=Tile(tokens=32, columns=128, num_warps=4),
    prob_columns=16,
    unpermute_backward=Tile(tokens=32, columns=128, num_warps=4),
    unpermute_backward_probs=WholeRows(tokens=32, elements=8192, num_warps=4),
    fill=Fill(lanes=8, rows=8, tail_lanes=8),
    sort_chunks=Tile(tokens=32, columns=128, num_warps=4),
    chunk_columns=16,
    multihot=Tile(tokens=32, columns=16, num_warps=4),
    multihot_rows=WholeRows(tokens=32, elements=8192, num_warps=4),
)


def for_device(device: torch.device) -> Tuning:
    """The sizes for kernels that run on `device`."""
    return INTERPRETER if INTERPRETED or device.type == "cpu" else GPU
