"""Cases of fused activations beyond axes: ragged groups, fixed shapes."""

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from conformance.core.axes import Changes
from conformance.core.model_sizes import FEW_ROWS, MODEL_WIDTHS, SPLITS
from conformance.core.scope import Scope
from conformance.core.shapes import Shapes
from conformance.families.experts.cases import PROB_DTYPES, WEIGHTS
from conformance.families.experts.space import near, of_a_model
from conformance.families.quantization.cases import DIRECTIONS, SCALINGS, UNIT, VARIANTS
from conformance.families.quantization.space import accepted, groups, mostly_some, overwritten_splits, wide_tensors

# in units: a block, and a little more
WIDTHS, ROWS = {"block": 140, "mxfp8": 3, "nvfp4": 5}, {"block": 200, "mxfp8": 2, "nvfp4": 4}
WIDTH = {"block": 130, "mxfp8": 1, "nvfp4": 2}  # under the covering array
ROUNDED: Changes = {"dtype": "bfloat16", "rounded": True}  # required by a transform
KINDS: tuple[Changes, ...] = tuple(
    {"scaling": scaling, "variant": variant, "direction": direction}
    for scaling in SCALINGS
    for variant in range(VARIANTS)
    for direction in DIRECTIONS
)


def drawn(scope: Scope) -> st.SearchStrategy[Changes]:
    """Quantisers drawn uniformly, groups and widths near their blocks, and probabilities in three
    of four cases.
    """
    kinds = [
        kind for kind in KINDS if any(scope.fits(scope.case(kind | extra_fields)) for extra_fields in ({}, ROUNDED))
    ]
    probs: st.SearchStrategy[Changes] = st.just({"probs": "", "weights": "plain"})
    if scope.accepts("probs"):
        dtypes_and_weights = st.tuples(st.sampled_from(PROB_DTYPES), st.sampled_from(WEIGHTS))
        weighed = dtypes_and_weights.map(lambda x: {"probs": x[0], "weights": x[1]})
        probs = st.sampled_from((probs, weighed, weighed, weighed)).flatmap(lambda strategy: strategy)
    return st.sampled_from(kinds).flatmap(lambda kind: _of_kind(scope, kind, probs))


@st.composite
def _of_kind(draw: st.DrawFn, scope: Scope, kind: Changes, probs: st.SearchStrategy[Changes]) -> Changes:
    scaling = kind["scaling"]
    fields = kind | draw(probs) | draw(groups(ROWS.get(scaling, 24), scope.accepts("splits")))
    fields |= {"width": draw(mostly_some(WIDTHS.get(scaling, 24))), "unused": ""}
    width = fields["width"] * UNIT.get(scaling, 1)
    fields["interleave"] = draw(st.sampled_from((0, *(s for s in (1, 2, 3, 8, 32, width) if s and width % s == 0))))
    return fields | (ROUNDED if scope.case(kind).transformed else {})


# no splits; empty groups first and in the middle; in units
GROUPS: list[Changes] = [
    {"tokens": 2, "experts": 0},
    *({"counts": counts, "experts": len(counts), "tokens": sum(counts)} for counts in ((0, 3), (2, 0, 1))),
]
LAYOUTS: list[Changes] = [  # each half of the functions runs all layouts
    {"layout": "contiguous", "layout_of": ""},
    {"layout": "transposed", "layout_of": "h"},
    {"layout": "strided", "layout_of": "probs"},
]


def together(scope: Scope) -> dict[str, list[Changes]]:
    backward = "d_out" in scope.signature.names
    last = {"layout": "shifted", "layout_of": "d_out"} if backward else EXPANDED
    return {"groups": GROUPS, "layout": [*LAYOUTS, last], "unused": [{"unused": ""}]}


EXPANDED: Changes = {"layout": "expanded", "layout_of": "d_dequantized"}


