"""Honest implementations: right, but not like the others. The suite must accept every one of them."""

HONEST = (
    "moe_ref",
    "moe_fast",
    "tests.honest.small_blocks",
    "tests.honest.large_blocks",
    "tests.honest.descending_sums",
)
ROUTERS = tuple(f"tests.honest.routers:{name}" for name in ("Autograd", "BaseTwo", "Wide", "OneByOne"))
EXPERTS = (  # in plain torch, with tables on the CPU
    *(f"tests.honest.experts:{name}" for name in ("Autograd", "BaseTwo", "Wide", "Backwards")),
    *(
        f"tests.honest.low_precision:{name}"
        for name in ("ScaledFirst", "ScaledLast", "Split", "FourteenBits", "Reciprocal")
    ),
    *(f"tests.honest.quantizers:{name}" for name in ("Divides", "Multiplies")),
)
