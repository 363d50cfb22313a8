"""Cases of permute_and_quantize: every recipe, role and direction, of tokens that any routing map permutes into any room."""

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from conformance.core.case import Case
from conformance.core.space import DTYPES, LAYOUTS, MAP_DTYPES, Space, mostly, some_of
from conformance.core.tensors import WIDE_LAYOUTS
from conformance.families.experts.space import finished
from conformance.families.fused.permute_and_quantize import PermutedQuantizationCase, fits
from conformance.families.permutation.space import explicit, spread
from conformance.families.quantization.cases import DIRECTIONS, RECIPES, ROLES, TRANSFORMED, VALUES, VARIANTS
from conformance.families.quantization.quantize import SUFFIXES
from conformance.families.quantization.space import COLUMNS, mostly_some

FUNCTION = "permute_and_quantize"
ALIGNED = ("mxfp8", "nvfp4")  # scalings that want an alignment or a capacity
Row = dict[str, Any]


def may_be(space: Space, **fields: Any) -> bool:
    """Whether the implementation has the settings that a case with these fields needs."""
    whole = fields.get("scaling") in ALIGNED
    needed = {
        "role": fields.get("role", "input") != "input",
        "rowwise": fields.get("direction") == "columnwise",
        "columnwise": fields.get("direction", "rowwise") != "rowwise",
        "state": fields.get("scaling") == "delayed",
        "align": fields.get("align", 0) > 0 or (whole and not fields.get("capacity")),
        "capacity": fields.get("capacity", 0) > 0,
        "num_rows": fields.get("slack") is not None,
        "probs": bool(fields.get("probs")),
    }
    return all(space.accepts(FUNCTION, name) for name, wanted in needed.items() if wanted)


def kinds(space: Space) -> list[Row]:
    """Every recipe, role and direction that can be asked for in some room."""
    every = [
        {"scaling": scaling, "variant": variant, "role": role, "direction": direction}
        for scaling in RECIPES
        for variant in range(VARIANTS)
        for role in ROLES
        for direction in DIRECTIONS
    ]
    return [
        kind
        for kind in every
        if _some_fits(kind) and any(may_be(space, **kind, capacity=capacity) for capacity in (0, 1))
    ]


def _some_fits(kind: Row) -> bool:
    return fits(PermutedQuantizationCase(function=FUNCTION, dtype="bfloat16", values="dyadic", **kind))


def _transformed(kind: Row) -> bool:
    return not fits(PermutedQuantizationCase(function=FUNCTION, dtype="float32", values="dyadic", **kind))


