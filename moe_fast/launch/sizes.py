"""The sizes of every kernel family as records; `tuning` holds their values."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Tile:
    """One [tokens, columns] tile per step."""

    tokens: int
    columns: int
    num_warps: int

    def blocks(self, tokens: str, columns: str) -> dict[str, int]:
        """The sizes as constants of a kernel, BLOCK_ and a letter for each side."""
        return {f"BLOCK_{tokens}": self.tokens, f"BLOCK_{columns}": self.columns, "num_warps": self.num_warps}


@dataclass(frozen=True)
class Walk(Tile):
    """A program takes `steps` tiles side by side, and loads `stages` of them at once."""

    steps: int
    stages: int
    registers: int | None = None  # at most, per thread: with fewer registers more threads run at a time


@dataclass(frozen=True)
class Quantize:
    """Tiles of quantization; no smaller than a block."""

    rows: Walk  # blocks along rows alone
    columns: Walk  # along columns, in both directions, or square
    tall: Walk  # as `columns`, for block scaling: its tiles are as high as its blocks
    groups: Walk  # one scale per group; also to dequantize rows
    transformed: Walk  # with the Hadamard transform: a thread has sixteen rows of a column


@dataclass(frozen=True)
class ActivateQuantize:
    """Tiles of activations that are quantised by the same launch; no smaller than a block."""

    rows: Walk  # blocks along rows alone
    columns: Walk  # along columns, or in both directions; block scaling has tiles as high as its blocks
    backward: Walk  # as `columns`, for gradients
    low: Walk  # along columns, or in both directions, for the low blocks of MXFP8
    low_backward: Walk  # as `low`, for gradients
    groups: Walk  # a scale for each group


@dataclass(frozen=True)
class PermuteQuantize:
    """Tokens that are quantised on the way to their rows; tiles are no smaller than a block."""

    scatter: Tile  # one pass from each token to its rows
    amax: Tile  # whole tokens, step by step
    scales: Tile  # of rows, by blocks
    gather: Walk  # tiles of rows, where blocks span them
    tall: Walk  # as `gather`, for block scaling: its tiles are as high as its blocks
    slab: int  # programs that run together on the columns of a tile


@dataclass(frozen=True)
class WholeRows:
    """Tiles of whole rows: at most `tokens` of them, and at most `elements` elements."""

    tokens: int
    elements: int
    num_warps: int

    def tile_tokens(self, width: int) -> int:
        """Tokens of a tile whose rows have `width` elements, a power of two."""
        return max(1, min(self.tokens, self.elements // width))


@dataclass(frozen=True)
class Metadata(WholeRows):
    """The walk over the routing map, and the layout that follows from the counts of its blocks."""

    max_programs: int
    min_tokens: int = 1  # at least, per tile, unless that takes more than twice `elements`
    warp_elements: int = 1  # least elements of a tile per warp
    layout_experts: int = 16  # experts per program of the layout
    layout_step: int = 16  # other experts per step of the layout
    layout_group: int = 1  # blocks per group
    layout_warps: int = 4

    def tile_tokens(self, width: int) -> int:
        """Tokens of a tile whose rows have `width` elements, a power of two."""
        return max(super().tile_tokens(width), min(self.min_tokens, 2 * self.elements // width))

    def tile_warps(self, width: int) -> int:
        """Warps for such a tile."""
        return max(1, min(self.num_warps, self.tile_tokens(width) * width // self.warp_elements))


@dataclass(frozen=True)
class Router(WholeRows):
    """Tiles of rows of logits. A row that lies within one warp is searched without
    shared memory.
    """

    warp_elements: int = 1024  # least elements of a tile per warp
    max_programs: int = 1  # most programs that sum a loss

    def blocks(self, width: int) -> dict[str, int]:
        """The sizes for rows of `width` experts, a power of two, as constants of a kernel."""
        return {"BLOCK_T": self.tile_tokens(width), "BLOCK_E": width, "num_warps": self.tile_warps(width)}

    def tile_warps(self, width: int) -> int:
        """Warps for a tile whose rows have `width` elements."""
        return max(1, min(self.num_warps, self.tile_tokens(width) * width // self.warp_elements))


@dataclass(frozen=True)
class Fill:
    """Zeros in rows without a token: `rows` per step in each of a program's `lanes`."""

    lanes: int
    rows: int
    tail_lanes: int  # lanes that share the rows past the last segment


