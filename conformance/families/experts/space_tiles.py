"""Products whose rows are whole lines of a tensor descriptor, with many rows for each expert.

Kernels that move tiles with a copy engine, and large tiles, run only for such products: widths that
are no multiples of 16 bytes are addressed by pointers, and experts with few rows have small tiles.
"""

from typing import Any

from conformance.core.axes import Changes
from conformance.core.scope import Scope

# rows of an expert: several tiles of 128; none; a tile and one more; many with a partial last tile
MANY_ROWS: Changes = {"tokens": 700, "experts": 4, "counts": (300, 0, 129, 271), "dtype": "bfloat16"}
WHOLE_TILES: Changes = {"tokens": 640, "experts": 3, "counts": (384, 128, 128), "dtype": "float16"}
LINES: Changes = {"hidden": 272, "width": 144}
ODD_LINES: Changes = {"hidden": 136, "width": 264}  # of 16 bytes, not of 32
EMPTY: Changes = {"tokens": 5, "experts": 2, "counts": (2, 3), "hidden": 0, "width": 5}  # sums of nothing
# codes of whole lines, results and scales of none
PART_LINES: Changes = {"tokens": 300, "experts": 4, "counts": (0, 129, 1, 170), "dtype": "bfloat16", "scaling": "block"}
PART_SIDES = {"grouped_dgrad": {"hidden": 131, "width": 144}}
NO_SEGMENT: Changes = {"tokens": 0, "experts": 2, "counts": (0, 0), "tail": 260, "dtype": "bfloat16"}
STEPS: Changes = {"hidden": 512, "width": 256}
LONG: Changes = {
    "tokens": 1500,
    "experts": 3,
    "counts": (800, 0, 700),
    "dtype": "bfloat16",
    "hidden": 256,
    "width": 384,
}


def tiles_of_products(scope: Scope) -> list[Any]:
    """Products with all gradients, and without any; codes of blocks, where more rows fill a larger
    tile; rows that are all past the segments; and for products nothing to contract.
    """
    if scope.space.device != "cuda":
        return []
    blocks = LONG | {"scaling": "block", "values": "dyadic", "tail": 3}
    low: list[Any] = [blocks] if scope.takes(scope.case(blocks)) else []
    apart: Changes = {"into": ""} if scope.accepts("accumulate_into") else {}  # a sum has another kernel
    sizes = [MANY_ROWS | LINES, WHOLE_TILES | STEPS | apart, MANY_ROWS | ODD_LINES | {"tail": 3} | apart]
    nothing = [scope.case(EMPTY)] if scope.function == "grouped_linear" else []
    partial_lines = scope.case(PART_LINES | PART_SIDES.get(scope.function, {"hidden": 144, "width": 131}) | apart)
    nothing += [partial_lines] if scope.fits(partial_lines) else []
    if scope.function != "grouped_wgrad":  # which has no such rows
        without_segment = [scope.case(NO_SEGMENT | LINES | {"scaling": scaling}) for scaling in ("", "block")]
        nothing += [case for case in without_segment if scope.fits(case)]
    return [*sizes, *low, *nothing]


def tiles_of_layers(scope: Scope) -> list[Any]:
    """Layers with all gradients; and without any, where a kernel may keep what lies between two
    stages, for several activations, with their numbers and without.
    """
    if scope.space.device != "cuda":
        return []
    alike = scope.function == "shared_experts"  # the same kernels, without bias and probs
    base: Changes = {"dtype": "bfloat16"} | ({"tokens": 200} if alike else MANY_ROWS) | LINES
    forms: list[Changes] = [{}, {"offset": 8, "clamp": 56, "alpha": 1702, "dtype": "float16"} | ODD_LINES]
    further: list[Changes] = [
        {"kind": "reglu", "offset": -4, "clamp": 6, "bias1": "float32"},
        {"kind": "geglu", "probs": "float32"} | ODD_LINES,
        {"kind": "quick_geglu", "probs": "bfloat16", "early": True},
        {"interleave": 16},
        {"hidden": 133, "width": 75},  # rows that are no whole lines
    ]
    forward_only = [scope.mended(scope.case(base | form)) for form in (forms if alike else forms + further)]
    coded = [] if alike else _coded(scope, base)
    return [base, *scope.lawful([case for case in forward_only if scope.fits(case)]), *coded]


def _coded(scope: Scope, base: Changes) -> list[Any]:
    """A sigmoid activation in FP8 by blocks, in lines that are no whole blocks, with all gradients.

    A kernel for Hopper encodes both directions at once, or one after the other. Other cases need
    what it must leave written: an input kept in E4M3, and rows of weight gradients that wait.
    """
    ragged: Changes = {"tokens": 300, "counts": (0, 129, 1, 170), "tail": 3, "scaling": "block"}
    ragged |= {"width": 584}  # more blocks than a program has steps, and a partial one
    numbers: Changes = {"offset": 8, "clamp": 56, "alpha": 1702, "dtype": "float16", "recompute": "moe_act"}
    changes_of_options: list[Changes] = [
        {"early": True, "probs": "bfloat16"},
        numbers | {"probs": "float32"},
        {"stored": True},
    ]
    forms = [base | ragged | form for form in (*changes_of_options, {"law": "delayed", "width": 144})]
    mixed = scope.case(base | ragged | {"interleave": 8})  # no such kernel takes it
    return [scope.fullest(form) for form in forms if scope.fits(scope.case(form))] + [mixed] * scope.fits(mixed)
