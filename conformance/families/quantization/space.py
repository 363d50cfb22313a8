"""Cases of quantisation: every recipe, role, direction and dtype, ragged groups, and values where a quantiser decides."""

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from conformance.core.case import Case
from conformance.core.space import DTYPES, Space, sizes
from conformance.core.tensors import WIDE_LAYOUTS
from conformance.families.experts.space import finished, laid_out
from conformance.families.quantization.cases import (
    DIRECTIONS,
    RECIPES,
    ROLES,
    TRANSFORMED,
    VALUES,
    VARIANTS,
    QuantizeCase,
    is_random,
    is_transformed,
)
from conformance.families.quantization.quantize import SUFFIXES
from conformance.judge.statistics import LEAST_REPEATS

COLUMNS, ROWS = (
    {"block": 300, "mxfp8": 3, "nvfp4": 7},
    {"block": 280, "mxfp8": 3, "nvfp4": 6},
)  # in units; as few as fill no second block, and more
SELDOM = ("idempotence", "row_independence", "scaling")  # laws that few cases have
FAR: dict[str, Any] = {
    "function": "quantize",
    "tokens": 3,
    "experts": 2,
    "hidden": 3,
    "dtype": "bfloat16",
    "index_dtype": "int32",
}


def may_be(space: Space, **fields: Any) -> bool:
    """Whether the implementation has the settings that a case with these fields needs."""
    needed = {
        "role": fields.get("role", "input") != "input",
        "splits": fields.get("experts", 0) > 0,
        "rowwise": fields.get("direction") == "columnwise",
        "columnwise": fields.get("direction", "rowwise") != "rowwise",
        "state": fields.get("scaling") == "delayed",
        "noise": not fields.get("repeats")
        and is_random(
            QuantizeCase(
                function="quantize", **{k: x for k, x in fields.items() if k in ("scaling", "variant", "role")}
            )
        ),
    }
    return all(space.accepts("quantize", name) for name, wanted in needed.items() if wanted)


@st.composite
def quantize_cases(draw: st.DrawFn, function: str, space: Space) -> Case:
    """quantize."""
    kinds = [
        {"scaling": scaling, "variant": variant, "role": role, "direction": direction}
        for scaling in RECIPES
        for variant in range(VARIANTS)
        for role in ROLES
        for direction in DIRECTIONS
    ]
    kind: dict[str, Any] = draw(st.sampled_from([kind for kind in kinds if may_be(space, **kind)]))
    fields: dict[str, Any] = {"function": function} | kind
    transformed = is_transformed(QuantizeCase(**fields))
    fields["dtype"] = "bfloat16" if transformed else draw(st.sampled_from(DTYPES))
    fields["values"] = draw(st.sampled_from(TRANSFORMED if transformed else VALUES))
    fields["hidden"] = draw(mostly_some(COLUMNS.get(kind["scaling"], 70)))
    fields |= draw(groups(ROWS.get(kind["scaling"], 40), space.accepts(function, "splits")))
    fields["steps"] = draw(steps()) if kind["scaling"] == "delayed" else "quantize"
    fields |= {"gemm": draw(st.booleans()), "index_dtype": draw(st.sampled_from(("int64", "int32")))}
    fields["grads"] = draw(st.sampled_from(("", "x"))) if function not in space.not_differentiable else ""
    case = QuantizeCase(**fields)
    cotangents = tuple(f"d_dequantized{suffix}" for suffix in SUFFIXES[case.direction]) if case.grads else ()
    layout = laid_out(draw, function, space, ("x",), ("splits",) if case.experts else (), cotangents)
    case = finished(draw, replace(case, **layout), space)  # type: ignore[arg-type,assignment]
    seldom = [law for law in space.laws(case) if law in SELDOM]
    return replace(case, law=draw(st.sampled_from([case.law, *2 * seldom])))


def mostly_some(most: int) -> st.SearchStrategy[int]:
    """A size, seldom 0."""
    return st.integers(0, 15).flatmap(lambda i: sizes(1, most) if i else st.just(0))