def always(scope: Scope) -> list[Any]:
    """Sizes one above a block, many groups, blocks of gates and values, and wide rows."""
    both: Changes = {"direction": "both"} if accepted(scope, {"direction": "both"}) else {}
    block: Changes = both | {"scaling": "block", "dtype": "bfloat16"}
    changes: list[Changes] = [
        block | {"tokens": 130, "width": 130, "values": "rows"},
        both | {"scaling": "mxfp8", "tokens": 2, "width": 8, "values": "rows"},
    ]
    # a history of values that are rounded first
    remembered = {"scaling": "delayed", "dtype": "bfloat16", "rounded": True, "tokens": 4, "width": 6}
    changes += [remembered | {"values": "rows", "seed": 3}] if accepted(scope, remembered) else []
    # a clamp that bfloat16 rounds up, and values at it
    fine = {"dtype": "bfloat16", "values": "bounds", "tokens": 4, "width": 6, "clamp": 259}
    changes += [fine] if scope.accepts("clamp") else []
    # amaxes whose scale has no bound, of an activation that is not rounded
    tiny: Changes = {"scaling": "block", "variant": 1, "values": "tiny", "dtype": "bfloat16", "tokens": 2, "width": 3}
    tiny |= {"kind": "reglu", "offset": 8} if scope.accepts("offset") else {"kind": "relu"}
    changes += [tiny] if "d_out" not in scope.signature.names and accepted(scope, tiny) else []
    if scope.accepts("splits"):
        if scope.accepts("clamp") and "d_out" in scope.signature.names:
            # halves that are whole tiles; of some groups the values' gradients are the largest
            changes += [{"tokens": 9, "experts": 9, "width": 64, "dtype": "bfloat16"}]
            whole_tiles: Changes = {"tokens": 3, "width": 512, "dtype": "bfloat16"}
            changes += [whole_tiles | {"scaling": name} for name in ("current", "block")]
        counts = {"tokens": 133, "experts": 5, "counts": (0, 130, 1, 0, 2), "tail": 3}
        changes += [block | counts | {"width": 6}]
        changes += [{"tokens": 40, "experts": 33, "tail": 2, "width": 9, "dtype": "bfloat16"}]
        changes += overwritten_splits(scope, "width")
    gpu = scope.space.device == "cuda"
    # of each program and step the largest value
    changes += [{"tokens": 3, "width": 2880 if gpu else 544, "values": "peak", "seed": seed} for seed in range(4)]
    if gpu:
        changes += [
            both | {"scaling": scaling, "tokens": 8, "width": n} for scaling, n in (("block", 2880), ("mxfp8", 90))
        ]
        changes += [block | {"tokens": 2049, "width": 256}, {"tokens": 300, "width": 2048}]
        return [*changes, *(fields for fields in _few_of_groups(both) if accepted(scope, fields)), *_lines(scope)]
    return [*changes, *(both | {"width": fields["hidden"]} | fields for fields in wide_tensors(scope))]


# gates and values in whole lines of 16 bytes, no whole blocks of them; groups of several blocks of
# rows, of one and one more, and empty ones
LINES: Changes = {"scaling": "block", "rounded": True, "dtype": "bfloat16", "width": 200, "kind": "swiglu"}
RAGGED: Changes = {"tokens": 300, "experts": 5, "counts": (0, 129, 1, 0, 170), "tail": 3}


BOTH: Changes = {"direction": "both"}
ROWS_WEIGHED: Changes = {"values": "rows", "probs": "float32"}
# by function: what a kernel for Hopper encodes, each direction alone and both, with each number
# that it takes; and gradients, which no such kernel takes
FORMS: dict[str, tuple[Changes, ...]] = {
    "glu_and_quantize": (
        RAGGED | BOTH | ROWS_WEIGHED,
        RAGGED | BOTH | {"values": "edges", "probs": "bfloat16", "variant": 1, "seed": 1},
        RAGGED | {"direction": "columnwise", "values": "special", "probs": "", "kind": "quick_geglu", "offset": 3},
        RAGGED | {"clamp": 56, "alpha": 1702, "offset": 8, "values": "bounds", "dtype": "float16", "probs": "bfloat16"},
        BOTH | {"tokens": 260, "width": 264, "clamp": 8, "values": "saturated", "dtype": "float16", "probs": ""},
        BOTH | {"tokens": 70, "width": 128, "values": "every", "probs": "float32"},
    ),
    "glu_backward_and_quantize": (
        RAGGED | ROWS_WEIGHED,
        RAGGED | ROWS_WEIGHED | {"direction": "columnwise"},
    ),
}


