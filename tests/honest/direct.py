"""moe_fast's symmetric-memory dispatcher without deduplication: one copy per (token, expert)."""

from functools import partial

from moe_fast.dispatch import symmetric
from moe_fast.dispatch.symmetric import (
    codes,
    declares,
    dequantize,
    hybridep_cached_dispatch,
    hybridep_combine,
    scales,
    supports,
)

__all__ = [
    "codes",
    "declares",
    "dequantize",
    "hybridep_cached_dispatch",
    "hybridep_combine",
    "hybridep_dispatch",
    "scales",
    "supports",
]

hybridep_dispatch = partial(symmetric.hybridep_dispatch, deduplicate=False)
