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
    registers: int | None = None  # of a thread, at most: fewer for one are more threads at a time


@dataclass(frozen=True)
class Quantize:
    """Tiles of quantization; no smaller than a block."""

    rows: Walk  # blocks along rows alone
    columns: Walk  # along columns, in both directions, or square
    tall: Walk  # the same of block scaling, whose tiles are as high as its blocks
    groups: Walk  # a scale for each group; also what dequantizes rows
    transformed: Walk  # sixteen rows of a column are one thread's


@dataclass(frozen=True)
class ActivateQuantize:
    """Tiles of activations that are quantised by the same launch; no smaller than a block."""

    rows: Walk  # blocks along rows alone
    columns: Walk  # along columns, or in both directions; block scaling has tiles as high as its blocks
    backward: Walk  # the same of gradients
    low: Walk  # along columns, or in both directions, where blocks are low: MXFP8
    low_backward: Walk  # the same of gradients
    groups: Walk  # a scale for each group


@dataclass(frozen=True)
class PermuteQuantize:
    """Tokens that are quantised on the way to their rows; tiles are no smaller than a block."""

    scatter: Tile  # one pass from each token to its rows
    amax: Tile  # whole tokens, step by step
    scales: Tile  # of rows, by blocks
    gather: Walk  # tiles of rows, where blocks span them
    tall: Walk  # the same of block scaling, whose tiles are as high as its blocks
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
    min_tokens: int = 1  # of a tile, as long as that takes no more than twice its elements
    warp_elements: int = 1  # of a tile, at least
    layout_experts: int = 16  # experts of a program of the layout
    layout_step: int = 16  # other experts a step
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

    warp_elements: int = 1024  # of a tile, at least
    max_programs: int = 1  # of a loss

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

    # each for experts that have, on average, as many rows as it has; the last for more
    by_rows: tuple[GroupedTile, ...]
    wide: GroupedTile  # elements of four bytes and more, which have no matrix unit that keeps all their bits
    wgrad: GroupedTile  # [outputs, inputs], as many rows deep
    wgrad_wide: GroupedTile
    scaled: GroupedTile  # codes of eight bits; as high, and as deep, as blocks of block scaling are long
    decoded: GroupedTile  # codes whose scales are multiplied in before the product; as high
    decoded_wide: GroupedTile  # the same in float32, number by number: larger tiles take seconds to compile
    pointer_columns: int  # of a tile that is loaded by pointers, at most: these take registers
    pointer_codes: int  # the same of codes, byte by byte
    turn_columns: int  # of a tile that is turned
    sums: Tile  # of an expert's rows
    plan_tiles: int  # tiles that a program of the plan writes at once
    # with descriptors, one loop over tiles and depth; loads by pointers would come one by one
    flatten: bool
    programs: int | None  # None: one for each multiprocessor

    def tile(self, rows: int, experts: int, itemsize: int) -> GroupedTile:
        """The tile for `rows` rows of `experts` experts."""
        if itemsize > 2:
            return self.wide
        return next((tile for tile in self.by_rows if rows <= tile.rows * experts), self.by_rows[-1])

    def wgrad_tile(self, itemsize: int) -> GroupedTile:
        """The tile of the weight's gradient."""
        return self.wgrad if itemsize <= 2 else self.wgrad_wide


@dataclass(frozen=True)
class Symmetric(Tile):
    """Tiles of rows that are written to the memory of other ranks, and brought back."""

    lists: int  # tokens whose lists a program writes
    fill_rows: int  # of padding that are zeroed at once
    tail_lanes: int  # programs that share the rows past the segments
    unroll: int  # rows of a token that are on their way together
    group: int  # rows that a program sees to: few of them have travelled


@dataclass(frozen=True)
class Tuning:
    """The sizes of every kernel family."""

    metadata: Metadata
    permute: Tile  # also unpermute's backward without probs
    list_tokens: int  # tokens whose probs and lists a program of permute moves
    unpermute: Tile
    unpermute_slots: int  # rows of a token that are loaded together
    prob_columns: int  # experts a step of the probs' gradient
    unpermute_backward: Tile
    unpermute_backward_probs: WholeRows  # bounds the tokens above: their rows of dprobs stay in registers
    fill: Fill  # with the columns of permute or unpermute_backward
    sort_chunks: Tile
    chunk_columns: int  # chunks a step of the search
    multihot: Tile  # columns are experts or slots
    multihot_rows: WholeRows
    topk: Router
    topk_backward: Router
    aux_scores: Router
    z_loss: Router
    balance: Tile
    balance_programs: int  # that add up scores, at most
    loss_step: int  # partial sums that are added together
    drop: Tile
    drop_column: Tile  # the tokens of some experts at once; more are walked over for every bit of the key
    grouped: Grouped
    activation: Tile  # columns of the result
    activation_backward: Tile  # a program walks along its rows
    symmetric: Symmetric
    quantize: Quantize
    permute_quantize: PermuteQuantize
    activate_quantize: ActivateQuantize
