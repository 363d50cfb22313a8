"""Cases of permute_and_quantize beyond axes: quantisers, maps, buffers, fixed shapes."""

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from conformance.core.axes import Changes
from conformance.core.model_sizes import FEW_EXPERTS, FEW_TOKENS, MODEL_WIDTHS
from conformance.core.scope import NARROW, Scope
from conformance.core.shapes import Shapes
from conformance.core.signature import FAR, NEAR
from conformance.families.fused.cases import PermutedQuantizationCase
from conformance.families.permutation import space as permutation
from conformance.families.quantization.cases import TRANSFORMED, VALUES
from conformance.families.quantization.space import (
    COLUMNS,
    HIDDEN,
    KINDS,
    accepted,
    mostly_some,
    states,
    wide_tensors,
)

ALIGNED = {"mxfp8": 32, "nvfp4": 32}  # scalings that need an alignment or a capacity


def kinds(scope: Scope) -> list[Changes]:
    """Every recipe, role and direction supported with some buffer size."""
    rooms: list[Changes] = [{}, {"capacity": 1}]
    base: Changes = {"dtype": "bfloat16"}
    return [kind for kind in KINDS if any(_is_accepted(scope, kind | base | room) for room in rooms)]


def _is_accepted(scope: Scope, fields: Changes) -> bool:
    return scope.fits(scope.case(fields))


def drawn(scope: Scope) -> st.SearchStrategy[Changes]:
    """Quantisers drawn uniformly, with legal values; explicit small maps, medium ones."""
    maps = [*[permutation.explicit()] * 3, permutation.spread(140, 9, 1), permutation.spread(40, 70, 1)]
    shapes = st.sampled_from(maps).flatmap(lambda shape: shape)
    return st.sampled_from(kinds(scope)).flatmap(lambda kind: _of_kind(scope, kind, shapes))


@st.composite
def _of_kind(draw: st.DrawFn, scope: Scope, kind: Changes, shapes: st.SearchStrategy[Changes]) -> Changes:
    fields = kind | draw(shapes) | {"hidden": draw(mostly_some(COLUMNS.get(kind["scaling"], 70)))}
    if kind["scaling"] in ALIGNED and not scope.accepts("align") and fields["experts"] > 64:
        fields |= {"experts": 1, "routing": None, "spread": "ragged"}
    transformed = not _is_accepted(scope, kind | {"dtype": "float32"})
    if transformed:
        fields["dtype"] = "bfloat16"
    fields["values"] = draw(st.sampled_from(TRANSFORMED if transformed else VALUES))
    return fields | draw(room(scope, kind, fields["tokens"], fields["experts"]))


