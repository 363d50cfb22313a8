"""Spaces of activations, and of grouped products in high and low precision."""

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from conformance.core.axes import Changes
from conformance.core.model_sizes import (
    EXPERTS_WITH_WEIGHTS,
    FEW_ROWS,
    MODEL_WIDTHS,
    NARROW_WIDTHS,
    ROWS,
    WEIGHT_WIDTHS,
)
from conformance.core.scope import Scope
from conformance.core.shapes import Shapes
from conformance.core.signature import FAR, NEAR
from conformance.core.space import LOGIT_DTYPES, mostly, sizes, some_of
from conformance.families.experts.cases import COUNTS, CURVES, GATES, GROUPED_VALUES
from conformance.families.experts.cases import PROB_DTYPES as PROB_DTYPES
from conformance.families.experts.precision import LOW_VALUES, fits, may_override
from conformance.families.experts.space_long import long_products
from conformance.families.experts.space_many import around_a_class, many_rows
from conformance.families.experts.space_ratios import ratio_cases
from conformance.families.experts.space_recipes import ALONE, CONTIGUOUS, LEAST, OUTGROWN, by_recipe
from conformance.families.experts.space_tiles import tiles_of_products
from conformance.families.experts.space_waves import waves_of_products
from conformance.families.quantization.cases import RECIPES, UNIT, VARIANTS
from moe_ref.config.quantization import OVERRIDES


def activations(scope: Scope) -> st.SearchStrategy[Changes]:
    """Small sizes, or one above every block; interleaved blocks that divide the width."""
    small, medium = (st.tuples(sizes(0, 9), sizes(0, 18)), st.tuples(sizes(1, 34), sizes(1, 34)))
    sized = st.one_of(small, medium, st.sampled_from(((3, 129), (70, 3))))

    def with_blocks(shape: tuple[int, int]) -> st.SearchStrategy[Changes]:
        tokens, width = shape
        steps = (0, *(step for step in (1, 2, 3, 8, 16, 32, width) if step and width % step == 0))
        return st.sampled_from(steps).map(lambda step: {"tokens": tokens, "width": width, "interleave": step})

    return sized.flatmap(with_blocks)


def near(case: Any, scope: Scope) -> Any:
    """The case without a far layout, because far layouts have cases of their own."""
    return replace(case, layout="contiguous", layout_of="") if case.layout in FAR else case


def long_rows(scope: Scope) -> list[Any]:
    """More rows than a power of two by one; blocks of rows and of columns; and the widths of real
    models, if a GPU makes them cheap.
    """
    gpu = scope.space.device == "cuda"
    wide_rows: list[Changes] = (
        [{"tokens": 5, "width": 2880}, {"tokens": 3, "width": 7168}] if gpu else [{"tokens": 3, "width": 513}]
    )
    cases: list[Changes] = [
        {"tokens": 2049 if gpu else 129, "width": 9, "values": "rows"},
        {"tokens": 97, "width": 257},
        *wide_rows,
    ]
    # rows of equal values, some of them 0, where this activation has a slope
    kind = {"kind": "silu"} if scope.function == "activation" else {}
    cases.append({"tokens": 9, "width": 1, "values": "edges"} | kind)
    if scope.accepts("interleave"):
        # two blocks of each of two widths
        cases += [{"tokens": 3, "width": 2 * width, "interleave": width} for width in (32, 96)]
    if scope.accepts("probs"):
        cases.append({"tokens": 2, "width": 1030, "probs": "float32", "grads": "h+probs"})
    if scope.accepts("clamp") and scope.accepts("offset"):
        cases += [*FINE, *(SELDOM if gpu and scope.accepts("fp8_input_store") else [])]
    return [*cases, *_huge(scope), *_strange(scope), *around_a_class(scope)]


def _huge(scope: Scope) -> list[Changes]:
    """Numbers whose square or cube overflows, for each activation that multiplies them."""
    kinds = ("", *GATES[1:4]) if scope.function == "glu" else CURVES[1:4]
    return [{"tokens": 5, "width": 6, "values": "huge", "kind": kind, "grads": "h"} for kind in kinds]


def _strange(scope: Scope) -> list[Any]:
    """Every 16-bit pattern; and strange values at the ends of rows, unless other shapes draw
    them.
    """
    # relu may hide a NaN, and it rounds nothing
    kind: Changes = {"kind": "silu"} if scope.function == "activation" else {}
    edges: Changes = {"tokens": 4, "width": 5, "values": "edges", "seed": 3} | kind
    all_patterns: Changes = {"tokens": 64, "width": 1024, "values": "every"} | kind
    patterns = [scope.case(all_patterns | {"dtype": dtype}) for dtype in ("bfloat16", "float16")]
    if scope.space.device == "cuda":
        return patterns
    return [*(edges | {"dtype": dtype} for dtype in LOGIT_DTYPES[:3]), *patterns]


