"""Grouped products in low precision: covering array, shapes and far addresses."""

from dataclasses import replace
from typing import Any

from conformance.core.axes import Changes
from conformance.core.case import Case
from conformance.core.scope import Scope
from conformance.core.signature import FAR as FAR_LAYOUTS
from conformance.families.experts.cases import GROUPED_VALUES
from conformance.families.experts.precision import LOW_VALUES
from conformance.families.quantization.cases import RECIPES, VARIANTS
from moe_ref.config.quantization import OVERRIDES

CONTIGUOUS: Changes = {"layout": "contiguous", "layout_of": ""}
# ragged; in LOW_ROWS
COUNTS = ((1, 1, 1), (0, 2, 0, 1, 0), (0, 0, 3), (3, 0))
LOW_ROWS = {"delayed": 9, "current": 9, "block": 45}  # others: 1 unit
# columns in and out: more than one block along each contraction
LOW_SIZES = {"block": (133, 130), "mxfp8": (3, 2), "nvfp4": (5, 6)}
FAR: Changes = {"scaling": "current", "tokens": 3, "experts": 2, "hidden": 3, "width": 3, "dtype": "bfloat16"}
# rows of codes that a matrix unit takes in whole blocks
FAR_BIAS = FAR | {"bias": "bfloat16", "hidden": 32, "width": 16}
PLACED = {  # every factor and cotangent once
    "grouped_linear": (("transposed", "rows"), ("strided", "weight"), ("transposed", "d_out"), ("expanded", "d_out")),
    "grouped_dgrad": (("transposed", "weight"), ("strided", "d_out"), ("expanded", "d_out")),
    "grouped_wgrad": (("transposed", "rows"), ("strided", "d_out"), ("strided", "accumulate_into")),
    "latent_projection": (("transposed", "x"), ("strided", "weight"), ("expanded", "d_out")),
}
FACTORS = {
    "grouped_linear": ("rows", "weight", "d_out"),
    "grouped_dgrad": ("d_out", "weight"),
    "grouped_wgrad": ("d_out", "rows"),
    "latent_projection": ("x", "weight", "d_out"),
}
LAWFUL = 3
# experts of one row, some below the least amax of the recipe
LEAST: Changes = {"scaling": "current", "variant": 2, "values": "rows", "dtype": "bfloat16"}
LEAST |= {"tokens": 9, "experts": 9, "counts": (1,) * 9, "hidden": 20, "width": 20}
# one expert has all rows but some: a kernel of one group may take the buffer for its rows
ALONE: tuple[Changes, ...] = (
    {"tokens": 8, "counts": (8,), "tail": 5, "hidden": 9, "width": 7},
    {"scaling": "current", "variant": 1, "tokens": 8, "counts": (8,), "tail": 5, "hidden": 9, "width": 7},
    {"scaling": "mxfp8", "variant": 1, "tokens": 1, "counts": (1,), "tail": 32, "hidden": 1, "width": 1},
)
OUTGROWN: Changes = {"scaling": "delayed", "values": "outgrown", "dtype": "bfloat16"}
OUTGROWN |= {"tokens": 4, "experts": 2, "hidden": 20, "width": 9}
SCOPED: Changes = {"scaling": "nvfp4", "variant": 7, "values": "rows"}  # operands with other bounds of their scales
SCOPED |= {"tokens": 1, "experts": 1, "counts": (), "hidden": 1, "width": 1}
BIASED: Changes = {"scaling": "nvfp4", "dtype": "bfloat16", "bias": "float32", "seed": 1}  # beside noise
OVERRIDDEN: list[dict[str, Any]] = [  # recipes whose columnwise codes differ, or need a dtype and noise
    {"scaling": "block", "variant": 1, "override": "dequantized", "dtype": "bfloat16", "values": "columns"},
    {"scaling": "nvfp4", "variant": 0, "override": "high_precision", "dtype": "float32"},
]
# an accumulator of its own beside an override
WIDE: Changes = {"scaling": "block", "variant": 1, "override": "dequantized", "accumulator": "float64", "seed": 2}
REAL: list[dict[str, Any]] = [  # on a GPU: sums long enough to show missing promotion of partial sums
    {"scaling": "current", "tokens": 4100, "experts": 2, "hidden": 66, "width": 66},
    {"scaling": "block", "variant": 1, "tokens": 70, "experts": 1, "hidden": 66, "width": 2100, "dtype": "bfloat16"},
    {"scaling": "block", "tokens": 300, "experts": 2, "hidden": 7168, "width": 264, "dtype": "bfloat16"},
    {"scaling": "mxfp8", "tokens": 9, "experts": 4, "hidden": 90, "width": 8, "dtype": "bfloat16"},
    {"scaling": "nvfp4", "tokens": 24, "experts": 4, "hidden": 180, "width": 16, "dtype": "bfloat16"},
]


