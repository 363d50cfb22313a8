"""A copy through shared memory on NVIDIA's Hopper, with or without the wait for its arrival."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from moe_fast.launch._hopper import load_tile

WORDS = 32  # of a line
LINES = 32  # of a tile


@gluon.jit
def staged_copy_kernel(source_desc, out_ptr, WAITS: gl.constexpr, LINES: gl.constexpr, WORDS: gl.constexpr):
    """out = source, [lines, WORDS] of int32; a tile per program."""
    first = gl.program_id(0) * LINES
    tile = gl.allocate_shared_memory(gl.int32, [LINES, WORDS], source_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    fence_async_shared()
    mbarrier.expect(ready, LINES * WORDS * 4)
    load_tile(source_desc, [first, 0], ready, tile)
    if WAITS:
        mbarrier.wait(ready, 0)
    lanes: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    values = tile.load(lanes)
    line = first + gl.arange(0, LINES, gl.SliceLayout(1, lanes))
    word = gl.arange(0, WORDS, gl.SliceLayout(0, lanes))
    gl.store(out_ptr + line[:, None] * WORDS + word[None, :], values)
    if not WAITS:
        mbarrier.wait(ready, 0)  # the tile must not arrive after the program has ended
    mbarrier.invalidate(ready)
