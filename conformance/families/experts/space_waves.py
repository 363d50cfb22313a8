"""Products with more tiles than a GPU has multiprocessors.

A persistent program takes one tile after the other. If each program has at most one tile, it never
uses what it carries from a tile to the next: the stage and the phase of its ring, the result that
is still being written, and the place of the next tile.
"""

from typing import Any

from conformance.core.axes import Changes
from conformance.core.scope import Scope

# A GPU has up to 148 multiprocessors. Of each expert's rows one is in a second tile of 128: 154
# tiles, and 2 of 256 columns; or 77 tiles of 192, and 3 of 128. Each has several steps
FULL = 77
ROWS: Changes = {
    "tokens": 129 * FULL,
    "experts": FULL,
    "counts": (129,) * FULL,
    "dtype": "bfloat16",
    "hidden": 136,
    "width": 264,
}
# experts of few rows, as small tiles take them; their gradients have 360 tiles of 128 × 256
COUNTS = tuple(0 if e % 11 == 5 else 130 if e % 16 == 3 else 1 + 37 * e % 40 for e in range(90))
EXPERTS: Changes = {
    "tokens": sum(COUNTS),
    "experts": len(COUNTS),
    "counts": COUNTS,
    "dtype": "bfloat16",
    "hidden": 272,
    "width": 144,
}
# kernels for Hopper, for its codes, and for any GPU; a sum that is added to has the last
OF_WEIGHTS: tuple[Changes, ...] = ({"into": ""}, {"into": "", "scaling": "block"}, {"into": "float32"})
OF_ROWS: tuple[Changes, ...] = (ROWS, ROWS | {"scaling": "block"}, EXPERTS, EXPERTS | {"scaling": "current"})


def waves_of_products(scope: Scope) -> list[Any]:
    """On a GPU: many tiles for a product without optional inputs, and without a law."""
    if scope.space.device != "cuda":
        return []
    forms = [EXPERTS | form for form in OF_WEIGHTS] if scope.function == "grouped_wgrad" else OF_ROWS
    return [case for case in map(scope.case, forms) if scope.fits(case)]


def waves_of_layers(scope: Scope) -> list[Any]:
    """On a GPU: many tiles for both layers without gradients, where a kernel may keep what lies
    between them.
    """
    if scope.space.device != "cuda":
        return []
    return [scope.mended(scope.case(ROWS | {"probs": "float32"}))]
