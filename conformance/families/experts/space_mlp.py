"""Spaces of expert MLPs: segments, settings of the activation, recipes of both layers."""

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from conformance.core.axes import Changes
from conformance.core.case import Case
from conformance.core.model_sizes import EXPERTS_WITH_WEIGHTS, MEDIUM_WIDTHS, NARROW_WIDTHS, ROWS
from conformance.core.scope import Scope
from conformance.core.shapes import Shapes
from conformance.core.shared_out import worlds
from conformance.core.space import mostly, sizes, some_of
from conformance.families.experts.cases import GROUPED_VALUES, PROB_DTYPES, WEIGHTS
from conformance.families.experts.cases_mlp import OVERFLOW
from conformance.families.experts.space import LOW_SHARE, few_segments, near, of_a_model, segments
from conformance.families.experts.space_long import long_layers
from conformance.families.experts.space_many import many_rows
from conformance.families.experts.space_recipes import one_per_recipe
from conformance.families.experts.space_tiles import tiles_of_layers
from conformance.families.experts.space_waves import waves_of_layers
from conformance.families.quantization.cases import RECIPES, UNIT, VARIANTS
from moe_ref.config import RECOMPUTED
from moe_ref.config.quantization import OVERRIDES

HIGH: Changes = {"scaling": "", "variant": 0, "override": ""}
RECIPE_CHANGES = [{"scaling": scaling, "variant": variant} for scaling in RECIPES for variant in range(VARIANTS)]
LOW_WIDTHS = {1: 20, 16: 3, 32: 2}  # the most columns, by unit
SHARED_ONE_IN = 6  # cases of shared_experts over ranks: one process per rank
_SOME = st.sampled_from((0,) + (1,) * 15).flatmap(lambda least: sizes(least, 20 * least))  # seldom none
_SEGMENTS = st.sampled_from((False,) + (True,) * 7).flatmap(
    lambda some: segments().filter(lambda changes: changes["tokens"]) if some else segments()
)
_FEW = {most: few_segments(most) for most in (9, 3)}
_VALUES = {scaling: st.sampled_from(GROUPED_VALUES[: 2 if scaling else 3]) for scaling in ("", *RECIPES)}
_DTYPES = {
    scaling: st.sampled_from(("float32", "bfloat16"))
    if scaling
    else mostly("float32", ("bfloat16", "float16", "float64"))
    for scaling in ("", *RECIPES)
}
_PROBS, _BIASES = st.sampled_from(("", *PROB_DTYPES, "float32")), st.sampled_from(("", "", *PROB_DTYPES))
_WEIGHTS, _ALIGNMENTS = st.sampled_from(WEIGHTS), st.sampled_from((0, 0, 0, 1, 3, 8, 16, 64, 256))
_OVERRIDES = st.sampled_from((*OVERRIDES, *("",) * 4))


def layers(scope: Scope) -> st.SearchStrategy[Changes]:
    """Layers in high precision, and some by a recipe that the implementation accepts."""
    fields = _shared if scope.function == "shared_experts" else _grouped
    possible = [recipe for recipe in RECIPE_CHANGES if scope.fits(scope.case(recipe | {"dtype": "bfloat16"}))]
    high = fields(scope, HIGH)
    if not possible:
        return high
    low = st.sampled_from(possible).flatmap(lambda recipe: fields(scope, recipe))
    return st.integers(1, LOW_SHARE[scope.space.device]).flatmap(lambda i: low if i == 1 else high)


