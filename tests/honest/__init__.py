"""Honest implementations: correct, computed differently. The suite must accept all of them."""

HONEST = (
    "moe_ref",
    "moe_fast",
    "tests.honest.small_blocks",
    "tests.honest.large_blocks",
    "tests.honest.descending_sums",
)
TACTICS = ("tests.honest.smallest_tactics", "tests.honest.largest_tactics")
ROUTERS = tuple(f"tests.honest.routers:{name}" for name in ("Autograd", "BaseTwo", "Wide", "OneByOne"))
ACTIVATIONS = tuple(f"tests.honest.activations:{name}" for name in ("Eager", "TanhHalf", "TermByTerm", "Doubles"))
SUMS = tuple(f"tests.honest.sums:{name}" for name in ("LogSum", "Pairs", "Kahan", "Atomics", "Doubled"))
OVER_RANKS = ("tests.honest.sums:OverRanks",)
LAYERS = tuple(f"tests.honest.layers:{name}" for name in ("Stages", "Kept", "Doubles", "OneStep", "Twice"))
STYLES = ("Slots", "Segments", "Sparse", "Library", "Masked", "Fast", "Frugal", "Padded", "Gathered", "Recomputed")
STRANGERS = (
    *(f"tests.honest.strangers:{name}" for name in STYLES),
    *(f"tests.honest.rows:{name}" for name in ("Cumsum", "OneHot", "Narrow")),
    *(f"tests.honest.choices:{name}" for name in ("Grouped", "Losses", "Online")),
    "tests.honest.codes:Bits",
)
EXPERTS = (  # in plain torch, CPU only
    *(f"tests.honest.experts:{name}" for name in ("Autograd", "BaseTwo", "Wide", "Backwards")),
    *(
        f"tests.honest.low_precision:{name}"
        for name in ("ScaledFirst", "ScaledLast", "Split", "FourteenBits", "Reciprocal")
    ),
    *(f"tests.honest.quantizers:{name}" for name in ("Divides", "Multiplies")),
    *(*ACTIVATIONS, *LAYERS),
)
