"""The finite axes of expert MLPs."""

from typing import Any

from conformance.core.case import Case
from conformance.core.space import LOGIT_DTYPES, POISONS, Space
from conformance.families.experts.axes import COUNTS
from conformance.families.experts.mlp import BIASES, INPUTS, VALUES, MlpCase
from conformance.families.experts.precision import may_override, recipe_of, rounds_gradients
from conformance.families.experts.precision_mlp import fits_low
from conformance.families.experts.shared import SHARED_INPUTS, SharedCase
from conformance.families.quantization.cases import RECIPES, VARIANTS
from conformance.families.router.axes import layouts
from moe_ref.config import GATED
from moe_ref.config.quantization import OVERRIDES

Row = dict[str, Any]

SETTING = {
    "early": "round_before_probs",
    "stored": "fp8_input_store",
    "on_input": "probs_on_input",
    **BIASES,
    "gate": "gate_weight",
    "again": "recompute",
}
OPTIONAL = (
    "kind",
    "offset",
    "clamp",
    "alpha",
    "interleave",
    "stored",
    "probs",
    "early",
    "on_input",
    "bias1",
    "bias2",
    "align",
    "recompute",
    "gate",
    "again",
)
# several fields on one axis: glu's own axes pair each of its settings with all else, and a case of two layers takes an interpreter ten times as long
TOGETHER = {
    "activated": ("kind", "offset", "clamp", "alpha", "interleave", "stored"),
    "weighted": ("probs", "weights", "early", "on_input"),
    "biased": ("bias1", "bias2"),
    "kept": ("align", "recompute"),
}
_PLAIN = ("", 0, 0, 0, 0, False)
_STORED = ("", 0, 6, 0, 0, True)
_ACTIVATED = {
    "activated": (
        *(_PLAIN, ("", 0, 6, 1702, 2, False), ("quick_geglu", 8, 56, 0, 0, False)),
        *(("reglu", -4, 6, 0, 1, False), ("squared_relu", 0, 0, 0, 0, False), _STORED),
    ),
    "dtype": LOGIT_DTYPES,
    "values": VALUES,
    "poison": POISONS,
}
_UNWEIGHTED = ("", "plain", False, False)
DECIDING = (*TOGETHER, "gate", "again", "layout", "grads")  # axes that legality looks at
GIVEN = "given"  # the gradients of all inputs that are given

AXES: dict[str, dict[str, tuple[Any, ...]]] = {
    "grouped_mlp": {
        **_ACTIVATED,
        "counts": COUNTS,
        "tail": (0, 3),
        "weighted": (
            _UNWEIGHTED,
            *(
                ("float32", "signed", False, False),
                ("bfloat16", "zeros", True, False),
                ("float64", "plain", False, False),
            ),
            *(("float32", "zeros", False, True), ("bfloat16", "signed", False, True)),
        ),
        "biased": (("", ""), ("float32", ""), ("", "float32"), ("bfloat16", "float64"), ("float32", "bfloat16")),
        "kept": ((0, ""), (4, ""), (0, "moe_act"), (4, "moe")),
        "index_dtype": ("int64", "int32"),
        "layout": layouts(vectors=("rows", "fc1_weight"), expanded=("d_out",)),
        "grads": ("", "rows", "fc1_weight+fc2_weight", GIVEN),
    },
    "sequential_mlp": {
        "activated": (_PLAIN, ("", 8, 6, 0, 2, False), _STORED),
        "counts": COUNTS,
        "weighted": (_UNWEIGHTED, ("float32", "signed", False, False), ("float32", "zeros", False, True)),
        "biased": (("", ""), ("float32", "bfloat16")),
        "dtype": ("float32", "bfloat16"),
        "layout": layouts(),
        "grads": ("", GIVEN),
    },
    "shared_experts": {
        **_ACTIVATED,
        "gate": (False, True),
        "again": (False, True),
        "layout": layouts(vectors=("x", "fc1_weight"), expanded=("d_out",)),
        "grads": ("", "x", "fc1_weight+fc2_weight", GIVEN),
    },
}


# ---- in low precision

