"""A barrier of processes that address each other's memory.

Each rank has one flag per peer. A rank raises its flag on every peer, then takes down the flag that
each peer has raised here.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from moe_fast.dispatch._symmetric import at_rank


@triton.jit
def handshake_kernel(flags_table_ptr, own_rank, ranks, LIMIT_NS: tl.constexpr):
    """Wait until all ranks have come here; the grid is one program. A limit of None, as in the
    interpreter, waits for ever.
    """
    began = globaltimer() if LIMIT_NS is not None else 0
    for peer in range(ranks):
        raised = at_rank(flags_table_ptr, peer, True, tl.int32) + own_rank
        while tl.atomic_cas(raised, 0, 1, sem="release", scope="sys") != 0:
            end_after(began, LIMIT_NS)
    for peer in range(ranks):
        awaited = at_rank(flags_table_ptr, own_rank, True, tl.int32) + peer
        while tl.atomic_cas(awaited, 1, 0, sem="acquire", scope="sys") != 1:
            end_after(began, LIMIT_NS)


@triton.jit
def end_after(began, LIMIT_NS: tl.constexpr):
    """End the kernel with an error once the limit has passed."""
    if LIMIT_NS is not None:  # noqa: SIM102  (a constant, then a value)
        if globaltimer() - began > LIMIT_NS:
            tl.inline_asm_elementwise("trap; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
