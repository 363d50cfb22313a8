"""The finite axes of what happens inside experts."""

from typing import Any

from conformance.core.case import Case
from conformance.core.space import LOGIT_DTYPES, POISONS, Space
from conformance.families.experts.cases import CURVES, GROUPED_VALUES, GroupedCase
from conformance.families.experts.cases import GATES as GATES
from conformance.families.experts.precision import LOW_VALUES, fits, may_override, recipe_of, rounds_gradients
from conformance.families.quantization.cases import RECIPES, VARIANTS
from conformance.families.router.axes import layouts
from moe_ref.config.quantization import OVERRIDES

Row = dict[str, Any]
PLAIN = CURVES

# what a field of a case is called in a call, where that is another name
SETTING = {"into": "accumulate_into"}
# nine rows: without an empty expert · empty first, in the middle and last · all but one empty · with a tile's worth and little beside it
COUNTS = ((4, 2, 3), (0, 5, 0, 4, 0), (0, 0, 9), (8, 0, 1))
_GROUPED = {
    "counts": COUNTS,
    "tail": (0, 3),
    "dtype": LOGIT_DTYPES,
    "values": GROUPED_VALUES,
    "accumulator": ("", "float64"),
    "index_dtype": ("int64", "int32"),
    "poison": POISONS,
}
OPTIONAL = ("bias", "into", "accumulator")

AXES: dict[str, dict[str, tuple[Any, ...]]] = {
    "grouped_linear": {
        **_GROUPED,
        "bias": ("", "float32", "bfloat16"),
        "layout": layouts("rows", "weight", "d_out", vectors=("tokens_per_expert", "bias"), expanded=("d_out",)),
        "grads": ("", "rows", "weight", "rows+weight", "rows+weight+bias"),
    },
    "latent_projection": {
        **{axis: values for axis, values in _GROUPED.items() if axis in ("dtype", "values", "poison")},
        "bias": ("", "float32", "bfloat16"),
        "layout": (
            ("contiguous", ""),
            ("transposed", "x"),
            ("strided", "weight"),
            ("strided", "bias"),
            ("expanded", "d_out"),
        ),
        "grads": ("", "x", "weight", "x+weight+bias"),
    },
    "grouped_dgrad": {
        **_GROUPED,
        "layout": layouts("d_out", "weight", vectors=("tokens_per_expert",), expanded=("d_out",)),
    },
    "grouped_wgrad": {
        **_GROUPED,
        "into": ("", "float32", "float64"),
        "layout": layouts("d_out", "rows", vectors=("tokens_per_expert", "accumulate_into"), expanded=("d_out",)),
    },
}


def legal(function: str, row: Row, space: Space) -> bool:
    """Whether the row describes a call that can be made."""
    of, wanted = row["layout"][1], row.get("grads", "").split("+")
    return (
        all(space.accepts(function, SETTING.get(name, name)) or not row.get(name) for name in OPTIONAL)
        and not (("bias" in wanted or of == "bias") and not row["bias"])
        and not (of == "accumulate_into" and not row["into"])
    )


def case_of(function: str, fields: Row) -> Case:
    """The case that a row with these values describes."""
    return GroupedCase(
        function=function, tokens=9, experts=len(fields.get("counts", (9,))), hidden=7, width=5, **fields
    )


# ---- grouped products in low precision

_LOW = {
    "scaling": tuple(RECIPES),
    "variant": tuple(range(VARIANTS)),
    "override": ("", *OVERRIDES),
    "counts": ((1, 1, 1), (0, 2, 0, 1, 0), (0, 0, 3), (3, 0)),  # in LOW_ROWS
    "tail": (0, 3),
    "dtype": LOGIT_DTYPES,
    "values": (*GROUPED_VALUES, *LOW_VALUES),
    "index_dtype": ("int64", "int32"),
    "poison": POISONS,
}
LOW_ROWS = {"delayed": 9, "current": 9, "block": 45}  # 1 for the others, whose sizes are in units
LOW_SIZES = {
    "block": (133, 130),
    "mxfp8": (3, 2),
    "nvfp4": (5, 6),
}  # columns in and out: more than a block along each contraction
LOW_AXES: dict[str, dict[str, tuple[Any, ...]]] = {
    "grouped_linear": {
        **_LOW,
        "bias": ("", "float32"),
        "layout": (
            ("contiguous", ""),
            ("transposed", "rows"),
            ("strided", "weight"),
            ("transposed", "d_out"),
            ("expanded", "d_out"),
        ),
        "grads": ("", "rows", "weight", "rows+weight"),
    },
    "latent_projection": {
        **{
            axis: values
            for axis, values in _LOW.items()
            if axis in ("scaling", "override", "dtype", "values", "poison")
        },
        "variant": (0,),
        "bias": ("", "float32"),
        "layout": (("contiguous", ""), ("transposed", "x"), ("strided", "weight"), ("expanded", "d_out")),
        "grads": ("", "x", "weight", "x+weight"),
    },
    "grouped_dgrad": {
        **_LOW,
        "layout": (("contiguous", ""), ("transposed", "weight"), ("strided", "d_out"), ("expanded", "d_out")),
    },
    "grouped_wgrad": {
        **_LOW,
        "into": ("", "float32", "float64"),
        "layout": (("contiguous", ""), ("transposed", "rows"), ("strided", "d_out"), ("strided", "accumulate_into")),
    },
}


def may_be_low(function: str, case: Any, space: Space) -> bool:
    """Whether the implementation has the settings that a case with this recipe needs, and the reference takes the call."""
    recipe = recipe_of(case)
    wanted = {"recipe": True, "state": case.scaling == "delayed", "noise": rounds_gradients(recipe)}
    return fits(case) and all(space.accepts(function, name) for name, needed in wanted.items() if needed)


def low_case(function: str, fields: Row) -> GroupedCase:
    """The case that a row of LOW_AXES describes."""
    layout, of = fields.get("layout", ("contiguous", ""))
    rows = LOW_ROWS.get(fields["scaling"], 1)
    counts = tuple(rows * count for count in fields.get("counts", (3,)))
    hidden, width = LOW_SIZES.get(fields["scaling"], (37, 20))
    sized: Row = {"tokens": sum(counts), "experts": len(counts), "counts": counts, "hidden": hidden, "width": width}
    return GroupedCase(function=function, **fields | sized | {"layout": layout, "layout_of": of})


def low_legal(function: str, row: Row, space: Space) -> bool:
    """Whether the row describes a call that can be made."""
    layout, of = row["layout"]
    return (
        all(space.accepts(function, SETTING.get(name, name)) or not row.get(name) for name in OPTIONAL)
        and not (row.get("grads") and function in space.not_differentiable)
        and not (layout != "contiguous" and function in space.contiguous_only)
        and not (of == "d_out" and "grads" in row and not row["grads"])
        and not (of == "accumulate_into" and not row["into"])
        and not (row.get("override") and not (may_override(row["scaling"]) and row.get("grads", "theirs")))
        and may_be_low(function, low_case(function, row), space)
    )