_LOW: dict[str, tuple[Any, ...]] = {
    "scaling": tuple(RECIPES),
    "variant": tuple(range(VARIANTS)),
    "override": ("", *OVERRIDES),
    "activated": (_PLAIN, ("reglu", -4, 6, 0, 0, False), ("squared_relu", 0, 0, 0, 0, False)),
    "dtype": ("float32", "bfloat16"),
    "values": ("dyadic", "rows"),
    "poison": POISONS,
}
LOW_COUNTS = ((1, 1, 1), (0, 2, 0, 1), (0, 3))  # in LOW_ROWS
LOW_ROWS = {"delayed": 3, "current": 3, "block": 5}  # 1 for the others, whose sizes are in units; 5 of what is padded
LOW_SIZES = {"mxfp8": (1, 1), "nvfp4": (1, 2)}  # H and F
LOW_AXES: dict[str, dict[str, tuple[Any, ...]]] = {
    "grouped_mlp": {
        **_LOW,
        "counts": LOW_COUNTS,
        "tail": (0, 3),
        "weighted": (
            _UNWEIGHTED,
            ("float32", "signed", False, False),
            ("bfloat16", "zeros", True, False),
            ("float32", "plain", False, True),
        ),
        "biased": (("", ""), ("float32", "float32")),
        "kept": ((0, ""), (32, "moe"), (0, "moe_act")),
        "grads": ("rows", "fc1_weight+fc2_weight", GIVEN),
    },
    "sequential_mlp": {
        **_LOW,
        "scaling": ("current", "block", "mxfp8"),
        "variant": (1,),
        "counts": LOW_COUNTS[1:2],
        "grads": (GIVEN,),
    },
    "shared_experts": {**_LOW, "variant": (1,), "gate": (False, True), "again": (False, True), "grads": ("x", GIVEN)},
}


def low_case(function: str, row: Row) -> Case:
    """The case that a row of LOW_AXES describes."""
    fields, scaling = apart(function, row), row["scaling"]
    hidden, width = LOW_SIZES.get(scaling, (6, 8))
    if function == "shared_experts":
        return SharedCase(function=function, tokens=LOW_ROWS.get(scaling, 1), hidden=hidden, width=width, **fields)
    rows = 5 if fields.get("align") else LOW_ROWS.get(scaling, 1)
    counts = tuple(rows * count for count in row["counts"])
    return MlpCase(
        function=function,
        **fields | {"tokens": sum(counts), "experts": len(counts), "counts": counts, "hidden": hidden, "width": width},
    )


def low_legal(function: str, row: Row, space: Space) -> bool:
    """Whether the row describes a call that can be made."""
    if row.get("override") and not may_override(row["scaling"]):
        return False
    case = low_case(function, row)
    given = [name for name in OPTIONAL if getattr(case, name, None)]
    return all(space.accepts(function, SETTING.get(name, name)) for name in given) and may_be_low(function, case, space)


def may_be_low(function: str, case: Any, space: Space) -> bool:
    """Whether the implementation has the settings that a case with this recipe needs, and the reference takes the call."""
    recipe = recipe_of(case)
    wanted = {
        "recipe": True,
        "state": case.scaling == "delayed",
        "noise": rounds_gradients(recipe) and bool(case.grads),
    }
    graded = not case.grads or function not in space.not_differentiable
    return fits_low(case) and graded and all(space.accepts(function, name) for name, needed in wanted.items() if needed)


def apart(function: str, row: Row) -> Row:
    """The row with each field by itself."""
    fields = {name: value for name, value in row.items() if name not in TOGETHER}
    fields |= {
        name: value
        for axis, names in TOGETHER.items()
        if axis in row
        for name, value in zip(names, row[axis], strict=True)
    }
    return fields | (
        {"grads": "+".join(inputs_of(function, row if function == "shared_experts" else fields))}
        if fields["grads"] == GIVEN
        else {}
    )


def gated(kind: str) -> bool:
    return kind in ("", *GATED)


def inputs_of(function: str, row: Row) -> tuple[str, ...]:
    """The inputs that are given and may require a gradient."""
    if function == "shared_experts":
        return SHARED_INPUTS if row["gate"] else SHARED_INPUTS[:-1]
    given = {"probs": row.get("probs"), **{name: row.get(field) for field, name in BIASES.items()}}
    return tuple(name for name in INPUTS if given.get(name, True))


def legal(function: str, row: Row, space: Space) -> bool:
    """Whether the row describes a call that can be made."""
    row = apart(function, {axis: row[axis] for axis in AXES[function] if axis in DECIDING})
    of, wanted = row["layout"][1], [name for name in row["grads"].split("+") if name]
    possible = inputs_of(function, row)
    return (
        all(space.accepts(function, SETTING.get(name, name)) or not row.get(name) for name in OPTIONAL)
        and all(name in possible for name in wanted)
        and (of in ("", "tokens_per_expert", "d_out") or of in possible)
    )


def row_of(case: Any) -> Row:
    """The row that `case_of` made this case of."""
    axes = AXES[case.function]
    row = {
        axis: tuple(getattr(case, name) for name in TOGETHER[axis]) if axis in TOGETHER else getattr(case, axis)
        for axis in axes
        if axis != "layout"
    }
    fields = apart(case.function, row | {"grads": GIVEN})
    return row | {
        "layout": (case.layout, case.layout_of),
        "grads": GIVEN if case.grads == fields["grads"] else case.grads,
    }


def case_of(function: str, fields: Row) -> Case:
    """The case that a row with these values describes."""
    fields = apart(function, fields)
    if function == "shared_experts":
        return SharedCase(function=function, tokens=7, hidden=5, width=6, **fields)
    return MlpCase(function=function, tokens=9, experts=len(fields["counts"]), hidden=5, width=6, **fields)