@st.composite
def room(draw: st.DrawFn, scope: Scope, kind: Changes, tokens: int, experts: int) -> Changes:
    """Buffer rows, in units: exact, aligned, by capacity, or given."""
    unit = ALIGNED.get(kind["scaling"], 1)
    none: Changes = {"align": 0, "capacity": 0, "slack": None}
    rooms: list[Changes] = [
        none,
        none | {"align": draw(st.sampled_from((1, 2, 5, *(n // unit for n in (64, 128, 256)))))},
    ]
    rooms += [room | {"slack": draw(st.integers(-3, 4))} for room in rooms]
    if experts <= 64:
        rooms.append(none | {"capacity": draw(st.integers(1, max(min(tokens // unit + 2, 40), 1)))})
    return draw(st.sampled_from([room for room in rooms if accepted(scope, kind | room)]))


def affordable(case: PermutedQuantizationCase, scope: Scope) -> PermutedQuantizationCase:
    """The case without a far layout of too large a span."""
    small = case.tokens <= 4 and case.dtype in NARROW and case.map_dtype in NARROW and case.probs != "float32"
    near_layout: PermutedQuantizationCase = replace(case, layout="contiguous", layout_of="")
    return case if small or case.layout not in FAR else near_layout


# scales of rows, and of squares, in cases of their own, because neither can be quantised on the way
ONE_FACTOR: tuple[Changes, ...] = ({"variant": 1, "role": "input"}, {"variant": 0, "role": "weight"})


def always(scope: Scope) -> list[Changes]:
    """More tokens than a block, second blocks of a segment, many experts; wide rows."""
    cuda = scope.space.device == "cuda"
    many = {"tokens": 2049 if cuda else 150, "experts": 3}
    blocks: Changes = {"scaling": "block", "hidden": 130}
    rows: Changes = {"tokens": 40, "experts": 3, "hidden": 5, "values": "rows"}
    both: Changes = rows | {"direction": "both"}
    changes: list[Changes] = [
        many | {"hidden": 5},
        many | blocks | {"values": "rows"},
        blocks | {"tokens": 150, "experts": 2, "direction": "both", "values": "bounds", "gemm": True},
        both | {"scaling": "mxfp8", "dtype": "bfloat16"},
        both | {"scaling": "nvfp4", "variant": 2, "role": "grad_output"},
        {"tokens": 33, "experts": 257 if cuda else 65, "topk": 3, "hidden": 3, "values": "wide"},
        {"tokens": 5, "experts": 3, "hidden": 3, "dtype": "float64", "values": "wide"},
        *(both | {"scaling": scaling, "dtype": "float64", "values": "wide"} for scaling in ("block", "mxfp8")),
    ]
    # tokens of whole lines, but no whole blocks: more than are under way at once, and more than a
    # program has; segments of more rows than a block; padding
    lines: Changes = {"scaling": "block", "hidden": 400, "tokens": 300, "experts": 5, "topk": 2, "dtype": "bfloat16"}
    if cuda:
        tall = {"direction": "columnwise", "dtype": "float16", "align": 64, "values": "rows", "hidden": 1072}
        changes += [
            lines | {"direction": "both", "slack": 70},
            lines | tall,
            lines | {"direction": "both", "capacity": 131},
        ]
    wide_rows = [fields | {"tokens": 40 if cuda else 5, "experts": 3} for fields in wide_tensors(scope)]
    wide_rows = [fields | ({} if fields["scaling"] == "current" else {"direction": "both"}) for fields in wide_rows]
    if cuda:  # values that the few rows of the covering array leave out
        changes += [
            {"role": "grad_output", "variant": 2, "direction": "both", "capacity": 3, "tokens": 7, "experts": 4}
        ]
        changes += [rows | {"scaling": "nvfp4"} | kind for kind in ONE_FACTOR]
    uniform: Changes = {"spread": "uniform", "topk": 2, "seed": 1}
    # the largest token has no row, and its only expert has all other tokens
    left_out: Changes = {"scaling": "delayed", "tokens": 9, "experts": 1, "topk": 1, "hidden": 3, "values": "rows"}
    dropped_slots = [
        left_out | {"routing": tuple(int(t != empty_token) for t in range(9))} for empty_token in (0, 4, 8)
    ]
    all_rows = [*(uniform | row for row in (*changes, *wide_rows)), *dropped_slots]
    return [row for row in all_rows if accepted(scope, row)]


# one layout of routing_map and d_probs, because all pairs would double the array
LAYOUTS: list[Changes] = [
    {"layout": "contiguous", "layout_of": ""},
    *({"layout": layout, "layout_of": name} for name in ("tokens", "probs", "d_dequantized") for layout in NEAR),
    {"layout": "transposed", "layout_of": "routing_map"},
    {"layout": "expanded", "layout_of": "d_dequantized"},
    {"layout": "strided", "layout_of": "d_probs"},
]


def together(scope: Scope) -> dict[str, list[Any]]:
    return {"room": permutation.ROOM, "layout": LAYOUTS, "unused": [{"unused": ""}]}


def of_a_model(scope: Scope) -> Changes:
    """The permutation of a layer, and MXFP8, with fewer tokens, because the judge is slow."""
    return permutation.of_a_model(scope) | states(scope) | {"align": 1, "tokens": scope.space.real_tokens // 4}


PERMUTE_AND_QUANTIZE = Shapes(
    drawn=drawn,
    affordable=affordable,
    covered=permutation.COVERED | {"hidden": lambda case: HIDDEN.get(case.scaling, 7)},
    models={"hidden": MODEL_WIDTHS, "experts": FEW_EXPERTS, "tokens": FEW_TOKENS},
    of_models=permutation.OF_MODELS | {"dtype": "bfloat16"},
    model_rows=(
        *(
            {"scaling": "block", "variant": variant, "direction": "rowwise", "experts": experts}
            for variant in (0, 4)
            for experts in (32, 128)
        ),
        {"scaling": "mxfp8", "variant": 0, "direction": "rowwise", "experts": 128},
    ),
    together=together,
    always=always,
    far=permutation.FAR | {"scaling": "delayed"},
    real=of_a_model,
)