@dataclass(frozen=True)
class GroupedTile:
    """One [rows, columns] tile of a product, and how deep a step of its sum is."""

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int

    def within(self, columns: int) -> "GroupedTile":
        """The tile, not wider than so many columns."""
        return replace(self, columns=min(self.columns, columns))

    def blocks(self, rows: str, columns: str, depth: str) -> dict[str, int]:
        """The sizes as constants of a kernel, BLOCK_ and a letter for each side."""
        sides = {f"BLOCK_{rows}": self.rows, f"BLOCK_{columns}": self.columns, f"BLOCK_{depth}": self.depth}
        return sides | {"num_warps": self.num_warps, "num_stages": self.num_stages}


@dataclass(frozen=True)
class Grouped:
    """grouped_linear and its gradients. Each program takes one tile after the other, until none is
    left.
    """

    # the first tile that is at least as high as experts have rows on average, else the last one
    by_rows: tuple[GroupedTile, ...]
    wide: GroupedTile  # for elements of four bytes and more: no matrix unit keeps all their bits
    wgrad: GroupedTile  # [outputs, inputs] of the gradient of the weight, `depth` rows per step
    wgrad_wide: GroupedTile
    scaled: GroupedTile  # for codes of eight bits; as high and as deep as the blocks of block scaling
    decoded: GroupedTile  # for codes whose scales are multiplied in before the product; as high as `scaled`
    decoded_wide: GroupedTile  # the same in float32; larger tiles take seconds to compile
    pointer_columns: int  # most columns of a tile that is loaded by pointers, which take registers
    pointer_codes: int  # the same for codes, which are loaded byte by byte
    turn_columns: int  # columns of a tile that is transposed
    sums: Tile  # to sum an expert's rows
    plan_tiles: int  # tiles that a program of the plan writes at once
    # whether products with descriptors have one loop over tiles and depth; with pointers each load
    # would wait for the one before
    flatten: bool
    programs: int | None  # None: one for each multiprocessor

    def tile(self, rows: int, experts: int, itemsize: int) -> GroupedTile:
        """The tile for `rows` rows of `experts` experts."""
        if itemsize > 2:
            return self.wide
        for tile in self.by_rows:
            if rows <= tile.rows * experts:
                return tile
        return self.by_rows[-1]

    def wgrad_tile(self, itemsize: int) -> GroupedTile:
        """The tile of the weight's gradient."""
        return self.wgrad if itemsize <= 2 else self.wgrad_wide


@dataclass(frozen=True)
class Symmetric(Tile):
    """Tiles of rows that are written to the memory of other ranks, and brought back."""

    lists: int  # tokens whose lists a program writes
    fill_rows: int  # rows of padding that are zeroed at once
    tail_lanes: int  # programs that share the rows past the segments
    unroll: int  # rows of a token that are loaded at the same time
    group: int  # rows that a program handles; few of them have travelled


@dataclass(frozen=True)
class Tuning:
    """The sizes of every kernel family."""

    metadata: Metadata
    permute: Tile  # also unpermute's backward without probs
    list_tokens: int  # tokens whose probs and lists a program of permute moves
    unpermute: Tile
    unpermute_slots: int  # rows of a token that are loaded together
    prob_columns: int  # experts per step of the gradient of the probs
    unpermute_backward: Tile
    unpermute_backward_probs: WholeRows  # bounds the tokens of the tile above: their rows of dprobs stay in registers
    fill: Fill  # with the columns of permute or unpermute_backward
    sort_chunks: Tile
    chunk_columns: int  # chunks per step of the search
    multihot: Tile  # columns are experts or slots
    multihot_rows: WholeRows
    topk: Router
    topk_backward: Router
    aux_scores: Router
    z_loss: Router
    balance: Tile
    balance_programs: int  # most programs that add up scores
    loss_step: int  # partial sums that are added together
    drop: Tile
    drop_column: Tile  # with more tokens, a program goes over them once for every bit of the key
    grouped: Grouped
    activation: Tile  # columns of the result
    activation_backward: Tile  # a program walks along its rows
    symmetric: Symmetric
    quantize: Quantize
    permute_quantize: PermuteQuantize
    activate_quantize: ActivateQuantize
