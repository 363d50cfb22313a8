"""Honest implementations: right, but not like the others. The suite must accept every one of them."""

HONEST = (
    "moe_ref",
    "moe_fast",
    "tests.variants.small_blocks",
    "tests.variants.large_blocks",
    "tests.variants.descending_sums",
)
ROUTERS = tuple(f"tests.variants.routers:{name}" for name in ("Autograd", "BaseTwo", "Wide", "OneByOne"))
EXPERTS = (  # in plain torch, with tables on the CPU
    *(f"tests.variants.experts:{name}" for name in ("Autograd", "BaseTwo", "Wide", "Backwards")),
    *(
        f"tests.variants.low_precision:{name}"
        for name in ("ScaledFirst", "ScaledLast", "Split", "FourteenBits", "Reciprocal")
    ),
    *(f"tests.variants.quantizers:{name}" for name in ("Divides", "Multiplies")),
)