# options that bfloat16 rounds by half a unit in its last place, and values equal to them
FINE: list[Changes] = [
    {"tokens": 9, "width": 6, "values": "bounds", "clamp": 257},
    {"tokens": 9, "width": 6, "values": "bounds", "clamp": 257, "dtype": "bfloat16"},
    {"tokens": 9, "width": 6, "values": "bounds", "clamp": 259, "dtype": "bfloat16"},  # rounds up there
    {"tokens": 9, "width": 6, "offset": 257},
    {"tokens": 9, "width": 6, "values": "bounds", "offset": 257, "dtype": "bfloat16"},  # terms cancel there
]


# what a GPU's few structures lack: an offset, or probs, in rows of several blocks; clamp and codes
SELDOM: list[Changes] = [
    {"tokens": 9, "width": 260, "values": "rows", "offset": 257},
    {"tokens": 9, "width": 260, "values": "rows", "dtype": "bfloat16", "probs": "float32", "grads": "h+probs"},
    {"tokens": 9, "width": 6, "values": "bounds", "clamp": 257, "stored": True, "grads": "h"},
]


def of_a_model(scope: Scope) -> Changes:
    """Rows of four experts of Qwen3-30B-A3B, in total as many as there are tokens."""
    kind = {"dtype": "bfloat16", "probs": "float32"}
    return kind | {"tokens": scope.space.real_tokens, "experts": 4, "hidden": 2048, "width": 768}


ELEMENTWISE = Shapes(
    drawn=activations,
    affordable=near,
    covered={"tokens": 5, "width": 6},
    models={"width": MODEL_WIDTHS, "tokens": FEW_ROWS},
    always=long_rows,
    tall={"width": 2},
    real=of_a_model,
)
GLU = replace(
    ELEMENTWISE,
    model_rows=(
        *({"kind": kind, "early": True, "probs": "float32", "dtype": "bfloat16"} for kind in ("reglu", "geglu")),
        {"kind": "geglu_erf", "interleave": 32, "width": 768, "dtype": "bfloat16"},
    ),
)
ACTIVATION = ELEMENTWISE


# at most, in units: rows of an expert, and columns; as few as fill no second block, and more
LOW_SIZES = {"delayed": (30, 40), "current": (30, 40), "block": (140, 150), "mxfp8": (3, 3), "nvfp4": (5, 6)}
# rows of 129 experts: of both sides of each power of two from 32 on, and of the last
MANY = tuple(int(e in (0, 31, 32, 64, 127, 128)) for e in range(129))
LOW_SHARE = {
    "cuda": 3,
    "cpu": 12,
}  # one product in this many is in low precision, which is the slowest in an interpreter


def products(scope: Scope) -> st.SearchStrategy[Changes]:
    """Products in high precision, and some by a recipe that the implementation accepts."""
    recipes = [{"scaling": scaling, "variant": variant} for scaling in RECIPES for variant in range(VARIANTS)]
    possible = [recipe for recipe in recipes if scope.takes(scope.case(recipe))]
    high = product(scope, {"scaling": "", "variant": 0})
    if not possible:
        return high
    low = st.sampled_from(possible).flatmap(lambda recipe: product(scope, recipe))
    return st.integers(1, LOW_SHARE[scope.space.device]).flatmap(lambda i: low if i == 1 else high)


@st.composite
def product(draw: st.DrawFn, scope: Scope, recipe: Changes) -> Changes:
    """Sizes, values and gradients that fit the recipe."""
    scaling = recipe["scaling"]
    rows, columns = LOW_SIZES[scaling] if scaling else (34, 40)
    least, some = (1, few_segments(rows)) if scaling else (0, segments())
    fields = recipe | {"override": ""} | draw(some if "counts" in scope.live else all_tokens(rows))
    fields |= {"hidden": draw(sizes(least, columns)), "width": draw(sizes(least, columns))}
    fields["values"] = draw(st.sampled_from((*GROUPED_VALUES, *(LOW_VALUES if scaling else ()))))
    fields["dtype"] = draw(mostly("float32", LOGIT_DTYPES[1:]))
    fields["accumulator"] = draw(st.sampled_from(("",) * 5 + ("float64",)))
    fields["bias"] = draw(st.sampled_from(("", "", "", "float32", "bfloat16", "float64")))
    gradient_names = [name for name in scope.signature.gradients if fields["bias"] or name != "bias"]
    fields["grads"] = draw(some_of(tuple(gradient_names))) if gradient_names else ""
    if may_override(scaling) and (fields["grads"] or not gradient_names):
        fields["override"] = draw(st.sampled_from((*OVERRIDES, *("",) * 4)))
    case = scope.case(fields)
    if not fits(case):
        fields |= {"dtype": "bfloat16", "values": "dyadic"}
    if case.noisy and draw(st.integers(0, 3)) == 0:  # few cases have noise
        fields |= {"layout": draw(st.sampled_from(NEAR)), "layout_of": "noise"}
    return fields