@st.composite
def groups(draw: st.DrawFn, most: int, split: bool) -> dict[str, Any]:
    """No splits; a few groups of any size; one with all rows; none with any; and rows behind them."""
    kind = draw(st.sampled_from((*("whole", "few", "one") * 3, "few", "none"))) if split else "whole"
    if kind == "whole":
        return {"tokens": draw(mostly_some(most))}
    if kind == "one":
        counts = tuple(draw(st.permutations([draw(sizes(1, most)), *[0] * draw(st.integers(0, 4))])))
    else:
        part = sizes(0, max(most // 3, 2)) | st.sampled_from((0, 1)) if kind == "few" else st.just(0)
        counts = tuple(draw(st.lists(part, min_size=1, max_size=4)))
    return {
        "tokens": sum(counts),
        "experts": len(counts),
        "counts": counts,
        "tail": draw(st.sampled_from((0, 0, 1, 5))),
    }


@st.composite
def steps(draw: st.DrawFn) -> str:
    """Quantising, updating, and saving in between."""
    more = draw(
        st.lists(
            st.sampled_from(("quantize", "update+quantize", "update+quantize", "reduced+quantize", "reload", "update")),
            max_size=5,
        )
    )
    return "+".join(["quantize", *more])


def far_quantize(space: Space) -> list[Case]:
    """Every input and cotangent once far in each of its dimensions."""
    function, found = "quantize", []
    grads = "" if function in space.not_differentiable else "x"
    common = FAR | {"grads": grads}
    if not space.accepts(function, "splits"):
        common |= {"experts": 0}
    for name, dimensions in (("x", 2), ("splits", 1), ("d_dequantized", 2)):
        if (name != "splits" or common["experts"]) and (grads or name != "d_dequantized"):
            found += [QuantizeCase(**common, layout=layout, layout_of=name) for layout in WIDE_LAYOUTS[:dimensions]]
    noisy = {"scaling": "nvfp4", "role": "grad_output"}
    if may_be(space, **noisy):
        found += [
            QuantizeCase(**common | noisy | {"tokens": 2, "hidden": 1}, layout=layout, layout_of="noise")
            for layout in WIDE_LAYOUTS
        ]
    return list(found)


def random_cases(space: Space) -> list[Case]:
    """Gradients whose noise the implementation draws itself, by rows and by columns, where the transform is; without laws, which compare runs."""
    common: dict[str, Any] = {
        "scaling": "nvfp4",
        "role": "grad_output",
        "repeats": LEAST_REPEATS // 2,
        "steps": "quantize+quantize",
        "hidden": 2,
    }
    kinds = [common | {"dtype": "bfloat16", "direction": direction} for direction in DIRECTIONS[:2]]
    return [QuantizeCase(function="quantize", **kind) for kind in kinds if may_be(space, **kind)]


def quantize_shapes(space: Space) -> list[dict[str, Any]]:
    """One more than a block, more than one of cuBLAS's tiles, and many groups; wide rows where a GPU makes them cheap."""
    square = (
        {"scaling": "block", "role": "weight"}
        if may_be(space, scaling="block", role="weight")
        else {"scaling": "block"}
    )
    turned = {"direction": "both"} if may_be(space, direction="both") else {}
    split = space.accepts("quantize", "splits")
    found: list[dict[str, Any]] = [
        square | turned | {"tokens": 257, "hidden": 129, "values": "rows"},
        {"scaling": "mxfp8", "tokens": 5, "hidden": 5, "gemm": True, "values": "rows", "dtype": "bfloat16"} | turned,
    ]
    if split:
        found += [
            turned
            | {
                "scaling": "block",
                "tokens": 262,
                "experts": 5,
                "counts": (0, 130, 1, 0, 131),
                "tail": 3,
                "hidden": 5,
                "values": "bounds",
            },
            {"scaling": "mxfp8", "tokens": 0, "experts": 2, "counts": (0, 0), "tail": 3, "hidden": 2},
            {"tokens": 66, "experts": 40, "hidden": 33, "tail": 2, "values": "wide"},
        ]
    wide = [
        {"scaling": scaling, "tokens": 8, "hidden": 7168 // unit}
        for scaling, unit in (("block", 1), ("mxfp8", 32), ("current", 1))
    ]
    return [*found, *(wide if space.device == "cuda" else [])]