@st.composite
def room(draw: st.DrawFn, space: Space, kind: Row, tokens: int, experts: int) -> Row:
    """How the buffer is sized: as needed, aligned, by capacity, or by a number of rows; in units."""
    unit = 32 if kind["scaling"] in ALIGNED else 1
    rooms: list[Row] = [{}, {"align": draw(st.sampled_from((1, 2, 5, 128 // unit)))}]
    rooms += [{**room, "slack": draw(st.integers(-3, 4))} for room in rooms]
    rooms += [{"capacity": draw(st.integers(1, max(min(tokens // unit + 2, 40), 1)))}] if experts <= 64 else []
    legal = [room for room in rooms if may_be(space, **kind, **room)]
    return draw(st.sampled_from(legal))  # kinds are of those that have one


@st.composite
def permuted_quantization_cases(draw: st.DrawFn, function: str, space: Space) -> Case:
    """permute_and_quantize."""
    kind: Row = draw(st.sampled_from(kinds(space)))
    shape = draw(
        st.sampled_from((explicit(), explicit(), explicit(), spread(140, 9, 1), spread(40, 70, 1))).flatmap(
            lambda shapes: shapes
        )
    )
    if kind["scaling"] in ALIGNED and not space.accepts(function, "align"):
        shape |= {"experts": 1, "routing": None, "spread": "ragged"} if shape["experts"] > 64 else {}
    dtype = "bfloat16" if _transformed(kind) else draw(st.sampled_from(DTYPES))
    probs = draw(st.sampled_from(("", "float32", "bfloat16"))) if space.accepts(function, "probs") else ""
    differentiable = function not in space.not_differentiable
    fields = (
        kind | shape | {"hidden": draw(mostly_some(COLUMNS.get(kind["scaling"], 70))), "dtype": dtype, "probs": probs}
    )
    fields |= draw(room(space, kind, shape["tokens"], shape["experts"]))
    fields |= {
        "values": draw(st.sampled_from(TRANSFORMED if _transformed(kind) else VALUES)),
        "gemm": draw(st.booleans()),
    }
    fields |= {"map_dtype": draw(mostly("bool", MAP_DTYPES[1:])), "zero_probs": bool(probs) and draw(st.booleans())}
    fields["grads"] = draw(some_of(("tokens", *(("probs",) if probs else ())))) if differentiable else ""
    if fields["grads"] and probs:
        fields["unused"] = draw(mostly("", ("rows", "probs")))
    case = PermutedQuantizationCase(function=function, **fields)
    if function not in space.contiguous_only:
        layout, of = _layout(draw, case)
        case = replace(case, layout=layout, layout_of=of)
    return finished(draw, case, space)


def _layout(draw: st.DrawFn, case: PermutedQuantizationCase) -> tuple[str, str]:
    """Another layout and the input or cotangent that has it, or none."""
    if draw(st.booleans()):
        return "contiguous", ""
    choices = [
        (layout, of)
        for of in ("tokens", "routing_map", *cotangents(case)[:1], *(["probs"] if case.probs else []))
        for layout in LAYOUTS[1:]
    ]
    return draw(st.sampled_from([*choices, *(("expanded", of) for of in ("tokens", *cotangents(case)))]))


def cotangents(case: PermutedQuantizationCase) -> list[str]:
    """The names of the matrices among the cotangents."""
    return (
        [f"d_dequantized{suffix}" for suffix in SUFFIXES[case.direction]]
        if case.grads and case.unused != "rows"
        else []
    )


# two tokens for both experts, one for one of them
FAR: Row = {
    "function": FUNCTION,
    "tokens": 3,
    "experts": 3,
    "hidden": 3,
    "routing": (0b101, 0b010, 0b111),
    "dtype": "bfloat16",
}


def far_permuted_quantization(space: Space) -> list[Case]:
    """Every input and cotangent once far in each of its dimensions."""
    differentiable = FUNCTION not in space.not_differentiable
    probs = space.accepts(FUNCTION, "probs")
    common = FAR | {
        "probs": "bfloat16" if probs else "",
        "grads": ("tokens+probs" if probs else "tokens") if differentiable else "",
    }
    stated = {"scaling": "delayed", "variant": 0} if space.accepts(FUNCTION, "state") else {}
    matrices = ["tokens", "routing_map", *(["probs"] if probs else []), *(["d_dequantized"] if differentiable else [])]
    vectors = [*(["scale"] if stated else []), *(["d_probs"] if probs and differentiable else [])]
    far = [(name, layout) for name in [*matrices, *(["amax_history"] if stated else [])] for layout in WIDE_LAYOUTS[:2]]
    far += [(name, WIDE_LAYOUTS[0]) for name in vectors]
    return [PermutedQuantizationCase(**common | stated, layout=layout, layout_of=name) for name, layout in far]


def permuted_quantization_shapes(space: Space) -> list[Row]:
    """More tokens than a block, a second block of rows and columns in a segment, many experts, and wide rows where a GPU makes them cheap."""
    uniform, many = {"spread": "uniform", "topk": 2, "seed": 1}, {"tokens": 2049 if space.device == "cuda" else 150}
    found: list[Row] = [
        uniform | many | {"experts": 3, "hidden": 5},
        uniform | many | {"experts": 3, "hidden": 130, "scaling": "block", "values": "rows"},
        uniform
        | {
            "tokens": 150,
            "experts": 2,
            "hidden": 130,
            "scaling": "block",
            "direction": "both",
            "values": "bounds",
            "gemm": True,
        },
        uniform
        | {
            "tokens": 40,
            "experts": 3,
            "hidden": 5,
            "scaling": "mxfp8",
            "direction": "both",
            "values": "rows",
            "dtype": "bfloat16",
        },
        uniform
        | {
            "tokens": 40,
            "experts": 3,
            "hidden": 5,
            "scaling": "nvfp4",
            "variant": 2,
            "role": "grad_output",
            "direction": "both",
            "values": "rows",
        },
        uniform
        | {"tokens": 33, "experts": 257 if space.device == "cuda" else 65, "topk": 3, "hidden": 3, "values": "wide"},
    ]
    units = {"block": 1, "mxfp8": 32, "current": 1}
    wide = [
        uniform | {"tokens": 40, "experts": 8, "hidden": 7168 // unit, "scaling": scaling}
        for scaling, unit in units.items()
    ]
    return [shape for shape in [*found, *(wide if space.device == "cuda" else [])] if may_be(space, **shape)]