def _lines(scope: Scope) -> list[Any]:
    """A rounded activation of σ, or its gradient, in whole lines."""
    cases = [scope.case(LINES | form) for form in FORMS.get(scope.function, ())]
    return scope.lawful([case for case in cases if scope.fits(case)])


def _few_of_groups(both: Changes) -> list[Changes]:
    """Values that the few rows of the covering array leave out: a transform of groups, with noise
    in both directions of a backward pass, with probabilities in float64; groups without rows before
    a tail; columns only, by the delayed recipe whose gradients have another format, of clamped
    gates with an alpha.
    """
    turned: Changes = ROUNDED | both | {"scaling": "nvfp4", "variant": 1, "width": 2, "probs": "float64"}
    turned |= {"tokens": 3, "experts": 3, "counts": (2, 0, 1), "tail": 4, "values": "rows"}
    empty: Changes = {"scaling": "mxfp8", "tokens": 0, "experts": 2, "counts": (0, 0), "tail": 3, "width": 2}
    single_group: Changes = {"scaling": "delayed", "variant": 2, "direction": "columnwise", "dtype": "bfloat16"}
    single_group |= {"tokens": 3, "experts": 2, "counts": (0, 3), "width": 6, "clamp": 6, "alpha": 250}
    return [turned, empty, single_group]


def in_blocks(scope: Scope) -> Changes:
    """The activation of a layer, quantised in MXFP8's blocks of 32 rows and of 32 columns."""
    kind = {"scaling": "mxfp8", "direction": "both"}
    return of_a_model(scope) | kind | {"tokens": scope.space.real_tokens // 32, "width": 768 // 32}


# each format and rounding of scales; of the scale of a group, over few groups and many
MODEL_ROWS: tuple[Changes, ...] = (
    *(
        {"scaling": "block", "variant": variant, "direction": direction}
        for variant in (0, 1, 2, 4)
        for direction in DIRECTIONS
    ),
    *(
        {"scaling": "current", "variant": variant, "direction": "rowwise", "experts": experts}
        for variant in (0, 4)
        for experts in (8, 128)
    ),
    *({"scaling": "current", "variant": variant, "direction": "rowwise", "experts": 128} for variant in (1, 3)),
    {"scaling": "mxfp8", "variant": 0, "direction": "rowwise", "experts": 8, "width": 32},
)
# gates' and values' gradients side by side, whose halves are whole lines and no whole tiles
HALVES: tuple[Changes, ...] = tuple(
    {"scaling": scaling, "variant": variant, "direction": direction, "experts": 8, "width": 2880}
    for scaling, variant, direction in (
        ("block", 1, "rowwise"),
        ("block", 2, "rowwise"),
        ("block", 2, "columnwise"),
        ("current", 4, "rowwise"),
    )
)


GLU_AND_QUANTIZE = Shapes(
    drawn=drawn,
    affordable=near,
    covered={"width": lambda case: WIDTH.get(case.scaling, 6)},
    models={"width": MODEL_WIDTHS, "tokens": FEW_ROWS, "experts": SPLITS},
    of_models={"dtype": "bfloat16", "rounded": lambda case: case.transformed},
    model_rows=MODEL_ROWS,
    together=together,
    always=always,
    far={"experts": 2},
    weight=0.5,
    real=in_blocks,
)
ACTIVATION_AND_QUANTIZE = GLU_AND_QUANTIZE
# whole lines of E5M2 in blocks of rows, whose scales are powers of two
ACTIVATION_BACKWARD_AND_QUANTIZE = replace(
    GLU_AND_QUANTIZE,
    model_rows=(
        *MODEL_ROWS,
        {"scaling": "block", "variant": 2, "direction": "rowwise", "experts": 128, "width": 2048},
    ),
)
GLU_BACKWARD_AND_QUANTIZE = replace(GLU_AND_QUANTIZE, model_rows=(*MODEL_ROWS, *HALVES))