@st.composite
def _grouped(draw: st.DrawFn, scope: Scope, recipe: Changes) -> Changes:
    """grouped_mlp and sequential_mlp."""
    unit = UNIT.get(recipe["scaling"], 1)
    fields = draw(_layers(recipe)) | draw(_FEW[9 if unit == 1 else 3] if recipe["scaling"] else _SEGMENTS)
    fields |= {"probs": draw(_PROBS), "bias1": draw(_BIASES), "bias2": draw(_BIASES)}
    fields["align"] = -(-draw(_ALIGNMENTS) // unit) * unit
    if fields["probs"]:
        weighted = {"weights": draw(_WEIGHTS), "early": draw(st.booleans()), "on_input": not draw(st.integers(0, 2))}
        fields |= weighted
    else:
        fields |= {"weights": "plain", "early": False, "on_input": False}
    return _graded(draw, scope, fields)


@st.composite
def _shared(draw: st.DrawFn, scope: Scope, recipe: Changes) -> Changes:
    """shared_experts; some over ranks."""
    unit = UNIT.get(recipe["scaling"], 1)
    most = (9 if unit == 1 else 3) if recipe["scaling"] else 34
    fields = draw(_layers(recipe)) | {"tokens": draw(sizes(bool(recipe["scaling"]), most)), "gate": draw(st.booleans())}
    if not recipe["scaling"] and scope.space.most_ranks > 1 and draw(st.integers(1, SHARED_ONE_IN)) == 1:
        counts = draw(worlds(scope.space))
        fields |= {"counts": counts, "tokens": sum(counts), "layout": "contiguous", "layout_of": ""}
    return _graded(draw, scope, fields)


@st.composite
def _layers(draw: st.DrawFn, recipe: Changes) -> Changes:
    """Columns, values and dtype that fit the recipe."""
    scaling = recipe["scaling"]
    columns = sizes(1, LOW_WIDTHS[UNIT.get(scaling, 1)]) if scaling else _SOME
    return recipe | {
        "hidden": draw(columns),
        "width": draw(columns),
        "values": draw(_VALUES[scaling]),
        "dtype": draw(_DTYPES[scaling]),
        "override": draw(_OVERRIDES) if scaling not in ("", "delayed") else "",
    }


def _graded(draw: st.DrawFn, scope: Scope, fields: Changes) -> Changes:
    """Gradients of given inputs, or none; dtype and values that the recipe takes with them."""
    present_inputs = tuple(x.name for x in scope.signature.inputs if x.gradient and fields.get(x.optional, True))
    fields = fields | {"grads": draw(some_of(present_inputs))}
    if fields["scaling"] and not scope.fits(scope.case(fields | {"interleave": 0})):
        fields |= {"dtype": "bfloat16", "values": "dyadic"}
    return fields


# ---- covering arrays

ACTIVATED = ("kind", "offset", "clamp", "alpha", "interleave", "stored")
_PLAIN, _STORED = ("", 0, 0, 0, 0, False), ("", 0, 6, 0, 0, True)
_FORMS = (
    *(_PLAIN, ("", 0, 6, 1702, 2, False), ("quick_geglu", 8, 56, 0, 0, False)),
    *(("reglu", -4, 6, 0, 1, False), ("squared_relu", 0, 0, 0, 0, False), _STORED),
)
WEIGHTED = ("probs", "weights", "early", "on_input")
_UNWEIGHTED = ("", "plain", False, False)
_WEIGHTINGS = (
    *(_UNWEIGHTED, ("float32", "signed", False, False), ("bfloat16", "zeros", True, False)),
    *(("float64", "plain", False, False), ("float32", "zeros", False, True), ("bfloat16", "signed", False, True)),
)
BIASED, KEPT = ("bias1", "bias2"), ("align", "recompute")
_BOTH = (("", ""), ("float32", ""), ("", "float32"), ("bfloat16", "float64"), ("float32", "bfloat16"))
# nine rows: no empty expert; empty first, middle and last; all but one empty; one full tile
COUNTS = ((4, 2, 3), (0, 5, 0, 4, 0), (0, 0, 9), (8, 0, 1))
CONTIGUOUS: Changes = {"layout": "contiguous", "layout_of": ""}
SIZES: Changes = {"tokens": 9, "hidden": 5, "width": 6}


def _named_combinations(names: tuple[str, ...], values: tuple[tuple[Any, ...], ...]) -> list[Changes]:
    return [dict(zip(names, combination, strict=True)) for combination in values]


def _segments(*count_lists: tuple[int, ...]) -> list[Changes]:
    return [{"counts": counts, "experts": len(counts)} for counts in count_lists]


def _gradients(scope: Scope, *some: str) -> list[Changes]:
    """These gradients, and the gradients of all given inputs."""
    return [*({"grads": grads} for grads in some), {"grads": scope.signature.all_gradients}]


def _layouts(*placed: tuple[str, str]) -> list[Changes]:
    return [CONTIGUOUS, *({"layout": layout, "layout_of": name} for layout, name in placed)]


def _grouped_pairs(scope: Scope) -> dict[str, list[Changes]]:
    """The settings of one stage are covered together, because interpreted layers take ten times as
    long as `glu`.
    """
    return {
        "recipe": [HIGH],
        "activated": _named_combinations(ACTIVATED, _FORMS),
        "weighted": _named_combinations(WEIGHTED, _WEIGHTINGS),
        "biased": _named_combinations(BIASED, _BOTH),
        "kept": _named_combinations(KEPT, ((0, ""), (4, ""), (0, "moe_act"), (4, "moe"))),
        "counts": _segments(*COUNTS),
        "layout": _layouts(("strided", "rows"), ("strided", "fc1_weight"), ("expanded", "d_out")),
        "grads": _gradients(scope, "", "rows", "fc1_weight+fc2_weight"),
    }


def _sequential_pairs(scope: Scope) -> dict[str, list[Changes]]:
    return {
        "recipe": [HIGH],
        "activated": _named_combinations(ACTIVATED, (_PLAIN, ("", 8, 6, 0, 2, False), _STORED)),
        "weighted": _named_combinations(WEIGHTED, (_UNWEIGHTED, *_WEIGHTINGS[1:5:3])),
        "biased": _named_combinations(BIASED, (("", ""), ("float32", "bfloat16"))),
        "kept": _named_combinations(KEPT, ((0, ""), (0, "moe_act"))),
        "counts": _segments(*COUNTS),
        "layout": [CONTIGUOUS],
        "dtype": [{"dtype": "float32"}, {"dtype": "bfloat16"}],
        "grads": _gradients(scope, ""),
        "rest": [{"values": "dyadic", "tail": 0, "index_dtype": "int64", "poison": "nan"}],
    }


def _shared_pairs(scope: Scope) -> dict[str, list[Changes]]:
    return {
        "recipe": [HIGH],
        "activated": _named_combinations(ACTIVATED, _FORMS),
        "layout": _layouts(("strided", "x"), ("strided", "fc1_weight"), ("expanded", "d_out")),
        "grads": _gradients(scope, "", "x", "fc1_weight+fc2_weight"),
    }


# ---- recipes

LOW_ROWS = {"delayed": 3, "current": 3, "block": 5}  # other scalings have 1 unit
LOW_SIZES = {"mxfp8": (1, 1), "nvfp4": (1, 2)}  # hidden and width
LAWFUL = 3  # in an interpreter one case in three has a law, which doubles its time
# recipes whose columnwise codes differ, or need a dtype and noise
OVERRIDDEN: list[Changes] = [
    {"scaling": "block", "variant": 1, "override": "dequantized", "dtype": "bfloat16"},
    {"scaling": "nvfp4", "variant": 0, "override": "high_precision", "dtype": "float32"},
]


def _rows(case: Any) -> int:
    """Rows of one part; 5 where experts are padded."""
    return 5 if case.align else LOW_ROWS.get(case.scaling, 1)


def _low_pairs(scope: Scope) -> dict[str, list[Changes]]:
    """Every recipe, and fewer values of the other settings; for few kernels one variant of each,
    because `grouped_linear` is judged with all.
    """
    per_expert = scope.function != "grouped_mlp"
    scalings = ("current", "block", "mxfp8") if scope.function == "sequential_mlp" else tuple(RECIPES)
    pairs: dict[str, list[Changes]] = {
        "scaling": [{"scaling": scaling} for scaling in scalings],
        "variant": [
            {"variant": variant} for variant in ((1,) if per_expert or scope.space.few_kernels else range(VARIANTS))
        ],
        "override": [{"override": ""}],
        "activated": _named_combinations(
            ACTIVATED, (_PLAIN, ("reglu", -4, 6, 0, 0, False), ("squared_relu", 0, 0, 0, 0, False))
        ),
        "dtype": [{"dtype": dtype} for dtype in ("float32", "bfloat16")],
        "values": [{"values": values} for values in ("dyadic", "rows")],
        "layout": [CONTIGUOUS],
    }
    if scope.function == "shared_experts":
        return pairs | {"grads": _gradients(scope, "x")}
    ratios_of_counts = ((0, 2, 0, 1),) if per_expert else ((1, 1, 1), (0, 2, 0, 1), (0, 3))
    weighted = (_UNWEIGHTED, *_WEIGHTINGS[1:3], ("float32", "plain", False, True))

    def ragged(ratios: tuple[int, ...]) -> Changes:
        return {"counts": lambda case: tuple(_rows(case) * n for n in ratios), "experts": len(ratios)}

    return pairs | {
        "counts": [ragged(parts) for parts in ratios_of_counts],
        "weighted": _named_combinations(WEIGHTED, (_UNWEIGHTED,) if per_expert else weighted),
        "biased": _named_combinations(BIASED, (("", ""),) if per_expert else (("", ""), ("float32", "float32"))),
        "kept": _named_combinations(KEPT, ((0, ""),) if per_expert else ((0, ""), (32, "moe"), (0, "moe_act"))),
        "tail": [{"tail": tail} for tail in ((0,) if per_expert else (0, 3))],
        "index_dtype": [{"index_dtype": "int64"}],
        "grads": _gradients(scope) if per_expert else _gradients(scope, "rows", "fc1_weight+fc2_weight"),
    }


def by_recipe(scope: Scope, other_cases: list[Case]) -> list[Case]:
    """Every legal pair of values, and every recipe with a backward_override.

    If few kernels shall be compiled, and in an interpreter, every recipe once.
    """
    if not scope.accepts("recipe"):
        return []
    gpu, pairs = scope.space.device == "cuda", _low_pairs(scope)
    base: Changes = {
        "variant": 1,
        "tokens": lambda case: _rows(case) * (1 if scope.function == "shared_experts" else 3),
        "hidden": lambda case: LOW_SIZES.get(case.scaling, (6, 8))[0],
        "width": lambda case: LOW_SIZES.get(case.scaling, (6, 8))[1],
    }
    cases = scope.array(base, pairs).cases
    if gpu and not scope.space.few_kernels:
        overrides: list[Changes] = [{"override": override} for override in OVERRIDES]
        cases += one_per_recipe(scope.array(base, pairs | {"override": overrides}).cases)
    else:
        simple = {name: value for values in pairs.values() for name, value in values[0].items()} | pairs["grads"][-1]
        overridden = [scope.checked(base | simple | fields) for fields in OVERRIDDEN]
        cases = [*one_per_recipe(cases), *filter(scope.fits, overridden)]
    cases = scope.lawful([replace(case, seed=index) for index, case in enumerate(cases)])
    return [case if gpu or index % LAWFUL == 0 else replace(case, law="") for index, case in enumerate(cases)]


# ---- shapes that always run


# stages exceed the largest number of float16, without other options and with them
OVERFLOWING: Changes = {"tokens": 12, "hidden": 5, "width": 6, "dtype": "float16", "values": OVERFLOW, "seed": 1}
# the rows with the largest cotangents have an expert each
APART: Changes = OVERFLOWING | {"experts": 5, "counts": (4, 1, 4, 1, 2)}
BARE: Changes = APART | {"probs": "", "bias1": "", "bias2": ""}


# options of all stages at once; the gates' and the rows' are those that an activation has
OPTIONS: Changes = {"clamp": 6, "offset": -4, "alpha": 250, "interleave": 1, "values": "rows"}
OPTIONS |= {"probs": "float32", "weights": "signed", "bias1": "float32", "bias2": "float32", "dtype": "bfloat16"}
# and experts whose aligned rows are made again by the backward pass
AGAIN: Changes = {"tokens": 9, "experts": 3, "counts": (4, 2, 3), "hidden": 5, "width": 6, "align": 4}
# a kernel of one expert may mistake the buffer for its rows
ALONE: Changes = {"scaling": "mxfp8", "variant": 1, "kind": "squared_relu", "experts": 1, "counts": (1,), "tail": 32}
ALONE |= {"tokens": 1, "hidden": 1, "width": 1, "dtype": "bfloat16"}


# an alpha that float16 rounds, and too few rows to hide it: few roundings in a gradient by codes
FINE: Changes = {"tokens": 2, "hidden": 7, "width": 65, "dtype": "float16", "alpha": 1702, "stored": True}
FINE |= {"gate": False}
# only the gate's weight has a gradient
FROZEN: Changes = {"tokens": 5, "hidden": 3, "width": 2, "gate": True, "grads": "gate_weight"}
# experts of one row, whose padding would have larger activations: of a bias, without the row's prob
PADDED: Changes = {"scaling": "current", "tokens": 16, "experts": 16, "counts": (1,) * 16, "align": 4}
PADDED |= {
    "hidden": 3,
    "width": 1,
    "probs": "float32",
    "weights": "signed",
    "bias1": "float32",
    "dtype": "bfloat16",
    "grads": "",
}


def _beside_options(scope: Scope) -> list[Any]:
    """Each recipe together with the options of all stages; probabilities on the input and stored
    codes in turn.
    """
    cases: list[Any] = []
    for index, scaling in enumerate(RECIPES):
        hidden, width = LOW_SIZES.get(scaling, (6, 8))
        rows, on_input = LOW_ROWS.get(scaling, 1), index % 2 == 1
        recipe: Changes = {"scaling": scaling, "variant": 1}
        sizes: Changes = {"hidden": hidden, "width": width, "tokens": 3 * rows}
        split: Changes = {"experts": 2, "counts": (2 * rows, rows), "tail": 3, "on_input": on_input, "stored": on_input}
        no_kernel_form = scope.function == "sequential_mlp" and scaling not in ("current", "mxfp8")
        if not no_kernel_form and scope.fits(scope.case(recipe)):
            cases.append(scope.fullest(OPTIONS | recipe | sizes | split))
    return cases


def _ragged(scope: Scope) -> list[Any]:
    """Sizes one above a power of two, so that the last block is nearly empty; stages that overflow;
    and all options.
    """
    ragged = {"tokens": 133, "experts": 5, "counts": (0, 65, 1, 0, 67), "hidden": 65, "width": 33, "values": "rows"}
    apart = [APART | {"kind": kind} for kind in ("", "squared_relu")]
    recomputing = [OPTIONS | AGAIN | {"recompute": word, "on_input": word == "moe"} for word in RECOMPUTED]
    return [ragged, BARE, *apart, *recomputing, *long_layers(scope), *_beside_options(scope)]


def _beside_pairs(scope: Scope) -> list[Any]:
    """Laws of a recipe with noise, and of a recipe with states, for both layers."""
    narrow: Changes = {"dtype": "bfloat16", "grads": "fc1_weight+fc2_weight"}
    noise = narrow | {"scaling": "nvfp4", "tokens": 2, "experts": 2, "hidden": 1, "width": 1}
    state = narrow | {"scaling": "delayed", "tokens": 5, "experts": 3, "counts": (4, 0, 1), "hidden": 3, "width": 2}
    cases_by_law = {"delayed": scope.case(noise), "amaxes": scope.case(state)}
    return [case.changed(law=law) for law, case in cases_by_law.items() if scope.fits(case)]


def _large(scope: Scope) -> list[Any]:
    """Ragged segments; more experts than rows; scales per layer with recomputation; long sums of
    bfloat16; one weight whose gradient waits, and both, also with noise; and amaxes of a step.
    """
    gpu = scope.space.device == "cuda"
    many = {"tokens": 40 if gpu else 12, "experts": 129 if gpu else 66, "hidden": 9, "width": 5}
    delayed_recompute = {"tokens": 5, "experts": 2, "hidden": 2, "width": 2, "dtype": "bfloat16"}
    delayed_recompute |= {"scaling": "delayed", "recompute": "moe_act"}
    long = {"tokens": 70 if gpu else 5, "experts": 2, "hidden": 2880 if gpu else 257, "width": 264 if gpu else 65}
    delayed = scope.fits(scope.case(delayed_recompute))
    delayed_gradients: Changes = {"tokens": 5, "experts": 2, "hidden": 3, "width": 2}
    second_alone, both = (delayed_gradients | {"grads": grads} for grads in ("fc2_weight", "fc1_weight+fc2_weight"))
    waits = [scope.mended(scope.case(fields)).changed(law="delayed") for fields in (second_alone, both)]
    waits += _beside_pairs(scope)
    large = [many, *([delayed_recompute] if delayed else []), long | {"dtype": "bfloat16"}]
    single = [scope.fullest(ALONE)] if scope.fits(scope.case(ALONE)) else []
    single += [scope.case(PADDED)] if scope.fits(scope.case(PADDED)) else []
    tiles = [*tiles_of_layers(scope), *waves_of_layers(scope)]
    return [*_ragged(scope), *large, *waits, *single, *tiles, *many_rows(scope)]


def _large_shared(scope: Scope) -> list[Any]:
    gpu = scope.space.device == "cuda"
    long = {"tokens": 70 if gpu else 5, "hidden": 2880 if gpu else 257, "width": 264 if gpu else 65}
    over_ranks = {"counts": (2, 0, 3, 1), "tokens": 6, "hidden": 3, "width": 2, "seed": 1}
    return [
        {"tokens": 129, "hidden": 65, "width": 33},
        *(OVERFLOWING | {"gate": gate, "kind": kind} for gate, kind in ((False, ""), (True, "squared_relu"))),
        long | {"dtype": "bfloat16"},
        *filter(scope.fits, [scope.case(FROZEN)]),
        *long_layers(scope),
        *_beside_options(scope),
        *tiles_of_layers(scope),
        *([over_ranks] if scope.space.most_ranks >= 4 else []),
        FINE,
    ]


GROUPED_MLP = Shapes(
    drawn=layers,
    affordable=near,
    covered=SIZES,
    models={"hidden": MEDIUM_WIDTHS, "width": NARROW_WIDTHS, "tokens": ROWS, "experts": EXPERTS_WITH_WEIGHTS},
    together=_grouped_pairs,
    more=by_recipe,
    always=_large,
    model_rows=tuple(
        option | {"experts": 128, "hidden": 64, "width": 64, "probs": "float32", "dtype": "bfloat16"}
        for option in ({"on_input": True}, {"bias2": "float32"})
    ),
    weight=0.5,
    real=of_a_model,
)
SEQUENTIAL_MLP = replace(GROUPED_MLP, together=_sequential_pairs, always=_ragged, model_rows=(), weight=0.2)
SHARED_EXPERTS = replace(
    GROUPED_MLP,
    covered={"tokens": 7, "hidden": 5, "width": 6},
    model_rows=(),
    together=_shared_pairs,
    always=_large_shared,
    tall={"hidden": 2, "width": 2},
)