def _rows(case: Any) -> int:
    return 3 * LOW_ROWS.get(case.scaling, 1)


# variant 1 needs no noise: every scaling stays when noise is unsupported
BASE: Changes = {
    "variant": 1,
    "tokens": _rows,
    "hidden": lambda case: LOW_SIZES.get(case.scaling, (37, 20))[0],
    "width": lambda case: LOW_SIZES.get(case.scaling, (37, 20))[1],
}


def _joint_axes(scope: Scope) -> dict[str, list[Changes]]:
    """Every recipe, and fewer layouts and gradients than in high precision."""
    several = "counts" in scope.live

    def ragged(counts: tuple[int, ...]) -> Changes:
        return {"counts": lambda case: tuple(LOW_ROWS.get(case.scaling, 1) * n for n in counts), "experts": len(counts)}

    factors = scope.signature.gradients[:2]
    return {
        "scaling": [{"scaling": scaling} for scaling in RECIPES],
        "variant": [{"variant": variant} for variant in range(VARIANTS if several else 1)],
        "counts": [ragged(counts) for counts in COUNTS] if several else [{}],
        "values": [{"values": values} for values in (*GROUPED_VALUES, *LOW_VALUES)],
        "bias": [{"bias": dtype} for dtype in ("", "float32")],
        "layout": [CONTIGUOUS, *({"layout": layout, "layout_of": of} for layout, of in PLACED[scope.function])],
        "grads": [{"grads": grads} for grads in ("", *factors, "+".join(factors))] if factors else [{}],
        "override": [{"override": ""}],
        "accumulator": [{"accumulator": ""}],
    }


def by_recipe(scope: Scope, other_cases: list[Case]) -> list[Case]:
    """On a GPU every legal pair, every recipe with a backward_override, and real shapes.

    If few kernels shall be compiled, and in an interpreter, every recipe and every
    backward_override once. And far addresses.
    """
    if not scope.accepts("recipe"):
        return []
    several = "counts" in scope.live
    gpu, grads, together = scope.space.device == "cuda", "+".join(scope.signature.gradients[:2]), _joint_axes(scope)
    cases = scope.array(BASE, together).cases
    if gpu and not scope.space.few_kernels:
        overrides: list[Changes] = [{"override": override} for override in OVERRIDES]
        cases += one_per_recipe(scope.array(BASE, together | {"override": overrides}).cases)
    else:
        first = [values[-1 if name == "grads" else 0].items() for name, values in together.items()]
        simple = {name: value for items in first for name, value in items}
        single = [scope.checked(BASE | simple | fields) for fields in (*OVERRIDDEN, SCOPED, BIASED, WIDE)]
        cases = [*one_per_recipe(cases), *filter(scope.fits, single)]
    if gpu and (several or not scope.space.few_kernels):
        real = [scope.mended(scope.case(shape | {"grads": grads})) for shape in REAL]
        cases += [case for case, shape in zip(real, REAL, strict=True) if case.scaling == shape["scaling"]]
    cases = [replace(case, seed=index) for index, case in enumerate(cases)]
    placed = [(name, layout, FAR) for name in FACTORS[scope.function] for layout in FAR_LAYOUTS[: 1 + gpu]]
    dims = scope.signature.placed.get("bias", "")
    placed += [("bias", layout, FAR_BIAS) for layout in FAR_LAYOUTS[: len(dims)][-1 - gpu :]]
    far = [scope.case(fields | {"grads": grads, "layout": layout, "layout_of": of}) for of, layout, fields in placed]
    return [*scope.lawful(cases), *filter(scope.fits, map(scope.mended, far))]


def one_per_recipe(cases: list[Any]) -> list[Any]:
    """One case per recipe. Each has as many values as possible that are new to the list."""
    chosen: list[Any] = []
    seen_values: set[Any] = set()
    for recipe in dict.fromkeys((case.scaling, case.variant) for case in cases):
        recipe_cases = [
            (case, {(name, str(x)) for name, x in case.record().items()})
            for case in cases
            if (case.scaling, case.variant) == recipe
        ]
        case, values = max(recipe_cases, key=lambda candidate: len(candidate[1] - seen_values))
        chosen.append(case)
        seen_values |= values
    return chosen