def all_tokens(most: int) -> st.SearchStrategy[dict[str, Any]]:
    """Up to this many tokens, all of one expert."""
    return sizes(0, most).map(lambda tokens: {"tokens": tokens})


@st.composite
def few_segments(draw: st.DrawFn, most: int) -> dict[str, Any]:
    """Counts of a few experts, of any size up to this; or one expert with all rows; or no rows; and
    a tail.
    """
    kind = draw(st.sampled_from(("few", "few", "few", "one", "none")))
    count = st.just(0) if kind == "none" else sizes(0, most) | st.sampled_from((0, 1))
    counts = tuple(draw(st.lists(count, min_size=1, max_size=4)))
    if kind == "one":
        counts = tuple(draw(st.permutations([draw(sizes(1, most)), *[0] * draw(st.integers(0, 3))])))
    return {
        "tokens": sum(counts),
        "experts": len(counts),
        "counts": counts,
        "tail": draw(st.sampled_from((0, 0, 1, 5))),
    }


@st.composite
def segments(draw: st.DrawFn) -> dict[str, Any]:
    """Counts of a few experts of any size, or of many small ones; or one expert with all rows; or
    no rows; and a tail.
    """
    kind = draw(st.sampled_from(("few", "few", "few", "many", "one", "none")))
    if kind == "many":
        counts = tuple(draw(st.lists(st.sampled_from((0, 0, 1, 2)), min_size=9, max_size=40)))
    elif kind == "one":
        counts = tuple(draw(st.permutations([draw(sizes(1, 64)), *[0] * draw(st.integers(0, 4))])))
    else:
        size = st.integers(0, 9) | sizes(0, 34) if kind == "few" else st.just(0)
        counts = tuple(draw(st.lists(size, min_size=1, max_size=5)))
    return {
        "tokens": sum(counts),
        "experts": len(counts),
        "counts": counts,
        "tail": draw(st.sampled_from((0, 0, 1, 7))),
    }


# the sums of halves exceed the largest number of float16, and the whole sum does not
CANCELLING: Changes = {"tokens": 5, "hidden": 65, "width": 33, "dtype": "float16", "values": "cancelling", "bias": ""}


def large(scope: Scope) -> list[Any]:
    """Sizes one above a power of two, so that the last block is nearly empty; long sums of 16-bit
    values; and experts below the least amax of a recipe.
    """
    ragged = {"tokens": 133, "experts": 5, "counts": (0, 65, 1, 0, 67), "hidden": 65, "width": 33, "values": "rows"}
    many = {"tokens": 6, "experts": 129, "counts": MANY, "hidden": 9, "width": 5}
    gpu = scope.space.device == "cuda"
    long: list[Changes] = [  # over columns and features: several steps of a kernel's loop, and one more
        {"tokens": 70 if gpu else 3, "hidden": 7168 if gpu else 513, "width": 136 if gpu else 9, "tail": 2},
        {"tokens": 70 if gpu else 3, "hidden": 136 if gpu else 9, "width": 2881 if gpu else 257, "dtype": "float16"},
    ]
    steps = {"hidden": 130, "width": 130}  # two steps of a kernel's loop
    tiles: list[Changes] = [  # rows of an expert: exactly a tile, one more, and many tiles
        steps | {"tokens": 4357, "experts": 4, "counts": (128, 129, 4097, 3)},
        {"tokens": 0, "counts": (0, 0), "hidden": 9, "width": 5},
    ]
    if not gpu:
        tiles = [
            steps | {"tokens": 257, "counts": (128, 129)},
            {"tokens": 260, "counts": (257, 3), "hidden": 9, "width": 5},
            {"tokens": 0, "counts": (0, 0), "tail": 70, "hidden": 3, "width": 2},  # tiles past all segments
        ]
    long = [{"experts": 2, "dtype": "bfloat16"} | fields for fields in (*long, *tiles)]
    long += [*tiles_of_products(scope), *waves_of_products(scope), *long_products(scope)]
    rows = (32, 33) if scope.function == "grouped_wgrad" else (2, 3)  # rows cancel in the sums of grouped_wgrad
    long.append(CANCELLING | {"experts": 2, "counts": rows, "tokens": sum(rows), "into": ""})
    if "bias" in scope.signature.names:
        long.append({"tokens": 5, "experts": 2, "hidden": 3, "width": 3, "dtype": "float64", "bias": "float64"})
    low = filter(scope.fits, [scope.case(fields) for fields in (LEAST, OUTGROWN)])
    single_expert = [scope.fullest(fields | {"experts": 1}) for fields in ALONE if scope.fits(scope.case(fields))]
    single_expert += [scope.fullest(fields) for fields in in_tiles() if scope.fits(scope.case(fields))]
    return [ragged, many, *long, *many_rows(scope), *around_a_class(scope), *ratio_cases(scope), *low, *single_expert]


