"""The table of the tiles that experts' rows are cut into."""

import triton
import triton.language as tl


@triton.jit
def put_tiles(tile_ptr, capacity, expert, first, tiles, begin, end, BLOCK_T: tl.constexpr):
    """Write the entries of some experts' tiles: for each tile its expert, the expert's first tile,
    first row and end.
    """
    for step in range(0, tl.max(tiles, axis=0), BLOCK_T):
        t = step + tl.arange(0, BLOCK_T)[None, :]
        entry = tile_ptr + first[:, None] + t
        valid = t < tiles[:, None]  # the last block sticks out, and other experts may have more
        zero = (t - t).to(tl.int64)
        tl.store(entry, zero + expert[:, None], mask=valid)
        tl.store(entry + capacity, zero + first[:, None], mask=valid)
        tl.store(entry + 2 * capacity, zero + begin[:, None], mask=valid)
        tl.store(entry + 3 * capacity, zero + end[:, None], mask=valid)
