"""Grouped products in low precision, beside the cases of the same functions in high precision: a covering array, shapes and far addresses."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from conformance.core.case import Case
from conformance.core.covering import covering
from conformance.core.space import Space
from conformance.core.tensors import WIDE_LAYOUTS
from conformance.families.experts import axes_mlp
from conformance.families.experts.axes import LOW_AXES, low_case, low_legal
from conformance.families.experts.cases import GroupedCase
from moe_ref.config.quantization import OVERRIDES

FAR: dict[str, Any] = {"scaling": "current", "tokens": 3, "experts": 2, "hidden": 3, "width": 3, "dtype": "bfloat16"}
FACTORS = {
    "grouped_linear": ("rows", "weight", "d_out"),
    "grouped_dgrad": ("d_out", "weight"),
    "grouped_wgrad": ("d_out", "rows"),
    "latent_projection": ("x", "weight", "d_out"),
}
LAWFUL = 3
OVERRIDDEN: list[
    dict[str, Any]
] = [  # where forms by columns would come back as other numbers, and where they would need a dtype and noise
    {"scaling": "block", "variant": 1, "override": "dequantized", "dtype": "bfloat16", "values": "columns"},
    {"scaling": "nvfp4", "variant": 0, "override": "high_precision", "dtype": "float32"},
]
GRADS = {"grouped_linear": "rows+weight", "latent_projection": "x+weight"}
REAL: list[
    dict[str, Any]
] = [  # where a GPU makes them cheap; in each product sums are long enough for those that are never promoted to show
    {"scaling": "current", "tokens": 4100, "experts": 2, "hidden": 66, "width": 66},
    {"scaling": "block", "variant": 1, "tokens": 70, "experts": 1, "hidden": 66, "width": 2100, "dtype": "bfloat16"},
    {"scaling": "block", "tokens": 300, "experts": 2, "hidden": 7168, "width": 264, "dtype": "bfloat16"},
    {"scaling": "mxfp8", "tokens": 9, "experts": 4, "hidden": 90, "width": 8, "dtype": "bfloat16"},
    {"scaling": "nvfp4", "tokens": 24, "experts": 4, "hidden": 180, "width": 16, "dtype": "bfloat16"},
]


def recipe_cases(function: str, space: Space) -> list[Case]:
    """On a GPU every legal pair of values of the function's LOW_AXES, every recipe with a backward_override, and real shapes; in an interpreter,
    which pays by the step, every recipe once, and each backward_override; laws go round. None of a function that has none, or takes no recipe.
    """
    if not space.accepts(function, "recipe"):
        return []
    if function in axes_mlp.LOW_AXES:
        return _of_layers(function, space)
    if function not in LOW_AXES:
        return []
    gpu = space.device == "cuda"
    rows = _low_rows(LOW_AXES[function], lambda row: low_legal(function, row, space), gpu)
    cases = [replace(low_case(function, row), seed=index) for index, row in enumerate(rows)]
    grads = GRADS.get(function, "") if function not in space.not_differentiable else ""
    noise = space.accepts(function, "noise")
    shapes = [shape for shape in REAL if gpu and (shape["scaling"] != "nvfp4" or noise)]
    cases += [GroupedCase(function=function, grads=grads, **shape) for shape in shapes]
    cases = [replace(case, law=space.laws(case)[index % len(space.laws(case))]) for index, case in enumerate(cases)]
    far = (
        []
        if function in space.contiguous_only
        else [name for name in FACTORS[function] if grads or name != "d_out" or function not in GRADS]
    )
    return [
        *cases,
        *(
            GroupedCase(function=function, grads=grads, **FAR, layout=layout, layout_of=name)
            for name in far
            for layout in WIDE_LAYOUTS[: 1 + gpu]
        ),
    ]


def _of_layers(function: str, space: Space) -> list[Case]:
    """Expert MLPs: likewise."""
    rows = _low_rows(
        axes_mlp.LOW_AXES[function], lambda row: axes_mlp.low_legal(function, row, space), space.device == "cuda"
    )
    cases = [replace(axes_mlp.low_case(function, row), seed=index) for index, row in enumerate(rows)]
    return [replace(case, law=_law_in_turn(case, index, space)) for index, case in enumerate(cases)]


def _law_in_turn(case: Case, index: int, space: Space) -> str:
    """A law of every case; of every third in an interpreter, which takes as long again for it."""
    laws = space.laws(case)
    return laws[index % len(laws)] if space.device == "cuda" or index % LAWFUL == 0 else ""


def _low_rows(
    axes: dict[str, tuple[Any, ...]], legal: Callable[[dict[str, Any]], bool], gpu: bool
) -> list[dict[str, Any]]:
    """A covering array, and every recipe with a backward_override; without a GPU a row of each recipe, and of each backward_override."""
    rows, *_ = covering({axis: values for axis, values in axes.items() if axis != "override"}, legal)
    if gpu:
        overridden, *_ = covering(axes | {"override": OVERRIDES}, legal)
        return rows + _one_of_each(overridden)
    simple = {axis: values[-1 if axis == "grads" else 0] for axis, values in axes.items()}
    chosen = [simple | {axis: x for axis, x in fields.items() if x in axes[axis]} for fields in OVERRIDDEN]
    return _one_of_each(rows) + [row for row in chosen if legal(row)]


def _one_of_each(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row of each recipe, with as many values as can be that no row before had."""
    chosen: list[dict[str, Any]] = []
    seen: set[tuple[str, Any]] = set()
    for recipe in dict.fromkeys((row["scaling"], row["variant"]) for row in rows):
        own = [row for row in rows if (row["scaling"], row["variant"]) == recipe]
        chosen.append(max(own, key=lambda row: len(set(row.items()) - seen)))
        seen |= set(chosen[-1].items())
    return chosen