def in_tiles() -> list[Changes]:
    """Two experts whose matrices are whole tiles of every kernel, by each recipe; whole steps of
    rows, of input columns and of output columns; and strange weights of an expert without rows.
    """
    tile: Changes = {"experts": 2, "dtype": "bfloat16", "variant": 1, "values": "rows"}
    steps: Changes = {"experts": 2, "dtype": "bfloat16", "counts": (256, 3), "tokens": 259}
    return [
        *(steps | {"hidden": 128, "width": 73}, steps | {"hidden": 73, "width": 128}),
        {"experts": 3, "counts": (4, 0, 0), "tokens": 4, "hidden": 5, "width": 3, "values": "special", "seed": 1},
        *(
            tile | {"scaling": scaling, "hidden": 128 // unit, "width": 128 // unit, "tokens": 4, "counts": (2, 2)}
            for scaling, unit in ((scaling, UNIT.get(scaling, 1)) for scaling in RECIPES)
        ),
    ]


def large_projections(scope: Scope) -> list[Changes]:
    """Sizes one above a power of two; long sums of 16-bit values over columns and tokens."""
    gpu = scope.space.device == "cuda"
    return [
        {"tokens": 129, "hidden": 65, "width": 33},
        CANCELLING,
        {"tokens": 3, "hidden": 130, "width": 9, "dtype": "bfloat16"},
        {"tokens": 70 if gpu else 3, "hidden": 7168 if gpu else 513, "width": 136 if gpu else 9, "dtype": "bfloat16"},
        {"tokens": 4097 if gpu else 257, "hidden": 9, "width": 5, "dtype": "float16"},
        *long_products(scope),
    ]


def in_high_precision(scope: Scope) -> dict[str, list[Changes]]:
    """Ragged segments; every layout but the noise's; gradients of one, both and all factors."""
    counts = [{"counts": counts, "experts": len(counts)} for counts in COUNTS] if "counts" in scope.live else [{}]
    layouts = [(of, layout) for of, layout in scope.signature.layouts(far=False) if of != "noise"]
    return {
        "recipe": [{"scaling": "", "variant": 0, "override": ""}],
        "counts": counts,
        "layout": [CONTIGUOUS, *({"layout": layout, "layout_of": of} for of, layout in layouts)],
        "grads": gradients(scope),
    }


def few_layouts(scope: Scope) -> dict[str, list[Changes]]:
    """The same, with one layout per tensor."""
    placed = [("x", "transposed"), ("weight", "strided"), ("bias", "strided"), ("d_out", "expanded")]
    layouts = [CONTIGUOUS, *({"layout": layout, "layout_of": of} for of, layout in placed)]
    return in_high_precision(scope) | {"layout": layouts}


def gradients(scope: Scope) -> list[Changes]:
    """None, each, both factors', and all."""
    names = scope.signature.gradients
    return [{"grads": grads} for grads in ("", *names, "+".join(names[:2]), "+".join(names))] if names else [{}]


SIZES: Changes = {"tokens": 9, "hidden": 7, "width": 5}
PRODUCT = Shapes(
    drawn=products,
    affordable=near,
    covered=SIZES,
    models={"hidden": WEIGHT_WIDTHS, "width": NARROW_WIDTHS, "tokens": ROWS, "experts": EXPERTS_WITH_WEIGHTS},
    together=in_high_precision,
    always=large,
    more=by_recipe,
    real=of_a_model,
)
GROUPED_LINEAR = replace(
    PRODUCT,
    model_rows=(
        *({"scaling": "block", "variant": variant, "dtype": "bfloat16"} for variant in (2, 4)),
        {"scaling": "block", "variant": 4, "dtype": "bfloat16", "hidden": 513},
        {"scaling": "block", "variant": 4, "dtype": "bfloat16", "hidden": 512, "grads": ""},
        {"experts": 128, "hidden": 256, "width": 64, "dtype": "bfloat16"},
    ),
)
GROUPED_DGRAD = GROUPED_WGRAD = PRODUCT
LATENT_PROJECTION = replace(
    PRODUCT, together=few_layouts, always=large_projections, tall={"hidden": 2, "width": 2}, weight=0.2
)
